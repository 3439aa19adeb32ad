"""Copies for nbval: counts, skip tags, and only the notebooks that carry results."""

import nbformat
import nbformat.v4 as nbf
from nbval_copies import copy_all, directives


def test_directives():
    assert directives("#| export\n#| eval: false\nx = 1\n#| hide") == {"export": "", "eval": "false"}


def test_copies(tmp_path):
    source, target = tmp_path / "nbs", tmp_path / "_nbval"
    for folder in ("data", "results", "paper"):
        (source / folder).mkdir(parents=True)
    shown = [nbf.new_output("execute_result", {"text/plain": "3"})]
    cells = [
        nbf.new_markdown_cell("# X"),
        nbf.new_code_cell("1 + 2", outputs=shown),
        nbf.new_code_cell("#| slow\nx"),
        nbf.new_code_cell("#| eval: false\nx"),
    ]
    for name in ("data/01_arrays", "results/01_id", "paper/01_tables", "index"):
        nbformat.write(nbf.new_notebook(cells=cells), source / f"{name}.ipynb")
    copies = copy_all(source, target)
    assert [f.relative_to(target).as_posix() for f in copies] == [
        "index.ipynb",
        "paper/01_tables.ipynb",
        "results/01_id.ipynb",
    ]
    nb = nbformat.read(copies[0], 4)
    code = nb.cells[1:]
    assert [c.execution_count for c in code] == [1, 2, 3] and code[0].outputs[0].execution_count == 1
    assert ["nbval-skip" in c.metadata.get("tags", []) for c in code] == [False, True, True]
    assert (
        nbformat.read(source / "results/01_id.ipynb", 4).cells[1].execution_count is None
    )  # the notebook itself is left alone
