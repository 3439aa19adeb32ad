"""Race ega against other libraries and a floor of unavoidable work: `python benchmarks/run.py`, about 10 minutes."""

import argparse
import sys

from contenders import GROUPS, run_benchmarks, write_results
from harness import format_ratios


def main(argv=None):
    "Time the groups, print the ratios and store the rows behind them."
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", nargs="+", choices=GROUPS, help="default: all but fit, which takes an hour")
    parser.add_argument("--quick", action="store_true", help="tiny sizes in one process; the ratios mean nothing")
    parser.add_argument("--threads", type=int, default=1, help="threads of every contender (default: 1)")
    parser.add_argument("-o", "--out", default="build/bench", help="folder for speed.parquet (default: build/bench)")
    args = parser.parse_args(argv)
    frame = run_benchmarks(args.groups, quick=args.quick, threads=args.threads, progress=sys.stderr.isatty())
    path = write_results(frame, args.out)
    print(f"{format_ratios(frame)}\n\n{path}")


if __name__ == "__main__":
    main()
