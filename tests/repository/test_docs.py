"""The pages: their code prints the output they show, no link is dead, and the site builds without warnings."""

import json
import re
import subprocess
import sys
from pathlib import Path

import api
import pages
import pytest

from ega.experiments.runs import platform_tag

root = Path(__file__).resolve().parents[2]


# The code of a page


@pytest.mark.parametrize("page", [root / "README.md", *pages.PAGES], ids=lambda p: p.stem)
def test_code_blocks_print_the_output_they_show(page, tmp_path):
    text = page.read_text()
    for package in " ".join(re.findall(r"^<!-- needs: (.+) -->$", text, re.M)).split():
        pytest.importorskip(package)
    assert pages.blocks(text)
    with pages.clone(tmp_path):
        for source, want, got in pages.prints(text):
            assert want is None or pages.agrees(want, got, platform_tag()), (
                f"{page.name} shows\n{want}\nbut\n{source}\nprints\n{got}; `python docs/pages.py` writes pages anew"
            )


@pytest.mark.parametrize(
    "text, found",
    [
        ("```python\nx = 1\n```\n\n    {'a': 1}\n\nWords.\n\n    more\n", [("python", "x = 1\n", "    {'a': 1}\n")]),
        ("```sh\nls\n```\n\n```text\na\n```\n\n```text\nb\n```\n", [("sh", "ls\n", "a\n")]),
        ("```python\nx\n```\n\nWords.\n\n```text\na\n```\n", [("python", "x\n", None)]),
        ("```console\nrm -r /\n```\n\n```text\na\n```\n", []),
    ],
)
def test_blocks_of_a_page(text, found):
    assert pages.blocks(text) == found


def test_output_that_differs_is_found():
    assert pages.python("x = 2\nprint(x)\nx + 1", {}) == "2\n3\n" and pages.python("x = None\nx", {}) == ""
    assert (
        pages.agrees("a ... 1.5", "a  b\n1.5", "any")
        and not pages.agrees("1.5", "1.6", pages.WRITTEN_ON)
        and pages.agrees("1.5 n 3", "1.6 n 3", "any")
    )
    assert not pages.agrees("1.5 n 3", "1.5 n 4", "any") and not pages.agrees("1.5", "3.5", "any")
    with pytest.raises(RuntimeError, match="no-such-target"):
        pages.shell("make no-such-target")


def test_page_on_extras_names_those_that_the_library_asks_for():
    page = (root / "docs/howto/extras.md").read_text()
    project = (root / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    declared = re.findall(r"^(\w+) = \[", project.partition("\n[")[0], re.M)
    asked = set(
        re.findall(r"import_optional\([^,()]+, \"(\w+)\"\)", "".join(f.read_text() for f in root.glob("ega/*.py")))
    )
    listed = {name for name in declared if f"`{name}`" in page}
    assert asked <= listed and {"cpu", "gpu", "deploy", "report", "paper", "bench"} <= listed


@pytest.mark.parametrize("page", [p for p in pages.PAGES if p.parent.name == "howto"], ids=lambda p: p.stem)
def test_first_page_lists_every_how_to_page(page):
    assert f"](howto/{page.name})" in (root / "docs/index.md").read_text() and page.read_text().count("\n") < 80


def test_first_page_lists_every_chapter_under_its_title():
    def title(path):
        return next(
            "".join(c["source"]).splitlines()[0][2:]
            for c in json.loads(path.read_text())["cells"]
            if c["cell_type"] == "markdown"
        )

    there = {path.relative_to(root).as_posix(): title(path) for path in (root / "nbs").glob("*/*.ipynb")}
    listed = [(path, name) for of in api.chapters(root).values() for name, path in of]
    assert dict(listed) == there and len(listed) == len(there)


def test_readme_is_short():
    assert len((root / "README.md").read_text().split()) <= 600


# Links


def cells(path):
    "The Markdown of a page or notebook: its cells, and what they show."
    if path.suffix == ".md":
        return path.read_text()
    text = []
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "markdown":
            text.append("".join(cell["source"]))
        text += [
            "".join(out["data"]["text/markdown"])
            for out in cell.get("outputs", [])
            if "text/markdown" in out.get("data", {})
        ]
    return "\n\n".join(text)


def anchors(path):
    "What `#...` may name in a page: headings as GitHub writes them, in a notebook as Jupyter does."
    headings = re.findall(r"^#+ (.+?) *$", re.sub(r"^```.*?^```$", "", cells(path), flags=re.M | re.S), re.M)
    if path.suffix == ".ipynb":
        return {h.replace(" ", "-") for h in headings}
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def dead_links(
    page,  # path of a Markdown file or notebook
):  # targets that do not exist
    "Links and pictures that lead to no file of the repository, or to no heading in it."
    dead, text = [], re.sub(r"^```.*?^```$|`[^`\n]*`", "", cells(page), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text) + re.findall(
        r'<(?:img|a) [^>]*(?:src|href)="([^"]+)"', text
    ):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = page.parent / name if name else page
        if not path.exists() or (anchor and path.suffix in (".md", ".ipynb") and anchor not in anchors(path)):
            dead.append(target)
    return dead


LINKED = [
    *(
        root / f
        for f in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "tests/README.md", "docs/index.md")
    ),
    *pages.PAGES,
    *sorted((root / "nbs").rglob("*.ipynb")),
]


@pytest.mark.parametrize("page", LINKED, ids=lambda p: p.relative_to(root).as_posix())
def test_links_are_not_dead(page):
    assert dead_links(page) == []


def test_a_dead_link_is_named(tmp_path):
    (tmp_path / "page.md").write_text(
        "# A b, c\n[a](page.md) [b](gone.md) [c](https://example.org) [d](#here) [e](#a-b-c) [f](x.ipynb#A-b) "
        "![g](g.png)\n"
        "```\n[h](gone)\n```"
    )
    (tmp_path / "x.ipynb").write_text(
        json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A b\n", "[a](#A-b) [b](#a-b)"]}]})
    )
    assert dead_links(tmp_path / "page.md") == ["gone.md", "#here", "g.png"] and dead_links(tmp_path / "x.ipynb") == [
        "#a-b"
    ]


# The site


def test_parameter_comments_are_extracted():
    assert api.comments(
        "def f(\n    x, y,  # rows\n    *,\n    k=1  # how many\n):  # the sum\n    'Adds.'\n    return x  # not this\n"
    ) == [("x, y", "rows"), ("k", "how many"), ("", "the sum")]
    assert api.comments("class A:\n    n: int  # how many\n    m: int\n") == [("n", "how many")]
    assert api.comments(
        "class A:\n    'A.'\n    def __init__(self,\n        d  # columns\n    ): self.d = d\n    def f(self): pass\n"
    ) == [("d", "columns")]
    assert api.comments("def f(self, x):   # rows -> sum\n    return x\n") == [(None, "rows -> sum")]
    assert api.as_rst("`a_b` of x* is |z|_ $\\rho$") == "``a_b``\\  of x\\* is \\|z\\|\\_ \\ :math:`\\rho`"


def test_dead_links_of_a_site_are_named(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">b</a> <a href="b.html#y">b</a> <a href="#z">z</a> <img src="c.png?v=1"> <a href="https://example.org">w</a>'
    )
    (tmp_path / "b.html").write_text('<p id="x">')
    assert api.dead_links([tmp_path / "a.html"]) == [
        (tmp_path / "a.html", link) for link in ("#z", "b.html#y", "c.png?v=1")
    ]


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    for package in ("furo", "myst_nb", "latex2mathml"):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", ".", tmp_path / "site"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    built = list((tmp_path / "site").rglob("*.html"))
    assert not [
        p for p in built if re.search(r'<(?:script|link|img)[^>]*(?:src|href)="(?:https?:)?//', p.read_text())
    ]  # nothing is fetched
    assert not [p for p in built if re.search(r"<t[hd][^>]*>[^<]*\$", p.read_text())]  # every formula is drawn
    assert (tmp_path / "site/index.html").exists() and len(built) > len(LINKED)
