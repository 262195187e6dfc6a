"""In which order a rank computes the chunks: by its rank, or with "/same-order" that of rank 0 on all of them."""

import pytest

from flux_ops import config, extension
from tests.cases.base import Case, check

pytestmark = pytest.mark.skipif(extension.module is None, reason=f"no compiled part: {extension.why_not_loaded}")


def chunks_of(ctx, op, strategy):
    """The chunks in order of completion. One worker ends them in the order in which it begins them, also those that it
    computes side by side.
    """
    core = extension.module
    core.set_cpu_threads(1)
    try:
        problem = check(ctx, Case(op, 130, 72, 64), strategy=strategy)
    finally:
        core.set_cpu_threads(config.settings.cpu_threads)
    assert problem is None, problem
    return [chunk for chunk, _ in core.last_trace()]


def order(op, rank, world):
    """As schedule/chunk_order.hpp draws it."""
    return [(rank - step if op == "ag_gemm" else rank + 1 + step) % world for step in range(world)]


@pytest.mark.parametrize("op", ("ag_gemm", "gemm_rs"))
def test_order_of_chunks(ranks, op):
    by_rank = ranks.run(chunks_of, op, "fused:t64x64/p2")
    assert by_rank == [order(op, rank, ranks.world) for rank in range(ranks.world)]
    assert ranks.run(chunks_of, op, "fused:t64x64/p2/same-order") == [order(op, 0, ranks.world)] * ranks.world
