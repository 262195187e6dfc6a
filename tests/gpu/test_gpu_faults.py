import time

import pytest

from tests.cases.base import Case, call, make
from tests.cases.faults import SLACK_S, FaultCases, expect_timeouts
from tests.cases.graphs import capture


def late_replay(ctx, op, seconds, culprit):
    """The culprit comes `seconds` late to the second replay of a graph of one call: the others wait where it begins,
    as that call is to use the region of the one before.
    """
    operands = make(ctx, Case(op, 1024, 4096, 1024))  # more tiles than SMs: no block has one of the own chunk at first
    call(operands, strategy="fused")
    graph, _ = capture(lambda: call(operands, strategy="fused"))
    graph.replay()
    ctx.sync()
    if ctx.rank == culprit:
        time.sleep(seconds)
    graph.replay()
    try:
        ctx.sync()
    except RuntimeError:
        call(operands, strategy="fused")  # says why
        raise


class TestGpuFaults(FaultCases):
    fault_world = 2
    timeout_s = 4  # the first call loads kernels

    @pytest.mark.parametrize("op", ("ag_gemm", "gemm_rs"))
    def test_a_peer_too_late_to_a_replay_is_named(self, spawn, op):
        outcomes = spawn(2, self.limit()).outcomes(late_replay, op, self.timeout_s + 2.5, 1)
        expect_timeouts(outcomes, op=op, culprit=1, seconds=self.timeout_s + SLACK_S, culprit_too=False)
        if op == "gemm_rs":  # the tiles of ag_gemm may be the first that time out, waiting for data
            assert "to finish the calls before that one" in outcomes[0].message, outcomes[0].describe()
