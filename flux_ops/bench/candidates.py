"""What is compared: the product alone, the plain sequence, what PyTorch has for the op, and ours by strategy.

Each candidate is a function of the sample's index, which rotates through copies of the operands, so that small
operands don't stay in the L2 cache.
"""

import torch
import torch.distributed as dist

from flux_ops import reference
from flux_ops.tuner.measure import GEMM, SEQUENTIAL, make_call

TORCH, ONE_SHOT, TWO_SHOT = "torch", "one-shot", "two-shot"
FUSED, AUTO, DECOMPOSED = "fused", "auto", "decomposed"

# What PyTorch has for each op, beside the plain sequence.
RIVALS = {"ag_gemm": (TORCH,), "gemm_rs": (TORCH,), "gemm_ar": (ONE_SHOT, TWO_SHOT)}
OPS = tuple(RIVALS)
EAGER_ONLY = dict.fromkeys((ONE_SHOT, TWO_SHOT), "replays of its CUDA graph did not come to an end on 2 H200s")
NOT_OURS = (GEMM, SEQUENTIAL, TORCH, ONE_SHOT, TWO_SHOT)


def make(name, op, operands, group=None):
    """The candidate `name` for `op` as a function call(i) -> result; `fused:CONFIG` names a configuration.

    `group` is the one on which our ops run: calls of a group whose workspace a CUDA graph has captured follow another
    protocol, so eager calls and graphs are measured on groups of their own.
    """
    if name == SEQUENTIAL:
        plain = getattr(reference, op)
        return lambda i: plain(*operands.at(i))
    if name in RIVALS[op]:
        if operands.x[0].device.type != "cuda":
            raise NotImplementedError("torch.ops.symm_mem needs CUDA")
        from torch.distributed import _symmetric_memory  # noqa: F401 (defines the operators)

        make_rival = {TORCH: _torch_fused, ONE_SHOT: _all_reduced, TWO_SHOT: _all_reduced}[name]
        return make_rival(name, op, operands, dist.group.WORLD.group_name)
    return make_call(name, op, operands, group)


def explored(text):
    """The candidates of --explore: configurations of `fused` by their names alone, of `decomposed` in full."""
    names = filter(None, text.split(","))
    return [name if name.partition(":")[0] == DECOMPOSED else f"{FUSED}:{name}" for name in names]


def is_ours(name):
    """Whether flux_ops runs it with a workspace, so that last_dispatch() tells what ran."""
    return name.partition(":")[0] in (FUSED, DECOMPOSED, AUTO)


def _torch_fused(_, op, operands, group_name):
    if op == "ag_gemm":

        def call(i):
            x, w = operands.at(i)
            return torch.ops.symm_mem.fused_all_gather_matmul(x, [w.t()], 0, group_name, return_A=False)[1][0]

    else:

        def call(i):
            x, w = operands.at(i)
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, w.t(), "sum", 0, group_name)

    return call


def _all_reduced(name, _, operands, group_name):
    """The product into symmetric memory, then PyTorch's all-reduce of it."""
    from torch.distributed import _symmetric_memory as symm_mem

    x, w = operands.at(0)
    partial = symm_mem.empty(x.shape[0], w.shape[0], dtype=x.dtype, device=x.device)
    symm_mem.rendezvous(partial, group_name)
    reduce = torch.ops.symm_mem.one_shot_all_reduce if name == ONE_SHOT else torch.ops.symm_mem.two_shot_all_reduce_

    def call(i):
        x, w = operands.at(i)
        torch.mm(x, w.t(), out=partial)
        return reduce(partial, "sum", group_name)

    return call
