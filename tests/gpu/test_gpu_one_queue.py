"""All streams of a process share one queue of the GPU, as Megatron-LM wants it: nothing waits for what comes later."""

import pytest

from tests.cases.allreduce import always_late
from tests.cases.base import OPS
from tests.cases.graphs import replays, replays_in_pieces
from tests.cases.reuse import constant_lag, short_k

SLOW_S = 0.004


@pytest.mark.parametrize("world", (2, 4))
def test_calls_and_replays_end(spawn, world, record_property):
    ranks = spawn(world, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})
    runs = [(short_k, 8), (replays_in_pieces, SLOW_S), (always_late, world - 1, SLOW_S)]
    runs += [(replays, op, SLOW_S) for op in OPS]
    runs += [(constant_lag, op, world - 1, 20, SLOW_S) for op in OPS]
    record_property("cells", sum(ranks.run(*run)[0] for run in runs))
