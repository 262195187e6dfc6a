"""Operators and layers under torch.autocast: as the products of PyTorch, with master weights in float32."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, FP32, FP64, OPS, Case, make, strategies_of
from tests.cases.layers import Calls
from tests.cases.parallel_styles import (
    HIDDEN,
    Mlp,
    both_styles,
    compare,
    mesh_of,
    overlapped,
    parallelized,
    training_step,
    with_exact_parameters,
)
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_x, generator

ROWS, WIDE, NARROW = 32, 64, 48  # of a rank; features of a whole layer, for each rank


def operators(ctx):
    """Y in bfloat16, gradients in the dtype of the operands; float64 stays as it is."""
    findings = Findings()
    for op, dtypes, (dtype, result) in itertools.product(
        OPS, ("all", "x", "weight"), ((FP32, BF16), (BF16, BF16), (FP64, FP64))
    ):
        case = Case(op, ROWS, WIDE, NARROW, bias=True, dtype=dtype, seed=len(dtypes))
        operands = make(ctx, case)
        x, weight, bias = operands.x, operands.weight, operands.bias
        if dtype == FP32 and dtypes == "x":
            weight, bias = weight.to(BF16), bias.to(BF16)
        if dtype == FP32 and dtypes == "weight":
            x = x.to(BF16)
        leaves = [t.requires_grad_() for t in (x, weight, bias)]
        for strategy in ("auto", *strategies_of(op)):
            if strategy in ("fused", "decomposed") and ctx.is_cuda:
                continue  # these sizes are too small for some of the kernels
            with torch.autocast(ctx.device.type, BF16):
                y = getattr(flux_ops, op)(x, weight, bias, strategy=strategy)
            what = f"{case} {strategy}, float32: {dtypes}"
            findings.add(what, first_difference(y, operands.expected().to(result), rank=ctx.rank))
            grads = torch.autograd.grad(y.sum(), leaves)
            wrong = [g.dtype for g, t in zip(grads, leaves, strict=True) if g.dtype != t.dtype]
            findings.add(f"{what}: gradients", f"they have {wrong}" if wrong else None)
    return findings.finish()


def layer_of(ctx, form, main_grad):
    layer_class, sequence_parallel = form
    layer = layer_class(
        *(NARROW * ctx.world, WIDE * ctx.world),
        sequence_parallel=sequence_parallel,
        gradient_accumulation_fusion=main_grad,
        dtype=FP32,
        device=ctx.device,
    )
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            parameter.copy_(exact_x(parameter.shape, FP32, generator(ctx.device, seed, "weight", ctx.rank)))
        if layer_class is RowParallelLinear:
            dist.broadcast(layer.bias, 0)
    if main_grad:
        layer.weight.main_grad = torch.zeros_like(layer.weight)
    return layer


def step(ctx, layer, x, autocast):
    """Y and the gradients of x, weight and bias."""
    x = x.clone().requires_grad_()
    layer.zero_grad()
    with torch.autocast(ctx.device.type, BF16, enabled=autocast):
        y = layer(x)
    seed = 0 if isinstance(layer, RowParallelLinear) and not layer.sequence_parallel else ctx.rank
    y.backward(exact_x(y.shape, FP32, generator(ctx.device, 7, "grad", seed)).to(y.dtype))
    weight_grad = layer.weight.main_grad if layer.gradient_accumulation_fusion else layer.weight.grad
    grads = [x.grad, weight_grad.clone(), layer.bias.grad]
    if layer.gradient_accumulation_fusion:
        layer.weight.main_grad.zero_()
    return [y.detach(), *grads]


def layers(ctx, compiled):
    """The data are exact in bfloat16: Y is that without autocast, rounded; so are the gradients, in float32."""
    findings = Findings()
    forms = itertools.product((ColumnParallelLinear, RowParallelLinear), (True, False))
    for form, main_grad in itertools.product(forms, (False, True)):
        layer = layer_of(ctx, form, main_grad)
        whole = form[0] is RowParallelLinear or not form[1]
        columns = NARROW if form[0] is RowParallelLinear else NARROW * ctx.world
        rank = 0 if form == (ColumnParallelLinear, False) else ctx.rank
        shape = (ROWS * ctx.world if whole else ROWS, columns)
        x = exact_x(shape, FP32, generator(ctx.device, 3, "x", rank))
        wants = step(ctx, layer, x, autocast=False)
        if compiled:
            layer.compile(fullgraph=True, backend="aot_eager")
        gots = step(ctx, layer, x, autocast=True)
        for name, got, want in zip(("y", "x", "weight", "bias"), gots, wants, strict=True):
            dtype = BF16 if name == "y" else FP32
            rounded = want.to(BF16).to(dtype)  # as autograd's casts do; main_grad is not rounded
            want = want if main_grad and name == "weight" else rounded
            problem = f"it has {got.dtype}" if got.dtype != dtype else first_difference(got, want, rank=ctx.rank)
            findings.add(f"{form[0].__name__}, sequence_parallel={form[1]}, main_grad={main_grad}: {name}", problem)
    return findings.finish()


def styles(ctx):
    """ColwiseParallel and RowwiseParallel: as torch's."""
    from torch.distributed.tensor import Replicate, Shard

    findings, mesh = Findings(), mesh_of(ctx)
    torch_styles, ours = both_styles()
    for bias, dim, output in itertools.product((True, False), (0, 1), (Shard, Replicate)):
        module = with_exact_parameters(ctx, Mlp(bias), FP32)
        x = exact_x((8, 8, HIDDEN), FP32, generator(ctx.device, 2, "x", ctx.rank))
        layouts = {"input_layouts": Shard(dim)}, {"output_layouts": Shard(dim) if output is Shard else Replicate()}
        results = []
        for kind in (torch_styles, ours):
            parallel = parallelized(copy.deepcopy(module), mesh, kind, *layouts)

            def run(x, parallel=parallel):
                with torch.autocast(ctx.device.type, BF16):
                    return parallel(x)

            with Calls() as calls:
                results.append(training_step(run, parallel, x))
        what = f"bias={bias}, dim={dim}, {output.__name__}"
        findings.add(what, None if len(overlapped(calls)) >= 3 else f"ran {overlapped(calls)}")
        compare(ctx, findings, what, results[1], results[0])
    return findings.finish()


class AutocastCases:
    def test_operators(self, ranks, record_property):
        record_property("cells", ranks.run(operators)[0])

    @pytest.mark.parametrize("compiled", (False, True))
    def test_layers(self, ranks, compiled, record_property):
        record_property("cells", ranks.run(layers, compiled)[0])

    def test_styles(self, ranks, record_property):
        record_property("cells", ranks.run(styles)[0])
