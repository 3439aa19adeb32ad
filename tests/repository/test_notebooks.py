"""The form of the notebooks: first cells, size, docstrings, outputs."""

import ast
import io
import json
import re
import tokenize
from pathlib import Path

import pytest

notebooks = sorted((Path(__file__).resolve().parents[2] / "nbs").rglob("*.ipynb"))
LINES, CELLS = 60, 70


def read(path):
    "Cells as (kind, source, outputs)."
    return [(c["cell_type"], "".join(c["source"]), c.get("outputs", [])) for c in json.loads(path.read_text())["cells"]]


def exported(cells):
    "Sources of the exported cells."
    return [s for kind, s, _ in cells if kind == "code" and re.match(r"\s*#\|\s*exports?\b", s)]


def definitions(source):
    "Functions and classes at the top level of a cell."
    return [n for n in ast.parse(source).body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]


def is_explained(
    node,  # ast node of a function
    source,  # text of its cell
):  # bool
    "A docstring, or docments: a comment behind each parameter."
    if ast.get_docstring(node):
        return True
    if isinstance(node, ast.ClassDef):
        return False
    commented = {
        t.start[0] for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT
    }
    args = [
        *node.args.posonlyargs,
        *node.args.args,
        *node.args.kwonlyargs,
        *filter(None, [node.args.vararg, node.args.kwarg]),
    ]
    return bool(args) and all(a.lineno in commented for a in args if a.arg != "self")


def code_lines(source):
    "Number of lines of a cell that are neither empty, nor a comment, nor part of a docstring."
    tree = ast.parse(source)
    documented = [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(n)]
    docstrings = {line for n in documented for line in range(n.body[0].lineno, n.body[0].end_lineno + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in docstrings for number, line in lines
    )


def start(cells):
    "Must begin with `#| default_exp` or a title, and have a description."
    kind, first, _ = cells[0]
    if not (re.match(r"#\|\s*default_exp [\w.]+", first) if kind == "code" else first.startswith("# ")):
        yield "begin with `#| default_exp name` or with a title `# ...`"
    head = "\n".join(s for kind, s, _ in cells[:3] if kind == "markdown")
    if not re.search(r"^# \S", head, re.M):
        yield "put the title `# ...` into the first cells"
    if not re.search(r"^> \S", head, re.M):
        yield "put the description below the title, in a line that begins with `> `"


def size(cells):
    "Must not be too long."
    if len(cells) > CELLS:
        yield f"{len(cells)} cells; at most {CELLS}: split the idea in two"
    for source in exported(cells):
        classes = [d for d in definitions(source) if isinstance(d, ast.ClassDef)]
        methods = [m for c in classes for m in c.body if isinstance(m, ast.FunctionDef)]
        name = next((d.name for d in definitions(source)), source.splitlines()[1:2])
        # a class keeps its methods together, so each of them is measured
        n = max((code_lines(ast.unparse(m)) for m in methods), default=code_lines(source))
        if n > LINES:
            yield f"the exported cell of {name} has {n} lines of code; at most {LINES}: divide it"


def explanation(cells):
    "Must explain what it exports; names with an underscore are not exported."
    for source in exported(cells):
        for node in definitions(source):
            if not node.name.startswith("_") and not is_explained(node, source):
                yield f"{node.name} has neither a docstring nor a comment behind each parameter"


def evidence(cells):
    "Must show no error, and no output that ties it to one machine's run."
    for i, (_, _, outputs) in enumerate(cells):
        if any(o["output_type"] == "error" for o in outputs):
            yield f"cell {i} shows an error; run the notebook again"
        if any(o.get("name") == "stderr" for o in outputs):
            yield f"cell {i} shows warnings or progress; mend or silence what prints them, then run the notebook again"


def results(cells):
    "A results notebook must show some."
    if not any(outputs for kind, _, outputs in cells if kind == "code"):
        yield "carries results but has no saved output; run it, then `make export`"


RULES = [start, size, explanation, evidence]


@pytest.mark.parametrize("path", notebooks, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_form(path):
    cells = read(path)
    rules = [*RULES, results] if path.parent.name in ("results", "paper") else RULES
    bad = [f"{path.name}: {line}" for rule in rules for line in rule(cells)]
    assert not bad, "\n".join(bad)


HEAD = [("code", "#| default_exp x", []), ("markdown", "# X\n\n> Rows are rows.", [])]
long = '#| export\ndef f(x):\n    "Long."\n' + "    x += 1\n" * LINES
offenders = {
    "a plain cell first": (start, [("code", "import torch", []), *HEAD], "begin with"),
    "no title": (start, [("code", "#| default_exp x", []), ("markdown", "> Description.", [])], "title"),
    "no description": (start, [("markdown", "# X\n\nIt is about x.", [])], "description"),
    "long cell": (size, [*HEAD, ("code", long, [])], "exported cell of f has 61 lines"),
    "too many cells": (size, HEAD * 36, "72 cells"),
    "silent function": (explanation, [*HEAD, ("code", "#| export\ndef f(x): return x", [])], "f has neither"),
    "half docments": (
        explanation,
        [*HEAD, ("code", "#| export\ndef f(\n    x,  # rows\n    y\n): return x", [])],
        "f has neither",
    ),
    "silent class": (explanation, [*HEAD, ("code", "#| exports\nclass A:\n    x = 1", [])], "A has neither"),
    "error": (evidence, [*HEAD, ("code", "1/0", [{"output_type": "error"}])], "cell 2 shows an error"),
    "warning": (
        evidence,
        [*HEAD, ("code", "f()", [{"output_type": "stream", "name": "stderr"}])],
        "cell 2 shows warnings",
    ),
    "no results": (results, [*HEAD, ("code", "table()", [])], "no saved output"),
}


@pytest.mark.parametrize("case", offenders)
def test_an_offender_is_named(case):
    rule, cells, words = offenders[case]
    assert [line for line in rule(cells) if words in line]


def test_good_form_passes():
    docments = "#| export\ndef f(\n    x,  # rows\n    *,\n    k=1 # how many\n): return x"
    shown = [{"output_type": "execute_result"}]
    cells = [
        *HEAD,
        ("code", docments, []),
        ("code", "#| export\ndef _own(x): return x", []),
        ("code", "#| export\nimport numpy as np", []),
        ("code", "f(1)", shown),
    ]
    assert not [line for rule in [*RULES, results] for line in rule(cells)]
