"""In which order a rank computes the chunks and, of gemm_rs, their pieces: by its rank, or with "/same-order" that of
rank 0 on all of them."""

import pytest

from flux_ops import config, extension
from tests.cases.base import Case, check

pytestmark = pytest.mark.skipif(extension.module is None, reason=f"no compiled part: {extension.why_not_loaded}")


PIECES = 2


def trace_of(ctx, op, strategy):
    """What the rank computes, in the order in which one worker ends it: chunks, or of gemm_rs (chunk, piece)."""
    core = extension.module
    core.set_cpu_threads(1)
    try:
        problem = check(ctx, Case(op, 130, 72, 64), strategy=strategy)
    finally:
        core.set_cpu_threads(config.settings.cpu_threads)
    assert problem is None, problem
    return [chunk if op == "ag_gemm" else (chunk, piece) for chunk, piece, *_ in core.last_trace()]


def by_chunk(op, rank, world):
    """As schedule/chunk_order.hpp draws it."""
    chunks = [(rank - step if op == "ag_gemm" else rank + 1 + step) % world for step in range(world)]
    return chunks if op == "ag_gemm" else [(chunk, piece) for chunk in chunks for piece in range(PIECES)]


def interleaved(rank, world):
    """The chunks of the peers piece after piece, then the own one."""
    peers = [(rank + 1 + step) % world for step in range(world - 1)]
    return [(chunk, piece) for piece in range(PIECES) for chunk in peers] + [(rank, piece) for piece in range(PIECES)]


@pytest.mark.parametrize("op", ("ag_gemm", "gemm_rs"))
def test_order_of_chunks(ranks, op):
    world, kernel = ranks.world, f"fused:t64x64/p{PIECES}"
    wanted = [by_chunk(op, r, world) if op == "ag_gemm" else interleaved(r, world) for r in range(world)]
    assert ranks.run(trace_of, op, kernel) == wanted
    assert ranks.run(trace_of, op, f"{kernel}/same-order") == [by_chunk(op, 0, world)] * world
