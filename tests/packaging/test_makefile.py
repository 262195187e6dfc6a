"""The Makefile's decisions, read with `make --dry-run`, and the choice of a Python."""

import os
import shutil
import subprocess

import pytest

from tools.build_config import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not on the PATH")


def dry_run(target, *settings):
    done = make("--dry-run", "--no-print-directory", target, *settings)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(*args):
    mine = ("FLUX_", "MAKE", "MFLAGS", "ARGS", "BUILD", "PYTHON", "SYSTEM_PYTHON", "TORCH")
    env = {k: v for k, v in os.environ.items() if not k.startswith(mine)}
    return subprocess.run(["make", *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("target", ("demo", "train", "generate", "test"))
def test_system_python_makes_no_environment_and_downloads_nothing(target):
    commands = dry_run(target, "SYSTEM_PYTHON=1", "VENV=none-here")
    assert "pip" not in commands
    assert "venv" not in commands
    assert "python3 setup.py --quiet build_ext --inplace" in commands


def test_fresh_machine_gets_an_environment_in_this_folder():
    commands = dry_run("test", "VENV=none-here", "HAS_GPU=")
    order = ["-m venv none-here", "requirements/torch.txt", "requirements/dev.txt", "build_ext --inplace", "-m pytest"]
    places = [commands.index(word) for word in order]
    assert places == sorted(places)
    assert "--no-deps -r requirements/megatron.txt" in commands
    assert "requirements/megatron.txt" not in dry_run("demo", "VENV=none-here", "HAS_GPU=")
    assert "--target none-here/vllm -r requirements/vllm.txt" in commands
    assert "requirements/vllm.txt" not in dry_run("demo", "VENV=none-here", "HAS_GPU=")
    assert "requirements/cutlass.txt" not in commands
    assert "requirements/plot.txt" in dry_run("train", "VENV=none-here", "ARGS=--steps 3 --plot loss.svg")
    assert "requirements/plot.txt" not in dry_run("train", "VENV=none-here")


def test_without_a_gpu_the_kernels_are_left_out_and_that_is_said():
    commands = dry_run("test", "HAS_GPU=")
    assert "No GPU here, so the CUDA kernels are left out" in commands
    assert "FLUX_BUILD_CUDA=0" in commands


@pytest.mark.parametrize("settings", (("HAS_GPU=/dev/nvidia0",), ("HAS_GPU=", "FLUX_BUILD_CUDA=1")))
def test_kernels_are_built_for_a_gpu_or_on_demand(settings):
    commands = dry_run("test", *settings, "VENV=none-here")
    assert "FLUX_BUILD_CUDA=0" not in commands
    assert "requirements/cutlass.txt" in commands


def test_existing_module_can_be_used():
    assert "build_ext" not in dry_run("gpu-test", "BUILD=0", "SYSTEM_PYTHON=1")


def test_another_torch_has_an_environment_and_a_module_of_its_own():
    commands = dry_run("test", "TORCH=2.98.0", "HAS_GPU=")
    there = str(ROOT / "build" / "torch-2.98.0")
    order = [f"--target-directory {there}", "-m venv .venv-torch-2.98.0", "torch==2.98.0", "build_ext", "-m pytest"]
    places = [commands.index(word) for word in order]
    assert places == sorted(places)
    run = [line for line in commands.splitlines() if "build_ext" in line or "-m pytest" in line]
    assert len(run) == 2
    assert all(f"env --chdir={there} {ROOT}/.venv-torch-2.98.0/bin/python" in line for line in run)
    assert "requirements/torch.txt" not in commands
    assert "requirements/vllm.txt" not in commands  # which is for one version of torch


def test_another_torch_needs_an_environment():
    done = make("--dry-run", "test", "TORCH=2.98.0", "SYSTEM_PYTHON=1")
    assert done.returncode == 2
    assert "TORCH=2.98.0 is for a virtual environment of its own, SYSTEM_PYTHON=1 for none" in done.stderr


class TestFindPython:
    @staticmethod
    def find(path, *args):
        command = ["/bin/sh", ROOT / "tools" / "find_python.sh", *args]
        return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, timeout=30)

    @staticmethod
    def fake(folder, name, exit_code):
        script = folder / name
        script.write_text(f"#!/bin/sh\nexit {exit_code}\n")
        script.chmod(0o755)
        return str(script)

    def test_a_shim_that_fails_is_passed_over(self, tmp_path):
        self.fake(tmp_path, "python3.12", 127)
        works = self.fake(tmp_path, "python3.10", 0)
        assert self.find(tmp_path).stdout.strip() == works

    def test_given_python(self, tmp_path):
        self.fake(tmp_path, "python3.12", 0)
        mine = self.fake(tmp_path, "mine", 0)
        assert self.find(tmp_path, mine).stdout.strip() == mine

    def test_none(self, tmp_path):
        self.fake(tmp_path, "python3.11", 1)
        result = self.find(tmp_path)
        assert result.returncode == 1
        assert "PYTHON=/path/to/python3" in result.stderr
