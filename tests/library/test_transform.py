"transform_file: same bits as `transform` for every format, resuming after a kill, bad inputs, memory, Ray."

import json
import os
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
from test_runs import make_packs

from ega.data.arrays import InputError, check_X, normalize
from ega.data.packs import EmbeddingSet, read_pack, write_pack
from ega.data.vectors import read_matrix
from ega.deploy import transform as transform_module
from ega.deploy.transform import transform_file, transform_ray
from ega.experiments.grids import ResultStore, run_grid_ray
from ega.experiments.runs import build_config, run_experiment
from ega.method.adapters import LinearAdapter, LoRAAdapter, ReleasedEGA, adapter_fingerprint, save_adapter, transform

D = 16
ONE = dict(device="cpu", threads=1)


def make_adapter(d=D, hidden=32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    f = ReleasedEGA(d, hidden=hidden, gen=gen).eval()
    with torch.no_grad():
        f.branch[3].weight.add_(0.2 * torch.randn(d, hidden, generator=gen))
    return f


def unit_rows(n, d=D, seed=0):
    return normalize(np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32))


def list_array(x, kind="fixed"):
    "Rows as an Arrow array of lists."
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


def transform_blocks(f, x, batch):
    x = check_X(x)  # float16 rows have norm 1 only up to their own rounding
    return np.concatenate(
        [transform(f, x[i : i + batch], batch_size=batch, device="cpu") for i in range(0, len(x), batch)]
    )


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(transform_module, "BLOCK_BYTES", 4 * D * 100)  # 100 rows


# -- formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", (1, 2, 49, 50, 51, 199, 1003))
@pytest.mark.parametrize("dtype", ("float16", "float32", "float64"))
def test_npy_equals_transform_of_an_array(tmp_path, small_blocks, n, dtype):
    f, x = make_adapter(), unit_rows(n).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    done = transform_file(f, tmp_path / "x.npy", tmp_path / "z.npy", batch_size=50, **ONE)
    z = np.load(tmp_path / "z.npy")
    assert z.dtype == np.float32 and z.flags.c_contiguous and np.array_equal(z, transform_blocks(f, x.astype("f4"), 50))
    assert (
        (done.rows, done.resumed_rows) == (n, 0)
        and done.path == tmp_path / "z.npy"
        and sorted(p.name for p in tmp_path.iterdir()) == ["x.npy", "z.npy"]
    )


@pytest.mark.parametrize("threads", (2, 3, None))
def test_thread_count_changes_no_bits_and_is_restored(tmp_path, small_blocks, threads):
    np.save(tmp_path / "x.npy", unit_rows(777))
    before = torch.get_num_threads()
    transform_file(make_adapter(), tmp_path / "x.npy", tmp_path / "z.npy", batch_size=50, device="cpu", threads=threads)
    assert (
        np.array_equal(np.load(tmp_path / "z.npy"), transform_blocks(make_adapter(), unit_rows(777), 50))
        and torch.get_num_threads() == before
    )


@pytest.mark.parametrize("kind", ("fixed", "list", "large"))
@pytest.mark.parametrize("width", ("f2", "f4", "f8"))
@pytest.mark.parametrize("group", (7, 64, 10**6))
def test_parquet_equals_transform_and_keeps_other_columns(tmp_path, small_blocks, kind, width, group):
    "Row groups smaller than, equal to and larger than a block; other columns and metadata are copied."
    x = unit_rows(331).astype(width)
    table = pa.table(
        {
            "name": pa.array([None if i % 7 == 0 else f"ü{i}" for i in range(331)]),
            "a.b": list_array(x, kind),
            "kind": pa.array(["p", "q", "r"] * 110 + ["p"]).dictionary_encode(),
            "tags": pa.array([[i, i] for i in range(331)]),
            "at": pa.array(np.arange(331), pa.timestamp("us", "UTC")),
        }
    ).replace_schema_metadata({"mine": "kept"})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=group)
    for dtype, back in (("float32", "f4"), ("float16", "f2")):
        transform_file(
            make_adapter(), tmp_path / "x.parquet", tmp_path / f"{dtype}.parquet", batch_size=50, dtype=dtype, **ONE
        )
        out = pq.read_table(tmp_path / f"{dtype}.parquet")
        assert out.column_names == table.column_names and all(
            out[c].to_pylist() == table[c].to_pylist() and out[c].type == table[c].type
            for c in table.column_names
            if c != "a.b"
        )
        assert np.array_equal(
            vectors(tmp_path / f"{dtype}.parquet", "a.b"),
            transform_blocks(make_adapter(), x.astype("f4"), 50).astype(back),
        )
        assert (
            out.schema.metadata[b"mine"] == b"kept"
            and b"ReleasedEGA(16)" in out.schema.field("a.b").metadata[b"ega_adapted"]
            and str(out.schema.field("a.b").type.list_size) == "16"
        )


@pytest.mark.parametrize("stored", ("int8", "float16", "float32"))
@pytest.mark.parametrize("dtype", ("float16", "float32"))
def test_pack_becomes_a_valid_pack(tmp_path, small_blocks, stored, dtype):
    "Valid hashes, the same ids and labels, and a note that it was adapted."
    meta = {"set": "toy", "encoder": "noise", "licence": "none", "source": "s", "notes": "first", "preprocessing": "-"}
    es = EmbeddingSet(
        unit_rows(257),
        np.arange(257) % 5 - 1,
        [f'{i}/Käse "{i}"\n' for i in range(257)],
        ["train", ""] * 128 + ["val"],
        ("a", "ö", "c", "d", "e"),
        meta,
    )
    write_pack(es, tmp_path / "x.parquet", dtype=stored)
    transform_file(make_adapter(), tmp_path / "x.parquet", tmp_path / "z.parquet", dtype=dtype, batch_size=50, **ONE)
    was, now = read_pack(tmp_path / "x.parquet"), read_pack(tmp_path / "z.parquet")
    z = transform_blocks(make_adapter(), was.x, 50)
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
    with pytest.raises(InputError, match="expected vectors that are not adapted"):
        transform_file(make_adapter(seed=1), tmp_path / "z.parquet", tmp_path / "zz.parquet", **ONE)


def test_pack_with_wrong_hash_is_rejected(tmp_path):
    write_pack(
        EmbeddingSet(unit_rows(20), [0] * 20, meta={"set": "s", "encoder": "e"}),
        tmp_path / "x.parquet",
        dtype="float32",
    )
    table = pq.read_table(tmp_path / "x.parquet")
    for column, value, words in (
        ("code", list_array(unit_rows(20, seed=1)).cast(table.schema.field("code").type), "sha256 should be"),
        ("label", pa.array([1] * 20, pa.int32()), "sha256_rest should be"),
    ):
        pq.write_table(
            table.set_column(table.column_names.index(column), table.schema.field(column), value),
            tmp_path / "bad.parquet",
        )
        with pytest.raises(InputError, match=words):
            transform_file(make_adapter(), tmp_path / "bad.parquet", tmp_path / "z.parquet", **ONE)
    pq.write_table(table.drop_columns("split"), tmp_path / "bad.parquet")
    with pytest.raises(InputError, match="columns of a pack"):
        transform_file(make_adapter(), tmp_path / "bad.parquet", tmp_path / "z.parquet", **ONE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.parquet", "x.parquet"]


def test_folder_of_files(tmp_path, small_blocks):
    (tmp_path / "x").mkdir()
    for i in range(3):
        np.save(tmp_path / f"x/{i}.npy", unit_rows(100 + i, seed=i))
    pq.write_table(pa.table({"v": list_array(unit_rows(30))}), tmp_path / "x/p.parquet")
    (tmp_path / "x/_SUCCESS").touch(), (tmp_path / "x/.hidden").touch()
    done = transform_file(make_adapter(), tmp_path / "x", tmp_path / "deep/er/z", batch_size=50, **ONE)
    assert (
        done.rows == 333
        and sorted(p.name for p in (tmp_path / "deep/er/z").iterdir()) == ["0.npy", "1.npy", "2.npy", "p.parquet"]
        and len(list((tmp_path / "deep/er").iterdir())) == 1
    )
    for i in range(3):
        assert np.array_equal(
            np.load(tmp_path / f"deep/er/z/{i}.npy"), transform_blocks(make_adapter(), unit_rows(100 + i, seed=i), 50)
        )
    assert np.array_equal(
        vectors(tmp_path / "deep/er/z/p.parquet"), transform_blocks(make_adapter(), unit_rows(30), 50)
    )


def test_affine_adapter_adapts_files_as_in_float64(tmp_path, small_blocks):
    "Given as a module and as a file; compared with l2(M x + b)."
    x, f = unit_rows(250), LinearAdapter(D, bias=True)
    rng = np.random.default_rng(1)
    W, b = 0.2 * rng.standard_normal((D, D)), 0.2 * rng.standard_normal(D)
    with torch.no_grad():
        f.weight.copy_(torch.from_numpy(W))
        f.offset.copy_(torch.from_numpy(b))
    z = x + x @ W.T + b
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    np.save(tmp_path / "x.npy", x)
    pq.write_table(pa.table({"v": list_array(x)}), tmp_path / "x.parquet")
    for name, adapter in (("a", f.eval()), ("b", save_adapter(f, tmp_path / "f.safetensors"))):
        npy, parquet = tmp_path / f"{name}.npy", tmp_path / f"{name}.parquet"
        transform_file(adapter, tmp_path / "x.npy", npy, **ONE)
        transform_file(adapter, tmp_path / "x.parquet", parquet, column="v", **ONE)
        assert np.abs(np.load(npy) - z).max() < 1e-6 and np.abs(vectors(parquet) - z).max() < 1e-6


def test_bfloat16_is_close_to_float32_and_not_the_default(tmp_path):
    np.save(tmp_path / "x.npy", unit_rows(300))
    for precision in ("float32", "bfloat16"):
        transform_file(make_adapter(), tmp_path / "x.npy", tmp_path / f"{precision}.npy", precision=precision, **ONE)
    a, b = (np.load(tmp_path / f"{c}.npy").astype("f8") for c in ("float32", "bfloat16"))
    off = 1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert (
        1e-9 < off.max() < 2**-13 and np.abs(np.linalg.norm(b, axis=1) - 1).max() < 1e-6
    )  # eight bits in the branch, not in the sum and its norm
    assert np.array_equal(a, transform_blocks(make_adapter(), unit_rows(300), 1024))


# -- resume -------------------------------------------------------------------------------------------------

CHILD = """
import sys
from ega.deploy import transform as transform_module
transform_module.BLOCK_BYTES = 4*16*200
threads = int(sys.argv[4])
transform_module.transform_file(*sys.argv[1:4], batch_size=200, device="cpu", threads=threads)
"""


def start_process(*args, code=CHILD, **how):
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        **how,
    )


def rows_on_disk(target):
    "The number of rows that the progress files of a target record."
    progress_files = [
        target.with_name(target.name + ".part.json"),
        *target.with_name(target.name + ".part").glob("*.part.json"),
    ]
    rows = 0
    for j in progress_files:
        try:
            rows = max(rows, json.loads(j.read_text())["rows"])
        except FileNotFoundError:
            pass
    return rows


def kill_after_rows(process, target, rows):
    "Kill the process when so many rows are on disk; False when it ended before."
    while process.poll() is None and rows_on_disk(target) < rows:
        time.sleep(0.002)
    process.kill()
    return process.wait() == -signal.SIGKILL


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    "The same vectors as .npy, Parquet, pack and folder; the .npy file and the pack also transformed."
    root, x = tmp_path_factory.mktemp("stores"), unit_rows(40_000)
    f = save_adapter(make_adapter(hidden=256), root / "f.safetensors")
    np.save(root / "x.npy", x)
    pq.write_table(pa.table({"v": list_array(x), "id": np.arange(len(x))}), root / "x.parquet", row_group_size=7000)
    write_pack(EmbeddingSet(x, np.zeros(len(x), int), meta={"set": "s", "encoder": "e"}), root / "p.parquet")
    (root / "x").mkdir()
    for i in range(2):
        np.save(root / f"x/{i}.npy", x[i::2])
    for name in ("x.npy", "p.parquet"):
        transform_file(f, root / name, root / f"complete_{name}", batch_size=200, **ONE)
    return root


def content(path):
    return [p.read_bytes() for p in (sorted(path.iterdir()) if path.is_dir() else [path])]


@pytest.mark.parametrize("name, rows", [("x.npy", 30_000), ("p.parquet", 10_000)])
def test_transform_resumes_after_kill_with_the_same_bytes(stores, tmp_path, name, rows):
    "The killed run has two threads, the resumed run one."
    target = tmp_path / name
    assert (
        kill_after_rows(start_process(stores / "f.safetensors", stores / name, target, 2), target, rows)
        and not target.exists()
    )
    kept = rows_on_disk(target)
    done = transform_file(stores / "f.safetensors", stores / name, target, batch_size=200, **ONE)
    assert done.resumed_rows >= kept >= rows and done.rows == 40_000
    assert content(target) == content(stores / f"complete_{name}") and [p.name for p in tmp_path.iterdir()] == [name]


FORKS = """
import json, os, signal, sys
from pathlib import Path
import numpy, pandas, pyarrow.parquet as pq, resource, torch  # pandas: or pyarrow imports it in every fork
from ega.deploy import transform as transform_module
from ega.method.adapters import load_adapter

def count_down():
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)

def deadly(call):
    def wrapped(*args, **kw):
        count_down()
        result = call(*args, **kw)
        count_down()
        return result
    return wrapped

operations = [(os, "fsync"), (pq.ParquetWriter, "write_table")]
operations += [(Path, name) for name in ("replace", "unlink", "mkdir", "touch")]

def run(block, limit, adapter, source, target, options):
    global left
    transform_module.BLOCK_BYTES = block
    if limit < 0:
        left = -limit
        for owner, name in operations:
            setattr(owner, name, deadly(getattr(owner, name)))
    if limit > 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    transform_module.transform_file(adapter, source, target, device="cpu", threads=1, **options)

for line in sys.stdin:
    block, limit, adapter, *rest = json.loads(line)
    adapter = load_adapter(adapter)
    adapter(torch.eye(adapter.d))  # torch loads some modules on first use; once, before the fork
    child = os.fork()
    if not child:
        message = ""
        try:
            run(block, limit, adapter, *rest)
        except BaseException as error:
            message = f"{type(error).__name__}: {error}"
        print(json.dumps(message), flush=True)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        print('"killed"', flush=True)
"""


@pytest.fixture(scope="module")
def forked():
    """Give a function that runs `transform_file` in a fork of a process without threads and returns its error message.

    A negative limit kills the fork at that disk operation; a positive one is the largest size of a file in bytes.
    """
    if not hasattr(os, "fork"):
        pytest.skip("no forks here")
    process = start_process(code=FORKS, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(limit, *paths, **how):
        process.stdin.write((json.dumps([transform_module.BLOCK_BYTES, limit, *map(str, paths), how]) + "\n").encode())
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield run
    process.communicate()


@pytest.mark.parametrize("name", ("x.parquet", "x"))
def test_transform_resumes_after_kill_at_any_disk_operation(stores, tmp_path, small_blocks, forked, name):
    "Kill a short run before and after each flush, rename, removal and row group; resumed, it has the same bytes."
    source = tmp_path / "in" / name
    (source if name == "x" else source.parent).mkdir(parents=True)
    for p in sorted((stores / name).iterdir()) if name == "x" else [stores / name]:
        to = source / p.name if name == "x" else source
        if p.suffix == ".npy":
            np.save(to, np.load(p)[:250])
        else:
            pq.write_table(pq.read_table(p).slice(0, 250), to)
    f = save_adapter(make_adapter(hidden=32), tmp_path / "f")
    transform_file(f, source, tmp_path / f"complete_{name}", batch_size=200, **ONE)
    for at in range(1, 300):
        target = tmp_path / f"out{at}" / name
        said = forked(-at, f, source, target, batch_size=200)
        if said != "killed":
            assert said == "" and at > 30
            break
        if [p.name for p in target.parent.glob("*")] != [name]:
            transform_file(f, source, target, batch_size=200, **ONE)  # otherwise it was killed after its last operation
        assert content(target) == content(tmp_path / f"complete_{name}"), at
        assert [p.name for p in target.parent.iterdir()] == [name]
    else:
        pytest.fail("the run did not end within 300 operations")


def interrupt_run(folder, f, name="x.npy", n=1000):
    "Interrupt a run after its first blocks, as a kill would."
    np.save(folder / name, unit_rows(n))

    class Stop(BaseException):
        pass

    original = transform_module._write_progress

    def write_progress(path, provenance, rows):
        original(path, provenance, rows)
        if rows >= 400:
            raise Stop

    transform_module._write_progress = write_progress
    try:
        transform_file(f, folder / name, folder / "z.npy", batch_size=50, **ONE)
    except Stop:
        pass
    finally:
        transform_module._write_progress = original
    return folder / name, folder / "z.npy"


def test_other_inputs_do_not_continue_a_run(tmp_path, small_blocks):
    source, target = interrupt_run(tmp_path, make_adapter())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for f, how in (
        (make_adapter(seed=1), {}),
        (make_adapter(), dict(dtype="float16")),
        (make_adapter(), dict(batch_size=100)),
        (make_adapter(), dict(precision="bfloat16")),
    ):
        with pytest.raises(InputError):
            transform_file(f, source, target, **{"batch_size": 50} | how, **ONE)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    os.utime(source, ns=(1, 1))
    with pytest.raises(InputError):
        transform_file(make_adapter(), source, target, batch_size=50, **ONE)


def test_a_damaged_progress_or_part_file_is_refused(tmp_path, small_blocks):
    source, target = interrupt_run(tmp_path, make_adapter())
    progress, part = tmp_path / "z.npy.part.json", tmp_path / "z.npy.part"
    valid, rows = progress.read_text(), part.read_bytes()

    def run():
        return transform_file(make_adapter(), source, target, batch_size=50, **ONE)

    for text in ("", "[]", '{"rows": "7", "provenance": {}}', '{"rows": 7}'):
        progress.write_text(text)
        with pytest.raises(InputError):
            run()
    progress.write_text(valid)
    for damaged in (rows[:500], rows.replace(b"adapted by", b"ADAPTED BY"), b""):
        part.write_bytes(damaged)
        with pytest.raises(InputError):
            run()
    part.write_bytes(rows + b"incomplete block")
    assert run().resumed_rows == json.loads(valid)["rows"]
    assert np.array_equal(np.load(target), transform_blocks(make_adapter(), unit_rows(1000), 50))


def test_batches_begin_at_the_same_rows_after_resume(tmp_path, small_blocks, monkeypatch):
    "In batches of other rows, a BLAS may sum in another order."
    source, target = interrupt_run(tmp_path, make_adapter())
    lengths, original = [], transform_module._transform_batch
    monkeypatch.setattr(
        transform_module,
        "_transform_batch",
        lambda adapter, device, precision, x: lengths.append(len(x)) or original(adapter, device, precision, x),
    )
    resumed = transform_file(make_adapter(), source, target, batch_size=50, **ONE).resumed_rows
    assert resumed % 50 == 0 and lengths == [50] * ((1000 - resumed) // 50)


def test_existing_files_are_not_overwritten(tmp_path, small_blocks):
    np.save(tmp_path / "x.npy", unit_rows(9))
    for name in ("z.npy", "z.npy.part"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(InputError, match=f"{name} exists already"):
            transform_file(make_adapter(), tmp_path / "x.npy", tmp_path / "z.npy", **ONE)
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    source, target = interrupt_run(tmp_path, make_adapter())
    target.write_text("mine")
    with pytest.raises(InputError, match="exists already"):
        transform_file(make_adapter(), source, target, batch_size=50, **ONE)
    assert target.read_text() == "mine"


def test_second_process_on_the_same_target_is_rejected(tmp_path, small_blocks):
    fcntl = pytest.importorskip("fcntl")
    source, target = interrupt_run(tmp_path, make_adapter())
    with open(tmp_path / "z.npy.part", "ab") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process"):
            transform_file(make_adapter(), source, target, batch_size=50, **ONE)
    assert transform_file(make_adapter(), source, target, batch_size=50, **ONE).resumed_rows >= 400


# -- bad inputs ----------------------------------------------------------------------------------------------


def rows_with(row, value):
    x = unit_rows(1000)
    x[row] = value
    return x


@pytest.mark.parametrize("kind", ("npy", "parquet"))
@pytest.mark.parametrize("row", (0, 99, 100, 999))
@pytest.mark.parametrize("value", (np.nan, np.inf, 0))
def test_a_bad_row_is_refused_by_its_number(tmp_path, small_blocks, kind, row, value):
    x = rows_with(row, value)
    np.save(tmp_path / "x.npy", x) if kind == "npy" else pq.write_table(
        pa.table({"v": list_array(x)}), tmp_path / "x.parquet", row_group_size=130
    )
    with pytest.raises(InputError, match=f"row {row}"):
        transform_file(make_adapter(), tmp_path / f"x.{kind}", tmp_path / f"z.{kind}", batch_size=50, **ONE)
    assert not (tmp_path / f"z.{kind}").exists()
    if row < 100:
        assert [p.name for p in tmp_path.iterdir()] == [f"x.{kind}"]  # no row was written, so no file is left


def test_rows_of_any_norm_are_brought_to_norm_1(tmp_path, small_blocks):
    x = unit_rows(500) * np.random.default_rng(3).uniform(1e-30, 1e30, (500, 1))
    np.save(tmp_path / "x.npy", x)
    transform_file(make_adapter(), tmp_path / "x.npy", tmp_path / "z.npy", batch_size=50, **ONE)
    assert np.array_equal(np.load(tmp_path / "z.npy"), transform_blocks(make_adapter(), normalize(x), 50))
    for value in (1e300, 1e-300):  # outside the range of float32
        x[321] = value
        np.save(tmp_path / "y.npy", x)
        with pytest.raises(InputError, match="row 321"):
            transform_file(make_adapter(), tmp_path / "y.npy", tmp_path / f"z{value}.npy", batch_size=50, **ONE)


NPY = {
    "cut": lambda b: b[:-1],
    "longer": lambda b: b + b"x",
    "other shape": lambda b: b.replace(b"(20, 16)", b"(99, 16)"),
    "negative shape": lambda b: b.replace(b"(20, 16)", b"(-2, 16)"),
    "objects": lambda b: b.replace(b"'<f4'", b"'|O8'"),
    "noise": lambda b: b"PAR1" + b[::-1],
}
COLUMNS = {
    "another width": [[0.25] * 16] * 5 + [[1.0] * 15],
    "a missing vector": [[1.0] * 16, None],
    "a missing number": [[0.25] * 16, [None] * 16],
    "texts": [["1"] * 16],
    "numbers": [1.0, 2.0],
}


@pytest.mark.parametrize("wrong", (*NPY, *COLUMNS, "page"))
def test_a_damaged_or_wrong_file_is_refused(tmp_path, wrong):
    path = tmp_path / ("x.npy" if wrong in NPY else "x.parquet")
    if wrong in NPY:
        np.save(path, unit_rows(20))
        path.write_bytes(NPY[wrong](path.read_bytes()))
    elif wrong in COLUMNS:
        pq.write_table(pa.table({"v": COLUMNS[wrong]}), path)
    else:  # 64 bytes in the middle are overwritten: a checksum fails
        options = dict(write_page_checksum=True, compression="none", use_dictionary=False, row_group_size=500)
        pq.write_table(pa.table({"v": list_array(unit_rows(3000))}), path, **options)
        good = path.read_bytes()
        path.write_bytes(good[: len(good) // 2] + bytes(64) + good[len(good) // 2 + 64 :])
    with pytest.raises(InputError):
        transform_file(make_adapter(), path, tmp_path / f"z{path.suffix}", **ONE)
    assert not (tmp_path / f"z{path.suffix}").exists()
    if wrong != "page":  # rows before a damaged page may have been written, and are kept
        assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "source, target, how",
    [
        ("none.npy", "z.npy", {}),
        ("x.npy", "z.parquet", {}),
        ("x.npy", "x.npy", {}),
        ("x.csv", "z.csv", {}),
        ("narrow.npy", "z.npy", {}),
        ("lists.parquet", "z.parquet", {}),
        ("x.npy", "z.npy", dict(column="v")),
        ("x.npy", "z.npy", dict(dtype="int8")),
        ("x.npy", "z.npy", dict(precision="f8")),
        ("x.npy", "z.npy", dict(batch_size=0)),
        ("x.npy", "z.npy", dict(threads=0)),
        ("x.npy", "x.csv/z.npy", {}),
        ("empty", "z", {}),
        ("strange", "z", {}),
        ("strange", "strange/z", {}),
        ("adapted", "z", {}),
        ("x.npy", "z.npy", dict(adapter=torch.nn.Linear(D, D))),
        ("x.npy", "z.npy", dict(adapter="none.safetensors")),
        ("x.npy", "z.npy", dict(adapter=np.ones((3, D)))),
    ],
)
def test_wrong_input_is_refused_and_leaves_nothing(tmp_path, source, target, how):
    for folder in ("empty", "strange", "adapted"):
        (tmp_path / folder).mkdir()
    np.save(tmp_path / "x.npy", unit_rows(5)), np.save(tmp_path / "narrow.npy", unit_rows(5, 15))
    lists = pa.table({"a": list_array(unit_rows(5)), "b": list_array(unit_rows(5))})
    pq.write_table(lists, tmp_path / "lists.parquet")
    (tmp_path / "x.csv").write_text("1"), (tmp_path / "strange/notes.txt").touch()
    transform_file(make_adapter(), tmp_path / "x.npy", tmp_path / "adapted/x.npy", **ONE)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError):
        transform_file(
            how.get("adapter", make_adapter()),
            tmp_path / source,
            tmp_path / target,
            **ONE | {name: value for name, value in how.items() if name != "adapter"},
        )
    assert sorted(tmp_path.rglob("*")) == before


def test_an_estimator_a_matrix_and_a_file_are_applied_and_not_changed(tmp_path):
    np.save(tmp_path / "x.npy", unit_rows(9).astype(">f4"))
    f = LoRAAdapter(D, rank=2, gen=torch.Generator()).train()
    matrix = f.as_matrix().numpy()
    for name, adapter in (("a", f), ("b", str(save_adapter(f, tmp_path / "f.safetensors"))), ("c", matrix)):
        transform_file(adapter, tmp_path / "x.npy", tmp_path / f"{name}.npy", **ONE)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes() and f.training
    assert np.abs(np.load(tmp_path / "a.npy") - np.load(tmp_path / "c.npy")).max() < 1e-6


@pytest.mark.parametrize("kind", ("npy", "parquet"))
def test_transform_resumes_after_a_failed_write(tmp_path, small_blocks, forked, kind):
    "The size of files is limited, which fails like a full disk: first for the part file, then for the Parquet target."
    x = unit_rows(2000)
    np.save(tmp_path / "x.npy", x) if kind == "npy" else pq.write_table(
        pa.table({"v": list_array(x), "noise": np.random.default_rng(0).random((2000, 30)).tolist()}),
        tmp_path / "x.parquet",
    )
    f, source, target, how = (
        save_adapter(make_adapter(), tmp_path / "f"),
        tmp_path / f"x.{kind}",
        tmp_path / f"z.{kind}",
        dict(batch_size=50, column="v" if kind == "parquet" else None),
    )
    for limit, words in ((70_000, "rows written so far are kept"), (200_000, "File too large"))[
        : 1 if kind == "npy" else 2
    ]:
        said = forked(limit, f, source, target, **how)
        assert said.startswith("OSError: ") and words in said and not target.exists()
        assert 500 < rows_on_disk(target) <= 2000 and sorted(p.name for p in tmp_path.iterdir()) == [
            "f",
            f"x.{kind}",
            f"z.{kind}.part",
            f"z.{kind}.part.json",
        ]
    assert transform_file(f, source, target, **how, **ONE).resumed_rows > 500
    assert np.array_equal(
        np.load(target) if kind == "npy" else vectors(target), transform_blocks(make_adapter(), x, 50)
    )


def test_bad_file_of_a_folder_is_found_before_computing(tmp_path):
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x/a.npy", unit_rows(5)), np.save(tmp_path / "x/b.npy", unit_rows(5, 15))
    with pytest.raises(InputError, match="b.npy"):
        transform_file(make_adapter(), tmp_path / "x", tmp_path / "z", **ONE)
    np.save(tmp_path / "x/b.npy", rows_with(5, np.nan))
    with pytest.raises(InputError, match="b.npy.*row 5"):
        transform_file(make_adapter(), tmp_path / "x", tmp_path / "z", **ONE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x", "z.part", "z.part.json"] and [
        p.name for p in (tmp_path / "z.part").iterdir()
    ] == ["a.npy"]


# -- memory ------------------------------------------------------------------------------------------------

MEMORY = """
import sys
import numpy, torch, pyarrow.parquet
from ega.method.adapters import LinearAdapter
from ega.deploy import transform as transform_module
from ega.testing import peak_memory_mb
from ega.deploy.transform import transform_file
transform_module.BLOCK_BYTES = 2**21
for source in sys.argv[1:]:
    transform_file(LinearAdapter(512), source, source.replace("x", "z"), device="cpu", threads=1)
    print(peak_memory_mb())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_does_not_grow_with_the_file(tmp_path, kinds=("npy", "parquet")):
    """10 blocks of 2 MB, then 160 (Parquet: in one row group).

    The second file is 300 MB larger; the peak may grow by a third of that, as malloc and Arrow keep some blocks.
    """
    x, sources = unit_rows(1024, 512), []
    for kind in kinds:
        for times in (10, 160):
            sources.append(tmp_path / f"x{times}.{kind}")
            if kind == "npy":
                np.save(sources[-1], np.tile(x, (times, 1)))
            else:
                pq.write_table(
                    pa.table({"v": pa.chunked_array([list_array(x)] * times)}),
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


# -- Ray ---------------------------------------------------------------------------------------------------


def needs_ray(test):
    return pytest.mark.slow(
        pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'ega[ray]'")(test)
    )  # half a minute, most of it Ray's start


def test_missing_ray_names_its_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    (tmp_path / "x").mkdir()
    np.save(tmp_path / "x/0.npy", unit_rows(5))
    save_adapter(make_adapter(), tmp_path / "f")
    with pytest.raises(ImportError, match=r"pip install 'ega\[ray\]'"):
        transform_ray(tmp_path / "f", tmp_path / "x", tmp_path / "z")
    with pytest.raises(ImportError, match=r"pip install 'ega\[ray\]'"):
        run_grid_ray([build_config("unseen", "cub100", "frozen")], ResultStore(tmp_path, "unseen"), tmp_path)
    assert not list(tmp_path.glob("z*"))


@pytest.fixture(scope="module")
def cluster():
    "A Ray cluster of two nodes with one processor each, on this machine."
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
    "Kill a worker that has written some, but not all rows of its file; returns its process id."
    import psutil

    while target.parent.exists():
        if 0 < rows_on_disk(target) < rows:
            for p in psutil.process_iter(["cmdline"]):
                if "ray::Map(_ray_transform_shard)" in " ".join(p.info["cmdline"] or []) and any(
                    0 < rows_on_disk(Path(f.path[: -len(".part")])) < rows
                    for f in p.open_files()
                    if f.path.endswith(".parquet.part")
                ):
                    p.kill()
                    return p.pid
        time.sleep(0.01)


@needs_ray
def test_ray_equals_transform_file_after_a_killed_worker(cluster, tmp_path):
    from threading import Thread

    f = save_adapter(make_adapter(64, 1024), tmp_path / "f.safetensors")
    (tmp_path / "x").mkdir()
    for i in range(2):
        pq.write_table(
            pa.table({"v": list_array(unit_rows(140_000, 64, i)), "id": np.arange(140_000)}),
            tmp_path / f"x/{i}.parquet",
        )
    killed = []
    thread = Thread(target=lambda: killed.append(kill_worker(tmp_path / "z", 140_000)), daemon=True)
    thread.start()
    done = transform_ray(f, tmp_path / "x", tmp_path / "z", device="cpu")
    thread.join(5)
    transform_file(f, tmp_path / "x", tmp_path / "again", **ONE)
    assert (
        killed and killed[0] and done.rows == 280_000 and 0 < done.resumed_rows < 140_000
    )  # the file of the killed worker was resumed, not started again
    assert content(tmp_path / "z") == content(tmp_path / "again") and sorted(p.name for p in tmp_path.iterdir()) == [
        "again",
        "f.safetensors",
        "x",
        "z",
    ]
    with pytest.raises(InputError, match="z exists already"):
        transform_ray(f, tmp_path / "x", tmp_path / "z", device="cpu")
    with pytest.raises(InputError, match="expected a folder of .npy and .parquet files"):
        transform_ray(f, tmp_path / "x/0.parquet", tmp_path / "0.parquet", device="cpu")


@needs_ray
def test_run_grid_ray_equals_one_process(cluster, tmp_path):
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


def test_a_fortran_order_file_gives_the_same_bytes(tmp_path, small_blocks):
    x, adapter = unit_rows(3000), make_adapter()
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "f").mkdir()
    np.save(tmp_path / "f/x.npy", np.asfortranarray(x))
    for folder in (tmp_path, tmp_path / "f"):
        transform_file(adapter, folder / "x.npy", folder / "z.npy", batch_size=50, **ONE)
    assert (tmp_path / "z.npy").read_bytes() == (tmp_path / "f/z.npy").read_bytes()
    read = read_matrix(tmp_path / "f/x.npy").array()
    assert np.array_equal(read, x)


def test_a_parquet_file_records_its_adapters(tmp_path):
    "By column: a column that was adapted is refused by any adapter, the other one is not."
    x = unit_rows(20)
    first, second = make_adapter(), make_adapter(seed=1)
    pq.write_table(pa.table({"a": list_array(x), "b": list_array(x)}), tmp_path / "x.parquet")
    paths = [tmp_path / f"{i}.parquet" for i in range(4)]
    assert read_matrix(tmp_path / "x.parquet", column="a").adapted_by == ()
    transform_file(first, tmp_path / "x.parquet", paths[0], column="a", **ONE)
    versions = [adapter_fingerprint(f)[:16] for f in (first, second)]
    assert read_matrix(paths[0], column="a").adapted_by == (versions[0],)
    transform_file(second, paths[0], paths[1], column="b", **ONE)
    assert read_matrix(paths[1], column="a").adapted_by == (versions[0],)
    assert read_matrix(paths[1], column="b").adapted_by == (versions[1],)
    for f in (first, second):
        with pytest.raises(InputError, match=f"not adapted, but the file records that the adapter {versions[0]}"):
            transform_file(f, paths[1], paths[2], column="a", **ONE)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.parquet", "1.parquet", "x.parquet"]


def test_npy_files_record_their_adapter_and_numpy_reads_them(tmp_path):
    "Behind the dictionary of the header, which NumPy reads as a Python literal."
    adapter, path = make_adapter(), tmp_path / "1.npy"
    np.save(tmp_path / "0.npy", unit_rows(20))
    transform_file(adapter, tmp_path / "0.npy", path, **ONE)
    x = transform(adapter, unit_rows(20), device="cpu")
    assert read_matrix(path).adapted_by == (adapter_fingerprint(adapter)[:16],)
    assert read_matrix(tmp_path / "0.npy").adapted_by == ()
    raw, opened = path.read_bytes(), np.load(path, mmap_mode="r")
    assert raw[:8] == b"\x93NUMPY\x01\x00" and opened.offset % 64 == 0 and raw[opened.offset - 1] == ord("\n")
    assert opened.offset == 10 + int.from_bytes(raw[8:10], "little")
    assert np.array_equal(np.load(path), x) and np.array_equal(opened, x)
