"""torch.compile and torch.export of functions that call the operators: one graph, few compilations, eager's results."""

import functools

import pytest
import torch
from torch import nn

import flux_ops
from tests.cases.base import FP32, OPS, Case, make
from tests.cases.layers import Cell, over_forms
from tests.cases.layout import views_of_weight, views_of_x
from tests.harness.compare import Findings, assert_same, first_difference
from tests.harness.data import exact_x, generator

HIDDEN, INNER = 24, 40
SIZES = (8, 16, 17, 1000, 24)  # M / TP
FEWER_ROWS = (8, 16, 17, 100, 24)  # which every op takes with strategy="fused", on a GPU too


class Mlp(nn.Module):
    """A sequence-parallel MLP: tokens sharded along dimension 0 on its way in and out."""

    def __init__(self, ctx, dtype=torch.float64, activation=torch.relu):
        super().__init__()
        self.activation = activation
        gen = generator(ctx.device, 1, "weight", ctx.rank)
        self.up = nn.Parameter(exact_x((INNER, HIDDEN), dtype, gen))
        self.down = nn.Parameter(exact_x((HIDDEN, INNER), dtype, gen))

    def forward(self, x):
        return flux_ops.gemm_rs(self.activation(flux_ops.ag_gemm(x, self.up)), self.down)


def tokens(ctx, *shape, dtype=torch.float64):
    return exact_x((*shape, HIDDEN), dtype, generator(ctx.device, 2, "x", ctx.rank))


def step(function, module, x, mark=False):
    """[y, dL/dx, dL/dup, dL/ddown]"""
    x = x.detach().requires_grad_()
    if mark:
        torch._dynamo.mark_dynamic(x, 0)
    y = function(x)
    factor = torch.arange(y.numel(), device=y.device, dtype=y.dtype).reshape(y.shape).remainder(3)
    return [y.detach(), *torch.autograd.grad((y * factor).sum(), (x, module.up, module.down))]


def counting(module, backend="aot_eager", **options):
    """(compiled, counter): whatever can't be traced raises."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(module, fullgraph=True, backend=counter, **options), counter


def training_steps(ctx, dynamic, leading=()):
    module = Mlp(ctx)
    compiled, counter = counting(module, dynamic=None if dynamic == "marked" else dynamic)
    for rows in SIZES:
        x = tokens(ctx, rows, *leading)
        want = step(module, module, x)
        results = step(compiled, module, x, mark=dynamic == "marked")
        for what, got, expected in zip(("y", "x", "up", "down"), results, want, strict=True):
            assert_same(got, expected, rank=ctx.rank, what=f"M/TP = {rows}: {what}")
    allowed = 2 if dynamic is None else 1  # the first size is taken as fixed, unless told otherwise
    assert counter.frame_count <= allowed, f"compiled {counter.frame_count} times for {len(SIZES)} sizes"


def static_step(ctx):
    module = Mlp(ctx)
    compiled, counter = counting(module, dynamic=False)
    x = tokens(ctx, 16)
    for got, want in zip(step(compiled, module, x), step(module, module, x), strict=True):
        assert_same(got, want, rank=ctx.rank)
    assert counter.frame_count == 1


def inductor_step(ctx):
    """On the CPU without a pointwise operator: Inductor would spend minutes on compiling C++."""
    dtype, activation = (torch.bfloat16, torch.relu) if ctx.is_cuda else (torch.float32, nn.Identity())
    module = Mlp(ctx, dtype, activation)
    compiled, _ = counting(module, backend="inductor", dynamic=True)
    for rows in (16, 17):
        x = tokens(ctx, rows, dtype=dtype)
        for got, want in zip(step(compiled, module, x), step(module, module, x), strict=True):
            assert_same(got, want, rank=ctx.rank, what=f"M/TP = {rows}")


def inference_first(ctx):
    module = Mlp(ctx)
    compiled, _ = counting(module)
    x = tokens(ctx, 16)
    want = step(module, module, x)
    with torch.inference_mode():
        assert_same(compiled(x), want[0], rank=ctx.rank)
    for got, expected in zip(step(compiled, module, x), want, strict=True):
        assert_same(got, expected, rank=ctx.rank)


def exported(ctx):
    module = Mlp(ctx).requires_grad_(False)
    rows = torch.export.Dim("rows", min=2, max=4096)
    program = torch.export.export(module, (tokens(ctx, 16),), dynamic_shapes=({0: rows * 1},))
    calls = [node.target for node in program.graph.nodes if "flux" in str(node.target)]
    assert calls == [torch.ops.flux.ag_gemm.default, torch.ops.flux.gemm_rs.default], calls
    for size in SIZES:
        x = tokens(ctx, size)
        assert_same(program.module()(x), module(x), rank=ctx.rank, what=f"M/TP = {size}")


def compiled_layer(ctx, kind, sequence_parallel, dynamic=None, sizes=SIZES, **options):
    layer = Cell(ctx, kind, sequence_parallel, **options).layer
    compiled, counter = counting(layer, dynamic=dynamic)
    has_main_grad = "gradient_accumulation_fusion" in options
    if has_main_grad:
        layer.weight.main_grad = torch.zeros(layer.weight.shape, device=ctx.device)

    def step_of(function, x):
        x = x.clone().requires_grad_()
        y = function(x)
        if not has_main_grad:
            return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, layer.weight, layer.bias))]
        layer.bias.grad = None
        layer.weight.main_grad.zero_()
        y.float().square().sum().backward()
        return [y.detach(), x.grad, layer.weight.main_grad.clone(), layer.bias.grad]

    flux_ops.dispatch_counts(reset=True)
    for tokens in sizes:
        x = Cell(ctx, kind, sequence_parallel, tokens=tokens).x
        for got, want in zip(step_of(compiled, x), step_of(layer, x), strict=True):
            assert_same(got, want, rank=ctx.rank, what=f"{tokens} tokens of a rank")
    allowed = 1 if dynamic else 2  # the first size is taken as fixed, unless told otherwise
    assert counter.frame_count <= allowed, f"compiled {counter.frame_count} times for {len(sizes)} sizes"
    if strategy := options.get("strategy"):  # of the forward; that of the backward is "auto"
        asked = {ran: calls for (_, ran, why), calls in flux_ops.dispatch_counts().items() if why == "asked for"}
        assert asked == {strategy: 2 * len(sizes)}, asked


def frozen_layer(ctx, kind, sequence_parallel):
    """A frozen weight needs no main_grad, compiled either; what is not wanted gets no gradient."""
    findings = Findings()
    for needs in ((1, 0, 0), (0, 0, 1)):  # x, weight, bias
        cell = Cell(ctx, kind, sequence_parallel, gradient_accumulation_fusion=True).require(needs)
        y = counting(cell.layer)[0](cell.x)
        cell.compare(findings, f"needs {needs}: y", y.detach(), cell.expected()[0])
        y.backward(cell.grad)
        cell.compare_grads(findings, f"needs {needs}", needs)
    return findings.finish()


def exported_layer(ctx, kind, sequence_parallel):
    cell = Cell(ctx, kind, sequence_parallel, tokens=16)
    rows = torch.export.Dim("rows", min=2, max=4096) * (cell.x.shape[0] // 16)
    program = torch.export.export(cell.layer, (cell.x,), dynamic_shapes=({0: rows},), strict=False)
    assert any("flux" in str(node.target) for node in program.graph.nodes) == (sequence_parallel or kind == "row")
    for tokens in SIZES:
        x = Cell(ctx, kind, sequence_parallel, tokens=tokens).x
        assert_same(program.module()(x), cell.layer(x), rank=ctx.rank, what=f"{tokens} tokens of a rank")


def compare_strides(ctx, findings, what, function, *tensors):
    """Results of eager, compiled and fake calls have one shape and one stride, and the gradients of the first two."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def call(function):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        results = function(*leaves)
        results = results if isinstance(results, tuple) else (results,)
        grads = torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])
        return [y.detach() for y in results], grads

    eager, eager_grads = call(function)
    compiled, compiled_grads = call(counting(function)[0])
    with FakeTensorMode() as mode:
        fake = function(*map(mode.from_tensor, tensors))
    fake = fake if isinstance(fake, tuple) else (fake,)
    for got, want in zip((*compiled, *compiled_grads), (*eager, *eager_grads), strict=True):
        findings.add(what, first_difference(got, want, rank=ctx.rank))
    shapes = [[(y.shape, y.stride()) for y in results] for results in (eager, compiled, fake)]
    findings.add(what, None if shapes[0] == shapes[1] == shapes[2] else f"eager, compiled, fake: {shapes}")
    shapes = [[(grad.shape, grad.stride()) for grad in grads] for grads in (eager_grads, compiled_grads)]
    findings.add(what, None if shapes[0] == shapes[1] else f"gradients of eager, compiled: {shapes}")


def swapped(x, first):
    """The values of x [M, K] as [first, M / first, K], the second dimension outermost in memory."""
    return x.reshape(first, -1, x.shape[-1]).transpose(0, 1).contiguous().transpose(0, 1)


def strides(ctx, op):
    """Whatever the strides of x and weight."""
    findings = Findings()
    case = Case(op, 8, 24, 40, dtype=FP32 if not ctx.is_cuda else torch.bfloat16)
    operands = make(ctx, case)
    options = {"return_gathered": True} if op == "ag_gemm" else {}
    function = functools.partial(getattr(flux_ops, op), **options)
    for name, x in {**views_of_x(operands.x), "3-D": swapped(operands.x, 2 * ctx.world)}.items():
        compare_strides(ctx, findings, name, function, x, operands.weight)
    weights = views_of_weight(operands.weight)
    for name in ("weight.t() of [K, N]", "weight[::2]"):
        compare_strides(ctx, findings, name, function, operands.x, weights[name])
    return findings.finish()


def strides_of_layer(ctx, kind, sequence_parallel):
    findings = Findings()
    cell = Cell(ctx, kind, sequence_parallel, tokens=6)
    names, parameters = zip(*cell.layer.named_parameters(), strict=True)

    def function(x, *parameters):
        return torch.func.functional_call(cell.layer, dict(zip(names, parameters, strict=True)), (x,))

    views = {**views_of_x(cell.x), "3-D": swapped(cell.x, len(cell.x) // 3)}
    for name in ("x.t() of [K, M]", "x[:, ::2]", "3-D"):
        compare_strides(ctx, findings, name, function, views[name], *parameters)
    return findings.finish()


class CompileCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("dynamic", (None, True, "marked"))
    def test_training_over_five_sizes(self, ranks, dynamic):
        ranks.run(training_steps, dynamic)

    @pytest.mark.worlds(2, 4)
    def test_tokens_of_two_dimensions(self, ranks):
        ranks.run(training_steps, True, (3,))

    @pytest.mark.worlds(2, 4)
    def test_a_fixed_size(self, ranks):
        ranks.run(static_step)

    @pytest.mark.worlds(2, 4)
    def test_inductor(self, ranks):
        ranks.run(inductor_step)

    @pytest.mark.worlds(2, 4)
    def test_inference_first_then_training(self, ranks):
        ranks.run(inference_first)

    @pytest.mark.worlds(2, 4)
    def test_export(self, ranks):
        ranks.run(exported)

    @over_forms
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("dynamic", (None, True))
    def test_layer_over_five_sizes(self, ranks, kind, sequence_parallel, dynamic):
        ranks.run(compiled_layer, kind, sequence_parallel, dynamic)

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind, sequence_parallel", (("column", True), ("row", True), ("row", False)))
    def test_layer_that_asks_for_fused(self, ranks, kind, sequence_parallel):
        ranks.run(compiled_layer, kind, sequence_parallel, True, FEWER_ROWS, strategy="fused")

    @over_forms
    @pytest.mark.worlds(2, 4)
    def test_layer_with_a_frozen_weight(self, ranks, kind, sequence_parallel, record_property):
        record_property("cells", ranks.run(frozen_layer, kind, sequence_parallel)[0])

    @over_forms
    @pytest.mark.worlds(2, 4)
    def test_layer_with_main_grad(self, ranks, kind, sequence_parallel):
        ranks.run(compiled_layer, kind, sequence_parallel, gradient_accumulation_fusion=True)

    @over_forms
    @pytest.mark.worlds(2, 4)
    def test_export_of_a_layer(self, ranks, kind, sequence_parallel):
        ranks.run(exported_layer, kind, sequence_parallel)

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_strides(self, ranks, op, record_property):
        record_property("cells", ranks.run(strides, op)[0])

    @over_forms
    @pytest.mark.worlds(2, 4)
    def test_strides_of_a_layer(self, ranks, kind, sequence_parallel, record_property):
        record_property("cells", ranks.run(strides_of_layer, kind, sequence_parallel)[0])
