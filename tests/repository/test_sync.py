"""The check of export itself: each way of being out of step is named, and the tree is left alone."""

import shutil
from pathlib import Path

import pytest
from sync import complaints, digests, exported

root = Path(__file__).resolve().parents[2]


@pytest.fixture
def tree(tmp_path):
    "A small repository in step with itself: the core alone."
    (tmp_path / "nbs/data").mkdir(parents=True)
    (tmp_path / "ega/data").mkdir(parents=True)
    for f in (
        "settings.ini",
        "nbs/data/01_arrays.ipynb",
        "ega/__init__.py",
        "ega/data/__init__.py",
        "ega/data/arrays.py",
    ):
        shutil.copy(root / f, tmp_path / f)
    (tmp_path / "made").mkdir()
    shutil.copy(exported(tmp_path, tmp_path / "made") / "ega/_modidx.py", tmp_path / "ega")
    shutil.rmtree(tmp_path / "made")
    return tmp_path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_in_step(tree):
    before = digests(tree)
    assert complaints(tree) == [] and digests(tree) == before


def test_each_way_out_of_step_is_named(tree):
    edit(tree / "ega/data/arrays.py", "import numpy as np", "import numpy as np  # by hand")
    edit(tree / "nbs/data/01_arrays.ipynb", '"execution_count": null', '"execution_count": 7')
    (tree / "ega/orphan.py").write_text("x = 1\n")
    (tree / "ega/_modidx.py").unlink()
    before = digests(tree)
    found = complaints(tree)
    assert [line.split(":")[0] for line in found] == [
        "ega/_modidx.py",
        "ega/data/arrays.py",
        "ega/orphan.py",
        "nbs/data/01_arrays.ipynb",
    ]
    assert all(word in line for line, word in zip(found, ["missing", "not what", "no notebook", "not cleaned"]))
    assert digests(tree) == before  # a check that mends would lose the edit


def test_an_edited_notebook_is_named_by_its_module(tree):
    edit(tree / "nbs/data/01_arrays.ipynb", "Bring rows to norm 1;", "Bring the rows to norm 1;")
    assert [line.split(":")[0] for line in complaints(tree)] == ["ega/data/arrays.py"]
