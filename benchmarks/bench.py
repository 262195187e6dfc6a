"""`python -m flux_ops bench`, from a checkout that is not installed: the same options, see --help."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flux_ops.bench import command

if __name__ == "__main__":
    sys.exit(command.main())
