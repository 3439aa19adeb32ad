"""README.md from nbs/index.ipynb, without Quarto. `--check` only says whether it is up to date."""

import posixpath
import re
import sys
from pathlib import Path

import nbformat
from nbconvert import MarkdownExporter

root = Path(__file__).resolve().parent.parent
SOURCE = "nbs/index.ipynb"


def shown(
    cell,  # notebook cell
):  # the cell as the README shows it, or None
    "Drop directives and hidden cells; `#| echo: false` keeps a cell's output alone."
    lines = cell.source.splitlines()
    n = next((i for i, line in enumerate(lines) if not line.lstrip().startswith("#|")), len(lines))
    directives = {line.lstrip()[2:].replace(" ", "") for line in lines[:n]}
    if directives & {"hide"} or any(d.startswith("default_exp") for d in directives):
        return None
    cell.source = "" if directives & {"echo:false", "hide_input"} else "\n".join(lines[n:])
    return cell


def cleaned(
    nb,  # notebook node, changed in place
):  # nb as readers see it
    "Without directives and hidden cells, and with the language of its code, which nbdev_clean drops."
    nb.cells = [c for c in map(shown, nb.cells) if c is not None]
    nb.metadata["language_info"] = {"name": "python"}
    return nb


def relinked(
    text,  # Markdown written in nbs/
):  # Markdown for the root
    "Turn links relative to nbs/ into links relative to the root."

    def link(m):
        return (
            m[0]
            if re.match(r"[a-z]+:|#|README_files/", m[1])
            else f"]({posixpath.normpath(posixpath.join('nbs', m[1]))})"
        )

    return re.sub(r"\]\(([^)\s]+)\)", link, text).replace('"../', '"')  # paths in code, too


def render(
    notebook,  # path of a notebook
):  # dict file name -> bytes: README.md and its pictures
    "The README and the pictures in it."
    nb = cleaned(nbformat.read(notebook, 4))
    body, resources = MarkdownExporter().from_notebook_node(
        nb, resources={"output_files_dir": "README_files", "unique_key": "README"}
    )
    body = re.sub(r"```python\s*```", "", body)  # what echo: false leaves
    body = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in body.splitlines())).strip()
    page = f"<!-- generated from {SOURCE}: edit the notebook, then `make export` -->\n\n{relinked(body)}\n"
    return {"README.md": page.encode(), **resources["outputs"]}


if __name__ == "__main__":
    files = render(root / SOURCE)
    stale = [f for f, content in files.items() if not (root / f).exists() or (root / f).read_bytes() != content]
    if "--check" in sys.argv:
        for f in stale:
            print(f"      {f} is not what {SOURCE} shows; run `make export`")
        sys.exit(bool(stale))
    for f in stale:
        (root / f).parent.mkdir(exist_ok=True)
        (root / f).write_bytes(files[f])
