"""Builds the C++ programs of tests/host with g++ alone: csrc/schedule needs neither torch nor CUDA."""

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CSRC = HERE.parents[1] / "csrc"
WARNINGS = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]


@pytest.fixture(scope="session")
def build_program(tmp_path_factory):
    """A function that compiles sources of this folder once a session and returns the path of the program."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine: the schedule headers are tested by programs that it builds")
    folder = tmp_path_factory.mktemp("host_programs")
    built = {}

    def build(name, sources, flags):
        if name not in built:
            program = folder / name
            command = [compiler, *WARNINGS, *flags, f"-I{CSRC}", *(str(HERE / s) for s in sources), "-o", str(program)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr}"
            built[name] = program
        return built[name]

    return build
