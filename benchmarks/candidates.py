"""What is compared: the product alone, the plain sequence, PyTorch's fused ops, and ours by strategy.

Each candidate is a function of the sample's index, which rotates through copies of the operands, so that small
operands don't stay in the L2 cache.
"""

import torch.distributed as dist

from flux_ops import reference
from flux_ops.tuner.measure import SEQUENTIAL, make_call

TORCH, FUSED, AUTO, DECOMPOSED = "torch", "fused", "auto", "decomposed"


def make(name, op, operands, group=None):
    """The candidate `name` for `op` as a function call(i) -> result; `fused:CONFIG` names a configuration.

    `group` is the one on which our ops run: calls of a group whose workspace a CUDA graph has captured follow another
    protocol, so eager calls and graphs are measured on groups of their own.
    """
    if name == SEQUENTIAL:
        plain = getattr(reference, op)
        return lambda i: plain(*operands.at(i))
    if name == TORCH:
        return _torch_fused(op, operands, dist.group.WORLD.group_name)
    return make_call(name, op, operands, group)


def _torch_fused(op, operands, group_name):
    if operands.x[0].device.type != "cuda":
        raise NotImplementedError("torch.ops.symm_mem.fused_* need CUDA")
    import torch.distributed._symmetric_memory

    if op == "ag_gemm":

        def call(i):
            x, w = operands.at(i)
            return torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, group_name, return_A=False)[1][0]

    else:

        def call(i):
            x, w = operands.at(i)
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group_name)

    return call
