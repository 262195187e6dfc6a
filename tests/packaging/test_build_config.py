"""tools/build_config.py: what is built on which machine. No compiler runs."""

import dataclasses
from pathlib import Path

import pytest

from tools import build_config
from tools.build_config import ROOT, BuildError, Plan, Probe, decide

FULL = Probe(
    switch="",
    cxx="/usr/bin/c++",
    has_ninja=True,
    torch_version="2.11.0+cu130",
    torch_cuda="13.0",
    cuda_home=Path("/opt/cuda"),
    nvcc_version=(13, 0),
    nvcc_missing="",
    cutlass_dir=Path("/opt/cutlass/include"),
    cutlass_missing="",
)

LACKS = {
    "no nvcc": (
        {"cuda_home": None, "nvcc_version": None, "nvcc_missing": "nvcc is nowhere: set CUDA_HOME"},
        ["nvcc is nowhere", "CUDA_HOME"],
    ),
    "old nvcc": ({"nvcc_version": (11, 8)}, ["11.8", "12.8", "CUDA_HOME"]),
    "nvcc of another major version": ({"nvcc_version": (12, 9)}, ["12.9", "13.0", "CUDA_HOME"]),
    "CPU build of torch": ({"torch_version": "2.11.0+cpu", "torch_cuda": None}, ["2.11.0+cpu", "CUDA build of torch"]),
    "no CUTLASS": (
        {"cutlass_dir": None, "cutlass_missing": "the CUTLASS headers are missing: set CUTLASS_DIR"},
        ["CUTLASS", "CUTLASS_DIR"],
    ),
    "no ninja": ({"has_ninja": False}, ["ninja", "pip install"]),
}


def machine(**changes):
    return dataclasses.replace(FULL, **changes)


@pytest.mark.parametrize("switch", ("", "1"))
def test_everything_there(switch):
    assert decide(machine(switch=switch)) == Plan(with_cuda=True, no_cuda_reason="")


def test_cuda_12_8_with_a_torch_of_the_same_major_version():
    assert decide(machine(torch_version="2.11.0+cu128", torch_cuda="12.8", nvcc_version=(12, 9))).with_cuda


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_leaves_the_kernels_out_and_is_said_in_one_sentence(lack):
    changes, words = LACKS[lack]
    plan = decide(machine(**changes))
    assert not plan.with_cuda
    for word in words:
        assert word in plan.no_cuda_reason
    assert "\n" not in plan.sentence()
    assert plan.no_cuda_reason in plan.sentence()


@pytest.mark.parametrize("lack", LACKS)
def test_what_is_missing_is_an_error_where_the_kernels_are_required(lack):
    changes, words = LACKS[lack]
    with pytest.raises(BuildError) as caught:
        decide(machine(switch="1", **changes))
    for word in ("FLUX_BUILD_CUDA=1", *words):
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lack", ("", *LACKS))
def test_switched_off(lack):
    changes = LACKS[lack][0] if lack else {}
    plan = decide(machine(switch="0", **changes))
    assert plan == Plan(with_cuda=False, no_cuda_reason="built with FLUX_BUILD_CUDA=0")


@pytest.mark.parametrize("junk", ("yes", "ON", "2", "true", " 1", "-1"))
def test_junk_in_the_switch(junk):
    with pytest.raises(BuildError, match=f"FLUX_BUILD_CUDA={junk} is not understood: set it to 1"):
        decide(machine(switch=junk))


@pytest.mark.parametrize(
    "version, age", (("2.10.1+cu130", "old"), ("1.13.0", "old"), ("2.15.0", "new"), ("3.0.0a0+git1234", "new"))
)
def test_another_torch(version, age):
    with pytest.raises(BuildError, match=rf"torch {version.replace('+', '.')} is too {age}, 2\.11 to 2\.14 is needed"):
        decide(machine(torch_version=version, switch="0"))


@pytest.mark.parametrize("version", ("2.11.0", "2.11.1+cu130", "2.12.1", "2.13.0+cu132", "2.14.1"))
def test_versions_of_torch(version):
    assert decide(machine(torch_version=version)).with_cuda


def test_the_package_asks_for_the_versions_of_torch_that_can_be_built():
    (major, oldest), (_, newest) = build_config.MIN_TORCH, build_config.MAX_TORCH
    wanted = f'"torch>={major}.{oldest},<{major}.{newest + 1}"'
    assert (ROOT / "pyproject.toml").read_text().count(wanted) == 2  # to build it and to run it


def test_no_compiler():
    with pytest.raises(BuildError, match=r"no C\+\+ compiler was found: install g\+\+, or set CXX"):
        decide(machine(cxx=None))


class TestFindCudaHome:
    @staticmethod
    def toolkit(folder, headers=True):
        (folder / "bin").mkdir(parents=True)
        nvcc = folder / "bin" / "nvcc"
        nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 11.8, V11.8.89'\n")
        nvcc.chmod(0o755)
        if headers:
            (folder / "include").mkdir()
            (folder / "include" / "cuda_runtime.h").touch()
        return folder

    @pytest.mark.parametrize("name", ("CUDA_HOME", "CUDA_PATH"))
    def test_variable(self, tmp_path, name):
        home = self.toolkit(tmp_path / "cuda")
        assert build_config.find_cuda_home({name: str(home)}) == (home, "")

    def test_wrong_variable_is_not_second_guessed(self, tmp_path):
        home = self.toolkit(tmp_path / "cuda")
        found, reason = build_config.find_cuda_home({"CUDA_HOME": "/nowhere", "PATH": str(home / "bin")}, home)
        assert found is None
        assert reason.startswith("CUDA_HOME=/nowhere has no bin/nvcc")

    def test_path(self, tmp_path):
        home = self.toolkit(tmp_path / "cuda")
        assert build_config.find_cuda_home({"PATH": str(home / "bin")}, tmp_path / "none") == (home, "")

    def test_nvcc_on_the_path_may_be_a_script(self, tmp_path):
        script = self.toolkit(tmp_path / "local", headers=False)
        home = self.toolkit(tmp_path / "cuda")
        assert build_config.find_cuda_home({"PATH": str(script / "bin")}, home) == (home, "")

    def test_nothing(self, tmp_path):
        found, reason = build_config.find_cuda_home({"PATH": str(tmp_path)}, tmp_path / "cuda")
        assert found is None
        assert "CUDA_HOME" in reason

    def test_probe_reads_the_version_and_the_headers(self, tmp_path):
        home = self.toolkit(tmp_path / "cuda")
        environ = {"CUDA_HOME": str(home), "CUTLASS_DIR": "/nowhere", "PATH": str(tmp_path), "FLUX_BUILD_CUDA": "0"}
        p = build_config.probe(environ, "2.11.0", "13.0")
        assert (p.nvcc_version, p.switch, p.has_ninja, p.cxx) == ((11, 8), "0", False, None)
        assert "CUTLASS_DIR=/nowhere" in p.cutlass_missing

    def test_probe_of_an_nvcc_that_does_not_run(self, tmp_path):
        home = self.toolkit(tmp_path / "cuda")
        (home / "bin" / "nvcc").write_text("#!/bin/sh\nexit 3\n")
        p = build_config.probe({"CUDA_HOME": str(home)}, "2.11.0", "13.0")
        assert p.nvcc_version is None
        assert "does not run" in p.nvcc_missing
        assert not decide(dataclasses.replace(p, cxx="c++")).with_cuda


@pytest.mark.parametrize(
    "with_cuda, cpus, free_gb, jobs",
    ((True, 2, 23.0, 2), (True, 16, 23.0, 6), (False, 16, 23.0, 11), (True, 8, 2.0, 1), (False, 1, 64.0, 1)),
)
def test_num_jobs(with_cuda, cpus, free_gb, jobs):
    assert build_config.num_jobs(with_cuda, cpus, free_gb) == jobs


def test_sources_of_the_cpu_part_are_part_of_both():
    cpu, both = build_config.sources(with_cuda=False), build_config.sources(with_cuda=True)
    assert set(cpu) < set(both)
    assert not any(source.endswith(".cu") for source in cpu)
    assert len(both) == len(set(both))


def test_c_string_survives_what_a_path_may_hold():
    assert build_config.c_string('a "b" \\c $HOME `d` é\n') == '"a \\"b\\" \\\\c ?HOME ?d? ??"'


def test_the_architecture_is_fixed():
    flags = build_config.nvcc_flags(FULL)
    assert [flag for flag in flags if "arch" in flag] == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert "-DNDEBUG" in flags
