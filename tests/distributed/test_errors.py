import threading
import time

import pytest
import torch
import torch.distributed as dist

import flux_ops
from tests.cases.base import FP64, OPS, Case, call, check, make
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


def call_beside_prepare(ctx, op):
    """The same the other way round: the thread is in flux_ops.prepare, where it waits for the peer."""
    case = Case(op, 1024, 256, 256, seed=3)
    group = dist.new_group(list(range(ctx.world)))
    if ctx.rank == 0:
        hooks, agreeing = flux_ops.ops._hooks, threading.Event()
        plain = hooks.agree
        hooks.agree = lambda *args: agreeing.set() or plain(*args)
        first = threading.Thread(target=prepare, args=(group,))
        first.start()
        assert agreeing.wait(20)
        with pytest.raises(RuntimeError, match=f"{op}: another thread is in a call on group"):
            call(make(ctx, case, group), group=group)
        dist.barrier()
        first.join()
        hooks.agree = plain
    else:
        dist.barrier()
        prepare(group)
    assert check(ctx, case, group=group) is None


def first_call_alone(ctx, op):
    """Where the first call of a group has failed for want of a peer, destroy() on all ranks, equally often, helps."""
    case = Case(op, 16, 24, 40)
    for times in (1, 2):
        group = dist.new_group(list(range(ctx.world)))
        if ctx.rank == 0:
            flux_ops.set_timeout(0.5)
            for _ in range(2):  # the second one is refused at once
                with pytest.raises(dist.DistBackendError):
                    call(make(ctx, case, group), group=group)
            flux_ops.set_timeout(30)
        dist.barrier()
        for _ in range(times):
            flux_ops.destroy(group)
        assert check(ctx, case, group=group) is None


def slow_products(ctx):
    """The timeout is of a wait: a rank whose own products take longer than that still waits for its peer."""
    operands = make(ctx, Case("ag_gemm", 2048, 2048, 2048, FP64, seed=4))
    call(operands, strategy="fused")
    started = time.monotonic()
    call(operands, strategy="fused")
    took = torch.tensor(time.monotonic() - started)
    dist.all_reduce(took, dist.ReduceOp.MIN)
    seconds = 0.4 * took.item()  # the own products are half of it, and come before the wait
    flux_ops.set_timeout(seconds)
    try:
        if ctx.rank == 1:
            time.sleep(0.6 * took.item())  # so that the other one has to wait
        call(operands, strategy="fused")
    finally:
        flux_ops.set_timeout(30)


def prepare(group=None):
    flux_ops.prepare(max_m=1024, n=256, k=256, group=group, device="cpu")


class TestErrors(ErrorCases):
    pass


class TestThreads:
    @pytest.mark.worlds(2)
    @pytest.mark.parametrize("op", OPS)
    def test_a_second_thread_is_refused(self, ranks, op):
        ranks.run(second_thread, op)

    @pytest.mark.worlds(2)
    @pytest.mark.parametrize("op", OPS)
    def test_a_call_beside_prepare_is_refused(self, ranks, op):
        ranks.run(call_beside_prepare, op)


class TestFirstCallAlone:
    @pytest.mark.worlds(2, 3)
    @pytest.mark.parametrize("op", OPS)
    def test_destroy_mends_the_group(self, ranks, op):
        ranks.run(first_call_alone, op)


class TestSlowProducts:
    def test_own_products_are_not_waits(self, spawn):
        spawn(2, {"FLUX_CPU_THREADS": "1"}).run(slow_products)
