"""What the cases share: call an op on made data, compare, and expect refusals."""

import torch

import flux_ops
from tests.harness.compare import first_difference
from tests.harness.data import Case, Operands, poison

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
DECOMPOSED_OPS = ("ag_gemm", "gemm_rs")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
REFUSALS = (TypeError, ValueError, NotImplementedError)

__all__ = ["BF16", "FP16", "FP32", "FP64", "OPS", "REFUSALS", "Case", "Operands", "call", "check", "check_or_refusal"]


def strategies_of(op, *names):
    """Of these names, or of all, those that the op has."""
    names = names or ("fused", "decomposed", "sequential")
    return tuple(name for name in names if name != "decomposed" or op in DECOMPOSED_OPS)


WITH_STRATEGY = [(op, strategy) for op in OPS for strategy in strategies_of(op)]


def call(operands, *, strategy="fused", group=None, **options):
    op = getattr(flux_ops, operands.case.op)
    return op(operands.x, operands.weight, operands.bias, group=group, strategy=strategy, **options)


def make(ctx, case, group=None):
    """Operands of `case` for this rank; in a subgroup, rank and world are those of the group."""
    if group is None:
        return Operands(case, ctx.rank, ctx.world, ctx.device)
    return Operands(case, group.rank(), group.size(), ctx.device)


def check(ctx, case, *, strategy="fused", group=None):
    """Make the data, poison the output's memory, call, compare. Returns what is wrong, or None."""
    operands = make(ctx, case, group)
    x, weight = operands.x.clone(), operands.weight.clone()
    want = operands.expected().to(case.dtype)
    poison(ctx.device, (want.shape, case.dtype), (operands.x.shape, case.dtype))
    y = call(operands, strategy=strategy, group=group)
    if problem := first_difference(y, want, rank=ctx.rank, rows_per_chunk=case.rows):
        return problem
    if not torch.equal(operands.x, x) or not torch.equal(operands.weight, weight):
        return f"rank {ctx.rank}: the call changed its inputs"
    ran = flux_ops.last_dispatch().strategy
    if strategy != "auto" and ran not in (strategy.partition(":")[0], "local"):
        return f"rank {ctx.rank}: asked for {strategy}, last_dispatch() says {ran}"
    return None


def check_or_refusal(ctx, case, *, strategy="fused"):
    """Like check, but a refusal that says what is not supported is fine. Returns (problem, refusal)."""
    try:
        return check(ctx, case, strategy=strategy), None
    except REFUSALS as error:
        return None if str(error) else f"rank {ctx.rank}: {type(error).__name__} without a word", str(error)


def refused(ctx, make_call):
    """(class name, message) of the refusal that make_call() has to raise."""
    try:
        make_call()
        ctx.sync()
    except REFUSALS as error:
        return type(error).__name__, str(error)
    raise AssertionError(f"rank {ctx.rank}: the call was not refused")
