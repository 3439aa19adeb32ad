"""Notebooks that carry results, copied so that nbval can check their outputs; `--run` checks them.

nbdev_clean drops execution counts, and nbval then fails every cell that has outputs as not run; nbval also
ignores the directives of nbdev. The copies have counts 1..n, and a skip tag on cells that nbdev would not run."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat

root = Path(__file__).resolve().parent.parent
RESULTS = re.compile(r"index|results/|paper/")
SKIPPED = {"slow", "notest"}  # tst_flags of settings.ini


def directives(
    source,  # text of a code cell
):  # dict name -> value of its leading `#|` lines
    "The nbdev directives of a cell."
    found = {}
    for line in source.splitlines():
        if not line.lstrip().startswith("#|"):
            break
        name, _, value = line.lstrip()[2:].strip().partition(":")
        found[name.strip()] = value.strip()
    return found


def with_counts(
    nb,  # notebook node, changed in place
):  # nb with execution counts and skip tags
    "Add the execution counts and tags that nbval needs."
    code = [c for c in nb.cells if c.cell_type == "code"]
    for n, cell in enumerate(code, 1):
        d = directives(cell.source)
        if SKIPPED & {word for name in d for word in name.split()} or d.get("eval") == "false":
            cell.metadata["tags"] = ["nbval-skip"]
        cell.execution_count = n
        for out in cell.outputs:
            if "execution_count" in out:
                out["execution_count"] = n
    return nb


def copy_all(
    source=root / "nbs",  # folder of notebooks
    target=root / "_nbval",  # folder at the same depth, so that relative paths mean the same; emptied first
):  # list of copies
    "Copies of the notebooks that carry results."
    shutil.rmtree(target, ignore_errors=True)
    chosen = [f for f in sorted(source.rglob("*.ipynb")) if RESULTS.match(f.relative_to(source).as_posix())]
    for f in chosen:
        copy = target / f.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(with_counts(nbformat.read(f, 4)), copy)
    return [target / f.relative_to(source) for f in chosen]


if __name__ == "__main__":
    copies = copy_all()
    if "--run" in sys.argv:
        options = [
            "-q",
            "-n",
            "2",
            "--dist",
            "loadfile",
            "--nbval",
            "--nbval-current-env",
            "--nbval-sanitize-with",
            "tests/sanitize.cfg",
        ]
        command = [sys.executable, "-m", "pytest", *options, *(f.relative_to(root).as_posix() for f in copies)]
        sys.exit(subprocess.run(command, cwd=root).returncode)
