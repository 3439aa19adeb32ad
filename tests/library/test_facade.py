"""The names at the top of the package: documented in numpydoc form, with examples that run."""

import doctest
import importlib
import inspect
import re
import subprocess
import sys

import api
import pytest

import ega

NAMES = [name for names in api.TASKS.values() for name in names]
TOP = [f"{ega._MODULE_OF[name]}.{name}" for name in ega.__all__ if name != "InputError"]
MADE_BY = {"deploy.monitor.Monitor": "fit"}  # the method that users call instead of the constructor


def main_object(name):
    "The object behind `module.attribute`."
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"ega.{module}"), attribute)


def undocumented(documented, docstring):
    "Parameters of a function, or of a class's constructor, that the docstring does not explain."
    parameters = [
        p for p in inspect.signature(documented).parameters.values() if p.name not in ("self", "args", "kwargs")
    ]
    return [p.name for p in parameters if not re.search(rf"^ *(\w+, )*\*{{0,2}}{p.name}(, \w+)* : ", docstring, re.M)]


@pytest.mark.parametrize("name", TOP)
def test_every_parameter_is_documented(name):
    documented = main_object(name)
    constructor = getattr(documented, MADE_BY[name]) if name in MADE_BY else documented
    assert undocumented(constructor, inspect.getdoc(constructor)) == []
    for where, section in ((constructor, "Parameters"), (documented, "Examples")):
        assert re.search(rf"^{section}\n-+$", inspect.getdoc(where), re.M), f"{name} has no section {section}"


@pytest.mark.parametrize("name", sorted({*NAMES, *TOP}))
def test_examples_run(name, tmp_path, monkeypatch):
    if package := api.NEEDS.get(name):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    documented, runner = (
        main_object(name),
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE),
    )
    examples = [test for test in doctest.DocTestFinder().find(documented, name, globs={}) if test.examples]
    for test in examples:
        output = []
        assert runner.run(test, out=output.append).failed == 0, "".join(output)


def test_names_of_the_package_are_loaded_when_used():
    code = """
import sys, ega
assert "torch" not in sys.modules
for name in ega.__all__:
    assert getattr(ega, name).__module__.startswith("ega."), name
assert set(ega.__all__) <= set(dir(ega))
try: ega.nothing
except AttributeError as error: assert "nothing" in str(error)
else: raise AssertionError
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [name for name in ega.__all__ if name not in ("InputError",)])
def test_an_editor_finds_the_signature_behind_a_public_name(name):
    "By static analysis, as in an editor: nothing of ega is imported for it, and the names are loaded late."
    jedi = pytest.importorskip("jedi")
    text = f"from ega import {name}\n{name}("
    (found,) = jedi.Script(text, project=jedi.Project(api.__file__.rsplit("/docs/")[0])).get_signatures(
        2, len(name) + 1
    )
    expected = [p for p in inspect.signature(getattr(ega, name)).parameters if p != "self"]
    assert [p.name for p in found.params] == expected and found.module_name.startswith("ega.")
