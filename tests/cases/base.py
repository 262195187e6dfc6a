"""What the cases share: call an op on made data, compare, and expect refusals."""

import torch
import torch.distributed as dist

import flux_ops
from flux_ops import extension
from tests.harness.compare import first_difference
from tests.harness.data import Case, Operands, poison

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
STRATEGIES = ("fused", "decomposed", "sequential")
BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
REFUSALS = (TypeError, ValueError, NotImplementedError)

__all__ = [
    "BF16",
    "FP16",
    "FP32",
    "FP64",
    "OPS",
    "REFUSALS",
    "STRATEGIES",
    "Case",
    "Operands",
    "call",
    "check",
    "check_or_refusal",
    "every_config",
    "force",
    "run",
]

_forced: dict[str, str] = {}  # on a rank: what the op runs in place of "fused" and "auto"


WITH_STRATEGY = [(op, strategy) for op in OPS for strategy in STRATEGIES]


def force(ctx, strategy):
    """From now on, the ops that have this configuration ("fused:CONFIG" or "decomposed:CONFIG") run it wherever a case
    that goes through run() asks for "fused" or "auto". Returns these ops. With "" they run what they are asked for.
    """
    _forced.clear()
    for op in OPS if strategy else ():
        try:
            call(make(ctx, Case(op, 16, 64, 64)), strategy=strategy)
        except NotImplementedError:
            continue
        _forced[op] = strategy
    assert _forced or not strategy, f"no op has the configuration '{strategy}'"
    return sorted(_forced)


SIZES_OF_CONFIGS = (
    *((8, 72, 64), (32, 512, 128), (64, 512, 128), (256, 512, 128)),
    *((512, 14336, 8192), (4096, 5504, 4096), (4096, 4096, 1024)),
)


def every_config(device, world=2):
    """The tuner's candidates of this build, over products that suit unlike kernels; every kernel at least once."""
    core, found = extension.module, {}
    for op in OPS:
        for rows, n, k in SIZES_OF_CONFIGS:
            found |= dict.fromkeys(core.candidates(op, device, world, rows, n, k, "bfloat16", False))
    del found["sequential"]
    if device == "cuda":
        for kernel in core.config_names(device).split():
            if not any(name.startswith(f"fused:{kernel}/") for name in found):
                found[f"fused:{kernel}/m1/p1"] = None
    return list(found)


def _meant(op, strategy):
    return _forced.get(op, strategy) if strategy in ("fused", "auto") else strategy


def _asked(op, x, weight, strategy, group=None):
    """What to ask for: "auto" in place of "fused" where the backend has nothing fused for a gemm_ar, as the kernels on
    GPUs take some sizes and layouts only.
    """
    if strategy != "fused" or op != "gemm_ar" or not x.is_cuda or 0 in (*x.shape, *weight.shape):
        return strategy
    (n, k), dtype = weight.shape, str(x.dtype).removeprefix("torch.")
    size = dist.get_world_size(group), x[..., 0].numel(), n, k
    choices = extension.module.candidates(op, "cuda", *size, dtype, weight.stride(-1) != 1)
    return "fused" if any(choice.startswith("fused:") for choice in choices) else "auto"


def run(op, x, weight, bias=None, *, strategy="fused", **options):
    """The op, with the forced configuration if there is one. "auto" runs as ever where that one can't."""
    strategy = _asked(op, x, weight, strategy, options.get("group"))
    fn, meant = getattr(flux_ops, op), _meant(op, strategy)
    try:
        return fn(x, weight, bias, strategy=meant, **options)
    except NotImplementedError:
        if strategy != "auto" or meant == strategy:
            raise
    return fn(x, weight, bias, strategy=strategy, **options)


def call(operands, **options):
    return run(operands.case.op, operands.x, operands.weight, operands.bias, **options)


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
    ran = flux_ops.last_dispatch()
    strategy = _asked(case.op, operands.x, operands.weight, strategy, group)
    meant, _, config = _meant(case.op, strategy).partition(":")
    if strategy != "auto" and ran.strategy != "local" and (ran.strategy != meant or config not in ("", ran.config)):
        return f"rank {ctx.rank}: asked for {meant} {config}, last_dispatch() says {ran}"
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
