"transform_file: the bits of `transform` for every format, resuming after a kill, wrong input, memory, Ray."

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

from ega.data.arrays import InputError, check_X, normalize
from ega.data.packs import EmbeddingSet, read_pack, write_pack
from ega.data.vectors import iter_tables, read_matrix
from ega.deploy import transform as transform_module
from ega.deploy.transform import AdaptBatches, transform_file
from ega.method.adapters import LinearAdapter, ReleasedEGA, adapter_fingerprint, save_adapter, transform
from ega.method.compression import PRECISIONS, quantize_embeddings

D = 16


def make_adapter(d=D, hidden=32, seed=0):
    gen = torch.Generator().manual_seed(seed)
    f = ReleasedEGA(d, hidden=hidden, gen=gen).eval()
    with torch.no_grad():
        f.branch[3].weight.add_(0.2 * torch.randn(d, hidden, generator=gen))
    return f


F = make_adapter()


def unit_rows(n, d=D, seed=0):
    return normalize(np.random.default_rng(seed).standard_normal((n, d), dtype=np.float32))


def list_array(x, kind="fixed"):
    "Rows as an Arrow array of lists."
    flat, ends = pa.array(x.ravel()), np.arange(0, x.size + 1, x.shape[1])
    if kind == "fixed":
        return pa.FixedSizeListArray.from_arrays(flat, x.shape[1])
    if kind == "list":
        return pa.ListArray.from_arrays(ends.astype("i4"), flat)
    return pa.LargeListArray.from_arrays(ends.astype("i8"), flat)


def save(x, path, **options):
    "Write rows as .npy, or as the column `v` of a Parquet file."
    if path.suffix == ".npy":
        np.save(path, x)
    else:
        pq.write_table(pa.table({"v": list_array(x)}), path, **options)
    return path


def read_table(path):
    "A Parquet file, a folder of them or a LanceDB table."
    return pa.concat_tables(iter_tables(path, None, 0, 1000), promote_options="permissive").unify_dictionaries()


def vectors(source, column="v"):
    if isinstance(source, Path) and source.suffix == ".npy":
        return np.load(source)
    a = (read_table(source) if isinstance(source, Path) else source)[column].combine_chunks()
    return a.flatten().to_numpy().reshape(len(a), -1)


def run(adapter, source, target, batch_size=50, threads=1, **options):
    return transform_file(adapter, source, target, batch_size=batch_size, threads=threads, device="cpu", **options)


def expected(x, f=F, batch=50):
    x = check_X(x.astype("f4"))  # float16 rows have norm 1 only up to their own rounding
    parts = [transform(f, x[i : i + batch], batch_size=batch, device="cpu") for i in range(0, len(x), batch)]
    return np.concatenate(parts)


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(transform_module, "BLOCK_BYTES", 4 * D * 100)  # 100 rows


# -- formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n, threads", ((1, 1), (50, 2), (51, 3), (1003, None)))
@pytest.mark.parametrize("dtype", ("float16", "float32", "float64"))
def test_npy_equals_transform_of_an_array(tmp_path, small_blocks, n, threads, dtype):
    "In both orders of storage, with any number of threads."
    x, before = unit_rows(n).astype(dtype), torch.get_num_threads()
    save(x, tmp_path / "x.npy"), save(np.asfortranarray(x), tmp_path / "f.npy")
    done = run(F, tmp_path / "x.npy", tmp_path / "z.npy", threads=threads)
    z = np.load(tmp_path / "z.npy")
    assert z.dtype == np.float32 and z.flags.c_contiguous and np.array_equal(z, expected(x))
    assert (done.rows, done.resumed_rows, done.path) == (n, 0, tmp_path / "z.npy")
    assert names_in(tmp_path) == ["f.npy", "x.npy", "z.npy"] and torch.get_num_threads() == before
    run(F, tmp_path / "f.npy", tmp_path / "g.npy")
    assert (tmp_path / "g.npy").read_bytes() == (tmp_path / "z.npy").read_bytes()


@pytest.mark.parametrize("kind, width", (("fixed", "f2"), ("list", "f4"), ("large", "f8")))
@pytest.mark.parametrize("group", (7, 64, 10**6))
def test_parquet_equals_transform_and_keeps_other_columns(tmp_path, small_blocks, kind, width, group):
    "Row groups smaller than, equal to and larger than a block; other columns and metadata are copied."
    x, n = unit_rows(331).astype(width), 331
    columns = {"name": [None if i % 7 == 0 else f"ü{i}" for i in range(n)], "a.b": list_array(x, kind)}
    columns |= {"kind": pa.array((["p", "q", "r"] * n)[:n]).dictionary_encode(), "tags": [[i, i] for i in range(n)]}
    table = pa.table(columns | {"at": pa.array(np.arange(n), pa.timestamp("us", "UTC"))})
    table = table.replace_schema_metadata({"mine": "kept"})
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=group)
    for dtype in PRECISIONS:
        target = tmp_path / f"{dtype}.parquet"
        run(F, tmp_path / "x.parquet", target, dtype=dtype)
        out = pq.read_table(target)
        assert out.drop_columns("a.b").equals(table.drop_columns("a.b")) and out.column_names == table.column_names
        codes, field = quantize_embeddings(expected(x), dtype), out.schema.field("a.b")
        assert np.array_equal(vectors(target, "a.b"), codes)
        assert b"ReleasedEGA(16)" in field.metadata[b"ega_adapted"] and field.type.list_size == codes.shape[1]
        assert out.schema.metadata[b"mine"] == b"kept"


@pytest.mark.parametrize("stored, dtype", (("int8", "float16"), ("float16", "float32"), ("float32", "int8")))
def test_pack_becomes_a_valid_pack(tmp_path, small_blocks, stored, dtype):
    "Valid hashes, the same ids and labels, and a note that it was adapted."
    meta = {"set": "toy", "encoder": "noise", "licence": "none", "source": "s", "notes": "first", "preprocessing": "-"}
    ids, split = [f'{i}/Käse "{i}"\n' for i in range(257)], ["train", ""] * 128 + ["val"]
    es = EmbeddingSet(unit_rows(257), np.arange(257) % 5 - 1, ids, split, ("a", "ö", "c", "d", "e"), meta)
    write_pack(es, tmp_path / "x.parquet", dtype=stored)
    run(F, tmp_path / "x.parquet", tmp_path / "z.parquet", dtype=dtype)
    was, now = read_pack(tmp_path / "x.parquet"), read_pack(tmp_path / "z.parquet")
    z = expected(was.x)
    error = np.abs(now.x - z).max()
    assert error == 0 if dtype == "float32" else error < {"float16": 2**-11, "int8": 2**-7}[dtype]
    assert all(getattr(now, name).tolist() == getattr(was, name).tolist() for name in ("ids", "y", "split"))
    assert now.classes == was.classes and now.meta["dtype"] == dtype
    assert now.meta["notes"].startswith("first; adapted by ReleasedEGA(16), weights ")
    assert now.meta["notes"].endswith(was.meta["sha256"][:16])
    with pytest.raises(InputError, match="not adapted"):
        run(make_adapter(seed=1), tmp_path / "z.parquet", tmp_path / "zz.parquet")
    with pytest.raises(InputError, match="bits"):
        run(F, tmp_path / "x.parquet", tmp_path / "b.parquet", dtype="binary")


def test_a_changed_pack_is_refused(tmp_path):
    es = EmbeddingSet(unit_rows(20), [0] * 20, meta={"set": "s", "encoder": "e"})
    table = pq.read_table(write_pack(es, tmp_path / "x.parquet", dtype="float32"))
    code = list_array(unit_rows(20, seed=1)).cast(table.schema.field("code").type)
    for name, value in (("code", code), ("label", pa.array([1] * 20, pa.int32())), ("split", None)):
        i = table.column_names.index(name)
        changed = table.drop_columns(name) if value is None else table.set_column(i, table.schema.field(name), value)
        pq.write_table(changed, tmp_path / "x.parquet")
        with pytest.raises(InputError):
            run(F, tmp_path / "x.parquet", tmp_path / "z.parquet")
    assert names_in(tmp_path) == ["x.parquet"]


def test_folder_of_files(tmp_path, small_blocks):
    (tmp_path / "x").mkdir()
    rows = {f"{i}.npy": unit_rows(100 + i, seed=i) for i in range(3)} | {"p.parquet": unit_rows(30)}
    for name, x in rows.items():
        save(x, tmp_path / "x" / name)
    (tmp_path / "x/_SUCCESS").touch(), (tmp_path / "x/.hidden").touch()
    assert run(F, tmp_path / "x", tmp_path / "deep/er/z").rows == 333
    assert names_in(tmp_path / "deep/er/z") == sorted(rows) and names_in(tmp_path / "deep/er") == ["z"]
    for name, x in rows.items():
        assert np.array_equal(vectors(tmp_path / "deep/er/z" / name), expected(x))


def test_affine_adapter_adapts_files_as_in_float64(tmp_path, small_blocks):
    "Given as a module and as a file; compared with l2(M x + b)."
    x, f, rng = unit_rows(250), LinearAdapter(D, bias=True).eval(), np.random.default_rng(1)
    W, b = 0.2 * rng.standard_normal((D, D)), 0.2 * rng.standard_normal(D)
    with torch.no_grad():
        f.weight.copy_(torch.from_numpy(W))
        f.offset.copy_(torch.from_numpy(b))
    z = x + x @ W.T + b
    z /= np.linalg.norm(z, axis=1, keepdims=True)
    for kind in ("npy", "parquet"):
        source = save(x, tmp_path / f"x.{kind}")
        for i, adapter in enumerate((f, save_adapter(f, tmp_path / "f.safetensors"))):
            run(adapter, source, tmp_path / f"{i}.{kind}", column="v" if kind == "parquet" else None)
            assert np.abs(vectors(tmp_path / f"{i}.{kind}") - z).max() < 1e-6


def test_bfloat16_is_close_to_float32_and_not_the_default(tmp_path):
    x = unit_rows(300)
    save(x, tmp_path / "x.npy")
    run(F, tmp_path / "x.npy", tmp_path / "a.npy"), run(F, tmp_path / "x.npy", tmp_path / "b.npy", precision="bfloat16")
    a, b = (np.load(tmp_path / f"{name}.npy").astype("f8") for name in "ab")
    off = 1 - (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert 1e-9 < off.max() < 2**-13  # eight bits in the branch, not in the sum and its norm
    assert np.abs(np.linalg.norm(b, axis=1) - 1).max() < 1e-6 and np.array_equal(a, expected(x))


def test_a_file_records_the_adapter_of_its_vectors(tmp_path):
    "Parquet by column; .npy behind the dictionary of the header, which NumPy reads as a Python literal."
    x, second = unit_rows(20), make_adapter(seed=1)
    first_id, second_id = (adapter_fingerprint(f)[:16] for f in (F, second))
    pq.write_table(pa.table({"a": list_array(x), "b": list_array(x)}), tmp_path / "0.parquet")
    run(F, tmp_path / "0.parquet", tmp_path / "1.parquet", column="a")
    run(second, tmp_path / "1.parquet", tmp_path / "2.parquet", column="b")
    recorded = [read_matrix(tmp_path / f"{i}.parquet", column=column).adapted_by for i, column in enumerate("aab")]
    assert recorded == [(), (first_id,), (second_id,)]
    save(x, tmp_path / "x.npy")
    run(F, tmp_path / "x.npy", tmp_path / "z.npy")
    assert read_matrix(tmp_path / "z.npy").adapted_by == (first_id,)
    for source, column in (("2.parquet", "a"), ("2.parquet", "b"), ("z.npy", None)):
        with pytest.raises(InputError, match="not adapted"):
            run(F, tmp_path / source, tmp_path / f"no{Path(source).suffix}", column=column)
    raw, opened = (tmp_path / "z.npy").read_bytes(), np.load(tmp_path / "z.npy", mmap_mode="r")
    assert raw[:8] == b"\x93NUMPY\x01\x00" and opened.offset % 64 == 0 and raw[opened.offset - 1] == ord("\n")
    assert opened.offset == 10 + int.from_bytes(raw[8:10], "little") and np.array_equal(opened, expected(x))


# -- LanceDB ------------------------------------------------------------------------------------------------


needs_lancedb = pytest.mark.skipif(find_spec("lancedb") is None, reason="needs LanceDB: pip install 'ega[deploy]'")


def write_source(table, path):
    "Write a table as .parquet, as a folder of two such files, or as .lance."
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=70)
    elif path.suffix == ".lance":
        lancedb = pytest.importorskip("lancedb")
        batches = pa.RecordBatchReader.from_batches(table.schema, table.to_batches(90))
        lancedb.connect(str(path.parent)).create_table(path.stem, batches)
    else:
        path.mkdir()
        pq.write_table(table[:140], path / "0.parquet"), pq.write_table(table[140:], path / "1.parquet")
    return path


@needs_lancedb
@pytest.mark.parametrize("name, kind", (("x.parquet", "list"), ("x", "fixed"), ("x.lance", "large")))
def test_tables_become_lancedb_tables(tmp_path, small_blocks, name, kind):
    "Each precision, other columns and their order; the table records its adapter and is not adapted again."
    x, n = unit_rows(331), 331
    columns = {"name": [None if i % 7 == 0 else f"ü{i}" for i in range(n)], "vector": list_array(x, kind)}
    columns |= {
        "kind": pa.array([f"{i // 50}" for i in range(n)]).dictionary_encode(),
        "tags": [[i, i] for i in range(n)],
    }
    table = pa.table(columns | {"at": pa.array(np.arange(n), pa.timestamp("us", "UTC"))})
    source = write_source(table.replace_schema_metadata({"mine": "kept"}), tmp_path / name)
    for dtype in PRECISIONS:
        target = tmp_path / f"{dtype}.lance"
        done, out = run(F, source, target, column="vector", dtype=dtype), read_table(target)
        codes = quantize_embeddings(expected(x), dtype)
        assert (
            done.rows == n
            and np.array_equal(vectors(target, "vector"), codes)
            and vectors(target, "vector").dtype == codes.dtype
        )
        assert out.column_names == table.column_names and out.schema.metadata[b"mine"] == b"kept"
        assert out.drop_columns("vector").to_pylist() == table.drop_columns("vector").to_pylist()
        assert read_matrix(target, column="vector").adapted_by == (adapter_fingerprint(F)[:16],)
        for again, other in ((target, tmp_path / "again.lance"), (source, target)):
            with pytest.raises(InputError):
                run(F, again, other, column="vector", dtype=dtype)
    assert names_in(tmp_path) == sorted([name, *(f"{dtype}.lance" for dtype in PRECISIONS)])


def test_a_lancedb_table_becomes_a_parquet_file(tmp_path, small_blocks):
    table = pa.table({"v": list_array(unit_rows(331)), "i": range(331)})
    run(F, write_source(table, tmp_path / "x.lance"), tmp_path / "z.parquet")
    run(F, write_source(table, tmp_path / "x.parquet"), tmp_path / "same.parquet")
    assert (tmp_path / "z.parquet").read_bytes() == (tmp_path / "same.parquet").read_bytes()


DIE = """
import os, signal, sys
from ega.deploy import transform as transform_module
transform_module.BLOCK_BYTES = 4*16*200
write_lance = transform_module._write_lance

def write_and_die(path, schema, tables):
    write_lance(path, schema, tables)
    if tables:
        os.kill(os.getpid(), signal.SIGKILL)

transform_module._write_lance = write_and_die
transform_module.transform_file(*sys.argv[1:4], batch_size=200, device="cpu", threads=2)
"""


@pytest.mark.parametrize("when", ("computing", "writing"))
def test_transform_to_lancedb_resumes_after_a_kill(tmp_path, when):
    "Killed while the rows are computed, and when the table is written, but not yet renamed."
    x, f = unit_rows(40_000), save_adapter(make_adapter(hidden=256), tmp_path / "f.safetensors")
    source = write_source(pa.table({"v": list_array(x), "i": range(len(x))}), tmp_path / "x.lance")
    target = tmp_path / "out/z.lance"
    process = start_process(f, source, target, code=CHILD if when == "computing" else DIE)
    while process.poll() is None and (when == "writing" or rows_on_disk(target) < 10_000):
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not target.exists()
    left = [f"z.lance.part{ending}" for ending in ("", ".json", ".tmp.lance")]
    assert names_in(target.parent) == left[: 2 if when == "computing" else 3]
    done = run(f, source, target, batch_size=200)
    assert done.resumed_rows >= (10_000 if when == "computing" else 40_000) and names_in(target.parent) == ["z.lance"]
    assert np.array_equal(vectors(target), expected(x, make_adapter(hidden=256), 200))
    assert read_table(target)["i"].to_pylist() == list(range(40_000))


def test_a_source_that_changes_meanwhile_is_refused(tmp_path, small_blocks, monkeypatch):
    "An update moves rows to the end of a LanceDB table; so vectors and columns would be of different rows."
    table = pa.table({"v": list_array(unit_rows(331)), "i": range(331)})
    source, original = write_source(table, tmp_path / "x.lance"), transform_module._write_lance

    def update_and_write(path, schema, tables):
        if tables:
            import lancedb

            lancedb.connect(str(tmp_path)).open_table("x").update(where="i = 5", values={"i": 1000})
        original(path, schema, tables)

    monkeypatch.setattr(transform_module, "_write_lance", update_and_write)
    with pytest.raises(InputError):
        run(F, source, tmp_path / "z.lance")
    assert not (tmp_path / "z.lance").exists()


@needs_lancedb
def test_what_cannot_become_a_lancedb_table_is_refused_before_rows_are_computed(tmp_path, small_blocks):
    x = unit_rows(100)
    pq.write_table(pa.table({"a.b": list_array(x)}), tmp_path / "dot.parquet")
    save(x, tmp_path / "x.parquet"), save(x, tmp_path / "x.npy")
    write_pack(EmbeddingSet(x, [0] * 100, meta={"set": "s", "encoder": "e"}), tmp_path / "p.parquet")
    (tmp_path / "mixed").mkdir(), (tmp_path / "order").mkdir()
    for names in ("vab", "vba"):
        columns = {name: list_array(x) if name == "v" else [name] * 100 for name in names}
        pq.write_table(pa.table(columns), tmp_path / f"order/{names}.parquet")
    save(x, tmp_path / "mixed/0.parquet"), run(F, tmp_path / "x.parquet", tmp_path / "mixed/1.parquet")
    before = sorted(tmp_path.rglob("*"))
    for source, target in (
        *(("dot.parquet", "z.lance"), ("x.parquet", "a b.lance"), ("x.npy", "z.lance"), ("p.parquet", "z.lance")),
        *(
            ("mixed", "z.lance"),
            ("order", "z.lance"),
            ("mixed", "mixed/z.lance"),
            ("none.lance", "z.lance"),
            ("none", "z.lance"),
        ),
    ):
        with pytest.raises(InputError):
            run(F, tmp_path / source, tmp_path / target)
    assert sorted(tmp_path.rglob("*")) == before


# -- batches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("fixed", "list", "large"))
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_adapt_batches_replaces_or_adds_a_column(kind, dtype):
    x = unit_rows(50)
    table = pa.table({"i": range(50), "v": list_array(x, kind), "w": [[1.0]] * 50})
    codes = quantize_embeddings(transform(F, x, device="cpu"), dtype)
    for output, names in ((None, ["i", "v", "w"]), ("v", ["i", "v", "w"]), ("z", ["i", "v", "w", "z"])):
        name, out = output or "v", AdaptBatches(F, "v", output, dtype, "cpu")(table)
        rest = [column for column in names if column != name]
        assert out.column_names == names and out.select(rest).equals(table.select(rest))
        assert np.array_equal(vectors(out, name), codes) and out.schema.field(name).type.list_size == codes.shape[1]
        assert read_matrix(out, column=name).adapted_by == (adapter_fingerprint(F)[:16],)


def test_adapt_batches_refuses_wrong_tables(tmp_path):
    x, bad = unit_rows(5), unit_rows(5)
    bad[3] = np.nan
    es = EmbeddingSet(x, [0] * 5, meta={"set": "s", "encoder": "e"})
    table, pack = pa.table({"i": range(5), "v": list_array(x)}), pq.read_table(write_pack(es, tmp_path / "x.parquet"))
    adapt = AdaptBatches(F, device="cpu")
    wrong = [(adapt, t) for t in (adapt(table), pack, table.select(["i"]), pa.table({"v": list_array(x[:, :15])}))]
    wrong += [(AdaptBatches(F, "v", "i"), table), (AdaptBatches(F, "none"), table), (AdaptBatches(F, "i"), table)]
    for f, t in wrong:
        with pytest.raises(InputError):
            f(t)
    with pytest.raises(InputError, match="row 3"):
        adapt(pa.table({"v": list_array(bad)}))
    with pytest.raises(InputError):
        AdaptBatches(F, dtype="int4")


# -- resume -------------------------------------------------------------------------------------------------

CHILD = """
import sys
from ega.deploy import transform as transform_module
transform_module.BLOCK_BYTES = 4*16*200
transform_module.transform_file(*sys.argv[1:4], batch_size=200, device="cpu", threads=2)
"""


def start_process(*args, code=CHILD, **how):
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], env=env, **how)


def rows_on_disk(target):
    "The number of rows that the progress files of a target record."
    rows = 0
    for path in (transform_module.progress_file(target), *target.with_name(f"{target.name}.part").glob("*.part.json")):
        try:
            rows = max(rows, json.loads(path.read_text())["rows"])
        except FileNotFoundError:
            pass
    return rows


@pytest.mark.parametrize("name, kill_at", [("x.npy", 30_000), ("p.parquet", 10_000), ("x", 10_000)])
def test_transform_resumes_after_a_kill_with_the_same_bytes(tmp_path, name, kill_at):
    "A file, a pack and a folder. The killed run has two threads, the resumed run one."
    x, f = unit_rows(40_000), save_adapter(make_adapter(hidden=256), tmp_path / "f.safetensors")
    source, target = tmp_path / name, tmp_path / "out" / name
    if name == "x":
        source.mkdir()
        save(x[::2], source / "0.npy"), save(x[1::2], source / "1.parquet", row_group_size=7000)
    elif name == "x.npy":
        save(x, source)
    else:
        write_pack(EmbeddingSet(x, np.zeros(len(x), int), meta={"set": "s", "encoder": "e"}), source)
    run(f, source, tmp_path / f"whole_{name}", batch_size=200)
    process = start_process(f, source, target)
    while process.poll() is None and rows_on_disk(target) < kill_at:
        time.sleep(0.002)
    process.kill()
    assert process.wait() == -signal.SIGKILL and not target.exists()
    kept = rows_on_disk(target)
    done = run(f, source, target, batch_size=200)
    assert done.resumed_rows >= kept >= kill_at and done.rows == 40_000 and names_in(tmp_path / "out") == [name]
    made, whole = ([p, *sorted(p.glob("*"))] for p in (target, tmp_path / f"whole_{name}"))
    assert [p.read_bytes() for p in made if p.is_file()] == [p.read_bytes() for p in whole if p.is_file()]


@pytest.fixture
def interrupted(tmp_path, small_blocks, monkeypatch):
    "Source and target of a run that was interrupted after its first blocks, as by a kill."

    class Stop(BaseException):
        pass

    original = transform_module._write_progress

    def write_progress(target, provenance, rows):
        original(target, provenance, rows)
        if rows >= 400:
            raise Stop

    save(unit_rows(1000), tmp_path / "x.npy")
    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(transform_module, "_write_progress", write_progress)
        run(F, tmp_path / "x.npy", tmp_path / "z.npy")
    return tmp_path / "x.npy", tmp_path / "z.npy"


def test_other_inputs_do_not_continue_a_run(tmp_path, interrupted):
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    others = [(F, dict(dtype="float16")), (F, dict(batch_size=100)), (F, dict(precision="bfloat16"))]
    for f, options in (*others, (make_adapter(seed=1), {})):
        with pytest.raises(InputError):
            run(f, *interrupted, **options)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before
    os.utime(interrupted[0], ns=(1, 1))
    with pytest.raises(InputError):
        run(F, *interrupted)


def test_a_damaged_progress_or_part_file_is_refused(tmp_path, interrupted):
    progress, part = tmp_path / "z.npy.part.json", tmp_path / "z.npy.part"
    valid, rows = progress.read_bytes(), part.read_bytes()
    wrong = [(progress, text) for text in (b"", b"[]", b'{"rows": 7}')]
    wrong += [(part, damaged) for damaged in (rows[:500], rows.replace(b"adapted by", b"ADAPTED BY"))]
    for path, content in wrong:
        path.write_bytes(content)
        with pytest.raises(InputError):
            run(F, *interrupted)
        progress.write_bytes(valid)
    part.write_bytes(rows + b"incomplete block")
    assert run(F, *interrupted).resumed_rows == json.loads(valid)["rows"]
    assert np.array_equal(np.load(interrupted[1]), expected(unit_rows(1000)))


def test_existing_files_are_not_overwritten(tmp_path, interrupted):
    source, target = interrupted
    target.write_text("mine")
    (tmp_path / "other.npy.part").write_text("mine")
    for z in (target, tmp_path / "other.npy"):
        with pytest.raises(InputError):
            run(F, source, z)
    assert target.read_text() == (tmp_path / "other.npy.part").read_text() == "mine"


# -- wrong input -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ("npy", "parquet"))
@pytest.mark.parametrize("row, value", ((99, np.nan), (999, 0)))
def test_a_bad_row_is_refused_by_its_number(tmp_path, small_blocks, kind, row, value):
    x = unit_rows(1000)
    x[row] = value
    save(x, tmp_path / f"x.{kind}")
    with pytest.raises(InputError, match=f"row {row}"):
        run(F, tmp_path / f"x.{kind}", tmp_path / f"z.{kind}")
    assert not (tmp_path / f"z.{kind}").exists()
    if row < 100:
        assert names_in(tmp_path) == [f"x.{kind}"]  # no row was written, so no file is left


WRONG = {
    "no file": ("none.npy", "z.npy", {}),
    "another format": ("x.npy", "z.parquet", {}),
    "its own target": ("x.npy", "x.npy", {}),
    "inside the source": ("strange", "strange/z", {}),
    "another width": ("narrow.npy", "z.npy", {}),
    "no rows": ("empty", "z", {}),
    "other files": ("strange", "z", {}),
    "dtype": ("x.npy", "z.npy", dict(dtype="int4")),
    "precision": ("x.npy", "z.npy", dict(precision="f8")),
    "no square matrix": ("x.npy", "z.npy", dict(adapter=np.ones((3, D)))),
    "one file on a cluster": ("x.npy", "z.npy", dict(ray="")),
}


@pytest.mark.parametrize("source, target, options", WRONG.values(), ids=WRONG)
def test_wrong_input_is_refused_and_leaves_nothing(tmp_path, source, target, options):
    for folder in ("empty", "strange"):
        (tmp_path / folder).mkdir()
    save(unit_rows(5), tmp_path / "x.npy"), save(unit_rows(5, 15), tmp_path / "narrow.npy")
    (tmp_path / "strange/notes.txt").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError):
        run(options.pop("adapter", F), tmp_path / source, tmp_path / target, **options)
    assert sorted(tmp_path.rglob("*")) == before


# -- memory ------------------------------------------------------------------------------------------------

MEMORY = """
import sys
import numpy, torch, pyarrow.parquet
from ega.method.adapters import LinearAdapter
from ega.deploy import transform as transform_module
from ega.testing import peak_memory_mb
transform_module.BLOCK_BYTES = 2**21
for source in sys.argv[1:]:
    transform_module.transform_file(LinearAdapter(512), source, source.replace("x", "z"), device="cpu", threads=1)
    print(peak_memory_mb())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.parametrize("kind", ("npy", "parquet", "lance"))
def test_memory_does_not_grow_with_the_file(tmp_path, kind):
    "10 blocks of 2 MB, then 160: 300 MB more, of which the peak may grow by a third, as malloc keeps some blocks."
    sources = []
    for times in (10, 160):
        x = np.tile(unit_rows(1024, 512), (times, 1))
        if kind == "lance":
            sources.append(write_source(pa.table({"v": list_array(x)}), tmp_path / f"x{times}.lance"))
            continue
        how = dict(row_group_size=len(x), use_dictionary=False, compression="none")
        sources.append(save(x, tmp_path / f"x{times}.{kind}", **how))
    done = start_process(*sources, code=MEMORY, stdout=subprocess.PIPE, text=True)
    small, large = (float(v) for v in done.communicate()[0].split())
    assert large - small < 100 and large < 1000


# -- Ray ---------------------------------------------------------------------------------------------------


def needs_ray(test):
    skip = pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: pip install 'ega[ray]'")
    return pytest.mark.slow(skip(test))  # half a minute, most of it Ray's start


@pytest.fixture(scope="module")
def cluster():
    "A Ray cluster of two nodes with three processors, on this machine."
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=os.pathsep.join(sys.path))
    import ray
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "object_store_memory": 100 * 2**20})
    nodes.add_node(num_cpus=2, object_store_memory=100 * 2**20)  # two actors leave one for reading
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()
    nodes.shutdown()


def kill_worker(target, rows):
    "Kill a worker that has written some, but not all rows of its file; returns its process id."
    import psutil

    while target.parent.exists():
        for p in psutil.process_iter(["cmdline"]) if 0 < rows_on_disk(target) < rows else ():
            if "ray::Map(run_task)" in " ".join(p.info["cmdline"] or []):
                parts = [Path(f.path.removesuffix(".part")) for f in p.open_files() if f.path.endswith(".parquet.part")]
                if any(0 < rows_on_disk(part) < rows for part in parts):
                    p.kill()
                    return p.pid
        time.sleep(0.01)


@needs_ray
def test_ray_equals_transform_file_after_a_killed_worker(cluster, tmp_path):
    "The file of the killed worker is resumed, not started again."
    from threading import Thread

    f, n = save_adapter(make_adapter(64, 1024), tmp_path / "f.safetensors"), 140_000
    (tmp_path / "x").mkdir()
    for i in range(2):
        save(unit_rows(n, 64, i), tmp_path / f"x/{i}.parquet")
    killed = []
    thread = Thread(target=lambda: killed.append(kill_worker(tmp_path / "z", n)), daemon=True)
    thread.start()
    done = transform_file(f, tmp_path / "x", tmp_path / "z", device="cpu", ray="")
    thread.join(5)
    run(f, tmp_path / "x", tmp_path / "again", batch_size=1024)
    assert killed and killed[0] and done.rows == 2 * n and 0 < done.resumed_rows < n
    for i in range(2):
        assert (tmp_path / f"z/{i}.parquet").read_bytes() == (tmp_path / f"again/{i}.parquet").read_bytes()
    assert names_in(tmp_path) == ["again", "f.safetensors", "x", "z"]
    for source, target in (("x", "z"), ("x/0.parquet", "0.parquet")):
        with pytest.raises(InputError):
            transform_file(f, tmp_path / source, tmp_path / target, device="cpu", ray="")


@needs_ray
@needs_lancedb
def test_adapt_batches_in_ray_data(cluster, tmp_path):
    "Two workers, and files of which no row is left. Equal to the rows of `transform_file` up to rounding."
    import ray.data
    from ray.data.expressions import col

    f, x = save_adapter(make_adapter(), tmp_path / "f.safetensors"), unit_rows(3000)
    ray.data.DataContext.get_current().enable_progress_bars = False
    table = pa.table({"i": range(3000), "v": list_array(x)})
    (tmp_path / "x").mkdir()
    for i in range(4):
        pq.write_table(table[750 * i : 750 * (i + 1)], tmp_path / f"x/{i}.parquet")
    run(f, tmp_path / "x", tmp_path / "all.lance")
    sources = {"z": ray.data.read_parquet(str(tmp_path / "x"), override_num_blocks=4)}
    if find_spec("lance"):
        sources["from_lance"] = ray.data.read_lance(str(write_source(table, tmp_path / "x.lance")))
    kept = [i for i in range(2250) if i != 7]
    for name, rows in sources.items():
        rows = rows.filter(expr=(col("i") != 7) & (col("i") < 2250)).map_batches(
            AdaptBatches,
            fn_constructor_args=(f,),
            fn_constructor_kwargs={"column": "v", "output": None, "device": "cpu"},
            batch_format="pyarrow",
            batch_size=200,
            concurrency=2,
        )
        rows.write_parquet(str(tmp_path / name))
        out = read_table(tmp_path / name).sort_by("i")
        assert out["i"].to_pylist() == kept
        assert np.allclose(vectors(out), vectors(tmp_path / "all.lance")[kept], rtol=0, atol=1e-6)
        assert read_matrix(tmp_path / name).adapted_by == (adapter_fingerprint(make_adapter())[:16],)
