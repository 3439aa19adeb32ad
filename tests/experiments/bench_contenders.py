"Contenders for tests/test_bench.py: their processes import this file, so it loads nothing heavy."

import os
import time

from ega.experiments import harness


def breaking(size, folder):
    def work():
        raise ValueError(f"no {size['fruit']} today")

    return harness.Job(work, 1)


def dying(size, folder):
    os._exit(7)


def faulty(size, folder):
    import ega.no_such_part  # noqa: F401  a fault of ours is no absence


def noting(size, folder):
    "Writes down when it worked."

    def work():
        print("a library may print what it likes")
        with open(folder / "order.txt", "a") as f:
            f.write(f"{size['name'] if 'name' in size else os.getpid()}\n")

    return harness.Job(work, 1)


def slow(size, folder):
    return harness.Job(lambda: time.sleep(60), 1)


def threads_seen(size, folder):
    return harness.Job(lambda: {"rho": float(os.environ["OMP_NUM_THREADS"])}, 1)
