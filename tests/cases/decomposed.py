"""The decomposed strategy: every configuration, on exact data, beside the other strategies on one group."""

import random

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops import extension
from tests.cases import shapes
from tests.cases.base import BF16, FP16, FP32, FP64, OPS, Case, call, check, make, refused
from tests.cases.dispatch import poisoned_workspace
from tests.cases.faults import SLACK_S, call_and_sync, case_of, dead, expect_out_of_step, expect_timeouts, late
from tests.cases.numerics import accuracy, adds_in_rank_order, reduces_in_fp32, repeats_bitwise, specials
from tests.cases.reuse import constant_lag, sequence_of
from tests.harness.compare import Findings, first_difference

DTYPES = (BF16, FP16, FP32, FP64)
GRAINY = {
    "ag_gemm": ("hetero-unfused-1d/c3", "uniform-fused-2d/c16"),
    "gemm_rs": ("chunks/c3", "chunks/c16"),
    "gemm_ar": (),
}


FAULTS = (*((op, "decomposed") for op in OPS), ("ag_gemm", "decomposed:gather"))


def strategies(op):
    """ "decomposed" and every configuration by name, with some that cut finer than is worth a try."""
    names = (*extension.module.decomposed_candidates(op), *GRAINY[op])
    return ["decomposed", *(f"decomposed:{name}" for name in names)]


def takes(ctx, case, strategy):
    """The kernels of CUDA that exchange data take rows of whole vectors, and what fits into the exchange area; the
    all-reduce takes 16-bit types alone.
    """
    if not ctx.is_cuda or (case.op != "gemm_ar" and strategy != "decomposed:gather"):
        return True
    m = case.rows if case.op == "gemm_ar" else case.rows * ctx.world
    sizes = (m, case.n, case.k, str(case.dtype).removeprefix("torch."), case.layout == "kn")
    can = extension.module.candidates(case.op, "cuda", ctx.world, *sizes)
    return any(name == strategy or name.partition(":")[0] == strategy for name in can)


def dtypes_of(ctx, op):
    return (BF16, FP16) if op == "gemm_ar" and ctx.is_cuda else DTYPES


def every_configuration(ctx, op):
    """Ragged rows, one row, odd N and K, large enough for several tiles a chunk."""
    findings = Findings()
    sizes = [(1, 7, 3), (2, 24, 64), (7, 72, 40), (129, 264, 136), (300, 20, 600)]
    if ctx.is_cuda:
        sizes += [(1000, 2056, 2744), (2047, 1400, 4096), (1024, 513, 1031)]
    rng, cells = random.Random(4), dict.fromkeys(strategies(op), 0)
    for rows, n, k in sizes:
        for strategy in cells:
            dtype, layout = rng.choice(dtypes_of(ctx, op)), rng.choice(("nk", "kn"))
            case = Case(op, rows, n, k, seed=rows + n, dtype=dtype, layout=layout, bias=rng.random() < 0.5)
            if takes(ctx, case, strategy):
                findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
                cells[strategy] += 1
    assert min(cells.values()) >= 3, cells
    return findings.finish()


def dtypes_and_bias(ctx, op):
    return shapes.dtypes_and_bias(ctx, op, strategies(op), dtypes_of(ctx, op))


def poisoned(ctx, op):
    """Those that exchange their data by a kernel on sizes that they take."""
    exchanging = [name for name in strategies(op) if op == "gemm_ar" or name == "decomposed:gather"]
    cells = 0
    if others := [name for name in strategies(op) if name not in exchanging]:
        cells += poisoned_workspace(ctx, op, others)
    if exchanging:
        much = (512 // ctx.world, 72, 4096) if op == "ag_gemm" else (min(2048, 8192 // ctx.world), 1024, 64)
        cells += poisoned_workspace(ctx, op, exchanging, ((40, 72, 64), (129, 264, 136), (8, 24, 264), much))
    return cells


def errors_against_fp64(ctx, op, dtype):
    """The gather takes 8 MiB of x, and the largest product of the case has 512 rows a rank of 8 KiB."""
    few = 2 if ctx.is_cuda else ctx.world
    return accuracy(
        ctx,
        op,
        dtype,
        lambda rows: [s for s in strategies(op) if rows < 512 or ctx.world <= few or s != "decomposed:gather"],
    )


def mixed(ctx, rounds, slow_s):
    """Calls of all strategies on one workspace, shapes changing, a rank in turn late; checked at the end."""
    rng = random.Random(9)
    results = []
    for turn, case in enumerate(sequence_of(ctx, rounds, seed=6)):
        names = [name for name in strategies(case.op) if takes(ctx, case, name)]
        strategy = rng.choice(("auto" if case.op == "gemm_ar" else "fused", "sequential", *names))
        slow = turn % 5 == 0 and turn // 5 % ctx.world == ctx.rank
        operands = make(ctx, case)
        if slow and turn % 2:
            ctx.stall(slow_s)
        results.append((strategy, case, call(operands, strategy=strategy)))
        if slow and not turn % 2:
            ctx.stall(slow_s)
    findings = Findings()
    for strategy, case, y in results:
        want = make(ctx, case).expected().to(case.dtype)
        difference = first_difference(y, want, rank=ctx.rank, rows_per_chunk=case.rows)
        findings.add(f"{strategy} {case}", difference)
    return findings.finish()


def workspace_grows(ctx, op):
    """On a group of its own, without prepare: small, large, small."""
    findings = Findings()
    group = dist.new_group(list(range(ctx.world)))
    n = 4096 if op == "gemm_ar" and ctx.is_cuda else 264  # its slots have 16 MiB from the beginning
    for rows in (8, 512, 8, 1500, 33):
        case = Case(op, rows, n, 200, seed=rows)
        findings.add(case, check(ctx, case, strategy="decomposed", group=group))
    ctx.sync()
    dist.barrier()
    flux_ops.destroy(group)
    return findings.finish()


def record_and_refusals(ctx, op):
    """last_dispatch() names the configuration; what can't run is refused with the reason, and costs nothing."""
    operands = make(ctx, Case(op, 40, 72, 64))
    for strategy in strategies(op):
        call(operands, strategy=strategy)
        record = flux_ops.last_dispatch()
        assert (record.op, record.strategy, record.reason) == (op, "decomposed", "asked for"), record
        assert strategy in ("decomposed", f"decomposed:{record.config}"), record
    others = strategies(OPS[OPS.index(op) - 1])[1]
    for strategy, words in (("decomposed:warp9", ["warp9", "one is"]), (others, [others.partition(":")[2]])):
        kind, message = refused(ctx, lambda s=strategy: call(operands, strategy=s))
        assert kind == "NotImplementedError", (kind, message)
        assert all(word in message for word in (op, "'decomposed'", *words)), message
    kind, message = refused(ctx, lambda: call(operands, strategy="decomposed:"))
    assert kind == "ValueError", (kind, message)
    assert "'decomposed'" in message
    assert check(ctx, Case(op, 16, 72, 64, seed=1), strategy="decomposed") is None


def backward(ctx, op):
    case = Case(op, 16, 64, 64, dtype=BF16 if ctx.is_cuda else FP32, bias=True)
    grads = []
    for strategy in ("decomposed", "sequential"):
        operands = make(ctx, case)
        leaves = [t.detach().requires_grad_() for t in (operands.x, operands.weight, operands.bias)]
        y = getattr(flux_ops, op)(*leaves, strategy=strategy)
        (y * torch.arange(case.n, device=ctx.device).remainder(3).to(case.dtype)).sum().backward()
        grads.append([leaf.grad for leaf in leaves])
    for ours, plain in zip(*grads, strict=True):
        problem = first_difference(ours, plain, rank=ctx.rank)
        assert problem is None, problem


def unlike_strategies(ctx, op, theirs, culprit):
    """The culprit runs another strategy, or configuration, of a call that all have made before."""
    operands = make(ctx, case_of(ctx, op))
    for strategy in ("decomposed", theirs):
        call(operands, strategy=strategy)
    call_and_sync(ctx, operands, theirs if ctx.rank == culprit else "decomposed")


class DecomposedCases:
    rounds = 300
    slow_s = 0.004
    timeout_s = 2

    @pytest.mark.parametrize("op", OPS)
    def test_every_configuration(self, ranks, op, record_property):
        record_property("cells", ranks.run(every_configuration, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_dtypes_bias_layouts(self, ranks, op, record_property):
        record_property("cells", ranks.run(dtypes_and_bias, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_rank_codes(self, ranks, op, record_property):
        record_property("cells", ranks.run(shapes.rank_codes, op, strategies(op))[0])

    def test_gathered_operand(self, ranks, record_property):
        record_property("cells", ranks.run(shapes.gathered, strategies("ag_gemm"))[0])

    @pytest.mark.parametrize("op", OPS)
    def test_empty_extents(self, ranks, op, record_property):
        record_property("cells", ranks.run(shapes.empty, op, "decomposed")[0])

    @pytest.mark.parametrize("op", OPS)
    def test_poisoned_workspace(self, ranks, op, record_property):
        record_property("cells", ranks.run(poisoned, op)[0])

    def test_all_strategies_on_one_group(self, ranks, record_property):
        record_property("cells", ranks.run(mixed, self.rounds, self.slow_s)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_one_rank_always_late(self, ranks, op, record_property):
        record_property("cells", ranks.run(constant_lag, op, ranks.world - 1, 24, self.slow_s, strategies(op))[0])

    @pytest.mark.parametrize("op", OPS)
    def test_workspace_grows(self, ranks, op, record_property):
        record_property("cells", ranks.run(workspace_grows, op)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_last_dispatch_and_refusals(self, ranks, op):
        ranks.run(record_and_refusals, op)

    @pytest.mark.parametrize("op", OPS)
    def test_backward(self, ranks, op):
        ranks.run(backward, op)

    @pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
    @pytest.mark.parametrize("op", OPS)
    def test_error_against_fp64(self, ranks, op, dtype, record_property):
        record_property("cells", ranks.run(errors_against_fp64, op, dtype)[0])

    @pytest.mark.parametrize("op", ("gemm_rs", "gemm_ar"))
    def test_partials_are_added_in_fp32_in_rank_order(self, ranks, op):
        for strategy in strategies(op):
            ranks.run(reduces_in_fp32, strategy, op)
            ranks.run(adds_in_rank_order, strategy, op)

    @pytest.mark.parametrize("op", OPS)
    def test_repeats_bitwise(self, ranks, op):
        ranks.run(repeats_bitwise, op, "decomposed")

    @pytest.mark.parametrize("op", OPS)
    def test_nan_and_inf_stay_in_their_rows(self, ranks, op):
        ranks.run(specials, op, 130, "decomposed")

    @pytest.mark.parametrize("op, strategy", FAULTS)
    def test_a_peer_too_late_is_named(self, spawn, op, strategy):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(late, op, self.timeout_s + 2.5, 1, strategy=strategy)
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    @pytest.mark.parametrize("op, strategy", FAULTS)
    def test_a_peer_that_is_gone_is_named(self, spawn, op, strategy):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(dead, op, 1, "raises before the call", strategy=strategy)
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    @pytest.mark.parametrize(
        "op, theirs",
        (
            *((op, "fused") for op in OPS),
            ("ag_gemm", "decomposed:hetero-unfused-1d/c1"),
            ("ag_gemm", "decomposed:gather"),
            ("gemm_ar", "decomposed:two-shot"),
        ),
    )
    def test_unlike_strategies(self, spawn, op, theirs):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(unlike_strategies, op, theirs, 1)
        expect_out_of_step(outcomes, op=op, seconds=self.timeout_s + SLACK_S)
