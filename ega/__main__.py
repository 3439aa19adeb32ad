"Start of `ega`, also as `python -m ega`: Ctrl-C while its modules load is one sentence."

import sys
from importlib import import_module


def main(module: str = "ega.cli", command: str = "ega") -> int:  # exit code, see ega.cli.main
    "Run the command line that a module defines."
    try:
        return import_module(module).main()
    except KeyboardInterrupt:  # before the command runs, such as while NumPy loads
        print(f"{command}: interrupted; run the same command again", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
