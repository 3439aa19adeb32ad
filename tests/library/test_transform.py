"Streaming: the bits of `transform` from every format, kills at any moment, journals of others, hostile files, memory, Ray."

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_runs import make_packs

from ega import transform as transform_module
from ega.adapters import LoRAAdapter, ReleasedEGA, save_adapter, transform
from ega.arrays import InputError, normalize
from ega.experiments import throughput
from ega.experiments.grids import ResultStore, run_grid_ray
from ega.experiments.runs import build_config, run_experiment
from ega.packs import EmbeddingSet, read_pack, write_pack
from ega.transform import transform_file, transform_ray
from ega.vectors import open_vectors

D = 16
ONE = dict(device="cpu", threads=1)


def made(d=D, hidden=32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    f = ReleasedEGA(d, hidden=hidden, gen=gen).eval()
    with torch.no_grad():
        f.branch[3].weight.add_(0.2 * torch.randn(d, hidden, generator=gen))
    return f


def unit(n, d=D, seed=0):
    return normalize(np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32))


def lists(x, kind="fixed"):
    "Rows as an Arrow column."
    flat = pa.array(x.ravel())
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(flat, x.shape[1])
    offsets = np.arange(0, x.size + 1, x.shape[1])
    return (
        pa.ListArray.from_arrays(offsets.astype("i4"), flat)
        if kind == "list"
        else pa.LargeListArray.from_arrays(offsets.astype("i8"), flat)
    )


def vectors(path, column="v"):
    a = pq.read_table(path)[column].combine_chunks()
    return a.flatten().to_numpy().reshape(len(a), -1)


def by_block(f, x, batch):
    return np.concatenate(
        [transform(f, x[i : i + batch], batch_size=batch, device="cpu") for i in range(0, len(x), batch)]
    )


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(transform_module, "BLOCK_BYTES", 4 * D * 100)  # 100 rows


# -- every way in ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 2, 49, 50, 51, 199, 1003))
@pytest.mark.parametrize("dtype", ("float16", "float32", "float64"))
def test_npy_has_the_bits_of_transform(tmp_path, small_blocks, n, dtype):
    f, x = made(), unit(n).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    done = transform_file(f, tmp_path / "x.npy", tmp_path / "z.npy", batch_size=50, **ONE)
    z = np.load(tmp_path / "z.npy")
    assert z.dtype == np.float32 and z.flags.c_contiguous and np.array_equal(z, by_block(f, x.astype("f4"), 50))
    assert (
        done[::2] == (n, 0)
        and done.path == tmp_path / "z.npy"
        and sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "z.npy"]
    )


@pytest.mark.parametrize("threads", (2, 3, None))
def test_threads_move_no_bit_and_are_given_back(tmp_path, small_blocks, threads):
    np.save(tmp_path / "x.npy", unit(777))
    before = torch.get_num_threads()
    transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", batch_size=50, device="cpu", threads=threads)
    assert (
        np.array_equal(np.load(tmp_path / "z.npy"), by_block(made(), unit(777), 50))
        and torch.get_num_threads() == before
    )


def test_big_endian_and_half_output(tmp_path):
    np.save(tmp_path / "x.npy", unit(60).astype(">f4"))
    transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", dtype="float16", **ONE)
    assert np.array_equal(np.load(tmp_path / "z.npy"), transform(made(), unit(60), device="cpu").astype("f2"))


@pytest.mark.parametrize("kind", ("fixed", "list", "large"))
@pytest.mark.parametrize("width", ("f2", "f4", "f8"))
@pytest.mark.parametrize("group", (7, 64, 10**6))
def test_parquet_has_the_bits_of_transform_and_keeps_the_rest(tmp_path, small_blocks, kind, width, group):
    "Row groups smaller, equal and larger than a block; strings, dictionaries, nulls, nested columns and metadata stay."
    x = unit(331).astype(width)
    table = pa.table(
        {
            "name": pa.array([None if i % 7 == 0 else f"ü{i}" for i in range(331)]),
            "a.b": lists(x, kind),
            "kind": pa.array(["p", "q", "r"] * 110 + ["p"]).dictionary_encode(),
            "tags": pa.array([[i, i] for i in range(331)]),
            "at": pa.array(np.arange(331), pa.timestamp("us", "UTC")),
        }
    ).replace_schema_metadata({"mine": "kept"})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=group)
    for dtype, back in (("float32", "f4"), ("float16", "f2")):
        transform_file(made(), tmp_path / "x.parquet", tmp_path / f"{dtype}.parquet", batch_size=50, dtype=dtype, **ONE)
        out = pq.read_table(tmp_path / f"{dtype}.parquet")
        assert out.column_names == table.column_names and all(
            out[c].to_pylist() == table[c].to_pylist() and out[c].type == table[c].type
            for c in table.column_names
            if c != "a.b"
        )
        assert np.array_equal(
            vectors(tmp_path / f"{dtype}.parquet", "a.b"), by_block(made(), x.astype("f4"), 50).astype(back)
        )
        assert (
            out.schema.metadata[b"mine"] == b"kept"
            and b"ReleasedEGA(16)" in out.schema.metadata[b"ega_adapted"]
            and str(out.schema.field("a.b").type.list_size) == "16"
        )


@pytest.mark.parametrize("stored", ("int8", "float16", "float32"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_a_pack_stays_a_pack(tmp_path, small_blocks, stored, dtype):
    "Verified hashes, the same names and labels, and the note; adapted twice, noted twice."
    meta = {"set": "toy", "encoder": "noise", "licence": "none", "source": "s", "notes": "first", "preprocessing": "-"}
    es = EmbeddingSet(
        unit(257),
        np.arange(257) % 5 - 1,
        [f'{i}/Käse "{i}"\n' for i in range(257)],
        ["train", ""] * 128 + ["val"],
        ("a", "ö", "c", "d", "e"),
        meta,
    )
    write_pack(es, tmp_path / "x.parquet", dtype=stored)
    transform_file(made(), tmp_path / "x.parquet", tmp_path / "z.parquet", dtype=dtype, batch_size=50, **ONE)
    was, now = read_pack(tmp_path / "x.parquet"), read_pack(tmp_path / "z.parquet")
    z = by_block(made(), was.x, 50)
    assert np.array_equal(now.x, z) if dtype == "float32" else np.abs(now.x - z).max() < 2**-11
    assert (
        all(getattr(now, k).tolist() == getattr(was, k).tolist() for k in ("ids", "y", "split"))
        and now.classes == was.classes
        and now.meta["dtype"] == dtype
    )
    assert (
        now.meta["notes"].startswith("first; adapted by ReleasedEGA(16), weights ")
        and now.meta["notes"].endswith(was.meta["sha256"][:16])
        and pq.read_schema(tmp_path / "z.parquet").names == ["id", "label", "split", "scale", "code"]
    )
    transform_file(made(), tmp_path / "z.parquet", tmp_path / "zz.parquet", **ONE)
    assert read_pack(tmp_path / "zz.parquet").meta["notes"].count("adapted by") == 2


def test_a_changed_pack_is_not_made_good_again(tmp_path):
    write_pack(
        EmbeddingSet(unit(20), [0] * 20, meta={"set": "s", "encoder": "e"}), tmp_path / "x.parquet", dtype="float32"
    )
    table = pq.read_table(tmp_path / "x.parquet")
    for column, value, words in (
        ("code", lists(unit(20, seed=1)).cast(table.schema.field("code").type), "sha256 should be"),
        ("label", pa.array([1] * 20, pa.int32()), "sha256_rest should be"),
    ):
        pq.write_table(
            table.set_column(table.column_names.index(column), table.schema.field(column), value),
            tmp_path / "bad.parquet",
        )
        with pytest.raises(InputError, match=words):
            transform_file(made(), tmp_path / "bad.parquet", tmp_path / "z.parquet", **ONE)
    pq.write_table(table.drop_columns("split"), tmp_path / "bad.parquet")
    with pytest.raises(InputError, match="columns of a pack"):
        transform_file(made(), tmp_path / "bad.parquet", tmp_path / "z.parquet", **ONE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.parquet", "x.parquet"]


def test_a_folder_becomes_a_folder(tmp_path, small_blocks):
    (tmp_path / "x").mkdir()
    for i in range(3):
        np.save(tmp_path / f"x/{i}.npy", unit(100 + i, seed=i))
    pq.write_table(pa.table({"v": lists(unit(30))}), tmp_path / "x/p.parquet")
    (tmp_path / "x/_SUCCESS").touch(), (tmp_path / "x/.hidden").touch()
    done = transform_file(made(), tmp_path / "x", tmp_path / "deep/er/z", batch_size=50, **ONE)
    assert (
        done.rows == 333
        and sorted(p.name for p in (tmp_path / "deep/er/z").iterdir()) == ["0.npy", "1.npy", "2.npy", "p.parquet"]
        and len(list((tmp_path / "deep/er").iterdir())) == 1
    )
    for i in range(3):
        assert np.array_equal(np.load(tmp_path / f"deep/er/z/{i}.npy"), by_block(made(), unit(100 + i, seed=i), 50))
    assert np.array_equal(vectors(tmp_path / "deep/er/z/p.parquet"), by_block(made(), unit(30), 50))


def test_a_file_of_an_adapter_will_do_and_the_adapter_is_left_alone(tmp_path):
    np.save(tmp_path / "x.npy", unit(9))
    f = LoRAAdapter(D, rank=2, gen=torch.Generator()).train()
    for name, adapter in (("a.npy", f), ("b.npy", str(save_adapter(f, tmp_path / "f.safetensors")))):
        transform_file(adapter, tmp_path / "x.npy", tmp_path / name, **ONE)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes() and f.training


def test_bfloat16_is_close_and_is_not_the_default(tmp_path):
    np.save(tmp_path / "x.npy", unit(300))
    for compute in ("float32", "bfloat16"):
        transform_file(made(), tmp_path / "x.npy", tmp_path / f"{compute}.npy", precision=compute, **ONE)
    a, b = (np.load(tmp_path / f"{c}.npy").astype("f8") for c in ("float32", "bfloat16"))
    off = 1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert (
        1e-9 < off.max() < 2**-13 and np.abs(np.linalg.norm(b, axis=1) - 1).max() < 1e-6
    )  # eight bits in the branch, not in the sum and its norm
    assert np.array_equal(a, by_block(made(), unit(300), 1024))


@settings(max_examples=15, deadline=None)
@given(n=st.integers(1, 300), first=st.integers(0, 299), size=st.integers(1, 120), group=st.integers(1, 90))
def test_parquet_blocks_are_slices(tmp_path_factory, n, first, size, group):
    x, path = unit(n, 3), tmp_path_factory.mktemp("p") / "x.parquet"
    pq.write_table(pa.table({"v": lists(x)}), path, row_group_size=group)
    blocks = list(open_vectors(path, 3).blocks(min(first, n - 1), size))
    assert np.array_equal(np.concatenate(blocks), x[min(first, n - 1) :]) and all(len(b) == size for b in blocks[:-1])


# -- kills -------------------------------------------------------------------------------------------------

CHILD = """
import sys
from ega import transform as transform_module
transform_module.BLOCK_BYTES = 4*16*200
transform_module.transform_file(sys.argv[1], sys.argv[2], sys.argv[3], batch_size=200, device="cpu", threads=int(sys.argv[4]))
"""


def start(*args, code=CHILD, **how):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        **how,
    )


def noted(target):
    "Rows that the journals of a target say are on disk."
    journals = [
        target.with_name(target.name + ".part.json"),
        *target.with_name(target.name + ".part").glob("*.part.json"),
    ]
    rows = 0
    for j in journals:
        try:
            rows = max(rows, json.loads(j.read_text())["rows"])
        except FileNotFoundError:
            pass
    return rows


def kill_at(process, target, rows):
    "SIGKILL when so many rows are noted; whether it came in time."
    while process.poll() is None and noted(target) < rows:
        time.sleep(0.002)
    process.kill()
    return process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    "One set as .npy, Parquet, pack and folder, and what an unbroken run makes of the first and the third."
    root, x = tmp_path_factory.mktemp("stores"), unit(40_000)
    f = save_adapter(made(hidden=256), root / "f.safetensors")
    np.save(root / "x.npy", x)
    pq.write_table(pa.table({"v": lists(x), "id": np.arange(len(x))}), root / "x.parquet", row_group_size=7000)
    write_pack(EmbeddingSet(x, np.zeros(len(x), int), meta={"set": "s", "encoder": "e"}), root / "p.parquet")
    (root / "x").mkdir()
    for i in range(2):
        np.save(root / f"x/{i}.npy", x[i::2])
    for name in ("x.npy", "p.parquet"):
        transform_file(f, root / name, root / f"unbroken_{name}", batch_size=200, **ONE)
    return root


def content(path):
    return [p.read_bytes() for p in (sorted(path.iterdir()) if path.is_dir() else [path])]


@pytest.mark.parametrize("name, rows", [("x.npy", 30_000), ("p.parquet", 10_000)])
def test_killed_and_resumed_it_has_the_same_bytes(stores, tmp_path, name, rows):
    "A kill at two threads, an end at one that finds the rows."
    target = tmp_path / name
    assert kill_at(start(stores / "f.safetensors", stores / name, target, 2), target, rows) and not target.exists()
    kept = noted(target)
    done = transform_file(stores / "f.safetensors", stores / name, target, batch_size=200, **ONE)
    assert done.resumed_rows >= kept >= rows and done.rows == 40_000
    assert content(target) == content(stores / f"unbroken_{name}") and [p.name for p in tmp_path.iterdir()] == [name]


FORKS = """
import json, os, signal, sys
from pathlib import Path
import numpy, pandas, pyarrow.parquet as pq, resource, torch          # pandas: pyarrow would load it in every fork
from ega import transform as transform_module
from ega.adapters import load_adapter

def step():
    global left
    left -= 1
    if not left: os.kill(os.getpid(), signal.SIGKILL)

def deadly(call):
    def wrapped(*args, **kw):
        step()
        done = call(*args, **kw)
        step()
        return done
    return wrapped

def run(block, limit, adapter, source, target, how):
    global left
    transform_module.BLOCK_BYTES = block
    if limit < 0:
        left = -limit
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir"), (Path, "touch"), (pq.ParquetWriter, "write_table")): setattr(owner, name, deadly(getattr(owner, name)))
    if limit > 0: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    transform_module.transform_file(adapter, source, target, device="cpu", threads=1, **how)

for line in sys.stdin:
    block, limit, adapter, *rest = json.loads(line)
    adapter = load_adapter(adapter)
    adapter(torch.eye(adapter.d))                       # here, once for all: what torch loads on first use; it starts no thread
    child = os.fork()
    if not child:
        said = ""
        try: run(block, limit, adapter, *rest)
        except BaseException as error: said = f"{type(error).__name__}: {error}"
        print(json.dumps(said), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]: print('"killed"', flush=True)
"""


@pytest.fixture(scope="module")
def forked():
    "A function that runs `transform_file` in a fork of a process which has no threads: killed at the step -limit, or with files of at most limit bytes; what it said."
    if not hasattr(os, "fork"):
        pytest.skip("no forks here")
    process = start(code=FORKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(limit, *paths, **how):
        process.stdin.write((json.dumps([transform_module.BLOCK_BYTES, limit, *map(str, paths), how]) + "\n").encode())
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.communicate()


@pytest.mark.parametrize("name", ("x.parquet", "x"))
def test_a_kill_before_and_after_any_step_on_the_disk_is_survived(stores, tmp_path, small_blocks, forked, name):
    "Every flush, rename, removal and row group of a short run in turn, by forks of one process: what stays on disk can be gone on from, to the same bytes."
    source = tmp_path / "in" / name
    (source if name == "x" else source.parent).mkdir(parents=True)
    for p in sorted((stores / name).iterdir()) if name == "x" else [stores / name]:
        to = source / p.name if name == "x" else source
        if p.suffix == ".npy":
            np.save(to, np.load(p)[:250])
        else:
            pq.write_table(pq.read_table(p).slice(0, 250), to)
    f = save_adapter(made(hidden=32), tmp_path / "f")
    transform_file(f, source, tmp_path / f"unbroken_{name}", batch_size=200, **ONE)
    for at in range(1, 300):
        target = tmp_path / f"out{at}" / name
        said = forked(-at, f, source, target, batch_size=200)
        if said != "killed":
            assert said == "" and at > 30
            break
        if [p.name for p in target.parent.glob("*")] != [name]:
            transform_file(f, source, target, batch_size=200, **ONE)  # else it died after its last step
        assert content(target) == content(tmp_path / f"unbroken_{name}"), at
        assert [p.name for p in target.parent.iterdir()] == [name]
    else:
        pytest.fail("the run never ended")


def half(folder, f, name="x.npy", n=1000):
    "A run broken after its first blocks, as a kill leaves it."
    np.save(folder / name, unit(n))

    class Stop(BaseException):
        pass

    real = transform_module._note

    def note(journal, owner, rows):
        real(journal, owner, rows)
        if rows >= 400:
            raise Stop

    transform_module._note = note
    try:
        transform_file(f, folder / name, folder / "z.npy", batch_size=50, **ONE)
    except Stop:
        pass
    finally:
        transform_module._note = real
    return folder / name, folder / "z.npy"


def test_a_journal_of_something_else_is_refused(tmp_path, small_blocks):
    source, target = half(tmp_path, made())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for f, how, words in (
        (made(seed=1), {}, "another adapter"),
        (made(), dict(dtype="float16"), "another settings"),
        (made(), dict(batch_size=100), "another settings"),
        (made(), dict(precision="bfloat16"), "another settings"),
        (made(), dict(normalize=True), "another settings"),
        (made(seed=1), dict(normalize=True), "another adapter and settings"),
    ):
        with pytest.raises(InputError, match=f"{words}.*delete z.npy.part and z.npy.part.json"):
            transform_file(f, source, target, **{"batch": 50} | how, **ONE)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    os.utime(source, ns=(1, 1))
    with pytest.raises(InputError, match="another source"):
        transform_file(made(), source, target, batch_size=50, **ONE)


def test_a_broken_journal_or_part_is_refused(tmp_path, small_blocks):
    source, target = half(tmp_path, made())
    journal, part = tmp_path / "z.npy.part.json", tmp_path / "z.npy.part"
    good, rows = journal.read_text(), part.read_bytes()
    for text in ("", "{", "[]", '{"rows": "7", "owner": {}}', '{"rows": 7}', '"a"'):
        journal.write_text(text)
        with pytest.raises(InputError, match="delete it and z.npy.part"):
            transform_file(made(), source, target, batch_size=50, **ONE)
    journal.write_text(good)
    part.write_bytes(rows[:500])
    with pytest.raises(InputError, match="shorter than its journal"):
        transform_file(made(), source, target, batch_size=50, **ONE)
    part.unlink()
    with pytest.raises(InputError, match="shorter than its journal"):
        transform_file(made(), source, target, batch_size=50, **ONE)
    part.write_bytes(rows + b"half a block of a killed run")
    assert transform_file(made(), source, target, batch_size=50, **ONE).resumed_rows == json.loads(good)["rows"]
    assert np.array_equal(np.load(target), by_block(made(), unit(1000), 50))


def test_batches_begin_at_the_same_rows_after_a_kill(tmp_path, small_blocks, monkeypatch):
    "Where they do not, a BLAS may sum in another order."
    source, target = half(tmp_path, made())
    lengths, real = [], transform_module._adapt
    monkeypatch.setattr(
        transform_module,
        "_adapt",
        lambda adapter, device, compute, x: lengths.append(len(x)) or real(adapter, device, compute, x),
    )
    resumed = transform_file(made(), source, target, batch_size=50, **ONE).resumed_rows
    assert resumed % 50 == 0 and lengths == [50] * ((1000 - resumed) // 50)


def test_what_is_there_is_not_overwritten(tmp_path, small_blocks):
    np.save(tmp_path / "x.npy", unit(9))
    for name in ("z.npy", "z.npy.part"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name} exists already"):
            transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", **ONE)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    source, target = half(tmp_path, made())
    target.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        transform_file(made(), source, target, batch_size=50, **ONE)
    assert target.read_text() == "mine"


def test_two_processes_do_not_write_one_file(tmp_path, small_blocks):
    fcntl = pytest.importorskip("fcntl")
    source, target = half(tmp_path, made())
    with open(tmp_path / "z.npy.part", "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            transform_file(made(), source, target, batch_size=50, **ONE)
    assert transform_file(made(), source, target, batch_size=50, **ONE).resumed_rows >= 400


# -- refusals ----------------------------------------------------------------------------------------------


def spoil(row, value):
    x = unit(1000)
    x[row] = value
    return x


@pytest.mark.parametrize("kind", ("npy", "parquet"))
@pytest.mark.parametrize("row", (0, 99, 100, 777, 999))
@pytest.mark.parametrize(
    "value, words",
    [
        (np.nan, "row {} has NaN or inf"),
        (np.inf, "row {} has NaN or inf"),
        (0, "row {} must be a unit row, got norm 0"),
        (1, "row {} must be a unit row, got norm 4"),
        (1e30, "row {} must be a unit row"),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path, small_blocks, kind, row, value, words):
    x = spoil(row, value)
    np.save(tmp_path / "x.npy", x) if kind == "npy" else pq.write_table(
        pa.table({"v": lists(x)}), tmp_path / "x.parquet", row_group_size=130
    )
    with pytest.raises(InputError, match=words.format(row)):
        transform_file(made(), tmp_path / f"x.{kind}", tmp_path / f"z.{kind}", batch_size=50, **ONE)
    assert not (tmp_path / f"z.{kind}").exists()
    if row < 100:
        assert [p.name for p in tmp_path.iterdir()] == [f"x.{kind}"]  # nothing was on disk, so nothing is left


def test_normalize_brings_rows_to_the_sphere(tmp_path, small_blocks):
    x = unit(500) * np.random.default_rng(3).uniform(1e-30, 1e30, (500, 1))
    np.save(tmp_path / "x.npy", x)
    transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", batch_size=50, normalize=True, **ONE)
    assert np.array_equal(np.load(tmp_path / "z.npy"), by_block(made(), normalize(x), 50))
    for value, words in ((0, "row 321 has norm 0"), (np.nan, "row 321 has NaN"), (1e300, "row 321 has NaN or inf")):
        x[321] = value
        np.save(tmp_path / "y.npy", x)
        with pytest.raises(InputError, match=words):
            transform_file(made(), tmp_path / "y.npy", tmp_path / f"z{value}.npy", batch_size=50, normalize=True, **ONE)


def raw(change):
    def write(path):
        np.save(path, unit(20))
        path.write_bytes(change(path.read_bytes()))

    return write


@pytest.mark.parametrize(
    "write, words",
    [
        (lambda p: p.write_bytes(b""), "cannot be read"),
        (lambda p: p.write_bytes(b"\x93NUMPY"), "cannot be read"),
        (lambda p: p.write_bytes(os.urandom(5000)), "cannot be read"),
        (raw(lambda b: b[:-1]), "cannot be read"),
        (raw(lambda b: b[:100]), "cannot be read"),
        (raw(lambda b: b + b"x"), "expected 1408 bytes, got 1409"),
        (raw(lambda b: b.replace(b"'shape': (20, 16)", b"'shape': (2**99,)")), "cannot be read"),
        (raw(lambda b: b.replace(b"(20, 16)", b"(-2, 16)")), "cannot be read|expected"),
        (raw(lambda b: b.replace(b"'<f4'", b"'|O8'")), "cannot be read"),
        (raw(lambda b: b.replace(b"(20, 16)", b"(99, 16)")), "cannot be read"),
        (lambda p: np.save(p, unit(20)[0]), r"shape \(n, 16\)"),
        (lambda p: np.save(p, np.empty((0, 16), "f4")), "at least one row|cannot be read"),
        (lambda p: np.save(p, unit(20, 15)), "expected 16 columns, as the adapter has, got 15"),
        (lambda p: np.save(p, np.asfortranarray(unit(20))), "Fortran order"),
        (lambda p: np.save(p, np.ones((20, 16), int)), "expected float16"),
        (lambda p: np.save(p, np.ones((20, 16), "c8")), "expected float16"),
        (lambda p: np.save(p, np.array([[None] * 16]), allow_pickle=True), "cannot be read"),
        (lambda p: np.save(p, np.ones((3, 16), np.longdouble)), "expected float16"),
    ],
)
def test_a_foreign_or_damaged_npy_is_refused(tmp_path, write, words):
    write(tmp_path / "x.npy")
    with pytest.raises(InputError, match=words) as error:
        transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", **ONE)
    assert "; " in str(error.value) and [p.name for p in tmp_path.iterdir()] == ["x.npy"]


def table(**columns):
    return lambda p: pq.write_table(pa.table(columns), p)


@pytest.mark.parametrize(
    "write, how, words",
    [
        (lambda p: p.write_bytes(b""), {}, "cannot be read"),
        (lambda p: p.write_bytes(b"PAR1" + os.urandom(500) + b"PAR1"), {}, "cannot be read"),
        (table(v=lists(unit(1)[:0])), {}, "at least one row"),
        (table(a=[1, 2]), {}, "found none; write the vectors as lists"),
        (table(a=lists(unit(3)), b=lists(unit(3)), c=[1, 2, 3]), {}, "found a, b; name one"),
        (table(a=lists(unit(3))), dict(column="b"), "expected one column 'b', the columns are a"),
        (table(a=lists(unit(3)), c=[1, 2, 3]), dict(column="c"), "candidates: a"),
        (table(a=lists(unit(3, 15))), {}, "row 0 of column 'a' has 15 numbers, expected 16"),
        (table(a=[[1.0] * 16, [1.0] * 15, None]), {}, "row 2 has no vector"),
        (table(a=[[0.25] * 16] * 5 + [[1.0] * 15]), {}, "row 5 of column 'a' has 15"),
        (table(a=[[0.25] * 16, [None] * 16]), {}, "row 1 has NaN"),
        (table(a=pa.array([[1] * 16])), {}, "found none"),
    ],
)
def test_a_foreign_or_damaged_parquet_is_refused(tmp_path, write, how, words):
    write(tmp_path / "x.parquet")
    with pytest.raises(InputError, match=words) as error:
        transform_file(made(), tmp_path / "x.parquet", tmp_path / "z.parquet", **how, **ONE)
    assert "; " in str(error.value) and [p.name for p in tmp_path.iterdir()] == ["x.parquet"]


def test_a_damaged_page_is_an_input_error(tmp_path, small_blocks):
    "Bytes in the middle of a file whose end is whole: checksums, or whatever fails first."
    pq.write_table(
        pa.table({"v": lists(unit(3000))}),
        tmp_path / "x.parquet",
        write_page_checksum=True,
        compression="none",
        use_dictionary=False,
        row_group_size=500,
    )
    good = (tmp_path / "x.parquet").read_bytes()
    for at in (4, len(good) // 3, len(good) // 2, len(good) * 2 // 3):
        (tmp_path / "x.parquet").write_bytes(good[:at] + bytes(64) + good[at + 64 :])
        with pytest.raises(InputError):
            transform_file(made(), tmp_path / "x.parquet", tmp_path / f"z{at}.parquet", batch_size=50, **ONE)


@pytest.mark.parametrize(
    "source, target, how, words",
    [
        ("none.npy", "z.npy", {}, "no such file"),
        ("x.npy", "z.parquet", {}, "target must end in .npy"),
        ("x.npy", "x.npy", {}, "outside of the source"),
        ("x.csv", "z.csv", {}, "ending .npy or .parquet"),
        ("x.npy", "z.npy", dict(dtype="int8"), "dtype must be float32 or float16"),
        ("x.npy", "z.npy", dict(precision="f8"), "compute must be"),
        ("x.npy", "z.npy", dict(batch_size=0), "batch must be"),
        ("x.npy", "z.npy", dict(batch_size=1.5), "batch must be"),
        ("x.npy", "z.npy", dict(threads=0), "threads must be"),
        ("x.npy", "x.csv/z.npy", {}, "folder cannot be made"),
        ("empty", "z", {}, "at least one"),
        ("strange", "z", {}, "found notes.txt"),
        ("strange", "strange/z", {}, "outside of the source"),
        ("nested", "z", {}, "found inner"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path, source, target, how, words):
    for folder in ("empty", "strange", "nested/inner"):
        (tmp_path / folder).mkdir(parents=True)
    np.save(tmp_path / "x.npy", unit(5))
    (tmp_path / "x.csv").write_text("1"), (tmp_path / "strange/notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match=words) as error:
        transform_file(made(), tmp_path / source, tmp_path / target, **ONE | how)
    assert sorted(tmp_path.rglob("*")) == before and str(error.value)


def test_other_modules_and_missing_adapters_are_refused(tmp_path):
    np.save(tmp_path / "x.npy", unit(5))
    for f, words in (
        (torch.nn.Linear(D, D), "attribute d"),
        (tmp_path / "none", "no such adapter"),
        (str(tmp_path / "x.npy"), "cannot be read"),
    ):
        with pytest.raises(InputError, match=words):
            transform_file(f, tmp_path / "x.npy", tmp_path / "z.npy", **ONE)


def test_a_folder_that_cannot_be_written_to_and_a_full_disk(tmp_path, monkeypatch):
    np.save(tmp_path / "x.npy", unit(5))
    monkeypatch.setattr(
        transform_module.os, "access", lambda *a: False
    )  # root may write anywhere, so a real one would not do
    with pytest.raises(InputError, match="cannot be written to"):
        transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", **ONE)
    monkeypatch.undo()
    monkeypatch.setattr(transform_module.shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(10, 10, 100))
    with pytest.raises(InputError, match="its disk has 0.0 GB"):
        transform_file(made(), tmp_path / "x.npy", tmp_path / "z.npy", **ONE)
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


@pytest.mark.parametrize("kind", ("npy", "parquet"))
def test_a_write_that_fails_says_so_and_is_gone_on_from(tmp_path, small_blocks, forked, kind):
    "The kernel refuses bytes beyond a limit, as it does on a full disk: first among the rows, then while Parquet is put together."
    x = unit(2000)
    np.save(tmp_path / "x.npy", x) if kind == "npy" else pq.write_table(
        pa.table({"v": lists(x), "noise": np.random.default_rng(0).random((2000, 30)).tolist()}), tmp_path / "x.parquet"
    )
    f, source, target, how = (
        save_adapter(made(), tmp_path / "f"),
        tmp_path / f"x.{kind}",
        tmp_path / f"z.{kind}",
        dict(batch_size=50, column="v" if kind == "parquet" else None),
    )
    for limit, words in ((70_000, "rows noted are kept"), (200_000, "File too large"))[: 1 if kind == "npy" else 2]:
        said = forked(limit, f, source, target, **how)
        assert said.startswith("OSError: ") and words in said and not target.exists()
        assert 500 < noted(target) <= 2000 and sorted(p.name for p in tmp_path.iterdir()) == [
            "f",
            f"x.{kind}",
            f"z.{kind}.part",
            f"z.{kind}.part.json",
        ]
    assert transform_file(f, source, target, **how, **ONE).resumed_rows > 500
    assert np.array_equal(np.load(target) if kind == "npy" else vectors(target), by_block(made(), x, 50))


def test_one_bad_shard_is_found_before_any_is_computed(tmp_path):
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x/a.npy", unit(5)), np.save(tmp_path / "x/b.npy", unit(5, 15))
    with pytest.raises(InputError, match="b.npy: expected 16 columns"):
        transform_file(made(), tmp_path / "x", tmp_path / "z", **ONE)
    np.save(tmp_path / "x/b.npy", spoil(5, np.nan))
    with pytest.raises(InputError, match="b.npy: row 5"):
        transform_file(made(), tmp_path / "x", tmp_path / "z", **ONE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "z.part", "z.part.json"] and [
        p.name for p in (tmp_path / "z.part").iterdir()
    ] == ["a.npy"]


# -- memory ------------------------------------------------------------------------------------------------

MEMORY = """
import sys
import numpy, torch, pyarrow.parquet
from ega.adapters import LinearAdapter
from ega import transform as transform_module
from ega.arrays import peak_memory_mb
from ega.transform import transform_file
transform_module.BLOCK_BYTES = 2**21
for source in sys.argv[1:]:
    transform_file(LinearAdapter(512), source, source.replace("x", "z"), device="cpu", threads=1)
    print(peak_memory_mb())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path, kinds=("npy", "parquet")):
    "10 blocks of 2 MB, then 160: 300 MB more go through (Parquet: in one row group), and the peak grows by a third of that at most; malloc and Arrow's pool keep a few blocks."
    x, sources = unit(1024, 512), []
    for kind in kinds:
        for times in (10, 160):
            sources.append(tmp_path / f"x{times}.{kind}")
            if kind == "npy":
                np.save(sources[-1], np.tile(x, (times, 1)))
            else:
                pq.write_table(
                    pa.table({"v": pa.chunked_array([lists(x)] * times)}),
                    sources[-1],
                    row_group_size=1024 * times,
                    use_dictionary=False,
                    compression="none",
                )
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *sources],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    for p in tmp_path.iterdir():
        p.unlink()
    peaks = [float(v) for v in done.stdout.split()]
    assert len(peaks) == 4 and peaks[1] - peaks[0] < 100 and peaks[3] - peaks[2] < 100 and peaks[3] < 1000, (
        peaks,
        done.stderr,
    )


# -- the rehearsal and its record -------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_a_rehearsal_kills_resumes_and_compares(tmp_path):
    f = made(64, 256)
    run = throughput.resume_test(f, tmp_path, rows=200_000, rng=np.random.default_rng(0))
    assert (
        run["rows_equal"] == run["rows"] == 200_000
        and 80_000 <= run["killed_after_rows"] <= run["resumed_rows"] < 200_000
        and 100 < run["peak_rss_mb"] < 2048
        and run["rows_per_s"] > 0
    )
    z = np.load(tmp_path / "z.npy", mmap_mode="r+")
    z[123_456] *= -1
    z.flush()  # a spoilt row is seen
    assert (
        sum(
            int((transform(f, a, device="cpu") == b).all(1).sum())
            for a, b in zip(*(open_vectors(tmp_path / n, 64).blocks(0, 2**14) for n in ("x.npy", "z.npy")))
        )
        == 199_999
    )


def test_the_share_of_the_products_is_one_where_nothing_else_is_done(tmp_path, monkeypatch):
    "Bare products against themselves, and against themselves twice."
    f = made(64, 1024)
    weights = [w for w in f.parameters() if w.ndim == 2]
    for times, share in ((1, 1), (2, 0.5)):

        def products(adapter, source, target, *, batch, **how):
            for _ in range(times * 8192 // batch):
                for w in weights:
                    torch.mm(torch.ones(batch, w.shape[1]), w.detach().T)
            Path(target).touch()

        monkeypatch.setattr(throughput, "transform_file", products)
        found = throughput.product_share(f, tmp_path, rows=8192, rng=np.random.default_rng(0))
        assert 0.6 * share < found["share_cpu"] < 1.5 * share and not list(
            tmp_path.iterdir()
        )  # neighbours on the machine


def test_the_committed_record_holds_what_is_claimed():
    record = json.loads((Path(__file__).parents[2] / "data/results/transform.json").read_text())
    run = record["run"]
    assert (
        run["rows"] == run["rows_equal"] == 10**7
        and 0 < run["killed_after_rows"] <= run["resumed_rows"] < 10**7
        and run["peak_rss_mb"] < 2048
    )
    assert run["gb_in"] == run["gb_out"] == 20.48 and {s["adapter"].split("(")[0] for s in record["shares"]} == {
        "EGA",
        "ReleasedEGA",
        "Linear",
    }
    assert all(s["share"] >= 0.8 for s in record["shares"] if s["adapter"].startswith("EGA")) and {
        "cpu",
        "versions",
        "machine",
    } <= set(record["machine"])


# -- Ray ---------------------------------------------------------------------------------------------------


def needs_ray(test):
    return pytest.mark.slow(
        pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'ega[ray]'")(test)
    )  # half a minute, most of it Ray's start


def test_without_ray_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x/0.npy", unit(5))
    save_adapter(made(), tmp_path / "f")
    with pytest.raises(ImportError, match=r"pip install 'ega\[ray\]'"):
        transform_ray(tmp_path / "f", tmp_path / "x", tmp_path / "z")
    with pytest.raises(ImportError, match=r"pip install 'ega\[ray\]'"):
        run_grid_ray([build_config("unseen", "cub100", "frozen")], ResultStore(tmp_path, "unseen"), tmp_path)
    assert not list(tmp_path.glob("z*"))


@pytest.fixture(scope="module")
def cluster():
    "Two nodes of one processor each, on this machine."
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=os.pathsep.join(sys.path))
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    nodes.add_node(num_cpus=1, object_store_memory=100 * 2**20)
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()
    nodes.shutdown()


def kill_worker(target, rows):
    "SIGKILL to a worker that has some, but not all of the rows of its shard on disk; its process id."
    import psutil

    while target.parent.exists():
        if 0 < noted(target) < rows:
            for p in psutil.process_iter(["cmdline"]):
                if "ray::Map(_adapt_shard)" in " ".join(p.info["cmdline"] or []) and any(
                    0 < noted(Path(f.path[: -len(".part")])) < rows
                    for f in p.open_files()
                    if f.path.endswith(".parquet.part")
                ):
                    p.kill()
                    return p.pid
        time.sleep(0.01)


@needs_ray
def test_ray_makes_the_same_files_and_survives_a_killed_worker(cluster, tmp_path):
    from threading import Thread

    f = save_adapter(made(64, 1024), tmp_path / "f.safetensors")
    (tmp_path / "x").mkdir()
    for i in range(2):
        pq.write_table(
            pa.table({"v": lists(unit(140_000, 64, i)), "id": np.arange(140_000)}), tmp_path / f"x/{i}.parquet"
        )
    killed = []
    thread = Thread(target=lambda: killed.append(kill_worker(tmp_path / "z", 140_000)), daemon=True)
    thread.start()
    done = transform_ray(f, tmp_path / "x", tmp_path / "z", device="cpu")
    thread.join(5)
    transform_file(f, tmp_path / "x", tmp_path / "again", **ONE)
    assert (
        killed and killed[0] and done.rows == 280_000 and 0 < done.resumed_rows < 140_000
    )  # the shard of the dead worker was gone on with, not begun anew
    assert content(tmp_path / "z") == content(tmp_path / "again") and sorted(p.name for p in tmp_path.iterdir()) == [
        "again",
        "f.safetensors",
        "x",
        "z",
    ]
    with pytest.raises(InputError, match="z exists already"):
        transform_ray(f, tmp_path / "x", tmp_path / "z", device="cpu")
    with pytest.raises(InputError, match="folder of shards"):
        transform_ray(f, tmp_path / "x/0.parquet", tmp_path / "0.parquet", device="cpu")


@needs_ray
def test_the_grid_on_ray_gives_the_digits_of_one_process(cluster, tmp_path):
    make_packs(tmp_path / "packs")
    configs = [build_config("unseen", "cub100", m, hidden=16, epochs=2) for m in ("frozen", "wccn", "supcon")]
    store = ResultStore(tmp_path, "unseen")
    store.add(run_experiment(configs[0], tmp_path / "packs", device="cpu"))
    assert (
        run_grid_ray(configs, store, tmp_path / "packs") == 2 and run_grid_ray(configs, store, tmp_path / "packs") == 0
    )
    rows = store.read().set_index(["run_id", "query_set"])
    assert len(rows) == 6
    for c in configs:
        for r in run_experiment(c, tmp_path / "packs", device="cpu").itertuples():
            assert rows.lp_at_1[c.run_id, r.query_set] == r.lp_at_1 and np.array_equal(
                rows.hit[c.run_id, r.query_set], r.hit
            )
