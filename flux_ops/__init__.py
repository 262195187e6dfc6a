"""Tensor-parallel linear layers and their collectives as one overlapped operation.

ag_gemm   Y = all_gather(X) · Wᵀ
gemm_rs   Y = reduce_scatter(X · Wᵀ)
gemm_ar   Y = all_reduce(X · Wᵀ)
"""

from flux_ops import nn, reference
from flux_ops.ops import (
    Dispatch,
    ag_gemm,
    destroy,
    dispatch_counts,
    gemm_ar,
    gemm_rs,
    has_cuda_kernels,
    last_dispatch,
    prepare,
    set_timeout,
    why_not_cuda,
)
from flux_ops.version import __version__

__all__ = [
    "Dispatch",
    "__version__",
    "ag_gemm",
    "destroy",
    "dispatch_counts",
    "gemm_ar",
    "gemm_rs",
    "has_cuda_kernels",
    "last_dispatch",
    "nn",
    "prepare",
    "reference",
    "set_timeout",
    "why_not_cuda",
]
