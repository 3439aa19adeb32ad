"""Build the tables, the figures and report.pdf from stored results; the same results give the same bytes.

Usage: python paper/build.py --results FOLDER --out FOLDER
"""

import argparse
import json
import os
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

PAPER = Path(__file__).resolve().parent
ROOT = PAPER.parent
NOTEBOOKS = ("01_tables.ipynb", "02_verdicts.ipynb", "03_figures.ipynb", "05_numbers.ipynb")


@contextmanager
def environment(
    folder,  # working folder inside the block
    **variables,  # environment variables inside the block
):
    "Change the working folder and environment variables, and restore both at the end."
    saved = {name: os.environ.get(name) for name in variables}
    saved_folder = os.getcwd()
    os.environ.update({name: str(value) for name, value in variables.items()})
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(saved_folder)
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def run_notebook(
    path,  # a notebook of plain Python, no magics
):  # dict of the names that its cells defined
    "Execute the code cells of a notebook in one namespace; the notebook file is not changed."
    names = {"__name__": "__main__"}
    for i, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{path.name}, cell {i}", "exec"), names)
    return names


def compile_report(
    out,  # folder with report.typ, refs.bib, tables/, figures/
):  # path of the PDF
    "Typeset the report with the fonts that come with typst."
    import typst

    from ega.data.files import atomic_write

    with atomic_write(out / "report.pdf") as temporary:
        temporary.write_bytes(typst.compile(str(out / "report.typ"), ignore_system_fonts=True))
    return out / "report.pdf"


def build(
    results=ROOT / "data/results",  # folder of stored experiments; may be empty
    out=PAPER,  # where tables, figures and report.pdf are written
):  # path of the PDF
    "Build all tables, all figures and the report."
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
    command = argparse.ArgumentParser(description="Build all tables, all figures and report.pdf from stored results.")
    command.add_argument(
        "--results",
        type=Path,
        default=ROOT / "data/results",
        help="folder of stored experiments (default: data/results)",
    )
    command.add_argument(
        "--out", type=Path, default=PAPER, help="where tables, figures and report.pdf are written (default: paper)"
    )
    build(**vars(command.parse_args()))
