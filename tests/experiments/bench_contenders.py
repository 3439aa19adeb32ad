"Contenders for test_benchmarks.py. Worker processes import this file, so it imports nothing heavy."

import os
import time

import harness


def failing(size, folder):
    "Raise an error when it is timed."

    def run():
        raise ValueError(f"no {size['fruit']} today")

    return harness.Job(run, 1)


def exiting(size, folder):
    "End the process while it is set up."
    os._exit(7)


def broken_import(size, folder):
    "Import a module of ega that does not exist; this is an error, not a missing package."
    import ega.no_such_part  # noqa: F401


def recording(size, folder):
    "Append the process id to a file when it is timed, and print, as a library may."

    def run():
        print("some output")
        with open(folder / "order.txt", "a") as f:
            f.write(f"{size['name'] if 'name' in size else os.getpid()}\n")

    return harness.Job(run, 1)


def slow(size, folder):
    "Sleep for a minute."
    return harness.Job(lambda: time.sleep(60), 1)
