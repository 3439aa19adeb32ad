"""Do the committed modules follow from the notebooks? Exports a copy and compares; the tree itself is never touched."""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

CURE = """run `make export`; an edit made in a module goes back to its notebook
      first, with .venv/bin/nbdev_update"""


def digests(root):
    "File name -> digest, for notebooks and modules."
    files = [*root.glob("nbs/**/*.ipynb"), *root.glob("ega/**/*.py")]
    return {
        f.relative_to(root).as_posix(): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in files
        if ".ipynb_checkpoints" not in f.parts
    }


def exported(root, folder):
    "Export and clean a copy of the notebooks in `folder`; only hand-written modules (`__init__.py`) are taken along."
    shutil.copy(root / "settings.ini", folder)
    for f in (f for f in digests(root) if f.endswith(".ipynb") or Path(f).name.startswith("__")):
        (folder / f).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / f, folder / f)
    for command in ("nbdev_export", "nbdev_clean"):
        done = subprocess.run([Path(sys.executable).parent / command], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{command} failed:\n{done.stdout}{done.stderr}")
    return folder


def complaints(root):
    "One line per file that is out of step."
    with tempfile.TemporaryDirectory() as folder:
        now, then = digests(root), digests(exported(root, Path(folder)))

    def line(f):
        if f not in then:
            return f"{f}: no notebook exports it; delete it or restore its notebook"
        if f not in now:
            return f"{f}: missing"
        return f"{f}: not cleaned" if f.endswith(".ipynb") else f"{f}: not what its notebook exports"

    return [line(f) for f in sorted({*now, *then}) if now.get(f) != then.get(f)]


if __name__ == "__main__":
    found = complaints(Path(__file__).resolve().parent.parent)
    for line in found:
        print(f"      {line}")
    if found:
        print(f"      Cure: {CURE}")
    sys.exit(bool(found))
