import threading
import time

import pytest
import torch.distributed as dist

import flux_ops
from tests.cases.base import OPS, Case, call, check, make
from tests.cases.errors import ErrorCases


def second_thread(ctx, op):
    """While a thread waits for the peers in a call, another one is refused; the first one's result is right."""
    case = Case(op, 16, 24, 40)
    assert check(ctx, case) is None
    if ctx.rank == 0:
        results = []
        operands = make(ctx, case)
        flux_ops.dispatch_counts(reset=True)
        first = threading.Thread(target=lambda: results.append(check(ctx, case)))
        first.start()
        while not flux_ops.dispatch_counts():  # the call has begun, and can't end without the peer
            time.sleep(0.01)
        for what, refused in ((op, lambda: call(operands)), ("prepare", prepare), ("destroy", flux_ops.destroy)):
            with pytest.raises(RuntimeError, match=f"{what}: another thread is in a call on group"):
                refused()
        dist.barrier()
        first.join()
        assert results == [None]
    else:
        dist.barrier()
        assert check(ctx, case) is None
    assert check(ctx, case) is None


def prepare():
    flux_ops.prepare(max_m=1024, n=256, k=256, device="cpu")


class TestErrors(ErrorCases):
    pass


class TestThreads:
    @pytest.mark.worlds(2)
    @pytest.mark.parametrize("op", OPS)
    def test_a_second_thread_is_refused(self, ranks, op):
        ranks.run(second_thread, op)
