"Atomic writes, hashes and files of labels; test_fuzz.py tests the readers on malformed files."

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ega.data import files
from ega.data.arrays import InputError, check_y
from ega.data.files import (
    atomic_write,
    hash_arrays,
    make_folder,
    read_csv_columns,
)
from ega.data.packs import EmbeddingSet, write_pack
from ega.data.vectors import read_labels


def test_atomic_write_leaves_a_whole_file_or_none(tmp_path):
    path = tmp_path / "new" / "a.bin"
    with pytest.raises(ZeroDivisionError):
        with atomic_write(path) as t:
            t.write_bytes(b"half")
            1 / 0
    assert not path.exists() and not any(path.parent.iterdir())
    with atomic_write(path) as t:
        t.write_bytes(b"whole")
        assert not path.exists()
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


def test_hash_arrays_depends_on_values_shape_dtype_and_order_only():
    a = np.arange(6.0).reshape(2, 3)
    assert len({hash_arrays(v) for v in (a, a.T, a.ravel(), a.astype(np.float32), a + 1)}) == 5
    assert hash_arrays(np.asfortranarray(a)) == hash_arrays(a)
    assert hash_arrays(a, a[:1]) != hash_arrays(a[:1], a)
    assert hash_arrays(np.empty(0))


with open(Path(__file__).with_name("label_files.csv"), encoding="utf-8", newline="") as file:
    LABEL_FILES = list(csv.DictReader(file))


def write_labels(folder, format, content):
    "A file of labels; format: encoding of a .csv file, `npy` and a dtype, or `parquet` and a type of column."
    kind, _, dtype = format.partition(" ")
    if kind == "npy":
        np.save(folder / "y.npy", np.array(json.loads(content), dtype))
        return folder / "y.npy"
    if kind == "parquet":
        values, is_category = json.loads(content), dtype.startswith("dictionary ")
        column = pa.array(values, pa.type_for_alias(dtype.removeprefix("dictionary ")))
        pq.write_table(pa.table({"label": column.dictionary_encode() if is_category else column}), folder / "y.parquet")
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


def test_labels_of_a_pack_are_class_names_and_other_columns_are_refused(tmp_path):
    path = tmp_path / "p.parquet"
    write_pack(
        EmbeddingSet(np.eye(3, dtype="f4"), [1, -1, 0], classes=("7", "owl"), meta={"set": "s", "encoder": "e"}), path
    )
    assert read_labels(path).tolist() == ["owl", "", "7"]
    with pytest.raises(InputError):
        read_labels(path, "split")


def test_only_one_column_of_a_parquet_file_needs_no_name_and_others_do(tmp_path):
    table = pa.table({"kind": ["owl", "asp"], "__index_level_0__": [4, 5]})
    pq.write_table(table, tmp_path / "y.parquet")
    assert read_labels(tmp_path / "y.parquet").tolist() == ["owl", "asp"]
    pq.write_table(table.append_column("vector", [[[1.0], [2.0]]]), tmp_path / "y.parquet")
    assert read_labels(tmp_path / "y.parquet", "kind").tolist() == ["owl", "asp"]
    for column in (None, "vector"):
        with pytest.raises(InputError):
            check_y(read_labels(tmp_path / "y.parquet", column))


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_the_one_in_the_header_outside_quotes(delimiter, tmp_path):
    others = ",;\t|".replace(delimiter, "")
    rows = [["a", f"b{others}c", 'd"e'], ["1", others, ""], ["2", delimiter, 'x"y\nz']]
    with open(tmp_path / "t.csv", "w", encoding="utf-8", newline="") as f:
        csv.writer(f, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    expected = {name: [row[i] for row in rows[1:]] for i, name in enumerate(rows[0])}
    assert read_csv_columns(tmp_path / "t.csv", "a table") == expected


def test_a_header_of_unclosed_quotes_is_read_in_linear_time(tmp_path):
    (tmp_path / "t.csv").write_text('a,"' + '""' * 10**6 + "b")
    with pytest.raises(InputError):
        read_csv_columns(tmp_path / "t.csv", "a table")


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


def test_a_folder_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file/folder", tmp_path / "file"):
        with pytest.raises(InputError):
            make_folder(path)
    make_folder(tmp_path / "a/b")
    make_folder(tmp_path / "a/b")


def test_a_path_like_object_is_a_path(tmp_path):
    class Named:
        def __fspath__(self):
            return str(tmp_path / "a")

    with atomic_write(Named()) as temporary:
        temporary.write_text("x")
    assert (tmp_path / "a").read_text() == "x"
