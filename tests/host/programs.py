"""How pytest runs a program of this folder: with a test's name it runs that test, without one it lists them."""

import re
import subprocess
from pathlib import Path

HERE = Path(__file__).parent


def passes(program, name):
    done = subprocess.run([str(program), name], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def tests_of(program):
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=True).stdout.split()


def tests_in(sources):
    """The names of the tests in C++ files of this folder, in their order there."""
    return [name for source in sources for name in re.findall(r"\bTEST\((\w+)\)", (HERE / source).read_text())]
