"""tools/nvcc_checked.py: a kernel that spills or whose wgmma instructions are serialised fails the compile."""

import os
import subprocess
import sys

import pytest

from tools import build_config
from tools.nvcc_checked import check_log

CLEAN = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z5smallPf' for 'sm_90a'
ptxas info    : Function properties for _Z5smallPf
    32 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 20 registers, used 0 barriers, 32 bytes cumulative stack size
ptxas info    : Function properties for _Z3fooPi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z3bigPf' for 'sm_90a'
ptxas info    : Function properties for _Z3bigPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""

SPILL = """\
ptxas info    : Compiling entry function '_Z3bigPf' for 'sm_90a'
ptxas info    : Function properties for _Z3bigPf
    1352 bytes stack frame, 2524 bytes spill stores, 2932 bytes spill loads
ptxas info    : Used 32 registers, used 1 barriers, 1352 bytes cumulative stack size
"""

SERIALISED = """\
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to \
non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage \
in the function '_Z6kernelv'
"""

SPILLING_SOURCE = """\
__global__ LIMIT void big(float* p) {
  float a[64];
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = p[i * 64 + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 64; ++i) a[i] = a[i] * a[(i + 7) % 64] + p[threadIdx.x];
#pragma unroll
  for (int i = 0; i < 64; ++i) p[i * 64 + threadIdx.x] = a[i];
}
"""


def test_clean_log():
    report = check_log(CLEAN)
    assert (report.num_kernels, report.max_registers, report.faults) == (2, 168, ())


def test_stack_frame_without_a_spill_is_allowed():
    assert "32 bytes stack frame" in CLEAN
    assert not check_log(CLEAN).faults


def test_spill_names_the_kernel_and_the_bytes():
    (fault,) = check_log(CLEAN + SPILL).faults
    assert "big" in fault
    assert "2524 bytes stored, 2932 loaded" in fault


def test_serialised_wgmma():
    (fault,) = check_log(CLEAN + SERIALISED).faults
    assert "wgmma is serialised" in fault
    assert "C7510" in fault


def compile_with_checker(nvcc, tmp_path, text, *flags):
    source, output = tmp_path / "kernel.cu", tmp_path / "kernel.o"
    source.write_text(text)
    checker = build_config.ROOT / "tools" / "nvcc_checked.py"
    arch = "-gencode=arch=compute_90a,code=sm_90a"
    # The first -c is as BuildExtension writes it.
    command = [sys.executable, checker, *nvcc, "-c", arch, "-Xptxas=-v", *flags, "-c", source, "-o", output]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result, source, output


class TestWithACompiler:
    @pytest.fixture
    def nvcc(self):
        home, reason = build_config.find_cuda_home(os.environ)
        if home is None:
            pytest.skip(reason)
        return [str(home / "bin" / "nvcc")]

    def test_kernel_that_fits(self, nvcc, tmp_path):
        result, _, output = compile_with_checker(nvcc, tmp_path, SPILLING_SOURCE, "-DLIMIT=")
        assert result.returncode == 0, result.stdout
        assert "1 kernels, at most" in result.stdout
        assert output.exists()

    def test_kernel_that_spills(self, nvcc, tmp_path):
        result, source, output = compile_with_checker(nvcc, tmp_path, SPILLING_SOURCE, "-DLIMIT=", "--maxrregcount=32")
        assert result.returncode == 1
        assert f"{source}: error: big(float*) spills registers" in result.stdout
        assert not output.exists()

    def test_source_with_an_error(self, nvcc, tmp_path):
        result, _, _ = compile_with_checker(nvcc, tmp_path, "int f() { return undeclared; }\n")
        assert result.returncode not in (0, None)
        assert "undeclared" in result.stdout


def test_exit_code_and_output_of_the_compiler_are_passed_on(tmp_path):
    fake = ["sh", "-c", "echo from the compiler; exit 7"]
    result, _, _ = compile_with_checker(fake, tmp_path, "")
    assert (result.returncode, result.stdout) == (7, "from the compiler\n")
