"""python -m flux_ops info | tune | bench"""

import argparse
import sys

from flux_ops import info
from flux_ops.bench import command as bench
from flux_ops.tuner import command as tune


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flux_ops")
    commands = parser.add_subparsers(dest="command", required=True)
    info.add_arguments(commands.add_parser("info", help="versions, devices, and the tuned choices in use"))
    tune.add_arguments(commands.add_parser("tune", help="find the fastest way to run each of a list of shapes"))
    bench.add_arguments(commands.add_parser("bench", help="time the ops against the plain sequence and PyTorch's"))
    args = parser.parse_args()
    return {"info": info, "tune": tune, "bench": bench}[args.command].run(args)


if __name__ == "__main__":
    sys.exit(main())
