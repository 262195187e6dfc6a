"""Exact data over many shapes: every tile, chunk and row where it belongs, whatever ran before."""

import random

import pytest
import torch

from tests.cases.base import BF16, FP16, FP32, FP64, OPS, STRATEGIES, Case, call, check, check_or_refusal, make, run
from tests.harness.compare import Findings, first_difference

DTYPES = {"cpu": (BF16, FP16, FP32, FP64), "cuda": (BF16, FP16)}

# M and (N, K) of the whole product, as a user of an un-sharded layer would name them.
GRID_M = {
    "cpu": (8, 16, 48, 64, 128, 136, 512, 1000),
    "cuda": (8, 16, 48, 64, 128, 136, 512, 1000, 1024, 4096, 8192),
}
GRID_NK = {
    "cpu": ((128, 128), (192, 128), (344, 128), (896, 128), (128, 448)),
    "cuda": ((4096, 4096), (6144, 4096), (11008, 4096), (28672, 4096), (4096, 14336)),
}


def local_case(op, m, n, k, world, **options):
    """The per-rank case of a whole product; what doesn't divide by the world size is rounded down to multiples of 8."""
    cut = (n if op == "ag_gemm" else k) // world
    cut -= cut % 8
    rows = m if op == "gemm_ar" else max(m // world, 1)
    return Case(op, rows, cut if op == "ag_gemm" else n, k if op == "ag_gemm" else cut, **options)


def grid(ctx, op):
    """All cells in random order, the same on each rank."""
    device = ctx.device.type
    cells = [
        local_case(op, m, n, k, ctx.world, dtype=dtype, layout=layout, seed=7 * m + n)
        for m in GRID_M[device]
        for n, k in GRID_NK[device]
        for dtype in (BF16, FP16)
        for layout in ("nk", "kn")
    ]
    random.Random(1).shuffle(cells)
    findings = Findings()
    for case in cells:
        findings.add(case, check(ctx, case))
    return findings.finish()


def residues(ctx, op):
    """Sizes off every grid: tile, 16 bytes, vector. `fused` may refuse them with a reason, `auto` may not."""
    findings = Findings()
    rows = (1, 3, 5, 7, 32, 33, 65, 127, 129)
    ns = (1, 7, 8, 24, 63, 64, 100, 257)
    ks = (1, 7, 8, 20, 63, 64, 72, 136)
    rng = random.Random(2)
    cells = [(m, n, k) for m in rows for n in ns for k in ks]
    for m, n, k in rng.sample(cells, 160 if ctx.is_cuda else 60):
        dtype = rng.choice(DTYPES[ctx.device.type])
        case = Case(op, m, n, k, dtype=dtype, seed=m + n + k, bias=rng.random() < 0.5, layout=rng.choice(("nk", "kn")))
        problem, refusal = check_or_refusal(ctx, case)
        findings.add(f"fused {case}", problem)
        if refusal is None and problem is None and not ctx.is_cuda:
            continue
        findings.add(f"auto {case}", check(ctx, case, strategy="auto"))
    return findings.finish()


def long_residues(ctx, op):
    """One long extent, off every grid. The last two are a vocabulary of 151552 at TP = 3 and at TP = 6."""
    findings = Findings()
    cells = ((5, 4097, 8), (64, 4095, 20), (64, 7, 4095), (5, 24, 4097), (5, 50517, 8), (3, 25259, 63))
    for turn, (rows, n, k) in enumerate(cells):
        for layout in ("nk", "kn"):
            case = Case(op, rows, n, k, dtype=(BF16, FP16)[turn % 2], seed=turn, bias=True, layout=layout)
            findings.add(f"fused {case}", check_or_refusal(ctx, case)[0])
            findings.add(f"auto {case}", check(ctx, case, strategy="auto"))
    return findings.finish()


def large_residues(ctx, op):
    """Ragged edges on sizes that have many tiles: K and N stay multiples of 8, so `fused` has to take them."""
    findings = Findings()
    sizes = (
        [(1000, 2056, 2744), (129, 4104, 1032), (2047, 1400, 4096)] if ctx.is_cuda else [(150, 200, 136), (67, 328, 72)]
    )
    for rows, n, k in sizes:
        for bias in (False, True):
            for layout in ("nk", "kn"):
                case = Case(op, rows, n, k, seed=rows, bias=bias, layout=layout)
                findings.add(case, check(ctx, case))
    return findings.finish()


def dtypes_and_bias(ctx, op, strategies=("fused", "sequential", "auto"), dtypes=None):
    findings = Findings()
    for dtype in dtypes or DTYPES[ctx.device.type]:
        for bias in (False, True):
            for layout in ("nk", "kn"):
                for strategy in strategies:
                    case = Case(op, 96, 136, 264, dtype=dtype, bias=bias, layout=layout, seed=3)
                    findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


def rank_codes(ctx, op, strategies=("fused",)):
    """Shards that hold their rank: a permuted or repeated chunk shows at once."""
    findings = Findings()
    for rows in (1, 8, 64, 200):
        for strategy in strategies:
            case = Case(op, rows, 72, 64, data="rankcode")
            findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


def gathered(ctx, strategies=("fused", "sequential", "auto")):
    findings = Findings()
    for strategy in strategies:
        for rows, bias in ((8, False), (72, True), (256, False)):
            case = Case("ag_gemm", rows, 80, 264, bias=bias, seed=rows)
            operands = make(ctx, case)
            y, whole = call(operands, strategy=strategy, return_gathered=True)
            want = operands.expected().to(case.dtype)
            findings.add(f"{strategy} y {case}", first_difference(y, want, rank=ctx.rank, rows_per_chunk=rows))
            difference = first_difference(whole, operands.gathered(), rank=ctx.rank, rows_per_chunk=rows)
            findings.add(f"{strategy} gathered {case}", difference)
            whole.zero_()  # it is the caller's: no later call may see this
            findings.add(f"{strategy} again {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


def leading_dims(ctx, op):
    """[s, b, h] and [a, b, c, h]: dim 0 is gathered or scattered, the leading dimensions come back."""
    findings = Findings()
    for shape in ((8, 3), (16, 1), (4, 3, 5)):
        flat = 1
        for size in shape:
            flat *= size
        case = Case(op, flat, 72, 264, seed=flat)
        operands = make(ctx, case)
        first = shape[0] * ctx.world if op == "gemm_rs" else shape[0]
        x = operands.x.view(first, *shape[1:], case.k)
        result_first = shape[0] * ctx.world if op == "ag_gemm" else shape[0]
        want = operands.expected().to(case.dtype).view(result_first, *shape[1:], case.n)
        for strategy in STRATEGIES:
            y = run(op, x, operands.weight, strategy=strategy)
            findings.add(f"{op} {strategy} {tuple(x.shape)}", first_difference(y, want, rank=ctx.rank))
            if op == "ag_gemm":
                y, whole = run(op, x, operands.weight, strategy=strategy, return_gathered=True)
                findings.add(f"{strategy} y beside gathered", first_difference(y, want, rank=ctx.rank))
                want_whole = operands.gathered().view(result_first, *shape[1:], case.k)
                findings.add(f"{strategy} gathered", first_difference(whole, want_whole, rank=ctx.rank))
    return findings.finish()


def empty(ctx, op, by_name="fused"):
    """No rows, no columns, nothing to contract: shapes as the equation says, zeros plus bias where K is empty."""
    findings = Findings()
    for rows, n, k in ((0, 64, 64), (16, 0, 64), (16, 64, 0), (0, 0, 64), (0, 64, 0)):
        for bias in (False, True):
            case = Case(op, rows, n, k, bias=bias)
            findings.add(f"auto {case}", check(ctx, case, strategy="auto"))
            findings.add(f"{by_name} {case}", check_or_refusal(ctx, case, strategy=by_name)[0])
    findings.add("a usual call afterwards", check(ctx, Case(op, 32, 64, 64), strategy=by_name))
    return findings.finish()


def decode_sizes(ctx, op):
    """One row (a rank, but for gemm_ar) and a little more, on a wide and on a narrow layer."""
    findings = Findings()
    wide = (8192, 28672 // ctx.world // 8 * 8) if ctx.is_cuda else (512, 384)
    for n, k in (wide, (128, 128)):
        for rows in (1, 2, 3, 7, 9):
            case = Case(op, rows, n, k, seed=rows)
            findings.add(f"auto {case}", check(ctx, case, strategy="auto"))
            findings.add(f"fused {case}", check_or_refusal(ctx, case)[0])
    return findings.finish()


def unaligned_rows(ctx, op):
    """x whose first element is only 2-byte aligned."""
    findings = Findings()
    for strategy in ("auto", "fused", "decomposed"):
        case = Case(op, 40, 72, 64, seed=5)
        operands = make(ctx, case)
        buffer = torch.empty(operands.x.numel() + 1, dtype=case.dtype, device=ctx.device)
        buffer[1:] = operands.x.flatten()
        operands.x = buffer[1:].view(operands.x.shape)
        want = operands.expected().to(case.dtype)
        try:
            findings.add(strategy, first_difference(call(operands, strategy=strategy), want, rank=ctx.rank))
        except (ValueError, NotImplementedError) as error:
            findings.add(strategy, f"refused: {error}" if strategy == "auto" else None)
    return findings.finish()


@pytest.mark.any_config
class ShapeCases:
    @pytest.mark.parametrize("op", OPS)
    def test_grid_in_random_order(self, ranks, op, record_property):
        record_property("cells", ranks.run(grid, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_residues(self, ranks, op, record_property):
        record_property("cells", ranks.run(residues, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_long_residues(self, ranks, op, record_property):
        record_property("cells", ranks.run(long_residues, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_large_residues(self, ranks, op, record_property):
        record_property("cells", ranks.run(large_residues, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_dtypes_bias_layouts_strategies(self, ranks, op, record_property):
        record_property("cells", ranks.run(dtypes_and_bias, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_rank_codes(self, ranks, op, record_property):
        record_property("cells", ranks.run(rank_codes, op)[0])

    def test_gathered_operand(self, ranks, record_property):
        record_property("cells", ranks.run(gathered)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_leading_dimensions(self, ranks, op, record_property):
        record_property("cells", ranks.run(leading_dims, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_empty_extents(self, ranks, op, record_property):
        record_property("cells", ranks.run(empty, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_decode_sizes(self, ranks, op, record_property):
        record_property("cells", ranks.run(decode_sizes, op)[0])

    @pytest.mark.cpu_is_enough
    @pytest.mark.worlds(8)
    @pytest.mark.parametrize("op", OPS)
    def test_decode_sizes_of_eight_ranks(self, ranks, op, record_property):
        record_property("cells", ranks.run(decode_sizes, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_x_aligned_to_two_bytes(self, ranks, op, record_property):
        record_property("cells", ranks.run(unaligned_rows, op)[0])
