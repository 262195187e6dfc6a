"""Modules for tensor-parallel models on top of the operators.

ColumnParallelLinear   Y = X · Wᵀ + b, W cut along its outputs; with sequence_parallel X is gathered: ag_gemm
RowParallelLinear      Y = Σ X · Wᵀ + b, W cut along its inputs; with sequence_parallel Y is scattered: gemm_rs
"""

from flux_ops.nn.functional import column_parallel
from flux_ops.nn.layers import ColumnParallelLinear, RowParallelLinear
from flux_ops.nn.model import allreduce_sequence_parallel_grads, prepare, sharded_state_dict

__all__ = [
    "ColumnParallelLinear",
    "RowParallelLinear",
    "allreduce_sequence_parallel_grads",
    "column_parallel",
    "prepare",
    "sharded_state_dict",
]
