"Atomic writes, hashes, tables, matrices and labels in files; test_fuzz.py tests the readers on malformed files."

import csv
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ega.data import files, vectors
from ega.data.arrays import InputError, check_X, check_y
from ega.data.files import atomic_write, check_output, file_lock, hash_arrays, open_npy, read_csv_columns, read_npz
from ega.data.packs import EmbeddingSet, write_pack
from ega.data.vectors import UnitRows, check_same_order, read_labels, read_matrix


def test_atomic_write_leaves_a_whole_file_or_none(tmp_path):
    path = tmp_path / "new" / "a.bin"
    with pytest.raises(ZeroDivisionError):
        with atomic_write(path) as t:
            t.write_bytes(b"half")
            1 / 0
    assert not path.exists() and not any(path.parent.iterdir())
    with atomic_write(path) as t:
        t.write_bytes(b"whole")
        assert not path.exists() and t.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes() == b"whole" and [p.name for p in path.parent.iterdir()] == ["a.bin"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_atomic_write_keeps_the_old_file_when_killed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import os\nfrom ega.data.files import atomic_write\n"
        f"with atomic_write({str(path)!r}) as t:\n t.write_text('half'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -9 and path.read_text() == "old"


@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_is_named_with_the_path_and_leaves_no_half_file(failing, tmp_path, monkeypatch):
    (tmp_path / "kept").write_text("before")

    def refuse(*args):
        raise OSError(28, "No space left on device")

    if failing == "fsync":
        monkeypatch.setattr(files.os, "fsync", refuse)
    for name in ("new", "kept"):
        with pytest.raises(OSError, match="No space left") as error:
            with atomic_write(tmp_path / name) as temporary:
                temporary.write_text("half")
                if failing == "write":
                    refuse()
        assert error.value.filename == str(tmp_path / name) and error.value.errno == 28
    assert [p.name for p in tmp_path.iterdir()] == ["kept"] and (tmp_path / "kept").read_text() == "before"


def test_a_lock_is_held_by_one_and_outputs_are_not_overwritten(tmp_path):
    for path in (tmp_path, tmp_path / "a.part"):
        with file_lock(path), pytest.raises(InputError, match="another process"):
            file_lock(path).__enter__()
    for path, options in (
        (tmp_path, {}),
        (tmp_path / "a.part", {}),
        (tmp_path / "a.part", {"endings": (".part",)}),
        (tmp_path / "a.txt", {"endings": (".html",)}),
        (Path("/proc/a"), {}),
    ):
        with pytest.raises(InputError):
            check_output(path, **options)
    assert check_output(tmp_path / "b") == tmp_path / "b" and not (tmp_path / "b").exists()


def test_hash_arrays_depends_on_values_shape_dtype_and_order_only():
    a = np.arange(6.0).reshape(2, 3)
    assert len({hash_arrays(v) for v in (a, a.T, a.ravel(), a.astype(np.float32), a + 1)}) == 5
    assert hash_arrays(np.asfortranarray(a)) == hash_arrays(a)
    assert hash_arrays(a, a[:1]) != hash_arrays(a[:1], a)
    assert hash_arrays(np.empty(0))


KINDS = st.one_of(
    hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.boolean_dtypes(), hnp.unicode_string_dtypes(max_len=5)
)


@given(
    a=hnp.arrays(KINDS, hnp.array_shapes(min_dims=1, max_dims=3, max_side=5)),
    cut=st.floats(0, 1, exclude_max=True),
    order=st.sampled_from("CF"),
)
@settings(max_examples=40)
def test_array_files_round_trip_and_truncated_files_are_refused(tmp_path_factory, a, cut, order):
    folder, a = tmp_path_factory.mktemp("arrays"), np.asarray(a, order=order)
    np.save(folder / "a.npy", a)
    np.savez(folder / "a.npz", a=a, b=a[:0])
    for back in (open_npy(folder / "a.npy"), read_npz(folder / "a.npz")["a"]):
        assert back.dtype == a.dtype and back.shape == a.shape and back.tobytes() == a.tobytes()
    for name, read in (("a.npy", open_npy), ("a.npz", read_npz)):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[: int(cut * len(whole))])
        with pytest.raises(InputError):
            read(folder / name)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_the_one_in_the_header_outside_quotes(delimiter, tmp_path):
    others = ",;\t|".replace(delimiter, "")
    rows = [["a", f"b{others}c", 'd"e'], ["1", others, ""], ["2", delimiter, 'x"y\nz']]
    with open(tmp_path / "t.csv", "w", encoding="utf-8", newline="") as f:
        csv.writer(f, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    expected = {name: [row[i] for row in rows[1:]] for i, name in enumerate(rows[0])}
    assert read_csv_columns(tmp_path / "t.csv", "a table") == expected


# -- matrices ------------------------------------------------------------------------------------------------


def test_blocks_of_every_format_are_the_rows(tmp_path):
    x = np.random.default_rng(0).normal(size=(101, 6)).astype("f4")
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "by_column.npy", np.asfortranarray(x.astype("f8")))
    np.savez(tmp_path / "x.npz", x=x, labels=np.arange(101))
    for name, kind in (("fixed", pa.list_(pa.float32(), 6)), ("list", pa.list_(pa.float32()))):
        table = pa.table({"v": pa.array(list(x), kind), "id": [str(i) for i in range(101)]})
        pq.write_table(table, tmp_path / f"{name}.parquet", row_group_size=30)
    for name in ("x.npy", "by_column.npy", "x.npz", "fixed.parquet", "list.parquet"):
        matrix = read_matrix(tmp_path / name, 6)
        assert (matrix.n, matrix.dim, matrix.adapted_by) == (101, 6, ())
        blocks = list(matrix.blocks(33, 20))
        assert [len(block) for block in blocks] == [20, 20, 20, 8] and np.array_equal(np.concatenate(blocks), x[33:])
        assert np.array_equal(matrix.array(), x)


@pytest.fixture
def tables(tmp_path):
    "Vectors (101, 6) with labels as a Parquet file, a folder of three, a LanceDB table and an Arrow table."
    x = np.random.default_rng(0).normal(size=(101, 6)).astype("f4")
    labels = [f"class {i % 7}" if i % 5 else None for i in range(101)]
    table = pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 6), "label": labels})
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/_SUCCESS").touch()
    for number, (first, stop) in enumerate([(0, 40), (40, 40), (40, 101)]):
        pq.write_table(table[first:stop], tmp_path / f"folder/{number}.parquet", row_group_size=30)
    pq.write_table(table, tmp_path / "x.parquet")
    lancedb = pytest.importorskip("lancedb")
    lancedb.connect(tmp_path).create_table("x", table[:50]).add(table[50:])
    return x, labels, [tmp_path / "x.parquet", tmp_path / "folder", tmp_path / "x.lance", table]


def test_rows_and_labels_of_every_table_are_the_same(tables, monkeypatch):
    x, labels, sources = tables
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    for source in sources:
        matrix = pickle.loads(pickle.dumps(read_matrix(source)))
        assert (matrix.n, matrix.dim) == x.shape and matrix.labels().tolist() == labels
        for first, stop in ((0, 101), (33, 101), (39, 41), (100, 101), (5, 5)):
            assert np.array_equal(np.concatenate([x[:0], *matrix.blocks(first, 20, stop)]), x[first:stop])
        rows = UnitRows(matrix)
        numbers = np.array([3, 39, 40, 100])
        assert np.array_equal(rows[numbers], check_X(x)[numbers]) and np.array_equal(rows[90:], check_X(x)[90:])
        assert not isinstance(source, Path) or read_labels(source, "label").tolist() == labels
        with pytest.raises(InputError):
            matrix.labels("species")


def test_of_a_folder_only_the_files_of_the_rows_are_opened(tables, monkeypatch):
    x, _, sources = tables
    matrix, opened = read_matrix(sources[1]), []
    open_file = vectors.open_parquet
    monkeypatch.setattr(vectors, "open_parquet", lambda path: opened.append(path.name) or open_file(path))
    assert np.array_equal(next(matrix.blocks(90)), x[90:]) and opened == ["2.parquet"]


def test_folders_that_are_no_table_are_refused(tmp_path, tables):
    packs = tmp_path / "packs"
    packs.mkdir()
    meta = {"set": "s", "encoder": "e"}
    write_pack(EmbeddingSet(np.eye(3, dtype="f4"), [1, -1, 0], meta=meta), packs / "p.parquet")
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/x.npy").touch()
    (tmp_path / "none.lance").mkdir()
    for name in ("packs", "mixed", "none.lance", "missing.lance"):
        with pytest.raises(InputError):
            read_matrix(tmp_path / name)
    first = tmp_path / "folder/0.parquet"
    pq.write_table(pq.read_table(first).rename_columns(["other", "label"]), first)
    with pytest.raises(InputError):
        read_matrix(tmp_path / "folder", column="v").array()


@pytest.mark.parametrize("n", [61, 101, 141])
def test_rows_that_changed_since_they_were_opened_are_refused(tables, n, monkeypatch):
    monkeypatch.setattr("ega.data.vectors._IN_MEMORY_BYTES", 0)
    path = tables[2][0]
    matrix = read_matrix(path)
    sent, rows = pickle.dumps(matrix), UnitRows(matrix)
    table = pa.concat_tables([pq.read_table(path)] * 2)
    pq.write_table(table[1 : n + 1], path)
    for call in (
        lambda: matrix.labels(),
        lambda: rows[np.arange(5)],
        lambda: list(pickle.loads(sent).blocks()),
        lambda: matrix.array(),
    ):
        with pytest.raises(InputError):
            call()


def test_a_pack_is_read_with_labels_ids_and_splits(tmp_path):
    meta = {"set": "s", "encoder": "e"}
    es = EmbeddingSet(np.eye(3, dtype="f4"), [1, -1, 0], classes=("7", "owl"), meta=meta)
    path = write_pack(es, tmp_path / "p.parquet")
    matrix = read_matrix(path)
    assert np.array_equal(matrix.array(), np.eye(3)) and np.array_equal(next(matrix.blocks()), np.eye(3))
    assert matrix.labels().tolist() == read_labels(path).tolist() == ["owl", "", "7"]
    assert matrix.embedding_set.ids.tolist() == ["0", "1", "2"]
    with pytest.raises(InputError):
        read_labels(path, "split")


def test_files_without_one_matrix_of_vectors_are_refused(tmp_path):
    np.save(tmp_path / "flat.npy", np.ones(3))
    np.save(tmp_path / "x.npy", np.eye(3))
    np.save(tmp_path / "empty.npy", np.ones((0, 3)))
    np.savez(tmp_path / "two.npz", a=np.eye(2), b=np.eye(2))
    pq.write_table(pa.table({"a": [[1.0]], "b": [[2.0]]}), tmp_path / "two.parquet")
    pq.write_table(pa.table({"a": [[1.0, 2.0], None, [1.0]]}), tmp_path / "ragged.parquet")
    (tmp_path / "x.csv").write_text("1,2\n")
    for name in ("flat.npy", "empty.npy", "two.npz", "two.parquet", "x.csv", "none.npy", "."):
        with pytest.raises(InputError):
            read_matrix(tmp_path / name)
    with pytest.raises(InputError, match=r"\(n, 5\)"):
        read_matrix(tmp_path / "x.npy", 5)
    with pytest.raises(InputError, match="row 1"):
        read_matrix(tmp_path / "ragged.parquet").array()
    assert read_matrix(tmp_path / "two.npz", column="b").dim == 2
    assert read_matrix(tmp_path / "two.parquet", column="b").array().tolist() == [[2.0]]


# -- labels --------------------------------------------------------------------------------------------------

with open(Path(__file__).with_name("label_files.csv"), encoding="utf-8", newline="") as file:
    LABEL_FILES = list(csv.DictReader(file))


def write_labels(folder, format, content):
    "A file of labels; format: encoding of a .csv file, `npy` and a dtype, or `parquet` and a type of column."
    kind, _, dtype = format.partition(" ")
    if kind == "npy":
        np.save(folder / "y.npy", np.array(json.loads(content), dtype))
        return folder / "y.npy"
    if kind == "parquet":
        column = pa.array(json.loads(content), pa.type_for_alias(dtype.removeprefix("dictionary ")))
        column = column.dictionary_encode() if dtype.startswith("dictionary ") else column
        pq.write_table(pa.table({"label": column}), folder / "y.parquet")
        return folder / "y.parquet"
    for written, character in (("\\n", "\n"), ("\\r", "\r"), ("\\t", "\t")):
        content = content.replace(written, character)
    (folder / "y.csv").write_bytes(content.encode(format))
    return folder / "y.csv"


@pytest.mark.parametrize("case", LABEL_FILES, ids=lambda case: case["name"])
def test_labels_of_a_file(case, tmp_path):
    "Each row of label_files.csv: a file, options of read_labels, and the labels or `error`."
    path, options = write_labels(tmp_path, case["format"], case["content"]), json.loads(case["options"] or "{}")

    def labels():
        y = read_labels(path, **options)
        labels, classes = check_y(y, options.get("n"), unlabelled=options.get("unlabelled"))
        return [None if label < 0 else classes[label].item() for label in labels]

    if case["result"] == "error":
        with pytest.raises(InputError):
            labels()
    else:
        assert labels() == json.loads(case["result"])


def test_only_one_column_of_a_parquet_file_needs_no_name_and_others_do(tmp_path):
    table = pa.table({"kind": ["owl", "asp"], "__index_level_0__": [4, 5]})
    pq.write_table(table, tmp_path / "y.parquet")
    assert read_labels(tmp_path / "y.parquet").tolist() == ["owl", "asp"]
    pq.write_table(table.append_column("vector", [[[1.0], [2.0]]]), tmp_path / "y.parquet")
    assert read_labels(tmp_path / "y.parquet", "kind").tolist() == ["owl", "asp"]
    for column in (None, "vector"):
        with pytest.raises(InputError):
            check_y(read_labels(tmp_path / "y.parquet", column))


@pytest.mark.parametrize(
    "ids_of_vectors, labels, is_same",
    [
        (["a", "b", "c"], "id,label\na,1\nb,2\nc,3\n", True),
        (["a", "b", "c"], "id,label\nb,2\na,1\nc,3\n", False),
        (["a", "b", "c"], "id,label\na,1\nb,2\nd,3\n", False),
        (["a", "b", "c"], "label\n1\n2\n3\n", True),
        (None, "id,label\n0,1\n1,2\n2,3\n", True),
        (None, "id,label\n1,1\n0,2\n2,3\n", False),
        (None, ",label\n0,1\n2,2\n1,3\n", False),  # the index that pandas writes
        (None, "id,label\nx,1\ny,2\nz,3\n", True),  # nothing to compare with
    ],
)
def test_labels_in_another_order_are_refused(tmp_path, ids_of_vectors, labels, is_same):
    (tmp_path / "y.csv").write_text(labels)
    if ids_of_vectors is None:
        np.save(source := tmp_path / "x.npy", np.eye(3))
    else:
        source = tmp_path / "x.parquet"
        pq.write_table(pa.table({"id": ids_of_vectors, "v": list(np.eye(3))}), source)
    if is_same:
        check_same_order(source, tmp_path / "y.csv")
    else:
        with pytest.raises(InputError, match="in row"):
            check_same_order(source, tmp_path / "y.csv")
