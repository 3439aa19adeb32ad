"""The lowest versions that pyproject.toml promises, in an environment of their own, must pass the tests of the core.

uv resolves them (`--resolution lowest-direct`); Python 3.11 where it is installed, else the one that runs this."""

import os
import subprocess
import sys
from pathlib import Path

root = Path(__file__).resolve().parent.parent
env, uv = root / "build/minimum", Path(sys.executable).parent / "uv"
python = env / "bin/python"
PARTS = [
    *(
        f"library/test_{name}.py"
        for name in (
            "arrays",
            "files",
            "packs",
            "datasets",
            "adapters",
            "losses",
            "sparsity",
            "training",
            "theory",
            "search",
            "metrics",
            "statistics",
            "closed_form",
            "selection",
            "estimator",
            "transform",
            "index",
            "monitor",
        )
    ),
    "experiments/test_runs.py",
]
NEEDED = ["--editable", ".[cpu]", "pillow>=10", "pytest>=8", "hypothesis>=6"]
VERSIONS = """
import importlib.metadata, platform
packages = "numpy torch pandas pyarrow scipy scikit-learn safetensors faiss-cpu".split()
print("Python", platform.python_version(), *(f"{p} {importlib.metadata.version(p)}" for p in packages), sep="  ")
"""


def interpreter():
    "Python 3.11 if there is one."
    found = subprocess.run([uv, "python", "find", "--no-python-downloads", "3.11"], capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else sys.executable


def main():
    said = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {
        "OMP_NUM_THREADS": "1",
        "VIRTUAL_ENV": str(env),
    }
    if not python.exists():
        subprocess.run(
            [uv, "venv", "--quiet", "--no-python-downloads", "--python", interpreter(), env], env=said, check=True
        )
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--resolution", "lowest-direct", *NEEDED], cwd=root, env=said, check=True
    )
    subprocess.run([python, "-c", VERSIONS], env=said, check=True)
    return subprocess.run(
        [python, "-m", "pytest", "-q", "--no-header", *(f"tests/{p}" for p in PARTS)], cwd=root, env=said
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
