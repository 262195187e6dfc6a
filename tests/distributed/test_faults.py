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


class TestFaults(FaultCases):
    fault_world = 4

    @pytest.mark.parametrize("strategy", ("fused", "decomposed"))
    def test_interrupt(self, spawn, strategy):
        ranks = spawn(2, {"FLUX_TIMEOUT": "30"})
        for op in OPS:
            ranks.run(interrupted, op, strategy)
