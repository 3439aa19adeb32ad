"""Which module may import which. The imports are read from the sources, so one inside a function counts too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

package = Path(__file__).resolve().parents[2] / "ega"

LIBRARY = [
    {"data.arrays"},
    {"data.files", "data.runtime", "testing"},
    {"data.packs", "method.adapters", "method.losses", "measure.search", "measure.statistics"},
    {
        "data.vectors",
        "data.datasets",
        "method.active_ratio",
        "measure.metrics",
        "method.certificates",
        "method.compression",
        "method.config",
    },
    {"data.encoders", "method.closed_form", "method.training", "method.interface"},
    {"data.embed", "method.methods", "method.theory", "deploy.transform", "measure.calibration"},
    {"measure.evaluation", "deploy.index", "data.relevance"},
    {
        "selection",
        "deploy.stores",
        "deploy.wrappers",
        "deploy.monitor",
        "measure.ranking",
    },
    {"estimator", "gain"},
    {"pairs", "cost"},
    {"deploy.report"},
    {"cli"},
]
EXPERIMENTS = [
    {
        "experiments.protocols",
        "experiments.plots",
    },
    {"experiments.runs"},
    {"experiments.grids", "experiments.summary"},
    {"experiments.published", "experiments.tables", "experiments.claims"},
    {"experiments.operating"},
    {"experiments.cli"},
]
LAYERS = LIBRARY + EXPERIMENTS  # an experiment may import the whole library; the library imports no experiment
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
PACKAGES = {name.split(".")[0] for name in LEVEL if "." in name}
WITHOUT_TORCH = [
    "data.arrays",
    "data.runtime",
    "data.files",
    "method.config",
    "data.packs",
    "data.datasets",
    "measure.search",
    "measure.metrics",
    "measure.statistics",
    "method.closed_form",
    "method.certificates",
    "method.compression",
    "data.relevance",
    "cli",
    "experiments.protocols",
    "experiments.plots",
    "experiments.cli",
]


def imported(
    source,  # text of a module of the package
    module,  # its dotted name below `ega`
):  # set of dotted names below `ega` that it imports, at any depth of nesting
    "Absolute and relative imports, and attributes such as `ega.x` after `import ega`."
    parents, taken = ["ega", *module.split(".")][:-1], set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            taken |= {a.name for a in node.names}
        elif isinstance(node, ast.Attribute):
            taken.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            above = parents[: len(parents) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            packages = {"ega", *(f"ega.{p}" for p in PACKAGES)}
            taken |= {f"{base}.{a.name}" for a in node.names} if base in packages else {base}
    below = {name.removeprefix("ega.") for name in taken if name.startswith("ega.") and "(" not in name}
    return {".".join(n.split(".")[: 2 if n.split(".")[0] in PACKAGES else 1]) for n in below} - PACKAGES


def modules(folder=package):
    "Dotted name below `ega` -> source, without the hand-written `__init__` and the index of nbdev."
    files = [f for f in sorted(folder.rglob("*.py")) if not f.stem.startswith("_")]
    return {".".join(f.relative_to(folder).with_suffix("").parts): f.read_text() for f in files}


def complaints(
    sources,  # dict: module name -> source
):  # list of sentences, empty when the order holds
    "Every import that goes upwards, sideways, or from the library to the experiments."
    bad = [f"ega.{m} has no layer: give it one in tests/repository/test_layers.py" for m in sources if m not in LEVEL]
    for m, source in sources.items():
        for n in sorted(imported(source, m) - {m}):
            if n not in LEVEL:
                if not n.startswith("__"):
                    bad.append(
                        f"ega.{m} takes {n} from the package itself, which hides its layer; import it from its module"
                    )
            elif m in LEVEL and n.startswith("experiments.") and not m.startswith("experiments."):
                bad.append(f"ega.{m} belongs to the library and imports ega.{n}, an experiment")
            elif m in LEVEL and LEVEL[n] > LEVEL[m]:
                bad.append(f"ega.{m} (layer {LEVEL[m]}) imports ega.{n} (layer {LEVEL[n]}), which lies above it")
            elif m in LEVEL and LEVEL[n] == LEVEL[m]:
                bad.append(f"ega.{m} imports ega.{n} sideways: both are in layer {LEVEL[m]}")
    return bad


def test_every_module_imports_from_lower_layers_only():
    assert not complaints(modules()), "\n".join(complaints(modules()))


@pytest.mark.parametrize(
    "module, source, word",
    [
        ("data.arrays", "from ega.data.packs import read_pack", "above"),
        ("method.losses", "def f():\n    from ega.method.training import train", "above"),  # hidden in a function
        ("measure.metrics", "class A:\n    def f(self):\n        import ega.method.methods as r", "above"),
        ("measure.search", "from . import metrics", "above"),
        ("data.packs", "from ..method.theory import drift", "above"),
        ("method.losses", "from ega.method.adapters import LinearAdapter", "sideways"),
        ("data.packs", "import ega\ndef f(): return ega.measure.metrics.lp_at_k", "above"),
        ("data.packs", "import ega\ndef f(): return ega.normalize", "takes normalize from the package"),
        ("selection", "from ega.experiments.grids import GRIDS", "an experiment"),
        ("method.methods", "from ..experiments.runs import RunConfig", "an experiment"),
        ("experiments.runs", "from .grids import GRIDS", "above"),
        ("surprise", "x = 1", "no layer"),
    ],
)
def test_an_offender_is_named(module, source, word):
    bad = complaints({**modules(), module: source})
    assert any(f"ega.{module}" in line and word in line for line in bad), bad


def test_what_is_allowed_passes():
    assert not complaints(
        {
            "measure.metrics": "from ega.measure.search import knn\nimport numpy",
            "experiments.runs": "from ..method.methods import fit_adapter\nfrom ega.estimator import EmbeddingAdapter",
            "data.arrays": "import torch, ega\nv = ega.__version__",
        }
    )


def loaded(
    statement,  # Python to run in a new process
    *names,  # top-level packages
):  # those of the names that the statement loaded
    "Which packages a statement loads, measured in a process of its own."
    code = f"{statement}\nimport sys\nprint(*(n for n in {names!r} if n in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=package.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("module", ["", *WITHOUT_TORCH])
def test_import_loads_no_torch(module):
    assert loaded(f"import ega{'.' if module else ''}{module}", "torch") == []


def test_a_loaded_torch_is_seen():
    assert loaded("import torch", "torch", "no_such_package") == ["torch"]


CHECKS = {"check_X", "check_y", "check_pairs", "check_matrix", "iter_unit_rows", "read_matrix", "read_labels"}
FACADE = {"method.interface", "measure.evaluation", "measure.ranking"}  # they take what comes from outside


def checks_in(source):
    "Names of the checks of arrays and readers of files that a module calls."
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return {name for call in calls if (name := ast.unparse(call).rpartition(".")[2]) in CHECKS}


def test_arrays_are_checked_in_the_facade_alone():
    below = [m for m in LEVEL if m.startswith(("method.", "measure.")) and m not in FACADE] + ["selection"]
    sources = modules()
    assert {m: found for m in below if (found := checks_in(sources[m]))} == {}
    assert checks_in(sources["measure.evaluation"]) and checks_in("x = arrays.check_X(y)") == {"check_X"}
