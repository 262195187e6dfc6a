"""`import flux_ops` works whatever the compiled part is like, and leaves the GPU alone."""

import multiprocessing
import pathlib
import shutil
import subprocess
import sys

import pytest

import flux_ops
from flux_ops import extension

PACKAGE = pathlib.Path(flux_ops.__file__).parent

# Two ranks would do the same; one shows that the operators are there and what they say.
USE = """
import warnings
import torch, torch.distributed as dist
import flux_ops
assert not flux_ops.has_cuda_kernels()
print("REASON", flux_ops.why_not_cuda())
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x, w, b = torch.randn(4, 8, requires_grad=True), torch.randn(3, 8), torch.randn(3)
want = torch.nn.functional.linear(x, w, b)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        torch.testing.assert_close(flux_ops.ag_gemm(x, w, b), want)
        torch.testing.assert_close(flux_ops.gemm_rs(x, w, b), want)
        torch.testing.assert_close(flux_ops.gemm_ar(x, w, b), want)
told = [w for w in caught if "falls back" in str(w.message)]
print("WARNINGS", len(told))
assert told[0].filename == "<string>", told[0]  # a line of this code, not one that it calls
assert flux_ops.last_dispatch().strategy == "sequential", flux_ops.last_dispatch()
counts = flux_ops.dispatch_counts(reset=True)
assert counts == {(op, "sequential", "fell back"): 2 for op in ("ag_gemm", "gemm_rs", "gemm_ar")}, counts
assert flux_ops.dispatch_counts() == {}
for op in (flux_ops.ag_gemm, flux_ops.gemm_rs, flux_ops.gemm_ar):
    x.grad = None
    op(x, w).sum().backward()
    torch.testing.assert_close(x.grad, w.sum(0).expand(4, 8))
try:
    flux_ops.ag_gemm(x, w, strategy="fused")
except NotImplementedError as error:
    print("FUSED", error)
flux_ops.prepare(max_m=8, n=8, k=8, device="cpu")
flux_ops.destroy()
dist.destroy_process_group()  # joins gloo's threads: at exit, one that still frees a tensor would abort the process
"""


def run(code, path=None):
    """Runs the code in a new process; returns its output, by first word of each line."""
    prelude = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    result = subprocess.run(
        [sys.executable, "-c", prelude + code], capture_output=True, text=True, timeout=100, cwd=path or PACKAGE.parent
    )
    assert result.returncode == 0, result.stderr
    return dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)


@pytest.fixture
def copy(tmp_path):
    """The package without its compiled part."""
    ignore = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE, tmp_path / "flux_ops", ignore=ignore)
    return tmp_path


def _check_fallback(output, *words):
    assert output["WARNINGS"] == "1"
    for word in words:
        assert word in output["REASON"]
        assert word in output["FUSED"]


def test_missing(copy):
    _check_fallback(run(USE, copy), "missing", "build it")


@pytest.mark.parametrize("content", (b"", b"\x7fELF" + b"\0" * 100))
def test_corrupt(copy, content):
    (copy / "flux_ops" / "_C.so").write_bytes(content)
    _check_fallback(run(USE, copy), "can't be loaded", "_C.so")


def test_cut_short(copy):
    if extension.module is None:
        pytest.skip(extension.why_not_loaded)
    whole = pathlib.Path(extension.module.__file__).read_bytes()
    (copy / "flux_ops" / "_C.so").write_bytes(whole[: len(whole) // 2])
    _check_fallback(run(USE, copy), "can't be loaded")


def test_built_for_another_torch(copy):
    import torch

    (copy / "flux_ops" / "_C.so").write_bytes(b"\x7fELF....flux_ops built for torch 1.13.1+cu117;....")
    _check_fallback(run(USE, copy), "1.13.1+cu117", torch.__version__)


def test_import_creates_no_cuda_context():
    code = """
import time
import torch
begin = time.perf_counter()
import flux_ops
print("SECONDS", time.perf_counter() - begin)
flux_ops.has_cuda_kernels(), flux_ops.why_not_cuda(), flux_ops.last_dispatch()
print("CONTEXT", torch.cuda.is_initialized())
"""
    output = run(code)
    assert output["CONTEXT"] == "False"
    assert float(output["SECONDS"]) < 5


def test_reason_and_answer_agree():
    assert flux_ops.has_cuda_kernels() == (flux_ops.why_not_cuda() == "")


def _import_in_child(queue):
    import flux_ops

    queue.put(flux_ops.__version__)


def test_import_in_a_forked_worker():
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_import_in_child, args=(queue,))
    child.start()
    assert queue.get(timeout=60) == flux_ops.__version__
    child.join(timeout=60)
    assert child.exitcode == 0
