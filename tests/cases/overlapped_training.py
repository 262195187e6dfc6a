"""Layers and styles at sizes where `auto` overlaps forward and backward on GPUs, too, in exact data.

The layers of tests/cases/layers.py are small: on GPUs the plain sequence is faster for their backward.
"""

import pytest
import torch
from torch import nn

import flux_ops
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


def styles(ctx, kind):
    """flux_ops.parallel against torch's styles."""
    from torch.distributed.tensor import Shard

    name = {"column": "ColwiseParallel", "row": "RowwiseParallel"}[kind]
    layouts = {"input_layouts": Shard(0)} if kind == "column" else {"output_layouts": Shard(0)}
    cell, results = Large(ctx, kind), []
    for module in both_styles():
        from torch.distributed.tensor.parallel import parallelize_module

        linear = nn.Linear(*cell.whole.weight.shape[::-1], bias=False, dtype=BF16, device=ctx.device)
        with torch.no_grad():
            linear.weight.copy_(cell.whole.weight)
        linear = parallelize_module(linear, mesh_of(ctx), getattr(module, name)(**layouts))
        x = cell.x.clone().requires_grad_()
        flux_ops.dispatch_counts(reset=True)
        y = linear(x)
        y.backward(cell.grad)
        results.append((y.detach(), x.grad, linear.weight.grad.to_local()))
    assert (problem := ran_overlapped(["ag_gemm", "gemm_rs"])) is None, problem
    for what, want, got in zip(("y", "x", "weight"), *results, strict=True):
        assert_same(got, want, rank=ctx.rank, what=what)


class OverlappedTrainingCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_layers(self, ranks, kind, record_property):
        record_property("cells", ranks.run(layers, kind)[0])

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_styles(self, ranks, kind):
        ranks.run(styles, kind)
