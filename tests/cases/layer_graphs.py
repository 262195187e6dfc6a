"""CUDA graphs of layers: an MLP and a transformer block in several sizes, training steps; captures too soon."""

import gc
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, FP64, OPS, Case, check
from tests.cases.blocks import Mlp, parallel_block, parallel_mlp, whole_block
from tests.cases.graphs import capture, release
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_bias, exact_x, generator

HIDDEN, INNER = 256, 768
FUSED_ROWS = 16  # of a rank: for so few "auto" runs a fused gemm_ar, which needs a workspace


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
    """Layers on a group of their own, so that their graphs pin no memory of the others, and what they should compute.

    `sizes` are the numbers of tokens M that graphs are captured for.
    """

    def __init__(self, ctx, sequence_parallel):
        self.ctx, self.sequence_parallel = ctx, sequence_parallel
        self.group = dist.new_group(list(range(ctx.world)))

    def own(self, whole):
        return whole.chunk(self.ctx.world)[self.ctx.rank] if self.sequence_parallel else whole


class ExactMlp(Model):
    """Column-parallel layer, activation, row-parallel layer: every replay gives what the whole layers do."""

    def __init__(self, ctx, sequence_parallel):
        super().__init__(ctx, sequence_parallel)
        self.sizes = [rows * ctx.world for rows in (512, 128, 64, 32, 16, 8, 2, 1)]
        strategy = "fused" if sequence_parallel else "auto"
        whole = exact_mlp(ctx)
        self.layers = parallel_mlp(whole, group=self.group, sequence_parallel=sequence_parallel, strategy=strategy)
        self.whole = whole.to(FP64)

    def tokens(self, m, seed):
        return exact_x((m, HIDDEN), BF16, generator(self.ctx.device, seed, "x"))

    @torch.no_grad()
    def expected(self, tokens):
        return self.own(self.whole(tokens.double())).to(BF16)


class Transformer(Model):
    """A transformer block: every replay gives what an eager call does, bit by bit.

    "fused", as the sums of a collective may come in another order in a graph.
    """

    def __init__(self, ctx, sequence_parallel):
        super().__init__(ctx, sequence_parallel)
        self.sizes = [rows * ctx.world for rows in (256, 128, 64, 32, 16, 8, 2, 1)]
        self.hidden = 64 * ctx.world
        whole = whole_block(self.hidden, 128 * ctx.world, 64, BF16, ctx.device)
        options = {"group": self.group, "sequence_parallel": sequence_parallel, "strategy": "fused"}
        self.layers = parallel_block(whole, **options)

    def tokens(self, m, seed):
        """[s, b, h], of two sequences where TP divides their length."""
        batch = 2 if m % (2 * self.ctx.world) == 0 else 1
        gen = generator(self.ctx.device, seed, "x")
        return torch.randn(m // batch, batch, self.hidden, generator=gen, device=self.ctx.device).to(BF16)

    @torch.no_grad()
    def expected(self, tokens):
        return self.layers(self.own(tokens))


def noise(ctx):
    """NaN in what the allocator holds free: up to 2 GiB, which all ranks may have on one GPU."""
    free, _ = torch.cuda.mem_get_info()
    return torch.full((min(2 << 30, free // (2 * ctx.world)) // 4,), float("nan"), device=ctx.device)


def many_sizes(ctx, kind, sequence_parallel, turns, slow_s):
    """Graphs of descending sizes in one pool, noise in the allocator; replays in random order, eager calls between."""
    findings = Findings()
    model = kind(ctx, sequence_parallel)
    flux_ops.nn.prepare(model.layers, max(model.sizes), training=False)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    with torch.no_grad():
        for m in model.sizes:
            x = model.own(model.tokens(m, 0)).clone()
            model.layers(x)
            graphs.append((m, x, *capture(lambda x=x: model.layers(x), pool)))
        gc.collect()
        torch.cuda.empty_cache()
        held = noise(ctx)
        rng, outputs = random.Random(3), []
        for turn in range(turns):
            m, x, graph, y = rng.choice(graphs)
            x.copy_(model.own(model.tokens(m, turn)))
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
    del held
    release(ctx, model.group, graphs)
    return findings.finish()


def warmed(step):
    """A step on a stream beside, as autograd wants it ahead of a capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = step()
    torch.cuda.current_stream().wait_stream(side)
    return results


class TrainingStep:
    """Forward and backward of the MLP, with static inputs."""

    def __init__(self, ctx, sequence_parallel, rows):
        self.ctx, self.m = ctx, rows * ctx.world
        self.model = ExactMlp(ctx, sequence_parallel)
        self.layers = self.model.layers
        self.x = self.model.own(self.model.tokens(self.m, 0)).clone().requires_grad_()
        self.grad = torch.ones_like(self.x)

    def __call__(self):
        self.x.grad = None
        self.layers.zero_grad()
        y = self.layers(self.x)
        y.backward(self.grad)
        return y.detach()

    def captured(self):
        warmed(self)
        return capture(self)

    def replay(self, findings, graph, y, turn):
        """Results and gradients of a replay on new tokens are those of the whole layers."""
        ctx, model = self.ctx, self.model
        tokens = model.tokens(self.m, turn)
        with torch.no_grad():
            self.x.copy_(model.own(tokens))
        if turn % ctx.world == ctx.rank:
            ctx.stall(0.003)
        y.fill_(float("nan"))
        graph.replay()
        tokens = tokens.double().requires_grad_()
        model.whole.zero_grad()
        want = model.whole(tokens)
        want.sum().backward()
        findings.add(f"y {turn}", first_difference(y, model.own(want.detach()).to(BF16), rank=ctx.rank))
        up, down = self.layers.up, self.layers.down
        pairs = {
            "x": (self.x.grad, model.own(tokens.grad)),
            "up": (up.sharding.gather(up.weight.grad, model.group), model.whole.up.weight.grad),
            "down": (down.sharding.gather(down.weight.grad, model.group), model.whole.down.weight.grad),
        }
        for name, (got, exact) in pairs.items():  # sums of up to INNER terms are rounded
            error = ((got.double() - exact).norm() / exact.norm()).item()
            what = f"gradient of {name}, {turn}"
            findings.add(what, None if error < 1e-2 else f"rank {ctx.rank}: off by {error:.2e}")


def training_step(ctx, sequence_parallel, turns):
    """Forward and backward in one graph."""
    findings = Findings()
    step = TrainingStep(ctx, sequence_parallel, 64)
    flux_ops.nn.prepare(step.layers, step.m)
    graph, y = step.captured()
    for turn in range(turns):
        step.replay(findings, graph, y, turn)
    release(ctx, step.model.group, graph)
    return findings.finish()


def refused_capture(ctx, function):
    """What a capture of the function says where something was not prepared. The process works on: a call of an op on
    the group of all ranks is right.
    """
    with pytest.raises(Exception) as caught:  # noqa: PT011 (words are checked by the tests)
        capture(function)
    chain, error = [], caught.value
    while error is not None:
        chain.append(str(error))
        error = error.__context__
    for op in OPS:
        problem = check(ctx, Case(op, 16, 72, 64, seed=1))
        assert problem is None, f"after the refused capture: {problem}"
    return "\n".join(chain)


def warm_library(ctx):
    """A plain product: the library's own first call is not to be captured."""
    a = torch.ones(64, 64, dtype=BF16, device=ctx.device)
    torch.mm(a, a)
    ctx.sync()


def inference_too_soon(ctx, sequence_parallel):
    """A capture before anything was prepared says what to call; after that it works in the same process."""
    warm_library(ctx)
    model, m = ExactMlp(ctx, sequence_parallel), FUSED_ROWS * ctx.world
    tokens = model.tokens(m, 1)
    x = model.own(tokens).clone()
    with torch.no_grad():
        message = refused_capture(ctx, lambda: model.layers(x))
        flux_ops.nn.prepare(model.layers, m, training=False)
        graph, y = capture(lambda: model.layers(x))
        y.fill_(float("nan"))
        graph.replay()
    problem = first_difference(y, model.expected(tokens), rank=ctx.rank)
    assert problem is None, problem
    release(ctx, model.group, graph)
    return message


def training_too_soon(ctx, sequence_parallel):
    """The same of a training step."""
    findings = Findings()
    warm_library(ctx)
    step = TrainingStep(ctx, sequence_parallel, FUSED_ROWS)
    message = refused_capture(ctx, step)
    assert all(tensor.grad is None for tensor in (step.x, *step.layers.parameters())), "a gradient of a refused step"
    flux_ops.nn.prepare(step.layers, step.m)
    graph, y = step.captured()
    for turn in range(3):
        step.replay(findings, graph, y, turn)
    release(ctx, step.model.group, graph)
    findings.finish()
    return message


def backward_too_soon(ctx, layer_class, **options):
    """A layer that is ready for its forward alone: in a training step its backward says what to call.

    Of a column-parallel one without `save_gathered` a collective may be on its way then.
    """
    findings = Findings()
    warm_library(ctx)
    group, rows, hidden = dist.new_group(list(range(ctx.world))), 1024, 4096  # for fewer "auto" may run the sequence
    options |= {"group": group, "sequence_parallel": True, "dtype": BF16, "device": ctx.device}
    layer = layer_class(hidden, 2048 * ctx.world, **options)
    shape = (rows, hidden) if layer_class is ColumnParallelLinear else (rows * ctx.world, hidden // ctx.world)
    x = exact_x(shape, BF16, generator(ctx.device, 1, "x", ctx.rank)).requires_grad_()

    def step():
        x.grad = None
        layer.zero_grad()
        y = layer(x)
        y.backward(torch.ones_like(y))
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    flux_ops.nn.prepare(layer, rows * ctx.world, training=False)
    message = refused_capture(ctx, step)
    flux_ops.nn.prepare(layer, rows * ctx.world)
    wants = warmed(step)
    graph, gots = capture(step)
    for got in gots:
        got.fill_(float("nan"))
    graph.replay()
    for name, got, want in zip(("y", "x", "weight", "bias"), gots, wants, strict=True):
        findings.add(name, first_difference(got, want, rank=ctx.rank))
    release(ctx, group, graph)
    findings.finish()
    return message


over_sequence_parallel = pytest.mark.parametrize("sequence_parallel", (True, False))


class LayerGraphCases:
    @over_sequence_parallel
    def test_many_sizes_of_an_mlp_in_one_pool(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(many_sizes, ExactMlp, sequence_parallel, 1000, 0.003)[0])

    @over_sequence_parallel
    def test_many_sizes_of_a_transformer_block_in_one_pool(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(many_sizes, Transformer, sequence_parallel, 1000, 0.003)[0])

    @over_sequence_parallel
    def test_a_training_step_in_one_graph(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(training_step, sequence_parallel, 12)[0])

    @over_sequence_parallel
    def test_capture_before_prepare(self, ranks, sequence_parallel):
        for message in ranks.run(inference_too_soon, sequence_parallel):
            says_to_prepare(message, "ag_gemm" if sequence_parallel else "gemm_ar")

    @over_sequence_parallel
    def test_capture_of_a_training_step_before_prepare(self, ranks, sequence_parallel):
        for message in ranks.run(training_too_soon, sequence_parallel):
            says_to_prepare(message, "ag_gemm" if sequence_parallel else "gemm_ar")

    @pytest.mark.parametrize("world", (2, 4))
    def test_capture_of_a_training_step_prepared_for_inference(self, spawn, world):
        ranks = spawn(world)
        for message in ranks.run(backward_too_soon, RowParallelLinear):
            says_to_prepare(message, "ag_gemm")
        for save_gathered in (True, False) if world > 2 else ():  # of two, the forward's ag_gemm needs as much memory
            for message in ranks.run(backward_too_soon, ColumnParallelLinear, save_gathered=save_gathered):
                says_to_prepare(message, "gemm_rs")


def says_to_prepare(message, op):
    assert f"{op}: the workspace" in message, message
    assert "Call flux_ops.prepare" in message, message
