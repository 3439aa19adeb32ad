"""The pages: their code runs and prints what they show, their links lead somewhere, and the site builds without a warning."""
import ast, contextlib, doctest, io, json, os, re, subprocess, sys
from pathlib import Path

import numpy as np
import pytest

import api
from ega import read_pack
from ega.runs import METHODS, machine

root = Path(__file__).resolve().parent.parent
PAGES = [root/"README.md", *sorted((root/"docs/tutorials").glob("*.md"))]
SAME = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
WRITTEN_ON = "Linux x86_64 AVX2, torch 2.13.0"      # there every digit must be the same; elsewhere a decimal may move by POINTS
POINTS = 1.


# The code of a page

def blocks(
    text   # of a Markdown page
):         # [(language, source, output shown behind it or None)] of its python and sh blocks
    "What runs: `python` and `sh`; a `text` block behind one, or an indented one as nbconvert writes it, is its output."
    found = []
    for m in re.finditer(r"^```(\w*)\n(.*?)^```$((?:\n\n(?:    [^\n]*\n)+)?)", text, re.M | re.S):
        language, source, indented = m.groups()
        if language in ("python", "sh"): found.append((language, source, indented.strip() or None))
        elif language == "text" and found and found[-1][2] is None: found[-1] = (*found[-1][:2], source)
    return found


def python(
    source,   # of a block
    space     # names of the blocks before it; changed
):            # what it prints, and the value of its last line
    "Run a block as a notebook would."
    tree, out = ast.parse(source), io.StringIO()
    last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(out):
        exec(compile(tree, "<page>", "exec"), space)
        value = eval(compile(last, "<page>", "eval"), space) if last else None
        if value is not None: print(repr(value))
    return out.getvalue()


def shell(
    source   # of a block
):           # what it prints
    "Run a block; of `make` only that the target is there, and `pip` would change the environment of this test."
    lines = [f"make -n -C '{root}' {line.split()[1]} > /dev/null" if line.startswith("make ") else line for line in source.splitlines() if not line.startswith("pip ")]
    done = subprocess.run(["sh", "-ec", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, f"{source}\n{done.stdout}{done.stderr}"
    return done.stdout


def agrees(
    want, got,              # what a page shows, what came
    here=machine()          # the kind of machine
):                          # bool
    "Equal but for spaces and `...`; on another kind of machine decimals may move."
    check = doctest.OutputChecker().check_output
    if check(want, got, SAME) or here == WRITTEN_ON: return check(want, got, SAME)
    a, b = (re.findall(r"-?\d+\.\d+", text) for text in (want, got))
    masked = [re.sub(r"[-+]?\d+\.\d+", "#", text) for text in (want, got)]
    return check(*masked, SAME) and len(a) == len(b) and all(abs(float(p) - float(q)) <= POINTS for p, q in zip(a, b))


@pytest.fixture
def clone(tmp_path, monkeypatch):
    "A folder that looks like a clone, with `ega` on the path, and the files that the first page takes for granted."
    for name in ("data", "nbs", "paper"): (tmp_path/name).symlink_to(root/name)
    (tmp_path/"bin").mkdir()
    (tmp_path/"bin/ega").write_text(f"#!/bin/sh\nexec '{sys.executable}' -m ega \"$@\"\n")
    (tmp_path/"bin/ega").chmod(0o755)
    es = read_pack(root/"data/packs/clinc150__all_minilm_l6_v2.parquet")
    few = np.flatnonzero((es.y >= 0) & (es.y < 24) & (es.split == "val"))
    np.save(tmp_path/"X.npy", es.x[few])
    (tmp_path/"labels.csv").write_text("label\n" + "\n".join(es.classes[c] for c in es.y[few]) + "\n")
    monkeypatch.chdir(tmp_path)
    for name, value in {"PATH": f"{tmp_path/'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}.items(): monkeypatch.setenv(name, value)
    before = dict(METHODS)
    yield tmp_path
    METHODS.clear(); METHODS.update(before)                            # a page may add one


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_code_of_a_page_runs_and_prints_what_it_shows(page, clone):
    text, space = page.read_text(), {}
    for package in " ".join(re.findall(r"^<!-- needs: (.+) -->$", text, re.M)).split(): pytest.importorskip(package)
    found = blocks(text)
    assert found
    for language, source, want in found:
        got = python(source, space) if language == "python" else shell(source)
        assert want is None or agrees(want, got), f"{page.name} shows\n{want}\nbut\n{source}\nprints\n{got}"


@pytest.mark.parametrize("text, found", [
    ("```python\nx = 1\n```\n\n    {'a': 1}\n\nWords.\n\n    more\n", [("python", "x = 1\n", "{'a': 1}")]),
    ("```sh\nls\n```\n\n```text\na\n```\n\n```text\nb\n```\n", [("sh", "ls\n", "a\n")]),
    ("```console\nrm -r /\n```\n\n```text\na\n```\n", [])])
def test_blocks_of_a_page(text, found):
    assert blocks(text) == found


def test_what_a_page_shows_must_come(clone):
    assert python("x = 2\nprint(x)\nx + 1", {}) == "2\n3\n" and python("x = None\nx", {}) == ""
    assert agrees("a ... 1.5", "a  b\n1.5") and not agrees("1.5", "1.6", WRITTEN_ON) and agrees("1.5 n 3", "1.6 n 3", "another")
    assert not agrees("1.5 n 3", "1.5 n 4", "another") and not agrees("1.5", "3.5", "another")
    with pytest.raises(AssertionError, match="no-such-target"): shell("make no-such-target")


# Links

def cells(path):
    "The Markdown of a page or notebook: its cells, and what they show."
    if path.suffix == ".md": return path.read_text()
    text = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown": text.append("".join(cell["source"]))
        text += ["".join(out["data"]["text/markdown"]) for out in cell.get("outputs", []) if "text/markdown" in out.get("data", {})]
    return "\n\n".join(text)


def anchors(path):
    "What `#...` may name in a page: headings as GitHub writes them, in a notebook as Jupyter does."
    headings = re.findall(r"^#+ (.+?) *$", re.sub(r"^```.*?^```$", "", cells(path), flags=re.M | re.S), re.M)
    if path.suffix == ".ipynb": return {h.replace(" ", "-") for h in headings}
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(
    page   # path of a Markdown file or notebook
):         # targets that do not exist
    "Links and pictures that lead to no file of the repository, or to no heading in it."
    dead, text = [], re.sub(r"^```.*?^```$|`[^`\n]*`", "", cells(page), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(r'<(?:img|a) [^>]*(?:src|href)="([^"]+)"', text):
        if re.match(r"[a-z]+:", target): continue
        name, _, anchor = target.partition("#")
        path = page.parent/name if name else page
        if not path.exists() or (anchor and path.suffix in (".md", ".ipynb") and anchor not in anchors(path)): dead.append(target)
    return dead


LINKED = [*(root/f for f in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/index.md")), *PAGES[1:], *sorted((root/"nbs").glob("*.ipynb"))]


@pytest.mark.parametrize("page", LINKED, ids=lambda p: p.name)
def test_links_lead_somewhere(page):
    assert dead_links(page) == []


def test_a_dead_link_is_named(tmp_path):
    (tmp_path/"page.md").write_text("# A b, c\n[a](page.md) [b](gone.md) [c](https://example.org) [d](#here) [e](#a-b-c) [f](x.ipynb#A-b) ![g](g.png)\n```\n[h](gone)\n```")
    (tmp_path/"x.ipynb").write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A b\n", "[a](#A-b) [b](#a-b)"]}]}))
    assert dead_links(tmp_path/"page.md") == ["gone.md", "#here", "g.png"] and dead_links(tmp_path/"x.ipynb") == ["#a-b"]


# The site

def test_comments_become_explanations():
    assert api.comments("def f(\n    x, y,  # rows\n    *,\n    k=1  # how many\n):  # the sum\n    'Adds.'\n    return x  # not this\n") == [("x, y", "rows"), ("k", "how many"), ("", "the sum")]
    assert api.comments("class A:\n    n: int  # how many\n    m: int\n") == [("n", "how many")]
    assert api.comments("class A:\n    'A.'\n    def __init__(self,\n        d  # columns\n    ): self.d = d\n    def f(self): pass\n") == [("d", "columns")]
    assert api.comments("def f(self, x):   # rows -> sum\n    return x\n") == [(None, "rows -> sum")]
    assert api.as_rst("`a_b` of x* is |z|_ $\\rho$") == "``a_b``\\  of x\\* is \\|z\\|\\_ \\ :math:`\\rho`"


def test_dead_ends_of_a_site_are_named(tmp_path):
    (tmp_path/"a.html").write_text('<a href="b.html#x">b</a> <a href="b.html#y">b</a> <a href="#z">z</a> <img src="c.png?v=1"> <a href="https://example.org">w</a>')
    (tmp_path/"b.html").write_text('<p id="x">')
    assert api.dead_links([tmp_path/"a.html"]) == [(tmp_path/"a.html", link) for link in ("#z", "b.html#y", "c.png?v=1")]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    for package in ("furo", "myst_nb", "latex2mathml"): pytest.importorskip(package)
    done = subprocess.run([sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path/"site"], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = list((tmp_path/"site").rglob("*.html"))
    assert not [p for p in pages if re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', p.read_text())]       # nothing is fetched
    assert not [p for p in pages if re.search(r"<t[hd][^>]*>[^<]*\$", p.read_text())]                                            # every formula is drawn
    assert (tmp_path/"site/index.html").exists() and len(pages) > len(LINKED)
