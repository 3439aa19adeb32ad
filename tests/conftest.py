"""Configuration of all tests.

Slow and GPU tests are skipped with a reason, and generated cases are the same in every run.
"""

import os

import pytest
from hypothesis import settings

os.environ.setdefault("MPLBACKEND", "agg")  # no window
settings.register_profile("ega", deadline=None, derandomize=True)  # a slow machine is no failure
settings.load_profile("ega")


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_collection_modifyitems(config, items):
    for item in items:
        if "slow" in item.keywords and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="slow; run with --slow"))
        if "gpu" in item.keywords:
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
