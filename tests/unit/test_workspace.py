"""How much memory the workspace of a group takes."""

import pytest

import flux_ops
from flux_ops import extension

ROWS, N, K, SIZE = 2048, 8192, 7168, 2
PADDING = 192  # columns that the widest tiles add, at most


@pytest.mark.skipif(not flux_ops.has_cuda_kernels(), reason="built without the CUDA kernels")
@pytest.mark.parametrize("world", (2, 3, 4, 8, 16))
def test_two_regions_hold_twice_what_travels(world):
    """There are two regions and, besides what few rows exchange, nothing else: no send buffer."""
    core, m = extension.module, ROWS * world
    ops = ("ag_gemm", "gemm_rs", "gemm_ar")
    region = {op: core.workspace_needs(op, "cuda", world, m, N, K, "bfloat16")[0] for op in ops}
    assert region["ag_gemm"] <= 1.001 * m * K * SIZE
    sent = (world - 1) * ROWS * (N + PADDING) * SIZE
    assert region["gemm_rs"] <= 1.001 * sent
    assert region["gemm_ar"] <= 2.35 * sent  # partials, padded by a third at most, and results
    for op, needed in region.items():
        total = core.workspace_total_bytes((needed, 0)) - core.workspace_total_bytes((0, 0))
        assert total - 2 * needed < 4096, f"{op}: {total} bytes for two regions of {needed}"


@pytest.mark.skipif(not flux_ops.has_cuda_kernels(), reason="built without the CUDA kernels")
@pytest.mark.parametrize("world", (2, 3, 4, 8, 16))
@pytest.mark.parametrize("rows", (128, 256, 300, 384, 512, 1024))
def test_fewer_rows_of_gemm_ar_are_padded_by_a_third_or_to_a_tile_at_most(world, rows):
    """Whatever kernel and sections could run."""
    needed, _ = extension.module.workspace_needs("gemm_ar", "cuda", world, rows * world, N, K, "bfloat16")
    partials, results = max(4 / 3 * rows, -(-rows // 256) * 256), rows
    assert needed <= 1.001 * (world - 1) * (partials + results) * (N + PADDING) * SIZE


@pytest.mark.skipif(not flux_ops.has_cuda_kernels(), reason="built without the CUDA kernels")
@pytest.mark.parametrize("world", (2, 4, 8, 16))
def test_some_kernel_takes_every_size_of_gemm_ar(world):
    """From 128 rows of each rank on: what leaves tiles empty is slow, but can be asked for."""
    for rows in (128, 129, 256, 257, 300, 383, 513, 575, 1025):
        names = extension.module.candidates("gemm_ar", "cuda", world, rows * world, N, K, "bfloat16", False)
        assert any(name.startswith("fused:p") and name.endswith("/s1") for name in names), (rows, names)
