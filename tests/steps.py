"""`make quick`, `make test`, `make check`: run the checks of the repository in order, even after one has failed."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

root = Path(__file__).resolve().parent.parent
bin_ = Path(sys.executable).parent
LIMIT = 1800  # seconds until a step counts as hung; the longest took 300 on two quiet cores
without_results = ["--skip_folder_re", r"^[_.]|^results$|^paper$", "--skip_file_re", r"^[_.]|^index"]
form = [f"tests/repository/test_{name}.py" for name in ("layers", "notebooks", "tree")]

QUICK = {
    "notebooks, tests and scripts are formatted (ruff)": ["ruff", "format", "--check", "--quiet", "."],
    "notebooks, tests and scripts are linted (ruff)": ["ruff", "check", "--quiet", "."],
    "modules in sync with the notebooks": ["python", "tests/sync.py"],
    "README in sync with nbs/index.ipynb": ["python", "docs/readme.py", "--check"],
    "layers, form of notebooks, tracked files": ["python", "-m", "pytest", "-q", *form],
}
TEST = {
    **dict(list(QUICK.items())[:4]),
    "the types of the library (mypy)": ["mypy"],
    "the notebooks of library and experiments run (nbdev_test)": ["nbdev_test", "--n_workers", "2", *without_results],
    "tests (pytest)": ["python", "-m", "pytest", "-q", "-n", "2", "--dist", "worksteal"],
    "the others run and show their stored outputs (nbval)": ["python", "tests/nbval_copies.py", "--run"],
}
CHECK = TEST | {
    "the docs site builds without a warning": ["make", "docs"],
    "the lowest versions that pyproject.toml promises": ["python", "tests/minimum.py"],
}


def environment():
    "Environment of the steps: one thread for each of two workers, no model hub, commands of this Python first."
    return {
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "MPLCONFIGDIR": str(root / "build" / "matplotlib"),  # fonts of this installation, not of a deleted one
        **{k: v for k, v in os.environ.items() if k != "VIRTUAL_ENV"},
        "PATH": f"{bin_}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def run(steps):
    "Run the steps and return the names of those that failed."
    failed, start = [], time.perf_counter()
    for i, (name, command) in enumerate(steps.items(), 1):
        print(f"[{i}/{len(steps)}] {name}", flush=True)
        t = time.perf_counter()
        try:
            program = shutil.which(command[0], path=environment()["PATH"])
            done = subprocess.run([program, *command[1:]], cwd=root, env=environment(), timeout=LIMIT)
            result = "FAILED" if done.returncode else "ok"
        except subprocess.TimeoutExpired:
            result = "HUNG"
        if result != "ok":
            failed.append(name)
        print(f"      {result}, {time.perf_counter() - t:.1f} s\n", flush=True)
    print(f"{len(steps) - len(failed)} of {len(steps)} steps passed in {time.perf_counter() - start:.0f} s")
    for name in failed:
        print(f"  failed: {name}")
    return failed


if __name__ == "__main__":
    sys.exit(bool(run({"quick": QUICK, "test": TEST, "check": CHECK}[sys.argv[1]])))
