"""Autograd of the operators in a group of one rank: what is kept, what is refused, what costs nothing."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import flux_ops

OPS = (flux_ops.ag_gemm, flux_ops.gemm_rs, flux_ops.gemm_ar)
over_ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


def leaves(wanted=(1, 1, 1), dtype=torch.float64):
    made = (torch.randn(shape, dtype=dtype) for shape in ((6, 8), (5, 8), (5,)))
    return [t.requires_grad_(bool(wants)) for t, wants in zip(made, wanted, strict=True)]


def grads(tensors):
    return [t.grad for t in tensors]


@over_ops
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_without_grad_mode_there_is_no_graph(one_rank, op, mode):
    with mode():
        y = op(*leaves())
    assert y.grad_fn is None
    assert not y.requires_grad
    assert y.is_inference() == (mode is torch.inference_mode)


@over_ops
def test_without_a_wish_for_gradients_there_is_no_graph(one_rank, op):
    y = op(*leaves((0, 0, 0)))
    assert y.grad_fn is None
    assert not y.requires_grad


def test_the_gathered_operand_of_a_frozen_x_needs_no_gradient(one_rank):
    for wanted in ((0, 1, 1), (1, 1, 1)):
        y, gathered = flux_ops.ag_gemm(*leaves(wanted), return_gathered=True)
        assert y.requires_grad
        assert gathered.requires_grad == bool(wanted[0])


@over_ops
def test_forward_mode_is_refused(one_rank, op):
    operands = leaves((0, 0, 0))
    for i, operand in enumerate(operands):

        def of_one(t, i=i):
            return op(*operands[:i], t, *operands[i + 1 :])

        with pytest.raises(NotImplementedError, match=f"{op.__name__} has no forward-mode derivative"):
            torch.func.jvp(of_one, (operand,), (torch.ones_like(operand),))
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            of_one(forward_ad.make_dual(operand, torch.ones_like(operand)))


@over_ops
@pytest.mark.parametrize("wanted", ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1)))
def test_only_what_a_gradient_needs_is_kept(one_rank, op, wanted):
    x, weight, bias = leaves(wanted)
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = op(x, weight, bias)
    want = ([x] if wanted[1] else []) + ([weight] if wanted[0] else [])
    assert [t.data_ptr() for t in kept] == [t.data_ptr() for t in want]
    y.sum().backward()
    assert [t.grad is not None for t in (x, weight, bias)] == [bool(w) for w in wanted]


def test_the_gathered_operand_is_kept_where_the_caller_has_it(one_rank):
    x, weight, _ = leaves()
    kept = []
    with saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y, gathered = flux_ops.ag_gemm(x, weight, return_gathered=True)
    assert [t.data_ptr() for t in kept] == [gathered.data_ptr(), weight.data_ptr()]
    y.sum().backward()
    torch.testing.assert_close(weight.grad, x.detach().sum(0).expand(5, 8))


def test_one_result_alone_has_a_gradient(one_rank):
    x, weight, _ = leaves()
    _, gathered = flux_ops.ag_gemm(x, weight, return_gathered=True)
    (gathered * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))
    assert weight.grad is None
    y, _ = flux_ops.ag_gemm(x.detach().requires_grad_(), weight, return_gathered=True)
    y.sum().backward()
    assert weight.grad is not None


@over_ops
def test_gradients_of_some_inputs_on_request(one_rank, op):
    tensors = leaves()
    loss = op(*tensors).pow(2).sum()
    whole = torch.autograd.grad(loss, tensors, retain_graph=True)
    for tensor, want in zip(tensors, whole, strict=True):
        assert torch.equal(torch.autograd.grad(loss, tensor, retain_graph=True)[0], want)


@over_ops
def test_second_backward(one_rank, op):
    tensors = leaves()
    y = op(*tensors)
    y.sum().backward(retain_graph=True)
    once = [g.clone() for g in grads(tensors)]
    y.sum().backward()
    assert all(torch.equal(g, 2 * o) for g, o in zip(grads(tensors), once, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@over_ops
def test_operands_changed_in_place_are_noticed(one_rank, op):
    x, weight, _ = leaves()
    y = op(x, weight)
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@over_ops
def test_nothing_is_left_behind(one_rank, op):
    tensors = leaves()
    y = op(*tensors)
    refs = [weakref.ref(t) for t in (*tensors, y)]
    y.sum().backward()
    del tensors, y
    gc.collect()
    assert [ref() for ref in refs] == [None] * 4


@over_ops
@pytest.mark.parametrize("use_reentrant", (True, False))
def test_checkpointing(one_rank, op, use_reentrant):
    ours, theirs = leaves(), leaves()
    for t, o in zip(theirs, ours, strict=True):
        t.data.copy_(o)
    checkpoint(lambda *t: torch.sin(op(*t)), *ours, use_reentrant=use_reentrant).sum().backward()
    torch.sin(F.linear(*theirs)).sum().backward()
    torch.testing.assert_close(grads(ours), grads(theirs))


@over_ops
def test_second_derivatives_are_refused_by_name(one_rank, op):
    tensors = leaves()
    first = torch.autograd.grad(op(*tensors).pow(2).sum(), tensors, create_graph=True)
    plain = torch.autograd.grad(op(*tensors).pow(2).sum(), tensors)
    for grad, want in zip(first, plain, strict=True):
        assert torch.equal(grad, want)
        with pytest.raises(RuntimeError, match=rf"flux_ops\.{op.__name__} can be differentiated only once"):
            grad.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="only once"):
            torch.autograd.grad(grad.sum(), tensors[0], retain_graph=True)


@over_ops
@pytest.mark.parametrize("dynamic", (False, None, True))
def test_compiled_training_step(one_rank, op, dynamic):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    layer = torch.compile(lambda *t: torch.tanh(op(*t)), fullgraph=True, dynamic=dynamic, backend=counter)
    _, weight, bias = leaves()
    for m in (6,) if dynamic is False else (6, 8, 9, 16, 31):
        x = torch.randn(m, 8, dtype=torch.float64, requires_grad=True)
        got, want = layer(x, weight, bias), torch.tanh(F.linear(x, weight, bias))
        torch.testing.assert_close(got, want)
        got, want = (torch.autograd.grad(y.sum(), (x, weight, bias)) for y in (got, want))
        torch.testing.assert_close(got, want)
    assert counter.frame_count <= 2


@over_ops
def test_compiled_autograd(one_rank, op):
    torch._dynamo.reset()
    tensors = leaves()
    loss = op(*tensors).pow(2).sum()
    want = torch.autograd.grad(loss, tensors, retain_graph=True)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        loss.backward()
    torch.testing.assert_close(grads(tensors), list(want))
