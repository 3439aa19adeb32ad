"""Who may import whom. The order is read from the sources, so an import inside a function counts, too."""
import ast, subprocess, sys
from pathlib import Path

import pytest

package = Path(__file__).resolve().parent.parent/"ega"

LAYERS = [
    {"core"},
    {"files"},
    {"data", "datasets", "adapters", "losses", "search", "plots", "harness"},
    {"rows", "sparsity", "metrics", "closed_form", "encoders", "encoding", "certificates"},
    {"comparison", "protocols"},
    {"training", "theory"},
    {"runs", "grids", "summary", "selection"},
    {"estimator", "deploy", "throughput", "index", "lance", "monitor", "published", "tables"},
    {"report", "bench", "cli"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
ONLY = {"plots": {"core"}, "datasets": {"core", "files", "data"}, "encoders": {"core", "files", "datasets"}, "encoding": {"core", "files", "data", "datasets", "encoders"}}      # narrower than their layer
NEVER = {("losses", "adapters"), ("adapters", "losses")}      # they meet in training and runs
WITHOUT_TORCH = ["core", "files", "data", "datasets", "search", "metrics", "comparison", "protocols", "closed_form", "certificates", "plots", "bench", "harness"]


def imported(
    source   # text of a module of the package
):           # set of names below `ega` that it takes, at any depth of nesting
    "`import ega.x`, `from ega.x import y`, `from ega import x`, `from .x import y`, `from . import x`, and `ega.x` after `import ega`."
    taken = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): taken |= {a.name for a in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name): taken.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(filter(None, ["ega" if node.level else "", node.module or ""]))
            taken |= {f"ega.{a.name}" for a in node.names} if base == "ega" else {base}
    return {name.split(".")[1] for name in taken if name.startswith("ega.")}


def modules(folder=package):
    "Module name -> source, without the hand-written `__init__` and the index of nbdev."
    return {f.stem: f.read_text() for f in sorted(folder.glob("*.py")) if not f.stem.startswith("_")}


def complaints(
    sources   # dict module name -> source
):            # list of sentences, empty when the order holds
    "Every import that goes upwards, sideways where it must not, or round in a circle."
    bad = [f"ega.{m} has no layer: give it one in tests/test_layers.py" for m in sources if m not in LEVEL]
    edges = [(m, n) for m, source in sources.items() for n in sorted(imported(source) & LEVEL.keys()) if m in LEVEL]
    bad += [f"ega.{m} (layer {LEVEL[m]}) imports ega.{n} (layer {LEVEL[n]}), which lies above it" for m, n in edges if LEVEL[n] > LEVEL[m]]
    bad += [f"ega.{m} imports ega.{n}; it may import {sorted(ONLY[m])} alone" for m, n in edges if n not in ONLY.get(m, {n})]
    bad += [f"ega.{m} imports ega.{n}; the two meet in training and runs only" for m, n in edges if (m, n) in NEVER]
    bad += [f"ega.{m} and ega.{n} import each other" for m, n in edges if m < n and (n, m) in edges]
    bad += [f"ega.{m} takes {n} from the package itself, which hides its layer; import it from its module"
            for m, source in sources.items() for n in sorted(imported(source) - LEVEL.keys()) if not n.startswith("__")]
    return bad


def test_nobody_imports_upwards():
    assert not complaints(modules()), "\n".join(complaints(modules()))


@pytest.mark.parametrize("module, source, word", [
    ("core", "from ega.data import read_pack", "above"),
    ("losses", "def f():\n    from ega.training import train", "above"),                  # hidden in a function
    ("metrics", "class A:\n    def f(self):\n        import ega.runs as r", "above"),
    ("search", "from . import metrics", "above"),
    ("data", "from .theory import drift", "above"),
    ("losses", "from ega.adapters import Linear", "meet"),
    ("adapters", "from .losses import supcon", "meet"),
    ("plots", "from ega.data import EmbeddingSet", "alone"),
    ("encoders", "from ega.search import knn", "alone"),
    ("datasets", "from ega.search import knn", "alone"),
    ("data", "import ega\ndef f(): return ega.metrics.lp_at_k", "above"),
    ("data", "import ega\ndef f(): return ega.normalize", "takes normalize from the package"),
    ("core", "def f():\n    from ega import read_pack", "takes read_pack from the package"),
    ("surprise", "x = 1", "no layer"),
])
def test_an_offender_is_named(module, source, word):
    bad = complaints({**modules(), module: source})
    assert any(f"ega.{module}" in line and word in line for line in bad), bad


def test_a_circle_is_named():
    bad = complaints({"sparsity": "from ega.metrics import lp_at_k", "metrics": "from ega.sparsity import rho"})
    assert bad == ["ega.metrics and ega.sparsity import each other"]


def test_what_is_allowed_passes():
    assert not complaints({"metrics": "from ega.search import knn\nimport numpy", "cli": "def f():\n    from ega.runs import grid", "core": "import torch, ega\nv = ega.__version__"})


def loaded(
    statement,  # Python to run in a fresh process
    *names      # top-level packages
):              # those of the names that the statement loaded
    "Measured in a process of its own: what is really imported, by whomever."
    code = f"{statement}\nimport sys\nprint(*(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", ["", *WITHOUT_TORCH])
def test_import_loads_no_torch(module):
    if module and not (package/f"{module}.py").exists(): pytest.skip(f"ega.{module} is not written yet")
    assert loaded(f"import ega{'.' if module else ''}{module}", "torch") == []


def test_the_measure_sees_torch():
    assert loaded("import torch", "torch", "no_such_package") == ["torch"]
