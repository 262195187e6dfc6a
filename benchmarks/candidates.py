"""What is compared: the product alone, the plain sequence, PyTorch's fused ops, and ours by strategy.

Each candidate is a function of the sample's index, which rotates through copies of the operands, so that small
operands don't stay in the L2 cache.
"""

import dataclasses

import torch
import torch.distributed as dist
import torch.nn.functional as F

import flux_ops
from flux_ops import reference

GEMM, SEQUENTIAL, TORCH, FUSED, AUTO, DECOMPOSED = "gemm", "sequential", "torch", "fused", "auto", "decomposed"
ROTATE_BYTES = 200 << 20  # four times the L2 of an H100
MAX_COPIES = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """A layer: AG is x [M/TP, H] gathered, times w [I/TP, H]^T; RS is x [M, I/TP] times w [H, I/TP]^T, scattered."""

    name: str
    m: int
    h: int
    i: int

    def operand_sizes(self, op, world):
        if op == "ag_gemm":
            return (self.m // world, self.h), (self.i // world, self.h)
        return (self.m, self.i // world), (self.h, self.i // world)


class Operands:
    def __init__(self, place, op, shape, dtype):
        x_size, w_size = shape.operand_sizes(op, place.world)
        gen = torch.Generator(place.device).manual_seed(place.rank)
        per_call = 2 * (x_size[0] * x_size[1] + w_size[0] * w_size[1])
        copies = min(max(ROTATE_BYTES // per_call, 1), MAX_COPIES) if place.is_cuda else 1

        def make(size, scale):
            return (torch.randn(size, generator=gen, device=place.device) * scale).to(dtype)

        self.x = [make(x_size, 1.0) for _ in range(copies)]
        self.w = [make(w_size, w_size[1] ** -0.5) for _ in range(copies)]
        # The operand of the whole product: what the collective would have brought, or all of x as it is.
        self.full = [reference_gathered(x) for x in self.x[:1]] if op == "ag_gemm" else self.x

    def at(self, i):
        return self.x[i % len(self.x)], self.w[i % len(self.w)]

    def full_at(self, i):
        return self.full[i % len(self.full)], self.w[i % len(self.w)]


def reference_gathered(x):
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), *x.shape[1:])
    dist.all_gather_into_tensor(whole, x)
    return whole


def make(name, op, operands, group=None):
    """The candidate `name` for `op` as a function call(i) -> result; `fused:CONFIG` names a configuration.

    `group` is the one on which our ops run: calls of a group whose workspace a CUDA graph has captured follow another
    protocol, so eager calls and graphs are measured on groups of their own.
    """
    group_name = dist.group.WORLD.group_name
    if name == GEMM:
        return lambda i: F.linear(*operands.full_at(i))
    if name == SEQUENTIAL:
        plain = getattr(reference, op)
        return lambda i: plain(*operands.at(i))
    if name == TORCH:
        return _torch_fused(op, operands, group_name)
    ours = getattr(flux_ops, op)
    return lambda i: ours(*operands.at(i), group=group, strategy=name)


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


def difference(got, want):
    """The largest relative error of a row or a column: one wrong tile shows, rounding doesn't."""
    if got.shape != want.shape:
        return float("inf")
    diff, want = got.float() - want.float(), want.float()
    rows = (diff.norm(dim=1) / want.norm(dim=1)).max()
    cols = (diff.norm(dim=0) / want.norm(dim=0)).max()
    worst = torch.maximum(rows, cols).item()
    return worst if worst == worst else float("inf")
