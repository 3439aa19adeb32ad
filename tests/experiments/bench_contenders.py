"Contenders for test_benchmarks.py. Worker processes import this file, so it imports nothing heavy."

import os

import harness


def failing(size, folder):
    "Raise an error when it is timed."

    def run():
        raise ValueError(f"no {size['fruit']} today")

    return harness.Job(run, 1)


def exiting(size, folder):
    "End the process while it is set up."
    os._exit(7)


def recording(size, folder):
    "Append the process id to a file when it is timed, and print, as a library may."

    def run():
        print("some output")
        with open(folder / "order.txt", "a") as f:
            f.write(f"{size['name'] if 'name' in size else os.getpid()}\n")

    return harness.Job(run, 1)
