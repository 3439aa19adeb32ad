"""Run the code of README.md, CONTRIBUTING.md, tutorials and how-to pages; `python docs/pages.py` writes its output."""

import ast
import contextlib
import doctest
import io
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

root = Path(__file__).resolve().parent.parent
FOLDERS = ("tutorials", "howto")
PAGES = [root / "CONTRIBUTING.md", *(p for folder in FOLDERS for p in sorted((root / "docs" / folder).glob("*.md")))]
# README.md is written by docs/readme.py
# Every digit must be equal there; elsewhere a decimal may differ by POINTS, as in `ega-paper rerun`.
WRITTEN_ON = "Linux x86_64 AVX2, torch 2.13.0"
POINTS = 1.0
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$(?:\n\n```text\n(.*?)^```$|\n\n((?:    [^\n]*\n)+))?", re.M | re.S)


def blocks(
    text,  # of a Markdown page
):  # [(language, source, output shown behind it or None)]
    "The blocks that run, `python` and `sh`, with the output shown behind them: a `text` block or an indented block."
    return [
        (language, source, output if output is not None else indented)
        for language, source, output, indented in (m.groups() for m in BLOCK.finditer(text))
    ]


def python(
    source,  # of a block
    space,  # names of the blocks before it; changed
):  # what it prints, and the value of its last line
    "Run a block as a notebook would."
    tree, out = ast.parse(source), io.StringIO()
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, "<page>", "exec"), space)
        value = eval(compile(last, "<page>", "eval"), space) if last else None
        if value is not None:
            print(repr(value))
    return out.getvalue()


def shell(
    source,  # of a block
):  # what it prints
    "Run a block; of `make` only that the target is there, and `pip` would change the environment it runs in."
    lines = [
        f"make -n -C '{root}' {line.split()[1]} > /dev/null" if line.startswith("make ") else line
        for line in source.splitlines()
        if not line.startswith("pip ")
    ]
    done = subprocess.run(["sh", "-ec", "\n".join(lines)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source}\n{done.stdout}{done.stderr}")
    return done.stdout


def agrees(
    want,
    got,  # what a page shows, what came
    here,  # the kind of machine
):  # bool
    "Equal but for spaces and `...`; on another kind of machine decimals may move."
    check = doctest.OutputChecker().check_output
    if check(want, got, SAME) or here == WRITTEN_ON:
        return check(want, got, SAME)
    a, b = (re.findall(r"-?\d+\.\d+", text) for text in (want, got))
    masked = [re.sub(r"[-+]?\d+\.\d+", "#", text) for text in (want, got)]
    return check(*masked, SAME) and len(a) == len(b) and all(abs(float(p) - float(q)) <= POINTS for p, q in zip(a, b))


@contextlib.contextmanager
def clone(
    folder,  # an empty one
):
    "Change into a folder that looks like a clone, with `ega` on the path and the two files that the README expects."
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ega import read_pack
    from ega.method.config import METHODS
    from ega.method.losses import LOSSES

    for name in ("data", "nbs", "paper"):
        (folder / name).symlink_to(root / name)
    (folder / "bin").mkdir()
    for name, module in (("ega", "ega"), ("ega-paper", "ega.experiments")):
        (folder / "bin" / name).write_text(f"#!/bin/sh\nexec '{sys.executable}' -m {module} \"$@\"\n")
        (folder / "bin" / name).chmod(0o755)
    es = read_pack(root / "data/packs/clinc150__all_minilm_l6_v2.parquet")
    few = np.flatnonzero((es.y >= 0) & (es.y < 24) & (es.split == "val"))
    np.save(folder / "X.npy", es.x[few])
    (folder / "labels.csv").write_text("label\n" + "\n".join(es.classes[c] for c in es.y[few]) + "\n")
    (folder / "embeddings").mkdir()
    for part, rows in enumerate(np.array_split(few, 2)):
        names = [es.classes[c] for c in es.y[rows]]
        table = pa.table({"id": es.ids[rows], "label": names, "vector": list(es.x[rows])})
        pq.write_table(table, folder / f"embeddings/{part}.parquet")
    before, methods, losses = dict(os.environ), dict(METHODS), dict(LOSSES)
    os.environ.update(
        PATH=f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", PYTHONPATH=str(root), OMP_NUM_THREADS="1"
    )
    try:
        with contextlib.chdir(folder):
            yield folder
    finally:
        os.environ.clear()
        os.environ.update(before)
        for registry, entries in ((METHODS, methods), (LOSSES, losses)):
            registry.clear()
            registry.update(entries)  # a page may add one


def prints(
    text,  # of a page; in a clone
):  # iterator of (source, output shown or None, what came)
    "Run a page."
    space = {}
    for language, source, want in blocks(text):
        yield source, want, python(source, space) if language == "python" else shell(source)


if __name__ == "__main__":
    from ega.experiments.runs import platform_tag

    for page in PAGES:
        with tempfile.TemporaryDirectory() as folder, clone(Path(folder)):
            came = [got for _, _, got in prints(page.read_text())]

        def renewed(m, came=iter(came)):  # noqa: B008
            got = next(came)
            if m[3] is None or agrees(m[3], got, platform_tag()):
                return m[0]
            return f"```{m[1]}\n{m[2]}```\n\n```text\n{got.rstrip()}\n```"

        page.write_text(BLOCK.sub(renewed, page.read_text()))
