"Files that are whole or not there, and hashes; what hostile ones do is asked in test_fuzz.py."

import os
import subprocess
import sys

import numpy as np
import pytest

from ega.files import atomic_write, hash_arrays


def test_a_file_is_whole_or_not_there(tmp_path):
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


def test_a_kill_leaves_the_old_file(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("old")
    code = f"import os\nfrom ega.files import atomic_write\nwith atomic_write({str(path)!r}) as t:\n t.write_text('half'); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    assert done.returncode == -9 and path.read_text() == "old"


def test_fingerprint_sees_values_shape_type_and_order_but_not_layout():
    a = np.arange(6.0).reshape(2, 3)
    assert len({hash_arrays(v) for v in (a, a.T, a.ravel(), a.astype(np.float32), a + 1)}) == 5
    assert (
        hash_arrays(np.asfortranarray(a)) == hash_arrays(a)
        and hash_arrays(a, a[:1]) != hash_arrays(a[:1], a)
        and hash_arrays(np.empty(0))
    )
