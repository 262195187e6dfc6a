"""gemm_ar: every form on exact data, for any M, the same bits on every rank, beside the other ops."""

import random

import pytest
import torch
import torch.distributed as dist

from flux_ops import extension
from tests.cases.base import BF16, FP16, OPS, Case, call, check, make, refused
from tests.cases.dispatch import poisoned_workspace
from tests.cases.faults import SLACK_S, call_and_sync, case_of, dead, expect_out_of_step, expect_timeouts, late
from tests.cases.graphs import IN_PIECES
from tests.cases.numerics import accuracy, adds_in_rank_order, bias_alone, reduces_in_fp32, repeats_bitwise, specials
from tests.cases.reuse import constant_lag
from tests.harness.compare import Findings, first_difference
from tests.harness.data import poison

OP = "gemm_ar"
FORMS = ("one-shot", "two-shot")
DECOMPOSED = ("decomposed:one-shot", "decomposed:two-shot")
FEW_ROWS = 64  # every form takes as many
M = (0, 1, 2, 3, 5, 7, 8, 9, 16, 17, 64, 127, 128, 129, 257, 1000)
NK = {"cpu": ((64, 64), (72, 40), (7, 3), (200, 136)), "cuda": ((256, 512), (72, 40), (1032, 2056), (8192, 1024))}


def strategies(ctx, m=FEW_ROWS, n=256, k=256):
    """ "fused", where it can run, and every configuration, decomposed ones too, that the backend offers for a product
    of these sizes.
    """
    core = extension.module
    names = [c for c in core.candidates(OP, ctx.device.type, ctx.world, m, n, k, "bfloat16", False) if ":" in c]
    # With two ranks the tuner need not try it: it sends as much as the one-shot form, and takes longer.
    two_shots = [c.replace("/one-shot", "/two-shot") for c in names if ctx.is_cuda and c.endswith("/one-shot")]
    has_fused = any(name.startswith("fused") for name in names)
    return list(dict.fromkeys([*(["fused"] if has_fused else []), *names, *two_shots]))


def takes_transposed(ctx, strategy):
    """The CUDA kernels for few rows take no transposed weight, and "fused" alone may be one of them."""
    return not ctx.is_cuda or not strategy.startswith("fused")


def every_row_count(ctx):
    """Few rows and many, even and uneven over the ranks, in an output that was NaN, in random order."""
    findings = Findings()
    rng = random.Random(11)
    cells = [(m, n, k) for m in M for n, k in NK[ctx.device.type]]
    rng.shuffle(cells)
    for m, n, k in cells:
        for strategy in (*strategies(ctx, max(m, 1), n, k), "auto", "sequential"):
            options = {
                "dtype": rng.choice((BF16, FP16)),
                "layout": rng.choice(("nk", "kn")) if takes_transposed(ctx, strategy) else "nk",
                "bias": rng.random() < 0.5,
            }
            case = Case(OP, m, n, k, seed=m + n, **options)
            findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


def same_bits(ctx):
    """Random data, whose sums depend on the order of adds: all ranks get the same bits, one of them late."""
    findings = Findings()
    n, k = (2048, 1024) if ctx.is_cuda else (136, 264)
    for m in (1, 3, 17, 64, 300):
        for turn, strategy in enumerate((*strategies(ctx, m), "sequential")):
            case = Case(OP, m, n, k, seed=m, data="random", bias=True)
            operands = make(ctx, case)
            poison(ctx.device, ((m, n), case.dtype))
            if turn % ctx.world == ctx.rank:
                ctx.stall(0.003)
            y = call(operands, strategy=strategy)
            everyone = [torch.empty_like(y) for _ in range(ctx.world)]
            dist.all_gather(everyone, y)
            for rank, other in enumerate(everyone):
                findings.add(f"{strategy} {case}, rank {rank}", first_difference(other, y, rank=ctx.rank))
    return findings.finish()


def numbers(ctx):
    for strategy in strategies(ctx):
        bias_alone(ctx, OP, strategy)
        reduces_in_fp32(ctx, strategy, OP)
        adds_in_rank_order(ctx, strategy, OP)
        repeats_bitwise(ctx, OP, strategy)


def errors_against_fp64(ctx, dtype):
    return accuracy(ctx, OP, dtype, lambda rows: (*strategies(ctx, rows), "sequential"))


def poisoned(ctx):
    """Each form on sizes that it takes; the last of the usual ones is for many rows."""
    cells = poisoned_workspace(ctx, OP, strategies(ctx, 129), ((40, 72, 64), (129, 264, 136), (8, 24, 264)))
    many = 2048 * ctx.world  # a multiple of TP x sections
    return cells + poisoned_workspace(ctx, OP, strategies(ctx, many, 264, 136), ((many, 264, 136),))


def always_late(ctx, laggard, slow_s):
    cells = constant_lag(ctx, OP, laggard, 24, slow_s, strategies(ctx, 256))
    if ctx.is_cuda:
        cells += constant_lag(ctx, OP, laggard, 24, slow_s, IN_PIECES, (1024 * ctx.world, 1032, 520))
    return cells


def special_rows(ctx, rows):
    for strategy in strategies(ctx, rows):
        specials(ctx, OP, rows, strategy)


def mixed(ctx, rounds, slow_s):
    """The three ops in turn on one workspace, every form of gemm_ar, M from 1 to many, a rotating rank late."""
    rng = random.Random(12)
    results = []
    for turn in range(rounds):
        op = OPS[turn % len(OPS)]
        m = rng.choice(M[1:])
        n, k = rng.choice(NK[ctx.device.type][-1:] if ctx.is_cuda else NK["cpu"])
        case = Case(op, m if op == OP else max(m // ctx.world, 1), n, k, seed=turn)
        strategy = rng.choice(strategies(ctx, m, n, k) or ["auto"]) if op == OP else "fused"
        operands = make(ctx, case)
        slow = turn // 4 % ctx.world == ctx.rank
        if slow and turn % 4 == 0:
            ctx.stall(slow_s)
        results.append((strategy, case, call(operands, strategy=strategy)))
        if slow and turn % 4 == 2:
            ctx.stall(slow_s)
    findings = Findings()
    for strategy, case, y in results:
        want = make(ctx, case).expected().to(case.dtype)
        findings.add(f"{strategy} {case}", first_difference(y, want, rank=ctx.rank, rows_per_chunk=case.rows))
    return findings.finish()


def endurance(ctx, calls):
    """Very many calls of few rows without a look at the results in between, one rank late now and then, and on GPUs
    with large copies on another stream beside them. Every result is compared at once, on the device.
    """
    rng = random.Random(13)
    n, k = (1024, 1024) if ctx.is_cuda else (64, 64)
    cells = [make(ctx, Case(OP, m, n, k, seed=m, bias=m % 2 == 0)) for m in range(1, 17)]
    wanted = [operands.expected().to(operands.case.dtype) for operands in cells]
    pairs, forms = list(zip(cells, wanted, strict=True)), strategies(ctx)
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    if ctx.is_cuda:
        beside, noise = torch.cuda.Stream(), torch.zeros(2, 64 << 20, dtype=torch.uint8, device=ctx.device)
    for turn in range(calls):
        operands, want = rng.choice(pairs)
        late, lag = rng.randrange(100 * ctx.world), rng.random() * 1e-3
        if late == ctx.rank:
            ctx.stall(lag)
        if ctx.is_cuda and turn % 64 == 0:
            with torch.cuda.stream(beside):
                noise[1].copy_(noise[0])
        wrong += (call(operands, strategy=rng.choice(forms)) != want).any()
    assert wrong.item() == 0, f"{wrong.item()} of {calls} results are wrong"
    return calls


def in_form(ctx, form, case, *args):
    """A case of a fault, in the first configuration of this form."""
    (strategy, *_) = [name for name in strategies(ctx) if form in name]
    case(ctx, OP, *args, strategy=strategy)


def no_such_form(ctx):
    """What gemm_ar can't run is refused by name; the next good call works."""
    operands = make(ctx, Case(OP, 600, 72, 64))
    for strategy, words in (
        ("decomposed:chunks/c1", ["gemm_ar", "decomposed", "one is"]),
        ("fused:t64x64/p4", ["t64x64/p4", "two-shot/"]),
        ("fused:two-shot/t64x64/s9", ["two-shot/t64x64/s9"]),
        ("fused:three-shot/t64x64/s1", ["three-shot"]),
        ("fused:one-shot/t64x64/p4", ["512", "600"]),
    ):
        kind, message = refused(ctx, lambda s=strategy: call(operands, strategy=s))
        assert kind == "NotImplementedError", (kind, message)
        assert all(word in message for word in words), message
    assert check(ctx, Case(OP, 16, 72, 64, seed=1)) is None


def unlike_forms(ctx, culprit):
    """The culprit runs another form of a call that all have made before."""
    operands = make(ctx, case_of(ctx, OP))
    first, other = (next(name for name in strategies(ctx) if form in name) for form in FORMS)
    for strategy in (first, other):
        call(operands, strategy=strategy)
    call_and_sync(ctx, operands, other if ctx.rank == culprit else first)


class AllReduceCases:
    rounds = 600
    endurance_calls = 1000
    slow_s = 0.004
    timeout_s = 2

    def test_every_row_count(self, ranks, record_property):
        record_property("cells", ranks.run(every_row_count)[0])

    def test_all_ranks_have_the_same_bits(self, ranks, record_property):
        record_property("cells", ranks.run(same_bits)[0])

    def test_numbers_of_every_form(self, ranks):
        ranks.run(numbers)

    @pytest.mark.parametrize("rows", (5, 6, 130))
    def test_nan_and_inf_stay_in_their_rows(self, ranks, rows):
        ranks.run(special_rows, rows)

    @pytest.mark.parametrize("dtype", (BF16, FP16), ids=("bf16", "fp16"))
    def test_error_against_fp64(self, ranks, dtype, record_property):
        record_property("cells", ranks.run(errors_against_fp64, dtype)[0])

    def test_poisoned_workspace(self, ranks, record_property):
        record_property("cells", ranks.run(poisoned)[0])

    def test_mixed_with_the_other_ops(self, ranks, record_property):
        record_property("cells", ranks.run(mixed, self.rounds, self.slow_s)[0])

    def test_one_rank_always_late(self, ranks, record_property):
        record_property("cells", ranks.run(always_late, ranks.world - 1, self.slow_s)[0])

    def test_endurance(self, ranks, record_property):
        record_property("cells", ranks.run(endurance, self.endurance_calls)[0])

    @pytest.mark.worlds(2, 3, 4)
    @pytest.mark.cpu_is_enough
    def test_refusals_of_forms(self, ranks):
        ranks.run(no_such_form)

    @pytest.mark.parametrize("form", FORMS)
    def test_a_peer_too_late_is_named(self, spawn, form):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(in_form, form, late, self.timeout_s + 2.5, 1)
        expect_timeouts(outcomes, op=OP, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    @pytest.mark.parametrize("form", (*FORMS, *DECOMPOSED))
    def test_a_dead_peer_is_named(self, spawn, form):
        ranks = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)})
        outcomes = ranks.outcomes(in_form, form, dead, 1, "killed in a call")
        expect_timeouts(outcomes, op=OP, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    def test_unlike_forms(self, spawn):
        outcomes = spawn(2, {"FLUX_TIMEOUT": str(self.timeout_s)}).outcomes(unlike_forms, 1)
        expect_out_of_step(outcomes, op=OP, seconds=self.timeout_s + SLACK_S)
