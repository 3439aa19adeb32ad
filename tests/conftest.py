"""Configuration of all tests.

Slow and GPU tests are skipped with a reason, generated cases are the same in every run, and counts are compared with
tests/README.md.
"""

import os
import re
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "agg")  # no window
settings.register_profile("ega", deadline=None, derandomize=True)  # a slow machine is no failure
settings.load_profile("ega")
PAGE = Path(__file__).with_name("README.md")
ROW = re.compile(r"^\| (.+) \| ([\d,]+) \|$", re.M)
COUNTED = pytest.StashKey()


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too, and fuzz longer")
    parser.addoption(
        "--counts", action="store_true", help="write what is counted into tests/README.md instead of comparing it"
    )


def pytest_configure(config):
    config.stash[COUNTED] = {}


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if "gpu" in item.keywords:
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def table(
    page=PAGE,  # a file with rows `| what | how many |`
):  # dict: what -> how many
    "The counts in a table of a Markdown page."
    return {name: int(n.replace(",", "")) for name, n in ROW.findall(page.read_text())}


@pytest.fixture
def count(request):
    "count(what, n): compare a count with tests/README.md; with --slow the counts are larger and are not compared."

    def note(what, n):
        config = request.config
        if config.getoption("--slow"):
            return
        if config.getoption("--counts"):
            config.stash[COUNTED][what] = n
            return
        files = " ".join(f"tests/library/test_{name}.py" for name in ("fuzz", "properties", "reliability"))
        assert table().get(what) == n, (
            f"{what}: {n} now, {table().get(what)} in tests/README.md; if that is intended: pytest {files} --counts"
        )

    return note


def pytest_sessionfinish(session, exitstatus):
    counted = session.config.stash[COUNTED]
    if not counted or exitstatus:
        return
    text = PAGE.read_text()
    rows = "".join(
        f"| {what} | {n:,} |\n" for what, n in (table() | counted).items()
    )  # what this run did not count stays
    begin, end = text.index("| counted | in the default run |"), text.rindex("|\n") + 2
    PAGE.write_text(text[:begin] + "| counted | in the default run |\n| --- | ---: |\n" + rows + text[end:])
