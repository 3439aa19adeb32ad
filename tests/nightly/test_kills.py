"Kills at every disk operation, Ctrl-C at many lines, processes that share a folder, full disks, and extreme inputs."

import concurrent.futures.thread
import contextlib
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from readers import embedding_set, labels, rows

from ega.data import datasets, embed, packs
from ega.data.arrays import InputError, normalize
from ega.data.files import atomic_write, hash_arrays
from ega.data.runtime import spawn_rngs, torch_generator
from ega.deploy import transform
from ega.deploy.index import AdaptedIndex
from ega.deploy.monitor import Monitor
from ega.deploy.stores import IndexStore
from ega.estimator import EmbeddingAdapter
from ega.experiments import grids
from ega.measure.evaluation import evaluate
from ega.method import training
from ega.method.active_ratio import index_rows_by_class, random_dataset_triplets
from ega.method.adapters import LinearAdapter, LoRAAdapter, ReleasedEGA, save_adapter
from ega.method.config import TrainConfig

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
WRITES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.chmod"}


def fork(work, before=lambda: None):
    "Run a work in a forked child after `before`; its process id, and the file for what it raises."
    told = Path(tempfile.mktemp())
    if not (pid := os.fork()):
        try:
            torch.set_num_threads(1)
            before()
            work()
            os._exit(0)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException as error:
            try:
                told.write_text(f"{isinstance(error, (OSError, RuntimeError))} {traceback.format_exc()}"[:900])
            finally:
                os._exit(1)
    return pid, told


def in_child(work, before=lambda: None):
    "The exit code of a work in a child, and what it raised as text."
    pid, told = fork(work, before)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code, told.read_text() if told.exists() else ""


def kill_at(step):
    "From now on, be killed at the so-manieth step on the disk."
    steps = 0

    def heard(event, args):
        nonlocal steps
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR) or event in WRITES
        if writes and "/dev/" not in str(args[0]):
            steps += 1
            if steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)


# -- work that is killed and resumes: a function of a folder that gives bytes --------------------------------


class Letters:
    "An encoder of texts without weights."

    modality, name, preprocessing, weights = "text", "letters", "none", "0"

    def prepare(self, text):
        return text

    def encode(self, batch):
        return np.array([[1 + text.count(c) for c in "abcdef"] for text in batch], np.float32)


def embed_texts(folder):
    (folder / "t.csv").write_text(
        "text,label,split,id\n" + "".join(f"abc{'f' * i},k{i % 3},t,{i}\n" for i in range(12))
    )
    source, options = datasets.open_input_source(folder / "t.csv"), dict(shard_rows=4, batch_size=2, progress=False)
    try:
        embed.embed(source, Letters(), folder / "p.parquet", **options)
    except InputError as error:
        assert "exists already" in str(error)
    return (folder / "p.parquet").read_bytes()


def transform_rows(folder):
    if not (folder / "x.npy").exists():
        with atomic_write(folder / "x.npy") as t, open(t, "wb") as f:
            np.save(f, rows(60))
    transform.BLOCK_BYTES = 2**9
    if not (folder / "z.npy").exists() or (folder / "z.npy.part.json").exists():
        options = dict(batch_size=8, threads=1, device="cpu")
        transform.transform_file(LinearAdapter(6), folder / "x.npy", folder / "z.npy", **options)
    return (folder / "z.npy").read_bytes()


def train(folder):
    rngs = spawn_rngs(0)
    adapter = ReleasedEGA(6, hidden=8, gen=torch_generator(rngs.init))
    options = dict(rngs=rngs, config=TrainConfig(epochs=6, batch_size=32), device="cpu", checkpoint_interval=0)
    objective, checkpoint = training.batch_triplet_objective(0.2), folder / "c.safetensors"
    history = training.train(adapter, objective, rows(90), labels(90), checkpoint=checkpoint, **options)
    return hash_arrays(*(p.numpy() for p in adapter.state_dict().values()), np.array(history.loss)).encode()


def save(folder):
    EmbeddingAdapter("wccn", max_unseen_loss=None).fit(rows(60), labels(60)).save(folder / "a")
    return hash_arrays(EmbeddingAdapter.load(folder / "a").transform(rows(5))).encode()


def save_index(folder):
    AdaptedIndex(np.eye(6, dtype="f4")).add(rows(30)).save(folder / "i")
    return hash_arrays(*AdaptedIndex.load(folder / "i").search(rows(3, seed=1), 3)).encode()


def migrate(folder):
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


WORK = [embed_texts, transform_rows, train, save, save_index, migrate]


@pytest.mark.parametrize("work", WORK)
def test_work_resumes_after_a_kill_at_any_disk_operation(tmp_path, work):
    "Killed at its 1st, 2nd, ... disk operation and run again, the work gives the result of an unbroken run."
    (whole := tmp_path / "whole").mkdir()
    expected, step, code = work(whole), 0, -signal.SIGKILL
    shape = {p.relative_to(whole).as_posix() for p in whole.rglob("*")}
    while code == -signal.SIGKILL:
        step += 1
        (folder := tmp_path / f"{step}").mkdir()
        code, told = in_child(lambda: work(folder), lambda: kill_at(step))
        assert work(folder) == expected
        left = {p.relative_to(folder).as_posix() for p in folder.rglob("*")} - shape
        assert all(".tmp" in p for p in left), left  # what a killed process was writing; nobody reads it
    assert code == 0 and step > 4, told


WATCHED = (os.path.dirname(concurrent.futures.__file__), os.path.dirname(transform.__file__), threading.__file__)


@pytest.mark.parametrize("work", [embed_texts, transform_rows])
def test_ctrl_c_at_any_line_ends_the_work(tmp_path, work):
    "The process ends even if Ctrl-C finds a pool's lock taken, and the next one gives the result of an unbroken run."
    (whole := tmp_path / "whole").mkdir()
    expected, events = work(whole), tmp_path / "events"

    def trace(point):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.alarm(600)  # a process that waits for ever is killed
        n = 0

        def step(frame, event, arg):
            nonlocal n
            n += 1
            if n == point:
                signal.raise_signal(signal.SIGINT)
            if not point:
                events.write_text(str(n))
            return step

        watched = WATCHED + (contextlib.__file__,)
        sys.settrace(lambda frame, event, arg: step if frame.f_code.co_filename.startswith(watched) else None)

    (free := tmp_path / "free").mkdir()
    assert in_child(lambda: work(free), lambda: trace(0))[0] == 0
    for i, point in enumerate(np.linspace(1, int(events.read_text()), 500).astype(int)):
        (folder := tmp_path / str(i)).mkdir()
        code, told = in_child(lambda: work(folder), lambda: trace(point))
        assert code in (0, 130), told
        assert work(folder) == expected


# -- several processes ---------------------------------------------------------------------------------------


def in_children(*works):
    for pid, told in [fork(work) for work in works]:
        assert os.waitpid(pid, 0)[1] == 0, told.read_text()


def test_processes_can_share_a_results_folder(tmp_path):
    "Three add and merge, each its own runs and some of the others'; a fourth reads and never sees fewer than before."

    def result(i):
        run = dict(run_id=f"{i:016x}", benchmark="b", method="frozen", config="{}", lp_at_1=i / 100)
        return pd.DataFrame([run | {"query_set": name} for name in ("seen", "unseen")])

    def write(w):
        store = grids.ResultStore(tmp_path / "r", "unseen")
        for i in range(30):
            store.add(result(w * 30 + i))
            store.add(result(i))
            if i % 3 == w:
                store.merge_parts()

    def read():
        store, seen = grids.ResultStore(tmp_path / "r", "unseen"), 0
        while seen < 90:
            ids = store.ids()
            assert len(ids) >= seen
            seen = len(ids)

    in_children(*(lambda w=w: write(w) for w in range(3)), read)
    store = grids.ResultStore(tmp_path / "r", "unseen")
    store.merge_parts()
    frame = store.read()
    assert len(frame) == 180 and np.allclose(frame.lp_at_1, [int(r, 16) / 100 for r in frame.run_id])


def test_concurrent_transforms_of_one_target(tmp_path):
    "The second is told that the first is at work, or finds its result; never a mixture."
    np.save(tmp_path / "x.npy", rows(4000))

    def work():
        options = dict(batch_size=8, threads=1, device="cpu")
        try:
            transform.transform_file(LinearAdapter(6), tmp_path / "x.npy", tmp_path / "z.npy", **options)
        except InputError as error:
            assert "another process" in str(error) or "exists already" in str(error)
        except FileNotFoundError:
            pass  # the first was done in between

    in_children(work, work, work)
    assert np.allclose(np.load(tmp_path / "z.npy"), rows(4000), atol=1e-6)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "z.npy"]


# -- full disks ----------------------------------------------------------------------------------------------


def wide_adapter():
    x = normalize(np.random.default_rng(0).normal(size=(60, 64)))
    return EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, labels(60))


WRITERS = {
    "pack": lambda f: packs.write_pack(embedding_set(400), f / "p.parquet", dtype="float32"),
    "adapter": lambda f: save_adapter(LoRAAdapter(64, rank=8, gen=torch.Generator()), f / "a.safetensors"),
    "estimator": lambda f: wide_adapter().save(f / "e"),
    "index": lambda f: AdaptedIndex(np.eye(6, dtype="f4")).add(rows(900)).save(f / "i"),
    "monitor": lambda f: Monitor.fit(rows(900), np.eye(6, dtype="f4"), horizon=5).save(f / "m"),
    "onnx": lambda f: wide_adapter().to_onnx(f / "e.onnx"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_raises_and_keeps_the_old_file(tmp_path, name):
    "The kernel refuses bytes beyond the first thousand of any file, as it does on a full disk."

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    WRITERS[name](tmp_path)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    code, told = in_child(lambda: WRITERS[name](tmp_path), fill)
    assert code == 1 and told.startswith("True"), (
        told
    )  # an OSError or RuntimeError, which the shell answers in one line
    now = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert {p: now.get(p) for p in before} == before and not any(p.name.endswith(".tmp") for p in now)


# -- many rows and classes -----------------------------------------------------------------------------------


def test_one_hundred_thousand_classes():
    "Two rows each; splits, samplers and a closed form take seconds, not hours."
    n = 100_000
    y = np.random.default_rng(0).permutation(np.repeat(np.arange(n), 2))
    x = normalize(np.random.default_rng(1).normal(size=(2 * n, 8)))
    assert len(packs.split_classes(y, spawn_rngs(0).split).seen) == 0.8 * n
    a, _ = packs.row_split(y, spawn_rngs(0).split, fractions=(0.5, 0.5))
    assert (np.bincount(y[a], minlength=n) == 1).all()
    index = index_rows_by_class(torch.from_numpy(y))
    t = random_dataset_triplets(index, torch.arange(4096), gen=torch.Generator().manual_seed(0))
    assert (y[t.a] == y[t.p]).all() and (y[t.a] != y[t.n]).all() and (t.a != t.p).all()
    adapter = EmbeddingAdapter("wccn", max_unseen_loss=None).fit(x, y)
    assert adapter.transform(x[:9]).shape == (9, 8) and len(adapter.classes_) == n


def small_sets():
    "Name -> (rows, labels) that are small, flat or alike."
    rng = np.random.default_rng(0)
    unit = lambda n, d=6: normalize(rng.normal(size=(n, d)))
    return {
        "one sample a class": (unit(30), np.arange(30)),
        "one class": (unit(30), np.zeros(30, int)),
        "one row": (unit(1), np.array([0])),
        "one dimension": (np.where(np.arange(60) % 2, 1.0, -1.0)[:, None], np.arange(60) % 12),
        "two dimensions": (unit(120, 2), np.arange(120) % 12),
        "all rows alike": (np.repeat(unit(1), 120, 0), np.arange(120) % 12),
        "every row twice": (np.repeat(unit(60), 2, 0), np.repeat(np.arange(60) % 12, 2)),
        "unlabelled but one": (unit(60), np.r_[0, np.full(59, -1)]),
        "more dimensions than rows": (unit(30, 200), np.arange(30) % 12),
        "one huge class": (unit(300), np.r_[np.arange(24) % 12, np.zeros(276, int)]),
    }


@pytest.mark.parametrize("method", ["auto", "wccn", "linear_supcon", "lora_triplet", "ega_released"])
@pytest.mark.parametrize("name", small_sets())
def test_extreme_inputs(name, method):
    "Every method returns unit rows or raises one sentence."
    x, y = small_sets()[name]
    try:
        adapter = EmbeddingAdapter(method, max_unseen_loss=1.0 if method == "auto" else None).fit(x, y)
        z = adapter.transform(x)
        assert z.shape == x.shape and np.abs(np.linalg.norm(z, axis=1) - 1).max() < 1e-5
        evaluate(adapter, x, y)
    except InputError as error:
        assert "\n" not in str(error)
