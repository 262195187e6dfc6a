"""What a candidate is measured on, and whether its result is right."""

import torch
import torch.nn.functional as F

import flux_ops
from flux_ops import reference
from flux_ops.tuner import timing

GEMM, SEQUENTIAL = "gemm", "sequential"
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 4e-3, torch.float32: 1e-5, torch.float64: 1e-6}
ROTATE_BYTES = 200 << 20  # four times the L2 of an H100
MAX_COPIES = 16


class Operands:
    """Random operands of one product, in as many copies as keep small ones out of the L2 cache."""

    def __init__(self, place, op, m, n, k, dtype, layout="nk"):
        x_size = (m // place.world if op == "ag_gemm" else m, k)
        gen = torch.Generator(place.device).manual_seed(place.rank)
        per_call = dtype.itemsize * (x_size[0] * k + n * k)
        copies = min(max(ROTATE_BYTES // per_call, 1), MAX_COPIES) if place.is_cuda else 1

        def make(size, scale):
            return (torch.randn(size, generator=gen, device=place.device) * scale).to(dtype)

        def make_weight():
            weight = make((n, k), k**-0.5)
            return weight.t().contiguous().t() if layout == "kn" else weight

        self.x = [make(x_size, 1.0) for _ in range(copies)]
        self.w = [make_weight() for _ in range(copies)]
        # The operand of the whole product: what the collective would have brought, or all of x as it is.
        self.full = [reference.all_gather(x, place.group) for x in self.x[:1]] if op == "ag_gemm" else self.x

    def at(self, i):
        return self.x[i % len(self.x)], self.w[i % len(self.w)]

    def full_at(self, i):
        return self.full[i % len(self.full)], self.w[i % len(self.w)]


def make_call(name, op, operands, group=None):
    """call(i) -> result on copy i of the operands: the product alone (`gemm`), or our op with the strategy `name`."""
    if name == GEMM:
        return lambda i: F.linear(*operands.full_at(i))
    ours = getattr(flux_ops, op)
    return lambda i: ours(*operands.at(i), group=group, strategy=name)


def comparable(name, op):
    """Whether the result must be that of the sequence. The product alone is but a partial of what a reduction gives."""
    return name != GEMM or op == "ag_gemm"


def difference(got, want):
    """The largest error of a row or a column, relative to its norm, or to the average one if that is larger: one wrong
    tile shows, rounding doesn't.
    """
    if got.shape != want.shape:
        return float("inf")
    diff, want = got.float() - want.float(), want.float()
    errors = [diff.norm(dim=dim) / (norm := want.norm(dim=dim)).clamp_min(norm.mean()) for dim in (0, 1)]
    worst = max(error.max().item() for error in errors)
    return worst if worst == worst else float("inf")


def why_wrong(place, got, want):
    """None if the result is right on every rank, else by how much it is off; the same on each."""
    error = max(place.everyone(difference(got, want)))
    return (
        None if error <= TOLERANCE[want.dtype] else f"wrong result: a row or column is off by {error:.1e} of its norm"
    )


def attempt(place, fn):
    """(result, None) if fn() works on every rank, else (None, the first reason); the same on each."""
    result, reason = None, None
    try:
        result = fn()
        place.sync()
    except Exception as error:  # noqa: BLE001 (a candidate that can't run is a result)
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
    reason = next(filter(None, place.everyone(reason)), None)
    return (None, reason) if reason else (result, None)


def as_graph(place, call, count, want):
    """((replay, graph), None) for a CUDA graph of `count` calls, or (None, the reason).

    `want` is what its last call must give, or None where there is nothing to compare with.
    """
    made, reason = attempt(place, lambda: timing.captured(call, count))
    if reason:
        return None, reason
    replay, result, graph = made
    result.zero_()
    _, reason = attempt(place, replay)
    if reason is None and want is not None:
        reason = why_wrong(place, result, want)
        reason = reason and f"in a graph: {reason}"
    return (None, reason) if reason else ((replay, graph), None)
