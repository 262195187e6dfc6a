"""CUDA graphs of layers: an MLP in several sizes, its training step, a transformer block; captures too soon."""

import gc
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flux_ops
from tests.cases.base import BF16, FP64
from tests.cases.blocks import Mlp, parallel_block, parallel_mlp, whole_block
from tests.cases.graphs import capture, release
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_bias, exact_x, generator

HIDDEN, INNER = 256, 768


def clamp(x):
    return x.clamp(-1, 1)


def exact_mlp(ctx):
    """An MLP of whole layers in exact data: every sum is a small integer, and the activation keeps it so."""
    layers = []
    for seed, (inputs, outputs) in enumerate(((HIDDEN, INNER), (INNER, HIDDEN))):
        layer = nn.Linear(inputs, outputs, dtype=BF16, device=ctx.device)
        with torch.no_grad():
            layer.weight.copy_(exact_x((outputs, inputs), BF16, generator(ctx.device, seed, "weight")))
            layer.bias.copy_(exact_bias(outputs, BF16, generator(ctx.device, seed, "bias")))
        layers.append(layer)
    return Mlp(*layers, clamp)


class Model:
    """The MLP on a group of its own, so that its graphs pin no memory of the others, and what it should compute."""

    def __init__(self, ctx, sequence_parallel):
        strategy = "fused" if sequence_parallel else "auto"
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        self.group = dist.new_group(list(range(ctx.world)))
        whole = exact_mlp(ctx)
        self.layers = parallel_mlp(whole, group=self.group, sequence_parallel=sequence_parallel, strategy=strategy)
        self.whole = whole.to(FP64)

    def own(self, whole):
        return whole.chunk(self.ctx.world)[self.ctx.rank] if self.sequence_parallel else whole

    def tokens(self, m, seed, role="x"):
        return exact_x((m, HIDDEN), BF16, generator(self.ctx.device, seed, role))

    @torch.no_grad()
    def expected(self, tokens):
        return self.own(self.whole(tokens.double())).to(BF16)


def many_sizes(ctx, sequence_parallel, turns, slow_s):
    """Graphs of descending sizes in one pool, noise in the allocator; replays in random order, eager calls between."""
    findings = Findings()
    model = Model(ctx, sequence_parallel)
    sizes = [rows * ctx.world for rows in (512, 128, 64, 32, 16, 8, 2, 1)]
    flux_ops.nn.prepare(model.layers, max(sizes), training=False)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    with torch.no_grad():
        for m in sizes:
            x = model.own(model.tokens(m, 0)).clone()
            model.layers(x)
            graphs.append((m, x, *capture(lambda x=x: model.layers(x), pool)))
        gc.collect()
        torch.cuda.empty_cache()
        noise = torch.full((1 << 28,), float("nan"), device=ctx.device)
        rng, outputs = random.Random(3), []
        for turn in range(turns):
            m, x, graph, y = rng.choice(graphs)
            tokens = model.tokens(m, turn)
            x.copy_(model.own(tokens))
            if turn % ctx.world == ctx.rank and turn % 20 < ctx.world:
                ctx.stall(slow_s)
            y.fill_(float("nan"))
            graph.replay()
            outputs.append((f"replay {turn} of M = {m}", turn, m, y.clone()))
            if turn % 10 == 9:
                m = 24 * ctx.world
                y = model.layers(model.own(model.tokens(m, turn)))
                outputs.append((f"eager call after {turn}", turn, m, y))
        for what, turn, m, y in outputs:
            want = model.expected(model.tokens(m, turn))
            findings.add(what, first_difference(y, want, rank=ctx.rank))
    del noise
    release(ctx, model.group, graphs)
    return findings.finish()


def training_step(ctx, sequence_parallel, turns):
    """Forward and backward in one graph: results and gradients of each replay are those of the whole layers."""
    findings = Findings()
    model, m = Model(ctx, sequence_parallel), 64 * ctx.world
    flux_ops.nn.prepare(model.layers, m)
    x = model.own(model.tokens(m, 0)).clone().requires_grad_()
    grad = torch.ones_like(x)

    def step():
        x.grad = None
        model.layers.zero_grad()
        y = model.layers(x)
        y.backward(grad)
        return y.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph, y = capture(step)
    up, down = model.layers.up, model.layers.down
    for turn in range(turns):
        tokens = model.tokens(m, turn)
        with torch.no_grad():
            x.copy_(model.own(tokens))
        if turn % ctx.world == ctx.rank:
            ctx.stall(0.003)
        graph.replay()
        tokens = tokens.double().requires_grad_()
        model.whole.zero_grad()
        want = model.whole(tokens)
        want.sum().backward()
        findings.add(f"y {turn}", first_difference(y, model.own(want.detach()).to(BF16), rank=ctx.rank))
        pairs = {
            "x": (x.grad, model.own(tokens.grad)),
            "up": (up.sharding.gather(up.weight.grad, model.group), model.whole.up.weight.grad),
            "down": (down.sharding.gather(down.weight.grad, model.group), model.whole.down.weight.grad),
        }
        for name, (got, exact) in pairs.items():  # sums of up to INNER terms are rounded
            error = ((got.double() - exact).norm() / exact.norm()).item()
            findings.add(
                f"gradient of {name}, {turn}", None if error < 1e-2 else f"rank {ctx.rank}: off by {error:.2e}"
            )
    release(ctx, model.group, graph)
    return findings.finish()


def block(ctx, sequence_parallel, turns):
    """A transformer block: replays give what eager calls do."""
    findings = Findings()
    group = dist.new_group(list(range(ctx.world)))
    hidden = 64 * ctx.world
    whole = whole_block(hidden, 128 * ctx.world, 64, BF16, ctx.device)
    model = parallel_block(whole, group=group, sequence_parallel=sequence_parallel)
    tokens, batch = 32 * ctx.world, 2
    flux_ops.nn.prepare(model, tokens * batch, training=False)
    rows = tokens // ctx.world if sequence_parallel else tokens
    seed = ctx.rank if sequence_parallel else 0

    def make(turn):
        return torch.randn(rows, batch, hidden, generator=generator(ctx.device, turn, "x", seed), device=ctx.device)

    with torch.no_grad():
        x = make(0).to(BF16)
        model(x)
        graph, y = capture(lambda: model(x))
        for turn in range(turns):
            x.copy_(make(turn))
            if turn % ctx.world == ctx.rank:
                ctx.stall(0.003)
            y.fill_(float("nan"))
            graph.replay()
            got, want = y.double(), model(x).double()
            error = ((got - want).norm() / want.norm()).item()
            findings.add(f"replay {turn}", None if error < 1e-3 else f"rank {ctx.rank}: off by {error:.2e} of its norm")
    release(ctx, group, graph)
    return findings.finish()


def too_soon(ctx):
    """A capture before anything was prepared says what to call; after that it works in the same process."""
    model, m = Model(ctx, True), 512 * ctx.world
    tokens = model.tokens(m, 1)
    x = model.own(tokens).clone()
    with torch.no_grad():
        with pytest.raises(Exception) as caught:  # noqa: PT011 (words are checked below)
            capture(lambda: model.layers(x))
        chain, error = [], caught.value
        while error is not None:
            chain.append(str(error))
            error = error.__context__
        flux_ops.nn.prepare(model.layers, m, training=False)
        graph, y = capture(lambda: model.layers(x))
        y.fill_(float("nan"))
        graph.replay()
    problem = first_difference(y, model.expected(tokens), rank=ctx.rank)
    assert problem is None, problem
    release(ctx, model.group, graph)
    return "\n".join(chain)


class LayerGraphCases:
    @pytest.mark.parametrize("sequence_parallel", (True, False))
    def test_many_sizes_of_an_mlp_in_one_pool(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(many_sizes, sequence_parallel, 1000, 0.003)[0])

    @pytest.mark.parametrize("sequence_parallel", (True, False))
    def test_a_training_step_in_one_graph(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(training_step, sequence_parallel, 12)[0])

    @pytest.mark.parametrize("sequence_parallel", (True, False))
    def test_a_transformer_block(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(block, sequence_parallel, 20)[0])

    def test_capture_before_prepare(self, ranks):
        for message in ranks.run(too_soon):
            assert "prepare" in message, message
