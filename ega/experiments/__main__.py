"Start of `ega-paper`, also as `python -m ega.experiments`: Ctrl-C while its modules load is one sentence."

import sys


def main():  # exit code, see ega.experiments.cli.main
    "The command `ega-paper`."
    try:
        from .cli import main

        return main()
    except KeyboardInterrupt:  # before the command runs, such as while NumPy loads
        print("ega-paper: interrupted; run the same command again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
