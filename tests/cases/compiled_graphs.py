"""torch.compile(mode="reduce-overhead"): Inductor keeps compiled layers as CUDA graphs, and replays them."""

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.cases.graphs import release
from tests.cases.layer_graphs import ExactMlp, TrainingStep, over_sequence_parallel
from tests.harness.compare import Findings, first_difference

TURNS = 8  # of which two may be eager: the compilation's own, and the one that warms up


@contextlib.contextmanager
def replays_of_graphs(at_least):
    """What runs inside makes so many replays of CUDA graphs, or more."""
    real = torch.cuda.CUDAGraph.replay
    with mock.patch.object(torch.cuda.CUDAGraph, "replay", autospec=True, side_effect=real) as replay:
        yield
    assert replay.call_count >= at_least, f"{replay.call_count} replays, not {at_least} or more"


def reduce_overhead(layers):
    torch._dynamo.reset()
    return torch.compile(layers, mode="reduce-overhead", fullgraph=True, dynamic=False)


def let_go(ctx, group, *held):
    """The compiled graphs, and then the group that they call."""
    from torch._inductor.cudagraph_trees import reset_cudagraph_trees

    torch._dynamo.reset()
    reset_cudagraph_trees()
    release(ctx, group, *held)


def inference(ctx, sequence_parallel):
    """Several sizes, one after the other and in turn; nothing is prepared, as the warm-up of a graph does it."""
    findings = Findings()
    model = ExactMlp(ctx, sequence_parallel)
    compiled = reduce_overhead(model.layers)
    sizes = model.sizes[1::3]
    with torch.no_grad(), replays_of_graphs(len(sizes) * (TURNS - 2)):
        for turn, m in enumerate([*(m for m in sizes for _ in range(TURNS // 2)), *(TURNS // 2 * sizes)]):
            tokens = model.tokens(m, turn)
            if turn % ctx.world == ctx.rank:
                ctx.stall(0.003)
            torch.compiler.cudagraph_mark_step_begin()
            y = compiled(model.own(tokens))
            what = f"call {turn}, M = {m}"
            findings.add(what, first_difference(y, model.expected(tokens), rank=ctx.rank))
    let_go(ctx, model.group, y)
    return findings.finish()


def training_step(ctx, sequence_parallel):
    """Forward and backward, each a graph."""
    findings = Findings()
    step = TrainingStep(ctx, sequence_parallel, 64)
    step.layers = reduce_overhead(step.layers)
    with replays_of_graphs(2 * (TURNS - 3)):
        y = step().clone()
        graph = SimpleNamespace(replay=lambda: y.copy_(step()))
        for turn in range(TURNS):
            torch.compiler.cudagraph_mark_step_begin()
            step.replay(findings, graph, y, turn)
    let_go(ctx, step.model.group, graph)
    return findings.finish()


class CompiledGraphCases:
    @over_sequence_parallel
    def test_reduce_overhead(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(inference, sequence_parallel)[0])

    @pytest.mark.worlds(2, 4)
    @over_sequence_parallel
    def test_reduce_overhead_of_a_training_step(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(training_step, sequence_parallel)[0])
