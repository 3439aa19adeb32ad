"Kills at any disk operation, several processes in one folder, full and read-only disks, threads, extreme inputs."

import concurrent.futures.thread
import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fuzzing import Letters, labels, repository, rows
from test_selection import world

from ega import cli
from ega.data import datasets, embed, packs
from ega.data.arrays import InputError, normalize, spawn_rngs, torch_generator
from ega.data.files import atomic_write, hash_arrays
from ega.deploy import transform
from ega.deploy.index import AdaptedIndex
from ega.deploy.monitor import Monitor
from ega.deploy.stores import IndexStore, LanceStore
from ega.estimator import EmbeddingAdapter
from ega.experiments import grids, runs
from ega.measure.evaluation import evaluate
from ega.measure.search import knn, loo_knn
from ega.method import training
from ega.method.active_ratio import index_rows_by_class, random_dataset_triplets
from ega.method.adapters import LinearAdapter, ReleasedEGA, save_adapter
from ega.method.closed_form import WCCN
from ega.method.config import TrainConfig

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CONFIG = runs.build_config("unseen", "cub100", "supcon", hidden=8, epochs=3)


# -- kills ---------------------------------------------------------------------------------------------------

WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}


def child(work, die_at, told):
    "In a forked child: do the work, and be killed at the die_at-th step on the disk."
    steps = 0

    def heard(event, args):
        nonlocal steps
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR) or event in WRITES
        if not writes or "/dev/" in str(args[0]):
            return
        steps += 1
        if steps == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        torch.set_num_threads(1)
        sys.addaudithook(heard)
        work()
        os._exit(0)
    except BaseException:
        Path(told).write_text(traceback.format_exc())
        os._exit(1)


def killed_at(work, die_at, told):
    "Whether the work was killed there; False when it came to its end before."
    if not (pid := os.fork()):
        child(work, die_at, told)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, Path(told).read_text()
    return False


def embedded(folder):
    texts, ids = ["abcdef"[: 1 + i % 6] * (1 + i) for i in range(12)], [str(i) for i in range(12)]
    source = datasets.Source("toy", texts, ids, np.arange(12) % 3, ["t"] * 12, ("a", "b", "c"))
    try:
        embed.embed(source, Letters(), folder / "p.parquet", shard_rows=4, batch_size=2, threads=1, progress=False)
    except InputError as error:
        assert "exists already" in str(error)  # and what a kill left beside it is gone
    return (folder / "p.parquet").read_bytes()


def stored(folder):
    if not (folder / "x.npy").exists():
        with atomic_write(folder / "x.npy") as t, open(t, "wb") as f:
            np.save(f, rows(60))
    transform.BLOCK_BYTES = 2**9
    if not (folder / "z.npy").exists() or (folder / "z.npy.part.json").exists():
        transform.transform_file(
            LinearAdapter(6), folder / "x.npy", folder / "z.npy", batch_size=8, threads=1, device="cpu"
        )
    return (folder / "z.npy").read_bytes()


def fitted(folder):
    x, y = rows(90), labels(90)
    adapter, s = ReleasedEGA(6, hidden=8, gen=torch_generator(spawn_rngs(0).init)), spawn_rngs(0)
    history = training.train(
        adapter,
        training.batch_triplet_objective(0.2),
        x,
        y,
        rngs=s,
        config=TrainConfig(epochs=6, batch_size=32),
        device="cpu",
        checkpoint=folder / "c.safetensors",
        checkpoint_interval=0,
    )
    return hash_arrays(*(p.numpy() for p in adapter.state_dict().values()), np.array(history.loss)).encode()


def grid(folder):
    "What a worker and its parent do, without the pool."
    store = grids.ResultStore(folder / "r", "unseen")
    for method in ("frozen", "supcon"):
        c = runs.build_config("unseen", "cub100", method, hidden=8, epochs=2)
        if c.run_id not in store.ids():
            store.add(
                runs.run_experiment(
                    c, folder.parent / "data/packs", checkpoint=store.parts / f"{c.run_id}.safetensors", device="cpu"
                ).assign(seconds=0.0)
            )
    store.merge_parts()
    return digits(store) if not store.parts.exists() else b"parts are left"


def digits(store):
    f = store.read()
    return (
        hash_arrays(f.lp_at_1.to_numpy(), f.ar_at_1.to_numpy(), np.concatenate(f.neighbour.to_list())).encode()
        + str(f.run_id.tolist()).encode()
    )


def saved(folder):
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(rows(60), labels(60))
    e.save(folder / "a")
    return hash_arrays(EmbeddingAdapter.load(folder / "a").transform(rows(5))).encode()


def fitted_by_command(folder):
    "Whatever was killed, the folder holds nothing or all files."
    if not (folder / "f").exists() or not any((folder / "f").iterdir()):
        for name, values in (("x", rows(60)), ("y", labels(60))):
            np.save(folder / f"{name}.npy", values)
        data = [str(folder / name) for name in ("x.npy", "y.npy")]
        command = ["fit", *data, "-o", str(folder / "f"), "--method", "wccn", "--max-unseen-loss", "none", "--json"]
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(command) == 0
    return hash_arrays(EmbeddingAdapter.load(folder / "f").transform(rows(5))).encode()


def updated(folder):
    "Until the new adapter is there as a whole, the present one is there, and nothing else of its name."

    def is_whole(name):
        return (folder / name).exists() and EmbeddingAdapter.load(folder / name).statistics_ is not None

    if not is_whole("a"):
        EmbeddingAdapter("wccn", max_unseen_loss=None).fit(rows(60), labels(60)).save(folder / "a", statistics=True)
    if not is_whole("b"):
        for name, values in (("x", rows(20, seed=1)), ("y", labels(20))):
            np.save(folder / f"{name}.npy", values)
        command = [
            "update",
            *(str(folder / name) for name in ("a", "x.npy", "y.npy")),
            "-o",
            str(folder / "b"),
            "--json",
        ]
        with contextlib.redirect_stdout(io.StringIO()):
            assert cli.main(command) == 0
    return hash_arrays(*(EmbeddingAdapter.load(folder / name).transform(rows(5)) for name in "ab")).encode()


def indexed(folder):
    AdaptedIndex(np.eye(6, dtype="f4")).add(rows(30)).save(folder / "i")
    return hash_arrays(*AdaptedIndex.load(folder / "i").search(rows(3, seed=1), 3)).encode()


def migrated(folder):
    "Beside the version that is served, and then instead of it."
    store, raw, m = IndexStore(folder / "v"), folder / "x.npy", np.diag(np.arange(1, 7)).astype("f4")
    if not raw.exists():
        with atomic_write(raw) as t, open(t, "wb") as f:
            np.save(f, rows(60))
    if store.active is None:
        store.activate(store.migrate(np.eye(6, dtype="f4"), raw))
    assert len(store.open(store.active)) == 60  # whatever was killed, something whole is served
    store.activate(store.migrate(m, raw))
    return hash_arrays(*store.open(adapter=m).search(rows(3, seed=1), 3)).encode()


WORK = {
    "embed": embedded,
    "transform": stored,
    "fit": fitted,
    "grid": grid,
    "save": saved,
    "ega fit": fitted_by_command,
    "update": updated,
    "index": indexed,
    "migrate": migrated,
}


@needs_fork
@pytest.mark.parametrize("name", WORK)
def test_work_resumes_after_a_kill_at_any_disk_operation(tmp_path, count, pytestconfig, name):
    "Killed at its 1st, 2nd, ... disk operation and run again, the work gives the result of an unbroken run."
    work, kills = WORK[name], 0
    repository(tmp_path)
    (whole := tmp_path / "whole").mkdir()
    expected = work(whole)
    shape = {p.relative_to(whole).as_posix() for p in whole.rglob("*")}

    def proved(folder):
        assert work(folder) == expected
        left = {p.relative_to(folder).as_posix() for p in folder.rglob("*")} - shape
        assert all(".tmp" in p for p in left), left  # what a killed process was writing; nobody reads it

    for step in range(1, 400):
        (folder := tmp_path / f"{step}").mkdir()
        if not killed_at(lambda: work(folder), step, tmp_path / "told"):
            break
        kills += 1
        proved(folder)
    (folder := tmp_path / "again").mkdir()
    rng = np.random.default_rng(0)
    for _ in range(40 if pytestconfig.getoption("--slow") else 8):
        if not killed_at(lambda: work(folder), int(rng.integers(1, 6)), tmp_path / "told"):
            break
        kills += 1
    proved(folder)
    assert kills > 3
    count(f"kills survived: {name}", kills)


# -- interruptions -------------------------------------------------------------------------------------------

WATCHED = tuple(os.path.dirname(m.__file__) for m in (concurrent.futures, transform)) + (
    threading.__file__,
    contextlib.__file__,
)


def interrupted_at(work, point, folder):
    "Run the work in a forked child with ctrl-c after some traced lines; return its exit code and their number."
    if not (pid := os.fork()):
        events = 0

        def step(frame, event, arg):
            nonlocal events
            if event in ("line", "return"):
                events += 1
                if events == point:
                    signal.raise_signal(signal.SIGINT)
            return step

        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            sys.settrace(lambda frame, event, arg: step if frame.f_code.co_filename.startswith(WATCHED) else None)
            try:
                work()
            finally:
                sys.settrace(None)
                (folder / "events").write_text(str(events))
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            (folder / "told").write_text(traceback.format_exc())
            os._exit(1)
    end = time.monotonic() + 60
    while not (ended := os.waitpid(pid, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.002)
    if not ended[0]:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        pytest.fail(f"interrupted after {point} lines it waits for ever")
    assert (code := os.waitstatus_to_exitcode(ended[1])) in (0, 130), (folder / "told").read_text()
    return code, int((folder / "events").read_text())


@needs_fork
@pytest.mark.parametrize("name", ["embed", "transform"])
def test_ctrl_c_at_any_line_ends_the_work(tmp_path, count, pytestconfig, name):
    "The process ends even if ctrl-c finds a pool's lock taken, and the next one gives the result of an unbroken run."
    work, landed = WORK[name], 0
    (whole := tmp_path / "whole").mkdir()
    expected = work(whole)
    (free := tmp_path / "free").mkdir()
    _, events = interrupted_at(lambda: work(free), 0, tmp_path)
    for i, point in enumerate(np.linspace(1, events, 2000 if pytestconfig.getoption("--slow") else 120).astype(int)):
        (folder := tmp_path / str(i)).mkdir()
        landed += interrupted_at(lambda: work(folder), point, tmp_path)[0] == 130
        assert work(folder) == expected
        shutil.rmtree(folder)
    assert landed > 0.9 * i  # nearly none came after the end, or to nothing
    count(f"interruptions ended: {name}", i + 1)


# -- several processes ---------------------------------------------------------------------------------------

MIGRATION = """
import sys, time
from ega.method.closed_form import WCCN
from ega.data.packs import read_pack
from dataclasses import replace
from ega.deploy.stores import LanceStore
from ega.method.interface import as_adapter
es = read_pack(sys.argv[1]); m = as_adapter(WCCN(.3).fit(es.x, es.y)); store = LanceStore(sys.argv[2])
def adapted(x): print("batch", flush=True); time.sleep(.05); return m.apply(x)
store.add(es, batch_size=40)
store.migrate(replace(m, apply=adapted), batch_size=16)
print("done", flush=True)
"""


def test_table_migration_resumes_after_kills(tmp_path, count):
    "Killed in batches 1, 2 and 5, the old column stays active and the new one equals that of an unbroken run."
    pytest.importorskip("lancedb")

    es = packs.EmbeddingSet(
        normalize(rows(200)),
        labels(200),
        [f"r{i}" for i in range(200)],
        ["t"] * 200,
        tuple(map(str, range(int(labels(200).max()) + 1))),
        {"set": "s", "encoder": "e"},
    )
    packs.write_pack(es, tmp_path / "p.parquet", dtype="float32")
    command = [sys.executable, "-c", MIGRATION, str(tmp_path / "p.parquet"), str(tmp_path / "t.lance")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for batches in (1, 2, 5):
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
            for _ in range(batches):
                assert child.stdout.readline() == "batch\n"
            child.kill()
        store = LanceStore(tmp_path / "t.lance")
        assert store.count(None) == 200 and store.active == "vector"
    killed = LanceStore(tmp_path / "t.lance").table
    column = next(name for name in killed.schema.names if name.startswith("adapted_"))
    assert 0 < killed.count_rows(f"{column} IS NULL") < 200  # what was written stays
    subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    white = WCCN(0.3).fit(es.x, es.y)
    table = LanceStore(tmp_path / "t.lance").table.to_arrow()
    order = np.argsort([int(i[1:]) for i in table["id"].to_pylist()])
    assert np.abs(np.array(table[column].to_pylist())[order] - white.transform(es.x)).max() < 1e-6
    count("kills survived: migrate of a table", 3)


def forked(*works):
    "Works in processes of their own, all at once; what they could not do is raised here."
    pids = []
    for work in works:
        told = tempfile.mktemp()
        if not (pid := os.fork()):
            child(work, 0, told)
        pids.append((pid, told))
    for pid, told in pids:
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, Path(told).read_text()


def result(i):
    return pd.DataFrame(
        [
            dict(run_id=f"{i:016x}", query_set=q, benchmark="b", method="frozen", config="{}", lp_at_1=i / 100)
            for q in ("seen", "unseen")
        ]
    )


@needs_fork
def test_processes_can_share_a_results_folder(tmp_path, count):
    "Three add and seal, each its own runs and some of the others'; a fourth reads and never sees fewer than before."
    each, many = 30, 3

    def worker(w):
        def work():
            store = grids.ResultStore(tmp_path / "r", "unseen")
            for i in range(each):
                store.add(result(w * each + i))
                store.add(result(i))
                store.merge_parts() if i % 3 == w else None

        return work

    def reader():
        store, seen, end = grids.ResultStore(tmp_path / "r", "unseen"), 0, time.monotonic() + 120
        while seen < many * each:
            assert time.monotonic() < end, "a run was lost"
            ids = store.ids()
            assert len(ids) >= seen
            seen = len(ids)
            if seen:
                assert store.read(["run_id"]).run_id.nunique() >= seen

    forked(*map(worker, range(many)), reader)
    store = grids.ResultStore(tmp_path / "r", "unseen")
    store.merge_parts()
    frame = store.read()
    assert (
        len(frame) == 2 * many * each
        and np.allclose(frame.lp_at_1, [int(r, 16) / 100 for r in frame.run_id])
        and not store.parts.exists()
    )
    assert [p.name for p in (tmp_path / "r").iterdir()] == ["unseen.parquet"]
    count("processes in one folder of results", many + 1)


@needs_fork
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_processes_can_fill_one_cached_table(tmp_path, count, ending):
    "Each some arms of its own and some of the others'; none is lost, and each stands there once, with all its rows."
    arms = [(f"a{i}", i / 7) for i in range(24)]

    def rows_of(name, x):
        time.sleep(0.002)
        return pd.DataFrame({"name": name, "x": x, "row": range(3)})

    def gather(some):
        return lambda: grids.cached_table(tmp_path / f"t.{ending}", some, ("name", "x"), rows_of, progress=False)

    forked(*map(gather, (arms[:16], arms[8:], arms[::-2])))
    table = grids.cached_table(tmp_path / f"t.{ending}", arms, ("name", "x"), lambda *arm: 1 / 0, progress=False)
    assert sorted(table.itertuples(index=False, name=None)) == sorted((*arm, row) for arm in arms for row in range(3))
    count(f"processes with one table .{ending}", 3)


@needs_fork
def test_concurrent_transforms_of_one_target(tmp_path, count):
    "The second is told that the first is at work, or finds its result; never a mixture."
    np.save(tmp_path / "x.npy", rows(4000))

    def work():
        try:
            transform.transform_file(
                LinearAdapter(6), tmp_path / "x.npy", tmp_path / "z.npy", batch_size=8, threads=1, device="cpu"
            )
        except InputError as error:
            assert "another process" in str(error) or "exists already" in str(error)
        except FileNotFoundError:
            pass  # the first was done in between

    forked(work, work, work)
    assert np.allclose(np.load(tmp_path / "z.npy"), rows(4000), atol=1e-6) and sorted(
        p.name for p in tmp_path.iterdir()
    ) == ["x.npy", "z.npy"]
    count("processes with one target", 3)


# -- full and closed disks -----------------------------------------------------------------------------------


def writers():
    "Name -> (file or folder written, function of the folder that writes)."
    es = packs.EmbeddingSet(rows(400), labels(400), meta={"set": "toy", "encoder": "noise"})
    big = normalize(np.random.default_rng(0).normal(size=(60, 64)))
    wide = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(big, labels(60))
    adapter = ReleasedEGA(6, hidden=512, gen=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(adapter.parameters())
    return {
        "pack": lambda f: packs.write_pack(es, f / "p.parquet", dtype="float32"),
        "adapter": lambda f: save_adapter(adapter, f / "a.safetensors"),
        "estimator": lambda f: wide.save(f / "e"),
        "checkpoint": lambda f: training.save_checkpoint(
            f / "c.safetensors", adapter, optimizer, [torch.Generator()], training.TrainHistory(), epoch=1, owner="o"
        ),
        "results": lambda f: grids.ResultStore(f, "unseen").write(
            pd.DataFrame({"run_id": [os.urandom(400).hex() for _ in range(40)]})
        ),
        "split": lambda f: packs.Split(*[np.arange(9000)] * 5).save(f / "s.json"),
        "index": lambda f: AdaptedIndex(np.eye(6, dtype="f4")).add(rows(900)).save(f / "i"),
        "monitor": lambda f: Monitor.fit(rows(900), np.eye(6, dtype="f4"), horizon=5).save(f / "m"),
        "onnx": lambda f: wide.to_onnx(f / "e.onnx"),
        "file": lambda f: _plain_file(f / "t.txt"),
    }


WRITERS = ("pack", "adapter", "estimator", "checkpoint", "results", "split", "index", "monitor", "onnx", "file")


def _plain_file(path):
    with atomic_write(path) as t:
        t.write_text("x" * 9999)


def in_child(work, before):
    "The exception of a work in a process of its own, as text; what `before` does to that process ends with it."
    told = Path(tempfile.mktemp())
    if not (pid := os.fork()):
        try:
            before()
            work()
            text = "nothing"
        except BaseException as error:
            text = f"{type(error).__name__}|{isinstance(error, (OSError, RuntimeError))}|{error}"
        try:
            told.write_bytes(text.encode()[:900])
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return told.read_text() if told.exists() else ""


def full():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


@needs_fork
@pytest.mark.parametrize("name", WRITERS)
def test_full_disk_raises_and_keeps_the_old_file(tmp_path, name):
    "The kernel refuses bytes beyond the first thousand of any file, as it does on a full disk."
    write = writers()[name]
    write(tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    said = in_child(lambda: write(tmp_path), full)
    assert said.split("|")[1:2] == ["True"], (
        said
    )  # an OSError or RuntimeError, which the command line answers in one line
    now = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert {p: now.get(p) for p in before} == before and not any(p.name.endswith(".tmp") for p in now)


@needs_fork
def test_commands_on_a_full_disk_print_one_line(tmp_path, capfd, count):
    np.save(tmp_path / "x.npy", normalize(np.random.default_rng(0).normal(size=(60, 64))))
    np.save(tmp_path / "y.npy", labels(60))
    save_adapter(LinearAdapter(64), tmp_path / "a.safetensors")
    commands = (
        ["fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet"],
        ["transform", "a.safetensors", "x.npy", "-o", "z.npy", "--quiet"],
        ["report", "e", "x.npy", "y.npy"],
    )
    EmbeddingAdapter("wccn", max_unseen_loss=None).fit(np.load(tmp_path / "x.npy"), labels(60)).save(tmp_path / "e")
    os.chdir(tmp_path)
    for argv in commands:
        before = {p.name for p in tmp_path.iterdir()}
        code = in_child(lambda: os._exit(9) if cli.main(argv) != 1 else None, full)
        err = capfd.readouterr().err.strip()
        assert code == "nothing" and err.startswith("ega: ") and "\n" not in err, (argv, code, err)
        assert {p.name for p in tmp_path.iterdir()} - before <= {"out", "z.npy.part", "z.npy.part.json"} and not (
            tmp_path / "report.html"
        ).exists()
    count("commands on a full disk", len(commands))


@needs_fork
@pytest.mark.skipif(os.name != "posix", reason="needs users")
def test_commands_name_a_folder_that_is_not_writable(capfd, count):
    "Root may write anywhere, so a child without its rights tries."
    folder = Path(tempfile.mkdtemp(prefix="ega-"))
    try:
        np.save(folder / "x.npy", rows(60))
        np.save(folder / "y.npy", labels(60))
        save_adapter(LinearAdapter(6), folder / "a.safetensors")
        for p in folder.iterdir():
            p.chmod(0o644)
        folder.chmod(0o555)

        def powerless():
            os.chdir(folder)
            if os.geteuid() == 0:
                os.setegid(65534)
                os.seteuid(65534)

        commands = (
            ["fit", "x.npy", "y.npy", "-o", "out", "--method", "wccn", "--quiet"],
            ["transform", "a.safetensors", "x.npy", "-o", "z.npy", "--quiet"],
        )
        for argv in commands:
            in_child(lambda: os._exit(0 if cli.main(argv) in (1, 2) else 9), powerless)
            err = capfd.readouterr().err.strip()
            assert err.startswith("ega: ") and "\n" not in err and ("ermission" in err or "written" in err), (argv, err)
        assert sorted(p.name for p in folder.iterdir()) == ["a.safetensors", "x.npy", "y.npy"]
        count("commands in a read-only folder", len(commands))
    finally:
        folder.chmod(0o755)
        for p in sorted(folder.rglob("*"), reverse=True):
            p.unlink() if p.is_file() else p.rmdir()
        folder.rmdir()


# -- threads -------------------------------------------------------------------------------------------------

BITS = """
import json, sys; sys.path.insert(0, {tests!r})
from test_reliability import *
from ega.method.adapters import transform
from threadpoolctl import threadpool_limits
x = normalize(np.random.default_rng(0).normal(size=(600, 96))); y = np.arange(600) % 20
for n in (1, 2, 2):
    torch.set_num_threads(n); threadpool_limits(n)
    f = ReleasedEGA(96, hidden=256, gen=torch_generator(spawn_rngs(0).init))
    config = TrainConfig(epochs=2, batch_size=128)
    training.train(f, training.batch_triplet_objective(.2), x, y, rngs=spawn_rngs(0), config=config, device="cpu")
    z = transform(f, x, device="cpu")
    made = {{"train": [p.numpy() for p in f.state_dict().values()], "transform": [z]}}
    made |= {{"wccn": [WCCN().fit(x, y).matrix_], "search": list(knn(x[:300], x[300:], 5))}}
    made |= {{"leave one out": list(loo_knn(x, 5))}}
    print(json.dumps({{k: hash_arrays(*v) for k, v in made.items()}} | {{"z": z.ravel()[:999].tolist()}}))
"""


def test_results_do_not_depend_on_the_number_of_threads(count):
    """Searches and closed forms have the same bits for any number of threads; training and transform agree to rounding.

    Threads divide the product of rows and weights, which changes the order of float32 sums. Stored runs and
    `transform_file` multiply with one thread, so their digits do not depend on it."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "KMP_BLOCKTIME": "0"}
    done = subprocess.run(
        [sys.executable, "-c", BITS.format(tests=os.path.dirname(__file__))],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    one, two, again = map(json.loads, done.stdout.splitlines())
    assert two == again  # two threads twice: the same
    assert all(one[k] == two[k] for k in ("search", "leave one out", "wccn"))
    assert np.abs(np.array(one["z"]) - two["z"]).max() < 1e-5
    count("runs with one and two threads", 3)


# -- the ends ------------------------------------------------------------------------------------------------


def outcome(call):
    "The value, or the InputError as text; anything else is a fault."
    try:
        return call()
    except InputError as error:
        assert "\n" not in str(error)
        return str(error)


def test_half_precision_input(count):
    x, y = world(0)
    half = [
        EmbeddingAdapter(method=m, max_unseen_loss=None).fit(x.astype(np.float16), y) for m in ("wccn", "linear_supcon")
    ]
    whole = [EmbeddingAdapter(method=m, max_unseen_loss=None).fit(x, y) for m in ("wccn", "linear_supcon")]
    for a, b in zip(half, whole):
        z = a.transform(x.astype(np.float16))
        assert (
            z.dtype == np.float32
            and np.abs(np.linalg.norm(z, axis=1) - 1).max() < 1e-5
            and np.abs((z * b.transform(x)).sum(1) - 1).max() < 1e-2
        )
    count("extremes: half precision", len(half))


@pytest.mark.parametrize("many", (100_000,))
def test_one_hundred_thousand_classes(count, many):
    "Two rows each; splits, samplers and a closed form take seconds, not hours."
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(many), 2))
    x = normalize(np.random.default_rng(1).normal(size=(2 * many, 8)))
    c = packs.split_classes(y, spawn_rngs(0).split)
    a, b = packs.row_split(y, spawn_rngs(0).split, fractions=(0.5, 0.5))
    assert (
        len(c.seen) == 0.8 * many
        and len(a) + len(b) == len(y)
        and np.abs(np.bincount(y[a], minlength=many) - 1).max() == 0
    )
    index = index_rows_by_class(torch.from_numpy(y))
    t = random_dataset_triplets(index, torch.arange(4096), gen=torch.Generator().manual_seed(0))
    assert (y[t.a] == y[t.p]).all() and (y[t.a] != y[t.n]).all() and (t.a != t.p).all()
    e = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y)
    assert e.transform(x[:9]).shape == (9, 8) and len(e.classes_) == many
    count("extremes: classes", many)


def edge_cases():
    "Name -> (rows, labels) that are small, flat or alike."
    r = np.random.default_rng(0)

    def unit(n, d):
        return normalize(r.normal(size=(n, d)))

    return {
        "one sample a class": (unit(30, 6), np.arange(30)),
        "one class": (unit(30, 6), np.zeros(30, int)),
        "two rows": (unit(2, 6), np.array([0, 1])),
        "one row": (unit(1, 6), np.array([0])),
        "fewer rows than a batch": (unit(24, 6), np.arange(24) % 12),
        "one dimension": (np.where(np.arange(60) % 2, 1.0, -1.0)[:, None].astype("f4"), np.arange(60) % 12),
        "two dimensions": (unit(120, 2), np.arange(120) % 12),
        "all rows alike": (np.repeat(unit(1, 6), 120, 0), np.arange(120) % 12),
        "every row twice": (np.repeat(unit(60, 6), 2, 0), np.repeat(np.arange(60) % 12, 2)),
        "unlabelled but one": (unit(60, 6), np.r_[0, np.full(59, -1)]),
        "nothing labelled": (unit(30, 6), np.full(30, -1)),
        "more dimensions than rows": (unit(30, 200), np.arange(30) % 12),
        "one huge class": (unit(300, 6), np.r_[np.arange(24) % 12, np.zeros(276, int)]),
    }


EDGES = tuple(edge_cases())


@pytest.mark.parametrize("name", EDGES)
def test_extreme_inputs(name):
    "Every method returns unit rows or raises one sentence; the selection never fails where a method would."
    x, y = edge_cases()[name]
    for method, max_unseen_loss in (
        ("auto", 1.0),
        ("wccn", None),
        ("linear_supcon", None),
        ("lora_triplet", None),
        ("ega_released", None),
    ):
        e = outcome(lambda: EmbeddingAdapter(method=method, max_unseen_loss=max_unseen_loss).fit(x, y))
        if isinstance(e, str):
            continue
        z = e.transform(x)
        assert z.shape == x.shape and np.isfinite(z).all() and np.abs(np.linalg.norm(z, axis=1) - 1).max() < 1e-5, (
            method
        )
        outcome(lambda: evaluate(e, x, y))
    for call in (
        lambda: loo_knn(x, 3),
        lambda: knn(x, x, 5),
        lambda: packs.row_split(y, spawn_rngs(0).split),
        lambda: packs.split_classes(y, spawn_rngs(0).split),
    ):
        outcome(call)


def test_extreme_inputs_are_counted(count):
    count("extremes: small, flat or alike", len(edge_cases()))


MILLION = """
import sys, numpy as np, torch
from pathlib import Path
from ega.method.adapters import LinearAdapter
from ega.testing import peak_memory_mb
from ega.deploy.transform import transform_file
from throughput import _write_synthetic
folder, n = Path(sys.argv[1]), int(sys.argv[2])
_write_synthetic(folder/"x.npy", n, 384, np.random.default_rng(0))
before = peak_memory_mb()
transform_file(LinearAdapter(384), folder/"x.npy", folder/"z.npy", device="cpu", threads=1)
print(before, peak_memory_mb(), (folder/"z.npy").stat().st_size)
"""


@pytest.mark.slow
def test_one_million_rows_in_bounded_memory(tmp_path):
    "1.5 GB go in and out; the process grows by less than 200 MB."
    done = subprocess.run(
        [sys.executable, "-c", MILLION, tmp_path, "1000000"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    before, after, size = map(float, done.stdout.split())
    print(f"{before:.0f} MB before, {after:.0f} MB at the peak")
    assert size > 1.5e9 and after - before < 200
