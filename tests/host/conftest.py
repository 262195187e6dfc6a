"""Builds the C++ programs of tests/host with g++ alone, and runs the protocol model: neither needs torch or CUDA."""

import re
import shutil
import subprocess
import time
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


class Tally:
    def __init__(self):
        self.verified, self.states, self.found = 0, 0, 0
        self.start = time.monotonic()

    def __str__(self):
        seconds = time.monotonic() - self.start
        return (
            f"protocol model: {self.verified} scenarios verified, {self.states:,} states; "
            f"{self.found} with a planted bug, each found; {seconds:.1f} s"
        )


@pytest.fixture(scope="module")
def tally(request):
    result = Tally()
    yield result
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"\n{result}")


@pytest.fixture(scope="module")
def explore(build_program, tally):
    """Runs one scenario; returns (failure, trace), both empty where every interleaving ends well."""
    program = build_program("protocol_check", ["protocol_check.cpp", "protocol_model.cpp"], ["-O2"])

    def run(world, calls, *options):
        command = [str(program), "--world", str(world), "--calls", calls, *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode in (0, 1), f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        print(" ".join(command[1:]), "\n", done.stdout)
        summary, _, rest = done.stdout.partition("\n")
        states = int(re.search(r"(\d+) states", summary).group(1))
        assert summary.startswith("verified" if done.returncode == 0 else "FAILED")
        if done.returncode == 0:
            tally.verified += 1
            tally.states += states
            return "", []
        tally.found += 1
        lines = rest.splitlines()
        trace = [line.split(maxsplit=1)[1] for line in lines if re.match(r" *\d+  rank", line)]
        return "\n".join(lines[: len(lines) - len(trace)]), trace

    return run
