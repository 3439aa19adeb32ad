"Start of `ega-paper`, also as `python -m ega.experiments`."

import sys

from ega.__main__ import main as run


def main():  # exit code, see ega.experiments.cli.main
    "The command `ega-paper`."
    return run("ega.experiments.cli", "ega-paper")


if __name__ == "__main__":
    sys.exit(main())
