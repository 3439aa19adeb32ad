"Atomic writes and hashes; test_fuzz.py tests the readers on malformed files."

import os
import subprocess
import sys

import numpy as np
import pytest

from ega.files import atomic_write, hash_arrays


def test_atomic_write_leaves_a_whole_file_or_none(tmp_path):
    path = tmp_path / "new" / "a.bin"
    with pytest.raises(ZeroDivisionError):
        with atomic_write(path) as t:
            t.write_bytes(b"half")
            1 / 0
    assert not path.exists() and not any(path.parent.iterdir())
    with atomic_write(path) as t:
        t.write_bytes(b"whole")
        assert not path.exists()
    assert path.read_bytes() == b"whole" and [p.name for p in path.parent.iterdir()] == ["a.bin"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_atomic_write_keeps_the_old_file_when_killed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = (
        "import os\nfrom ega.files import atomic_write\n"
        f"with atomic_write({str(path)!r}) as t:\n t.write_text('half'); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -9 and path.read_text() == "old"


def test_hash_arrays_depends_on_values_shape_dtype_and_order_only():
    a = np.arange(6.0).reshape(2, 3)
    assert len({hash_arrays(v) for v in (a, a.T, a.ravel(), a.astype(np.float32), a + 1)}) == 5
    assert hash_arrays(np.asfortranarray(a)) == hash_arrays(a)
    assert hash_arrays(a, a[:1]) != hash_arrays(a[:1], a)
    assert hash_arrays(np.empty(0))
