"""Backward against the un-sharded layer, in exact data."""

import dataclasses
import itertools

import pytest
import torch
import torch.distributed as dist

import flux_ops
from tests.cases.base import BF16, FP32, FP64, OPS, WITH_STRATEGY, Case, call, make
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_x, generator


def grad_of(ctx, case, rank):
    """dL/dY on `rank`: exact, and known to every rank. gemm_ar's is the same on all ranks, as Y is."""
    rows = case.rows * ctx.world if case.op == "ag_gemm" else case.rows
    rank = 0 if case.op == "gemm_ar" else rank
    return exact_x((rows, case.n), case.dtype, generator(ctx.device, case.seed, "grad", rank))


def expected_grads(ctx, operands, grads):
    """(dX, dW, db) on this rank, from all operands."""
    case, rank, rows = operands.case, ctx.rank, operands.case.rows
    wide = [g.float() for g in grads]
    if case.op == "ag_gemm":
        whole = sum(g @ operands._weight(r).float() for r, g in enumerate(wide))
        grad_x = whole[rank * rows : (rank + 1) * rows]
        grad_w = wide[rank].t() @ operands.gathered().float()
    else:
        gathered = torch.cat(wide) if case.op == "gemm_rs" else wide[rank]
        grad_x = gathered @ operands._weight(rank).float()
        grad_w = gathered.t() @ operands.x.detach().float()
    return [g.to(case.dtype) for g in (grad_x, grad_w, wide[rank].sum(0))]


def backward(ctx, op, strategy):
    """Every combination of what needs a gradient; nothing else gets one."""
    findings = Findings()
    dtype = BF16 if ctx.is_cuda else FP32
    for layout in ("nk", "kn"):
        for wanted in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)):
            case = Case(op, 32, 64, 64, dtype=dtype, bias=True, layout=layout, seed=sum(wanted))
            operands = make(ctx, case)
            inputs = [operands.x, operands.weight, operands.bias]
            for tensor, needs in zip(inputs, wanted, strict=True):
                tensor.requires_grad_(bool(needs))
            grads = [grad_of(ctx, case, rank) for rank in range(ctx.world)]
            call(operands, strategy=strategy).backward(grads[ctx.rank])
            with torch.no_grad():
                expected = expected_grads(ctx, operands, grads)
            for name, tensor, needs, want in zip(("x", "weight", "bias"), inputs, wanted, expected, strict=True):
                what = f"{case} needs {wanted}: grad of {name}"
                if needs:
                    findings.add(what, first_difference(tensor.grad, want, rank=ctx.rank))
                else:
                    findings.add(what, None if tensor.grad is None else "was not asked for")
    return findings.finish()


def repeated_grad(ctx, op):
    """sum().backward() hands back one element with stride 0."""
    findings = Findings()
    case = Case(op, 32, 64, 64, dtype=BF16 if ctx.is_cuda else FP32, seed=3)
    operands = make(ctx, case)
    operands.x.requires_grad_()
    operands.weight.requires_grad_()
    y = call(operands)
    y.sum().backward()
    with torch.no_grad():
        want = expected_grads(ctx, operands, [torch.ones_like(y)] * ctx.world)
    findings.add("x", first_difference(operands.x.grad, want[0], rank=ctx.rank))
    findings.add("weight", first_difference(operands.weight.grad, want[1], rank=ctx.rank))
    return findings.finish()


def through_gathered(ctx):
    """A gradient that comes back through the gathered operand is added."""
    case = Case("ag_gemm", 32, 64, 64, dtype=BF16 if ctx.is_cuda else FP32, seed=4)
    operands = make(ctx, case)
    operands.x.requires_grad_()
    operands.weight.requires_grad_()
    y, gathered = call(operands, return_gathered=True)
    grads = [grad_of(ctx, case, rank) for rank in range(ctx.world)]
    torch.autograd.backward([y, gathered], [grads[ctx.rank], torch.ones_like(gathered)])
    with torch.no_grad():
        want_x, want_w, _ = expected_grads(ctx, operands, grads)
        want_x = (want_x.float() + ctx.world).to(case.dtype)
    findings = Findings()
    findings.add("x", first_difference(operands.x.grad, want_x, rank=ctx.rank))
    findings.add("weight", first_difference(operands.weight.grad, want_w, rank=ctx.rank))
    return findings.finish()


def empty_backward(ctx, op):
    """No tokens: the weight's gradient is there, whole, and zero. Nothing to contract: x's is there and empty."""
    findings = Findings()
    for rows, n, k in ((0, 64, 64), (16, 64, 0)):
        case = Case(op, rows, n, k, dtype=BF16 if ctx.is_cuda else FP32, bias=True)
        operands = make(ctx, case)
        inputs = [operands.x, operands.weight, operands.bias]
        for tensor in inputs:
            tensor.requires_grad_()
        y = call(operands, strategy="auto")
        y.backward(torch.ones_like(y))
        for name, tensor in zip(("x", "weight", "bias"), inputs, strict=True):
            want = torch.zeros_like(tensor) if name != "bias" else torch.full_like(tensor, y.shape[0])
            findings.add(f"{case} {name}", first_difference(tensor.grad, want, rank=ctx.rank))
    return findings.finish()


def mlp_step(ctx):
    """Column- then row-parallel layer, a training step: gradients as of the whole layers, added up where replicated."""
    rows, hidden, inner = 16, 32, 24
    device, dtype = ctx.device, (BF16 if ctx.is_cuda else torch.float64)
    gen = generator("cpu", 5, "weight")
    whole_up = torch.randn(inner * ctx.world, hidden, generator=gen, dtype=torch.float64)
    whole_down = torch.randn(hidden, inner * ctx.world, generator=gen, dtype=torch.float64)
    tokens = torch.randn(rows * ctx.world, hidden, generator=gen, dtype=torch.float64)
    bias = torch.randn(hidden, generator=gen, dtype=torch.float64)

    def leaf(tensor):
        return tensor.detach().clone().to(device, dtype).requires_grad_()

    x, up = leaf(tokens.chunk(ctx.world)[ctx.rank]), leaf(whole_up.chunk(ctx.world)[ctx.rank])
    down, b = leaf(whole_down.chunk(ctx.world, dim=1)[ctx.rank]), leaf(bias)
    hidden_state = torch.nn.functional.gelu(flux_ops.ag_gemm(x, up, strategy="fused"))
    y = flux_ops.gemm_rs(hidden_state, down, b, strategy="fused")
    (y.double() ** 2).sum().backward()
    torch.distributed.all_reduce(b.grad)  # replicated parameter under sequence parallelism

    whole = [t.clone().requires_grad_() for t in (tokens, whole_up, whole_down, bias)]
    out = torch.nn.functional.gelu(whole[0] @ whole[1].t()) @ whole[2].t() + whole[3]
    (out**2).sum().backward()
    wanted = (
        whole[0].grad.chunk(ctx.world)[ctx.rank],
        whole[1].grad.chunk(ctx.world)[ctx.rank],
        whole[2].grad.chunk(ctx.world, dim=1)[ctx.rank],
        whole[3].grad,
    )
    limit = 3e-2 if ctx.is_cuda else 1e-12
    for name, got, want in zip(("x", "up", "down", "bias"), (x, up, down, b), wanted, strict=True):
        error = ((got.grad.cpu().double() - want).norm() / want.norm()).item()
        assert error < limit, f"rank {ctx.rank}: gradient of {name} is off by {error:.2e} of its norm"


def whole_layer(op, xs, weights, biases):
    """Each rank's result in plain PyTorch, from the operands of all ranks."""
    linear, world = torch.nn.functional.linear, len(xs)
    if op == "ag_gemm":
        return [linear(torch.cat(xs), weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    whole = sum(linear(x, weight) for x, weight in zip(xs, weights, strict=True))
    rows = whole.chunk(world) if op == "gemm_rs" else [whole] * world
    return [y if bias is None else y + bias for y, bias in zip(rows, biases, strict=True)]


def against_plain_torch(ctx, op, strategy):
    """fp64: gradients of a loss over all ranks, whatever needs one, as PyTorch derives them for the whole layer.

    The loss of gemm_ar is one and the same on each rank.
    """
    findings = Findings()
    rows, n, k = 6, 10, 8
    cells = itertools.product(((), (3,)), (False, True), (False, True), ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1)))
    for leading, transposed, with_bias, wanted in cells:
        if wanted == (0, 0, 1) and not with_bias:
            continue
        gen = torch.Generator().manual_seed(7)

        def make_all(*shape, gen=gen):
            return [torch.randn(*shape, generator=gen, dtype=FP64).to(ctx.device) for _ in range(ctx.world)]

        m = rows * ctx.world if op == "gemm_rs" else rows
        xs, weights, biases = make_all(m, *leading, k), make_all(n, k), make_all(n)
        m = rows * ctx.world if op == "ag_gemm" else rows
        factors = make_all(m, *leading, n)
        if op == "gemm_ar":
            biases, factors = [biases[ctx.rank].copy_(biases[0])] * ctx.world, factors[:1] * ctx.world
        ours = [xs[ctx.rank].clone(), weights[ctx.rank].clone(), biases[ctx.rank].clone()]
        if transposed:
            ours[1] = ours[1].t().contiguous().t()
        theirs = [xs, weights, biases if with_bias else [None] * ctx.world]
        for own, tensors, needs in zip(ours, theirs, wanted, strict=True):
            own.requires_grad_(bool(needs))
            if tensors[0] is not None:
                tensors[ctx.rank].requires_grad_(bool(needs))

        y = getattr(flux_ops, op)(ours[0], ours[1], ours[2] if with_bias else None, strategy=strategy)
        (torch.sin(y) * factors[ctx.rank]).sum().backward()
        plain = whole_layer(op, *theirs)
        losses = [(torch.sin(p) * f).sum() for p, f in zip(plain, factors, strict=True)]
        (losses[0] if op == "gemm_ar" else sum(losses)).backward()
        for name, own, tensors, needs in zip(("x", "weight", "bias"), ours, theirs, wanted, strict=True):
            what = f"leading {leading}, transposed {transposed}, bias {with_bias}, needs {wanted}: grad of {name}"
            want = tensors[ctx.rank].grad if needs and tensors[0] is not None else None
            if want is None or own.grad is None:
                findings.add(what, None if want is own.grad else f"got {own.grad}, expected {want}")
            else:
                error = (own.grad - want).abs().max().item()
                findings.add(what, None if error < 1e-12 else f"rank {ctx.rank}: off by {error}")
    return findings.finish()


def inference_first(ctx):
    """In a new process, each op and strategy on a group of its own: first in inference mode, where the workspace grows,
    then in a training step.
    """
    findings = Findings()
    for op, strategy in WITH_STRATEGY:
        group = dist.new_group(list(range(ctx.world)))
        case = Case(op, 16, 64, 64, dtype=BF16 if ctx.is_cuda else FP32, bias=True, seed=6)
        operands, large = make(ctx, case, group), make(ctx, dataclasses.replace(case, rows=1024), group)
        tensors = operands.x, operands.weight, operands.bias
        want, want_large = (one.expected().to(case.dtype) for one in (operands, large))
        grads = [grad_of(ctx, case, rank) for rank in range(ctx.world)]
        want_grads = expected_grads(ctx, operands, grads)

        def compare(what, got, want, where=f"{op}, {strategy}"):
            findings.add(f"{where}: {what}", first_difference(got, want, rank=ctx.rank))

        with torch.inference_mode():
            compare("inference", call(operands, strategy=strategy, group=group), want)
            compare("inference of more rows", call(large, strategy=strategy, group=group), want_large)
            kept = call(operands, strategy=strategy, group=group)
        with torch.no_grad():
            compare("no_grad", call(operands, strategy=strategy, group=group), want)
        for tensor in tensors:
            tensor.requires_grad_()
        y = call(operands, strategy=strategy, group=group)
        y.backward(grads[ctx.rank])
        compare("training", y.detach(), want)
        for name, tensor, grad in zip(("x", "weight", "bias"), tensors, want_grads, strict=True):
            compare(f"gradient of {name}", tensor.grad, grad)
        compare("what inference mode made", kept, want)
        flux_ops.destroy(group)
    return findings.finish()


class AutogradCases:
    @pytest.mark.parametrize("world", (pytest.param(1, marks=pytest.mark.cpu_is_enough), 2, 4))
    def test_first_use_in_inference_mode(self, spawn, world, record_property):
        record_property("cells", spawn(world).run(inference_first)[0])

    @pytest.mark.cpu_is_enough
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("strategy", ("auto", "sequential"))
    @pytest.mark.parametrize("op", OPS)
    def test_fp64_gradients_are_those_of_plain_torch(self, ranks, op, strategy, record_property):
        record_property("cells", ranks.run(against_plain_torch, op, strategy)[0])

    @pytest.mark.parametrize("strategy", ("fused", "sequential"))
    @pytest.mark.parametrize("op", OPS)
    def test_backward(self, ranks, op, strategy, record_property):
        record_property("cells", ranks.run(backward, op, strategy)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_gradient_with_stride_zero(self, ranks, op):
        ranks.run(repeated_grad, op)

    def test_gradient_through_the_gathered_operand(self, ranks):
        ranks.run(through_gathered)

    @pytest.mark.parametrize("op", OPS)
    def test_backward_of_empty_extents(self, ranks, op):
        ranks.run(empty_backward, op)

    def test_a_training_step_of_an_mlp(self, ranks):
        ranks.run(mlp_step)
