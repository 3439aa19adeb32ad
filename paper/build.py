"""Results -> tables, figures, report.pdf. `python paper/build.py --results FOLDER --out FOLDER`; the same results give the same bytes."""

import argparse
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

PAPER = Path(__file__).resolve().parent
ROOT = PAPER.parent
NOTEBOOKS = ("01_tables.ipynb", "02_verdicts.ipynb", "03_figures.ipynb")


@contextmanager
def environment(
    folder,  # working folder inside the block
    **values,  # environment variables inside the block
):
    "Change folder and environment, and put both back."
    before, here = {k: os.environ.get(k) for k in values}, os.getcwd()
    os.environ.update({k: str(v) for k, v in values.items()})
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(here)
        for k, v in before.items():
            os.environ.pop(k, None) if v is None else os.environ.__setitem__(k, v)


def run_notebook(
    path,  # a notebook of plain Python, no magics
):  # the names its cells defined
    "Execute the code cells in one namespace; the notebook file is not touched."
    names = {"__name__": "__main__"}
    for i, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {i}", "exec"), names)
    return names


def compile_report(
    out,  # folder with report.typ, refs.bib, tables/, figures/
):  # path of the PDF
    "Typeset the report with typst's own fonts."
    import typst

    from ega.files import atomic_write

    with atomic_write(out / "report.pdf") as t:
        t.write_bytes(typst.compile(str(out / "report.typ"), ignore_system_fonts=True))
    return out / "report.pdf"


def build(
    results=ROOT / "data/results",  # folder of stored experiments; may be empty
    out=PAPER,  # where tables, figures and report.pdf go
):  # path of the PDF
    "Make every table, every figure and the report."
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results, out = Path(results).resolve(), Path(out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    with environment(ROOT / "nbs/paper", EGA_RESULTS=results, EGA_PAPER=out), matplotlib.rc_context():
        for name in NOTEBOOKS:
            run_notebook(ROOT / "nbs/paper" / name)
        plt.close("all")
    if out != PAPER:
        for name in ("report.typ", "refs.bib", "style.mplstyle"):
            shutil.copyfile(PAPER / name, out / name)
    return compile_report(out)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    command = argparse.ArgumentParser(description="Make every table, every figure and report.pdf from stored results.")
    command.add_argument(
        "--results",
        type=Path,
        default=ROOT / "data/results",
        help="folder of stored experiments (default: data/results)",
    )
    command.add_argument(
        "--out", type=Path, default=PAPER, help="where tables, figures and report.pdf go (default: paper)"
    )
    build(**vars(command.parse_args()))
