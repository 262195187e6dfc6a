"""A peer that is late, dead or elsewhere: every rank that lives gets an error that names it, within the time.

Each case has ranks of its own: on a GPU a wait that ran out ends the context, and a dead rank is not revived.
"""

import dataclasses
import os
import re
import signal
import threading
import time

import pytest
import torch.distributed as dist

import flux_ops
from tests.cases.base import BF16, FP16, OPS, Case, call, make
from tests.harness.compare import assert_same

SLACK_S = 12.0  # beyond the timeout: start of kernels, exchange of workspaces, a busy machine


def case_of(ctx, op, seed=0):
    rows, n, k = (256, 512, 1024) if ctx.is_cuda else (32, 72, 64)
    return Case(op, rows, n, k, seed=seed)


def call_and_sync(ctx, operands, strategy="fused"):
    """On a GPU a wait that ran out ends the kernel: the synchronisation fails, and the next call says why."""
    y = call(operands, strategy=strategy)
    try:
        ctx.sync()
    except RuntimeError:
        call(operands, strategy=strategy)
        raise
    return y


def calls_until_error(ctx, op, count=4, strategy="fused"):
    for seed in range(count):
        call_and_sync(ctx, make(ctx, case_of(ctx, op, seed)), strategy)


def good_call(ctx, op, strategy="fused"):
    operands = make(ctx, case_of(ctx, op, 99))
    y = call(operands, strategy=strategy)
    assert_same(y, operands.expected().to(BF16), rank=ctx.rank)


def late(ctx, op, seconds, culprit, strategy="fused"):
    """The culprit comes `seconds` late to its second call."""
    good_call(ctx, op, strategy)
    if ctx.rank == culprit:
        time.sleep(seconds)
    operands = make(ctx, case_of(ctx, op, 5))
    y = call_and_sync(ctx, operands, strategy)
    calls_until_error(ctx, op, 1, strategy)
    assert_same(y, operands.expected().to(BF16), rank=ctx.rank)


def dead(ctx, op, culprit, how, strategy="fused"):
    good_call(ctx, op, strategy)
    if ctx.rank == culprit:
        if how == "killed before the call":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "killed in a call":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        elif how == "raises before the call":
            raise KeyError("planted")
    elif how == "killed in a call":
        time.sleep(1.0)
    calls_until_error(ctx, op, strategy=strategy)


def other_op(ctx, op, culprit):
    """The culprit calls another op, with operands that fit it."""
    for one in OPS:
        good_call(ctx, one)
    mine = op if ctx.rank != culprit else OPS[OPS.index(op) - 1]
    calls_until_error(ctx, mine, 2)


def unlike_arguments(ctx, op, what, culprit):
    """Unlike calls of shapes that each rank has used before end in an error, the first of them: no result is wrong."""
    case = case_of(ctx, op)
    other = {
        "rows": dataclasses.replace(case, rows=case.rows + 8),
        "n": dataclasses.replace(case, n=case.n + 8),
        "k": dataclasses.replace(case, k=case.k + 8),
        "dtype": dataclasses.replace(case, dtype=FP16),
    }[what]
    for one in (case, other):
        operands = make(ctx, one)
        assert_same(call(operands), operands.expected().to(one.dtype), rank=ctx.rank)
    call_and_sync(ctx, make(ctx, other if ctx.rank == culprit else case))


def refused_alone(ctx, op, culprit):
    """One rank is refused a call that its peers make: they are out of step, and no later call may pair wrongly."""
    case = case_of(ctx, op)
    first = make(ctx, case)
    assert_same(call(first), first.expected().to(case.dtype), rank=ctx.rank)
    for seed in (1, 2):
        operands = make(ctx, dataclasses.replace(case, seed=seed))
        if ctx.rank == culprit and seed == 1:
            with pytest.raises(ValueError, match="K"):
                getattr(flux_ops, op)(operands.x[:, :-1], operands.weight)
        else:
            call_and_sync(ctx, operands)


def destroyed_alone(ctx, op, culprit):
    """A rank that alone begins anew is told apart at once; when all have, all is well."""
    good_call(ctx, op)
    if ctx.rank == culprit:
        flux_ops.destroy()
    started = time.monotonic()
    case = dataclasses.replace(case_of(ctx, op, 3), rows=24)
    if ctx.rank != culprit:
        with pytest.raises(dist.DistBackendError, match="destroy"):
            call(make(ctx, case))
        assert time.monotonic() - started < 10.0
        flux_ops.destroy()
    operands = make(ctx, case)
    assert_same(call(operands), operands.expected().to(case.dtype), rank=ctx.rank)


def set_timeout_and_wait(ctx, culprit, seconds):
    """flux_ops.set_timeout acts on calls that follow."""
    good_call(ctx, "ag_gemm")
    flux_ops.set_timeout(seconds)
    if ctx.rank == culprit:
        time.sleep(seconds + 2.0)
    calls_until_error(ctx, "ag_gemm", 2)


def names(message, rank):
    """Whether an error of another rank says so of this one: among ranks, not as an epoch, a piece or a tile."""
    return re.search(rf"\b(peer|[Rr]anks?) (\d+, )*{rank}\b", message) is not None


def expect_out_of_step(outcomes, *, op, seconds):
    """Each rank, whoever began it, has the error of a wait."""
    for outcome in outcomes:
        text = outcome.describe()
        assert outcome.status == "error", text
        assert "DistBackendError" in outcome.kinds, text
        assert op in outcome.message, text
        assert outcome.seconds < seconds, text


def expect_timeouts(outcomes, *, op, culprit, seconds, culprit_too=True):
    for outcome in outcomes:
        if outcome.rank == culprit and not culprit_too:
            continue
        text = outcome.describe()
        assert outcome.status == "error", text
        assert outcome.seconds < seconds, f"took {outcome.seconds:.1f} s, allowed {seconds}: {text}"
        if outcome.rank != culprit:
            assert "DistBackendError" in outcome.kinds, text
            assert op in outcome.message, text
            assert names(outcome.message, culprit), f"doesn't name rank {culprit}: {text}"


CPU_IS_ENOUGH = pytest.mark.cpu_is_enough  # each of these cases costs a start of ranks
DEATHS = (
    "killed in a call",
    pytest.param("killed before the call", marks=CPU_IS_ENOUGH),
    pytest.param("raises before the call", marks=CPU_IS_ENOUGH),
)


class FaultCases:
    timeout_s = 2

    def limit(self):
        return {"FLUX_TIMEOUT": str(self.timeout_s)}

    def test_a_late_peer_is_waited_for(self, spawn):
        ranks = spawn(2, {"FLUX_TIMEOUT": "20"})
        for op in OPS:
            ranks.run(late, op, 2.0, 1)

    @pytest.mark.parametrize("op", OPS)
    def test_a_peer_too_late_is_named(self, spawn, op):
        outcomes = spawn(2, self.limit()).outcomes(late, op, self.timeout_s + 2.5, 1)
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    @pytest.mark.parametrize("how", DEATHS)
    @pytest.mark.parametrize("op", OPS)
    def test_a_dead_peer_is_named(self, spawn, op, how):
        world = self.fault_world
        outcomes = spawn(world, self.limit()).outcomes(dead, op, world - 1, how)
        expect_timeouts(outcomes, op=op, culprit=world - 1, seconds=self.timeout_s + SLACK_S, culprit_too=False)

    @pytest.mark.parametrize("op", ("gemm_rs", "gemm_ar", pytest.param("ag_gemm", marks=CPU_IS_ENOUGH)))
    def test_a_peer_in_another_op(self, spawn, op):
        outcomes = spawn(2, self.limit()).outcomes(other_op, op, 1)
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S)

    @pytest.mark.parametrize("check", ("1", "0"), ids=("later call", "FLUX_CHECK=0"))
    @pytest.mark.parametrize(
        "op, what",
        (
            ("ag_gemm", "rows"),
            ("gemm_rs", "rows"),
            ("gemm_ar", "rows"),
            pytest.param("gemm_ar", "n", marks=CPU_IS_ENOUGH),
            pytest.param("ag_gemm", "k", marks=CPU_IS_ENOUGH),
            pytest.param("gemm_rs", "n", marks=CPU_IS_ENOUGH),
            pytest.param("gemm_rs", "dtype", marks=CPU_IS_ENOUGH),
        ),
    )
    def test_unlike_arguments(self, spawn, op, what, check):
        """Both ranks know both shapes, or nobody checks: no comparison takes place before the call."""
        outcomes = spawn(2, {**self.limit(), "FLUX_CHECK": check}).outcomes(unlike_arguments, op, what, 1)
        expect_out_of_step(outcomes, op=op, seconds=self.timeout_s + SLACK_S)

    @pytest.mark.parametrize(
        "op",
        ("ag_gemm", pytest.param("gemm_rs", marks=CPU_IS_ENOUGH), pytest.param("gemm_ar", marks=CPU_IS_ENOUGH)),
    )
    def test_a_call_that_one_rank_alone_is_refused(self, spawn, op):
        outcomes = spawn(2, self.limit()).outcomes(refused_alone, op, 1)
        expect_out_of_step(outcomes, op=op, seconds=self.timeout_s + SLACK_S)

    @pytest.mark.parametrize("op", (pytest.param("ag_gemm", marks=CPU_IS_ENOUGH),))
    def test_a_rank_that_alone_begins_anew(self, spawn, op):
        spawn(2, {"FLUX_TIMEOUT": "30"}).run(destroyed_alone, op, 1)

    def test_set_timeout(self, spawn):
        outcomes = spawn(2, {"FLUX_TIMEOUT": "60"}).outcomes(set_timeout_and_wait, 1, self.timeout_s)
        expect_timeouts(outcomes, op="ag_gemm", culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)
