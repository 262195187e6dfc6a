"""tools/build_output.py: what of a compiler's output is shown."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.build_config import ROOT
from tools.build_output import LineFilter

NVCC = "/venv/bin/python /src/tools/nvcc_checked.py /cuda/bin/nvcc -MD -MF /src/build/k.o.d -I/src/csrc -c -c"


@pytest.fixture
def show():
    return LineFilter(Path("/src"))


def test_a_step_is_its_number_and_its_file(show):
    assert show("[1/7] g++ -MMD -MF x.o.d -O3 -c -c /src/csrc/cpu/x.cpp -o /src/build/x.o -O3").split() == [
        "[1/7]",
        "0:00",
        "csrc/cpu/x.cpp",
    ]
    assert show(f"[2/7] {NVCC} /src/csrc/kernels/k.cu -o /src/build/k.o").endswith("csrc/kernels/k.cu")


@pytest.mark.parametrize(
    "line",
    (
        "ptxas info    : Used 168 registers, used 1 barriers",
        "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads",
        "creating build/lib.linux",
        f"{NVCC} /src/csrc/kernels/k.cu -o /src/build/k.o",
        "g++ -c /src/csrc/cpu/x.cpp -o /src/build/x.o",
    ),
)
def test_noise_is_left_out(show, line):
    show("[1/7] g++ -c /src/csrc/cpu/x.cpp -o /src/build/x.o")
    assert show(line) is None


@pytest.mark.parametrize(
    "line",
    (
        "/src/csrc/cpu/x.cpp:3:1: error: expected ';'",
        "/src/csrc/cpu/x.cpp:3:1: warning: unused variable 'y'",
        "k.cu: error: big(float*) spills registers: 8 bytes stored, 8 loaded",
        "collect2: error: ld returned 1 exit status",
        "cc1plus: error: one or more PCH files were found",
        "/usr/bin/ld: cannot find -lcudart: No such file",
        "nvcc fatal   : Unsupported gpu architecture",
    ),
)
def test_warnings_and_errors_are_shown(show, line):
    assert show(line) == line


def test_verdict_of_the_checked_compiler_is_shown(show):
    verdict = "2 kernels, at most 168 registers, no spill"
    assert show(f"nvcc_checked: {verdict}").strip() == verdict


def test_failed_file_is_named(show):
    assert show("FAILED: [code=1] /src/build/cuda/csrc/k.o ") == "  FAILED build/cuda/csrc/k.o"


def test_whole_output_is_logged_and_a_quiet_compiler_is_reported(tmp_path):
    program = (
        "import os, pathlib, sys, time\n"
        "from tools.build_output import readable\n"
        "log = pathlib.Path(sys.argv[1])\n"
        "with readable(log, log.parent, quiet_seconds=0.2):\n"
        "    os.system('echo creating noise; echo an error 1>&2')\n"
        "    time.sleep(0.5)\n"
        "    os.write(1, b'no newline at the end')\n"
        "print('after', flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, str(tmp_path / "build.log")]
    result = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60, check=True)
    lines = result.stdout.splitlines()
    assert lines[0] == "an error"
    assert lines[1].split() == ["...", "0:00", "the", "first", "files", "are", "compiling"]
    assert lines[-2:] == ["no newline at the end", "after"]
    assert (tmp_path / "build.log").read_text() == "creating noise\nan error\nno newline at the end\n"
