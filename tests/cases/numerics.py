"""Numbers: bias once, fp32 sums in rank order, repeatable bits, NaN where it belongs, error no worse than PyTorch's."""

import itertools

import pytest
import torch

from tests.cases.base import BF16, FP16, FP32, OPS, WITH_STRATEGY, Case, call, make, run
from tests.harness.compare import Findings, assert_same, first_difference


def among_nan(t, gap=8):
    """The values of t in a buffer of NaN, which is before them, behind them and, with a gap, between their rows."""
    rows, columns = (1, t.numel()) if t.dim() == 1 else t.shape
    store = torch.full((rows + 2, columns + gap), float("nan"), dtype=t.dtype, device=t.device)
    store[1:-1, :columns] = t
    return store[1:-1, :columns].view(t.shape)


def bias_alone(ctx, op, strategy):
    """x = 0: the output is the bias, once."""
    findings = Findings()
    for rows, n, k in ((8, 64, 64), (100, 200, 72)):
        x = torch.zeros(rows * (ctx.world if op == "gemm_rs" else 1), k, dtype=BF16, device=ctx.device)
        weight = torch.ones(n, k, dtype=BF16, device=ctx.device)
        bias = torch.arange(n, device=ctx.device).remainder(7).to(BF16)
        y = run(op, x, weight, bias, strategy=strategy)
        findings.add((rows, n, k), first_difference(y, bias.expand_as(y), rank=ctx.rank))
        for gap in (0, 8):  # a sum that takes in what is beside an operand, or behind a row, is NaN
            tensors = (among_nan(t, gap) for t in (x, weight, bias))
            y = run(op, *tensors, strategy=strategy)
            findings.add((rows, n, k, f"among NaN, {gap}"), first_difference(y, bias.expand_as(y), rank=ctx.rank))
    return findings.finish()


def one_hot_partials(ctx, op, values, dtype, strategy, rows=8, n=72, k=64, bias=None):
    """gemm_rs or gemm_ar where rank r's partial is values[r] everywhere."""
    x = torch.zeros(rows * ctx.world, k, dtype=dtype, device=ctx.device)
    x[:, 0] = values[ctx.rank]
    weight = torch.ones(n, k, dtype=dtype, device=ctx.device)
    bias = None if bias is None else torch.full((n,), bias, dtype=dtype, device=ctx.device)
    return run(op, x, weight, bias, strategy=strategy)


def reduces_in_fp32(ctx, strategy="fused", op="gemm_rs"):
    """256 from one rank, 1 from each other: added in bf16 the ones would vanish, for 256 + 1 rounds to 256."""
    findings = Findings()
    for big in range(ctx.world):
        values = [256.0 if rank == big else 1.0 for rank in range(ctx.world)]
        bias = 1.0 if ctx.world == 2 else None  # two ranks alone can't tell: one add, one rounding
        y = one_hot_partials(ctx, op, values, BF16, strategy, bias=bias)
        want = torch.full_like(y, sum(values) + (bias or 0.0))
        findings.add(f"256 on rank {big}", first_difference(y, want, rank=ctx.rank))
    return findings.finish()


def adds_in_rank_order(ctx, strategy="fused", op="gemm_rs"):
    """2^24 + 1 = 2^24 in fp32, so the sum shows the order of the adds."""
    findings = Findings()
    big = 2.0**24
    base = ([big, 1.0, -big, 1.0] + [1.0] * ctx.world)[: ctx.world]
    for values in sorted(set(itertools.permutations(base))):
        total = torch.zeros((), dtype=FP32)
        for value in values:
            total = total + torch.tensor(value, dtype=FP32)
        y = one_hot_partials(ctx, op, values, BF16, strategy)
        findings.add(values, first_difference(y, torch.full_like(y, total.item()), rank=ctx.rank))
    return findings.finish()


def repeats_bitwise(ctx, op, strategy="fused"):
    """Data whose sums depend on the order of adds, under changing delays: the same bits each time."""
    rows, n, k = (512, 2048, 1792) if ctx.is_cuda else (40, 136, 264)
    operands = make(ctx, Case(op, rows, n, k, data="random", seed=21))
    first = call(operands, strategy=strategy)
    others = []
    for turn in range(10):
        if turn % ctx.world == ctx.rank:
            ctx.stall(0.004)
        others.append(call(operands, strategy=strategy))
    for turn, y in enumerate(others):
        assert_same(y, first, rank=ctx.rank, what=f"repeat {turn}", rows_per_chunk=rows)


def accuracy(ctx, op, dtype, strategies=("fused", "sequential")):
    """Error against fp64: at most twice that of PyTorch in the same dtype. `strategies`: names, or what gives them by
    the rows.
    """
    findings = Findings()
    sizes = [(512, 1024, 4096), (64, 512, 8192)] if ctx.is_cuda else [(32, 64, 512), (24, 136, 2048)]
    for rows, n, k in sizes:
        case = Case(op, rows, n, k, dtype=dtype, data="random", seed=rows, bias=True)
        operands = make(ctx, case)
        exact = operands.expected(torch.float64)
        for strategy in strategies(rows) if callable(strategies) else strategies:
            ours = (call(operands, strategy=strategy).double() - exact).abs()
            plain = (operands.plain().double() - exact).abs()
            limit = 3 if strategy == "sequential" else 2  # NCCL and gloo choose their own order of adds
            for what, a, b in (("max", ours.max(), plain.max()), ("mean", ours.mean(), plain.mean())):
                bad = not a <= limit * b
                problem = f"rank {ctx.rank}: {what} error {a:.3e}, PyTorch's is {b:.3e}" if bad else None
                findings.add(f"{strategy} {case}", problem)
    return findings.finish()


def specials(ctx, op, rows, strategy="fused"):
    """A NaN row and an Inf row stay where they are; all other rows keep their bits."""
    rows_of_x = rows * ctx.world if op == "gemm_rs" else rows
    case = Case(op, rows, 72, 64, seed=31)
    operands = make(ctx, case)
    clean = call(operands, strategy=strategy)
    nan_row, inf_row = 3 % rows_of_x, 4 % rows_of_x
    if ctx.rank == ctx.world - 1:
        operands.x[nan_row] = float("nan")
        operands.x[inf_row] = float("inf")
    y = call(operands, strategy=strategy)
    # Where row 0 of the last rank's x is in this rank's result.
    first = {"ag_gemm": (ctx.world - 1) * rows, "gemm_rs": -ctx.rank * rows, "gemm_ar": 0}[op]
    touched = {first + r for r in (nan_row, inf_row) if 0 <= first + r < y.shape[0]}
    rest = [r for r in range(y.shape[0]) if r not in touched]
    assert_same(y[rest], clean[rest], rank=ctx.rank, what="rows without NaN or Inf")
    for row in touched:
        assert not y[row].isfinite().all(), f"rank {ctx.rank}: row {row} lost its NaN or Inf"
    if first + nan_row in touched:
        assert y[first + nan_row].isnan().all(), f"rank {ctx.rank}: row {first + nan_row} isn't all NaN"
    assert_same(call(make(ctx, case), strategy=strategy), clean, rank=ctx.rank, what="the next clean call")


def inf_in_weight(ctx, op):
    """One Inf in each weight: NaN and Inf appear in its column as in a plain product, and nowhere else."""
    case = Case(op, 16, 72, 64, seed=33)
    operands = make(ctx, case)
    operands.weight[5, 0] = float("inf")
    pairs = [(operands.gathered(), operands.weight)] if op == "ag_gemm" else operands.partials()
    for _, weight in pairs:
        weight[5, 0] = float("inf")
    want = sum(x.float() @ weight.float().t() for x, weight in pairs)
    assert_same(call(operands), want.to(case.dtype), rank=ctx.rank, rows_per_chunk=case.rows)


def inputs_rewritten_at_once(ctx, op):
    """The inputs belong to the caller again when the call returns (on a GPU: in stream order)."""
    findings = Findings()
    rows, n, k = (1024, 1024, 2048) if ctx.is_cuda else (64, 72, 136)
    operands = make(ctx, Case(op, rows, n, k, seed=41))
    want = operands.expected().to(BF16)
    x, weight = operands.x.clone(), operands.weight.clone()
    for turn in range(8):
        operands.x.copy_(x)
        operands.weight.copy_(weight)
        if turn % ctx.world == ctx.rank:
            ctx.stall(0.003)
        y = call(operands)
        operands.x.fill_(float("nan"))
        operands.weight.fill_(float("nan"))
        findings.add(f"turn {turn}", first_difference(y, want, rank=ctx.rank, rows_per_chunk=rows))
    return findings.finish()


@pytest.mark.any_config
class NumericsCases:
    @pytest.mark.parametrize("op, strategy", WITH_STRATEGY)
    def test_bias_is_added_once(self, ranks, op, strategy):
        ranks.run(bias_alone, op, strategy)

    def test_partials_are_added_in_fp32(self, ranks):
        ranks.run(reduces_in_fp32)

    def test_partials_are_added_in_rank_order(self, ranks):
        ranks.run(adds_in_rank_order)

    @pytest.mark.parametrize("op", OPS)
    def test_repeats_bitwise(self, ranks, op):
        ranks.run(repeats_bitwise, op)

    @pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
    @pytest.mark.parametrize("op", OPS)
    def test_error_against_fp64(self, ranks, op, dtype):
        ranks.run(accuracy, op, dtype)

    @pytest.mark.parametrize("rows", (5, 6, 130))
    @pytest.mark.parametrize("op", OPS)
    def test_nan_and_inf_stay_in_their_rows(self, ranks, op, rows):
        ranks.run(specials, op, rows)

    @pytest.mark.parametrize("op", OPS)
    def test_inf_in_weight_stays_in_its_column(self, ranks, op):
        ranks.run(inf_in_weight, op)

    @pytest.mark.parametrize("op", OPS)
    def test_inputs_may_be_rewritten_after_the_call(self, ranks, op):
        ranks.run(inputs_rewritten_at_once, op)
