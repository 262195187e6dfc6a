"""python -m flux_ops info | tune"""

import argparse
import sys

from flux_ops import info
from flux_ops.tuner import command


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flux_ops")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, devices, and the tuned choices in use")
    command.add_arguments(commands.add_parser("tune", help="find the fastest way to run each of a list of shapes"))
    args = parser.parse_args()
    if args.command == "tune":
        return command.run(args)
    print(*info.lines(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
