"Start of `ega`, also as `python -m ega`: Ctrl-C while its modules load is one sentence."

import sys


def main() -> int:  # exit code, see ega.cli.main
    "The command `ega`."
    try:
        from .cli import main

        return main()
    except KeyboardInterrupt:  # before the command runs, such as while NumPy loads
        print("ega: interrupted; run the same command again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
