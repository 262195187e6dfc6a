"""Operators and layers under torch.autocast: as the products of PyTorch, with master weights in float32."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, FP32, FP64, OPS, STRATEGIES, Case, make
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


DTYPES = ((FP32, FP32), (FP32, BF16), (BF16, FP32), (BF16, BF16), (FP64, FP64))  # of x; of weight and bias


def operators(ctx):
    """Y in bfloat16, gradients in the dtype of the operands; float64 stays as it is. The data are exact in bfloat16, so
    all are those without autocast in float64, rounded.
    """
    findings = Findings()
    rows, n, k = (512, 2048, 1024) if ctx.is_cuda else (ROWS, WIDE, NARROW)
    for op, (x_dtype, dtype) in itertools.product(OPS, DTYPES):
        case = Case(op, rows, n, k, bias=True, dtype=FP64, seed=1)
        operands = make(ctx, case)
        whole = [t.requires_grad_() for t in (operands.x, operands.weight, operands.bias)]
        want = getattr(flux_ops, op)(*whole, strategy="sequential")
        grad = exact_x(want.shape, FP64, generator(ctx.device, 2, "grad", 0 if op == "gemm_ar" else ctx.rank))
        grad *= torch.rand(grad.shape, generator=generator(ctx.device, 3, "grad"), device=ctx.device) < 0.05
        wants = [want.detach(), *torch.autograd.grad(want, whole, grad)]
        leaves = [t.detach().to(d).requires_grad_() for t, d in zip(whole, (x_dtype, dtype, dtype), strict=True)]
        result = FP64 if dtype == FP64 else BF16
        for strategy in ("auto", *STRATEGIES):
            if strategy not in ("auto", "sequential") and ctx.is_cuda and result == FP64:
                continue
            with torch.autocast(ctx.device.type, BF16):
                y = getattr(flux_ops, op)(*leaves, strategy=strategy)
            gots = [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]
            what = f"{op} {strategy}, x {x_dtype}, weight {dtype}"
            dtypes = result, x_dtype, dtype, dtype
            for name, got, one, d in zip(("y", "x", "weight", "bias"), gots, wants, dtypes, strict=True):
                problem = first_difference(got, one.to(result).to(d), rank=ctx.rank)
                findings.add(f"{what}: {name}", f"it has {got.dtype}" if got.dtype != d else problem)
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


def input_of(ctx, form):
    whole = form[0] is RowParallelLinear or not form[1]
    columns = NARROW if form[0] is RowParallelLinear else NARROW * ctx.world
    rank = 0 if form == (ColumnParallelLinear, False) else ctx.rank
    return exact_x((ROWS * ctx.world if whole else ROWS, columns), FP32, generator(ctx.device, 3, "x", rank))


def step(ctx, layer, x, autocast, backward_inside=False, scale=1.0):
    """Y and the gradients of x, weight and bias."""
    x = (x * scale).requires_grad_()
    layer.zero_grad()
    with torch.autocast(ctx.device.type, BF16, enabled=autocast):
        y = layer(x)
    seed = 0 if isinstance(layer, RowParallelLinear) and not layer.sequence_parallel else ctx.rank
    grad = scale * exact_x(y.shape, FP32, generator(ctx.device, 7, "grad", seed)).to(y.dtype)
    with torch.autocast(ctx.device.type, BF16, enabled=backward_inside):
        y.backward(grad)
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
        x = input_of(ctx, form)
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


def backward_inside(ctx):
    """A forward without autocast, its backward in a region: layers whose gradients go to main_grad keep their dtype."""
    findings = Findings()
    for form in itertools.product((ColumnParallelLinear, RowParallelLinear), (True, False)):
        layer, results = layer_of(ctx, form, main_grad=True), []
        for inside in (False, True):
            x = input_of(ctx, form)
            results.append(step(ctx, layer, x, autocast=False, backward_inside=inside, scale=1.001))  # not in bfloat16
        for name, want, got in zip(("y", "x", "weight", "bias"), *results, strict=True):
            findings.add(f"{form}: {name}", first_difference(got, want, rank=ctx.rank))
    return findings.finish()


class InRegion(torch.nn.Module):
    """A layer that its model calls in a region."""

    def __init__(self, layer, device):
        super().__init__()
        self.layer, self.device = layer, device

    def forward(self, x):
        with torch.autocast(self.device, BF16):
            return self.layer(x)


def exported(ctx):
    """torch.export keeps the region, so the program casts as the module does, wherever it runs."""
    findings = Findings()
    for form in itertools.product((ColumnParallelLinear, RowParallelLinear), (True, False)):
        layer, x = layer_of(ctx, form, main_grad=False), input_of(ctx, form)
        module = InRegion(layer, ctx.device.type).requires_grad_(False)
        program, want = torch.export.export(module, (x,), strict=False), module(x)
        got = program.module()(x)
        findings.add(f"{form}: dtype", None if want.dtype == BF16 else f"{want.dtype}")
        findings.add(f"{form}: y", first_difference(got, want, rank=ctx.rank))
    return findings.finish()


class AutocastCases:
    def test_operators(self, ranks, record_property):
        record_property("cells", ranks.run(operators)[0])

    @pytest.mark.parametrize("compiled", (False, True))
    def test_layers(self, ranks, compiled, record_property):
        record_property("cells", ranks.run(layers, compiled)[0])

    def test_backward_inside_a_region(self, ranks, record_property):
        record_property("cells", ranks.run(backward_inside)[0])

    def test_styles(self, ranks, record_property):
        record_property("cells", ranks.run(styles)[0])

    def test_export(self, ranks, record_property):
        record_property("cells", ranks.run(exported)[0])
