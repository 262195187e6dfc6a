"""Layers and styles at sizes where `auto` overlaps forward and backward on GPUs, too, in exact data.

The layers of tests/cases/layers.py are small: on GPUs the plain sequence is faster for their backward.
"""

import pytest
import torch
from torch import nn

import flux_ops
from flux_ops import inductor
from tests.cases.base import BF16, FP32, FP64
from tests.cases.layers import KINDS, Cell
from tests.cases.parallel_styles import both_styles, mesh_of
from tests.harness.compare import Findings, assert_same
from tests.harness.data import exact_x, generator

NONZERO = 160  # of a row or a column, about: a sum of so many stays below 256, which bfloat16 holds exactly
OPTIONS = ({}, {"save_gathered": True}, {"gradient_accumulation_fusion": True})


def sizes(ctx):
    """(tokens, features in and out) of the whole."""
    return (4096, 4096) if ctx.is_cuda else (16 * ctx.world, 48 * ctx.world)


def sparse(ctx, rows, columns, *seed):
    gen = generator(ctx.device, *seed)
    keep = torch.rand(rows, columns, generator=gen, device=ctx.device) < NONZERO / max(rows, columns)
    return exact_x((rows, columns), FP64, gen) * keep


class Large(Cell):
    """A sequence-parallel layer, and the whole nn.Linear that it is a shard of."""

    def __init__(self, ctx, kind, **options):
        self.ctx, self.kind, self.sequence_parallel = ctx, kind, True
        tokens, features = sizes(ctx)
        self.whole = nn.Linear(features, features, dtype=BF16, device=ctx.device)
        with torch.no_grad():
            self.whole.weight.copy_(sparse(ctx, features, features, 0, "weight"))
            self.whole.bias.copy_(exact_x((features,), BF16, generator(ctx.device, 0, "bias")))
        self.layer = KINDS[kind].from_linear(self.whole, sequence_parallel=True, **options)
        self.whole.to(FP64)
        self.x_whole = sparse(ctx, tokens, features, 0, "x")
        self.grad_whole = sparse(ctx, tokens, features, 0, "grad")
        self.x, self.grad = self.of_input(self.x_whole).to(BF16), self.of_output(self.grad_whole).to(BF16)


def ran_overlapped(ops):
    """None if these operators ran since the last call, each once and overlapped; else what ran."""
    counts = flux_ops.dispatch_counts(reset=True)
    ran = sorted((op, strategy) for (op, strategy, _), count in counts.items() for _ in range(count))
    overlapped = sorted(op for op, _ in ran) == sorted(ops) and all(strategy != "sequential" for _, strategy in ran)
    return None if overlapped else f"ran {counts}"


def layers(ctx, kind):
    """Results and gradients, eager and compiled."""
    findings = Findings()
    for options in OPTIONS if kind == "column" else (OPTIONS[0], OPTIONS[2]):
        for compiles in (False, True):
            cell = Large(ctx, kind, **options).require((1, 1, 1))
            if "gradient_accumulation_fusion" in options:
                cell.layer.weight.main_grad = torch.zeros_like(cell.layer.weight, dtype=FP32)
            torch._dynamo.reset()
            forward = torch.compile(cell.layer, fullgraph=True, backend="aot_eager") if compiles else cell.layer
            what = f"{options}, compiled {compiles}"
            flux_ops.dispatch_counts(reset=True)
            y = forward(cell.x)
            y.backward(cell.grad)
            findings.add(f"{what}: operators", ran_overlapped(["ag_gemm", "gemm_rs"]))
            cell.compare(findings, f"{what}: y", y.detach(), cell.expected()[0])
            cell.compare_grads(findings, what)
    return findings.finish()


def linear_in_style(cell, kind, style_module, dim):
    """An nn.Linear without bias in the style for its kind, its weight the cell's."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import parallelize_module

    style = style_module.ColwiseParallel if kind == "column" else style_module.RowwiseParallel
    layouts = {"input_layouts" if kind == "column" else "output_layouts": Shard(dim)}
    linear = nn.Linear(*cell.whole.weight.shape[::-1], bias=False, dtype=BF16, device=cell.ctx.device)
    with torch.no_grad():
        linear.weight.copy_(cell.whole.weight)
    return parallelize_module(linear, mesh_of(cell.ctx), style(**layouts))


def results_of(function, linear, x, grad):
    """Y and the gradients of x and of this rank's part of the weight."""
    linear.zero_grad()
    x = x.clone().requires_grad_()
    flux_ops.dispatch_counts(reset=True)
    y = function(x)
    y.backward(grad)
    return {"y": y.detach(), "x": x.grad, "weight": linear.weight.grad.to_local().clone()}


def compare_overlapped(ctx, got, want):
    assert (problem := ran_overlapped(["ag_gemm", "gemm_rs"])) is None, problem
    for name, result in got.items():
        assert_same(result, want[name], rank=ctx.rank, what=name)


def styles(ctx, kind, dim):
    """flux_ops.parallel against torch's styles; tokens of two dimensions, sharded along the first, or of three."""
    cell = Large(ctx, kind)
    x, grad = (t if dim == 0 else t.view(2, -1, t.shape[-1]) for t in (cell.x, cell.grad))
    linears = [linear_in_style(cell, kind, module, dim) for module in both_styles()]
    want, got = (results_of(linear, linear, x, grad) for linear in linears)
    compare_overlapped(ctx, got, want)


def overlap_pass(ctx, kind):
    """torch's styles, compiled by Inductor with OverlapPass, against the same that are not."""
    cell = Large(ctx, kind)
    linear = linear_in_style(cell, kind, both_styles()[0], 0)
    want = results_of(linear, linear, cell.x, cell.grad)
    options = {"post_grad_custom_post_pass": inductor.OverlapPass(), "fx_graph_cache": False}
    torch._dynamo.reset()
    got = results_of(torch.compile(linear, fullgraph=True, options=options), linear, cell.x, cell.grad)
    compare_overlapped(ctx, got, want)


class OverlappedTrainingCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_layers(self, ranks, kind, record_property):
        record_property("cells", ranks.run(layers, kind)[0])

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("dim", (0, 1))
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_styles(self, ranks, kind, dim):
        ranks.run(styles, kind, dim)

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_overlap_pass(self, ranks, kind):
        ranks.run(overlap_pass, kind)
