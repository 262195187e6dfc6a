import dataclasses
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

import flux_ops
from tests.cases.base import OPS, call, make
from tests.cases.faults import FaultCases, case_of, good_call


def interrupted(ctx, op, strategy):
    """A signal's handler ends a call that waits for a peer; when all ranks have begun anew, all is well."""
    good_call(ctx, op, strategy)
    operands = make(ctx, case_of(ctx, op, 99))
    if ctx.rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            call(operands, strategy=strategy)
        assert time.monotonic() - started < 10.0
        with pytest.raises(dist.DistBackendError, match="KeyboardInterrupt"):
            call(operands, strategy=strategy)
    flux_ops.destroy()
    good_call(ctx, op, strategy)


def refused_in_sequence(ctx, culprit):
    """Torch's collectives would pair the culprit's next call with the one that it was refused."""
    good_call(ctx, "gemm_ar", "sequential")
    operands = make(ctx, case_of(ctx, "gemm_ar", 1))
    if ctx.rank == culprit:
        with pytest.raises(ValueError, match="K"):
            flux_ops.gemm_ar(operands.x[:, :-1], operands.weight, strategy="sequential")
    call(operands, strategy="sequential")


def refused_at_first(ctx, culprit):
    """On the first call of a shape every rank hears of the refusal: they stay in step."""
    good_call(ctx, "gemm_ar", "sequential")
    operands = make(ctx, dataclasses.replace(case_of(ctx, "gemm_ar", 1), rows=24))
    x = operands.x[:, :-1] if ctx.rank == culprit else operands.x
    with pytest.raises(ValueError, match="K"):
        flux_ops.gemm_ar(x, operands.weight, strategy="sequential")
    good_call(ctx, "gemm_ar", "sequential")


class TestFaults(FaultCases):
    fault_world = 4

    def test_a_refusal_that_all_hear_of(self, spawn):
        spawn(2, self.limit()).run(refused_at_first, 1)

    def test_a_refusal_in_sequence(self, spawn):
        outcomes = spawn(2, self.limit()).outcomes(refused_in_sequence, 1)
        assert all(outcome.status != "ok" for outcome in outcomes)
        assert "DistBackendError" in outcomes[1].kinds, outcomes[1].describe()
        assert "to make the same call" in outcomes[1].message

    @pytest.mark.parametrize("strategy", ("fused", "decomposed"))
    def test_interrupt(self, spawn, strategy):
        ranks = spawn(2, {"FLUX_TIMEOUT": "30"})
        for op in OPS:
            ranks.run(interrupted, op, strategy)
