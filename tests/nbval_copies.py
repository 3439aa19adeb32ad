"""Notebooks that carry results, copied so that nbval can judge them; `--run` judges them.

nbdev_clean drops execution counts, and nbval then calls every cell with outputs unrun; nbval also knows
nothing of nbdev's directives. The copies have counts 1..n, and a skip tag on cells that nbdev would not run."""
import re, shutil, subprocess, sys
from pathlib import Path

import nbformat

root = Path(__file__).resolve().parent.parent
RESULTS = re.compile(r"index|[234]\d_")      # the front page, experiments, measured theory, paper
SKIPPED = {"slow", "notest"}                 # tst_flags of settings.ini


def directives(
    source   # text of a code cell
):           # dict name -> value of its leading `#|` lines
    "The nbdev directives of a cell."
    found = {}
    for line in source.splitlines():
        if not line.lstrip().startswith("#|"): break
        name, _, value = line.lstrip()[2:].strip().partition(":")
        found[name.strip()] = value.strip()
    return found


def judged(
    nb   # notebook node, changed in place
):       # nb with execution counts and skip tags
    "Give a cleaned notebook what nbval wants to see."
    code = [c for c in nb.cells if c.cell_type == "code"]
    for n, cell in enumerate(code, 1):
        d = directives(cell.source)
        if SKIPPED & {word for name in d for word in name.split()} or d.get("eval") == "false": cell.metadata["tags"] = ["nbval-skip"]
        cell.execution_count = n
        for out in cell.outputs:
            if "execution_count" in out: out["execution_count"] = n
    return nb


def copy_all(
    source=root/"nbs",    # folder of notebooks
    target=root/"_nbval"  # folder at the same depth, so that ../data means the same; emptied first
):                        # list of copies
    "Copies of the results notebooks."
    shutil.rmtree(target, ignore_errors=True); target.mkdir()
    chosen = [f for f in sorted(source.glob("*.ipynb")) if RESULTS.match(f.name)]
    for f in chosen: nbformat.write(judged(nbformat.read(f, 4)), target/f.name)
    return [target/f.name for f in chosen]


if __name__ == "__main__":
    copies = copy_all()
    if "--run" in sys.argv:
        sys.exit(subprocess.run([sys.executable, "-m", "pytest", "-q", "--nbval", "--nbval-current-env", "--nbval-sanitize-with",
                                 "tests/sanitize.cfg", *(f"_nbval/{f.name}" for f in copies)], cwd=root).returncode)
