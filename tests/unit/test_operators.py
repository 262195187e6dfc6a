"""The operators in a group of one rank: results, shapes without data, opcheck, autograd."""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import flux_ops

OPS = (flux_ops.ag_gemm, flux_ops.gemm_rs, flux_ops.gemm_ar)
FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def operands(shape=(6, 8), n=5, dtype=torch.float32, requires_grad=False, device="cpu"):
    made = (torch.randn(s, dtype=dtype, device=device) for s in (shape, (n, shape[-1]), (n,)))
    return [t.requires_grad_(requires_grad) for t in made]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ((6, 8), (4, 3, 8), (2, 3, 2, 8)))
def test_one_rank_is_a_linear_layer(one_rank, dtype, shape):
    x, w, b = operands(shape, dtype=dtype)
    why = ("local", "no communication")
    flux_ops.dispatch_counts(reset=True)
    for bias, strategy in itertools.product((None, b), ("auto", "fused", "decomposed", "sequential")):
        y, gathered = flux_ops.ag_gemm(x, w, bias, return_gathered=True, strategy=strategy)
        assert torch.equal(y, F.linear(x, w, bias))
        assert torch.equal(gathered, x)
        assert gathered.data_ptr() != x.data_ptr()
        for op in (flux_ops.gemm_rs, flux_ops.gemm_ar):
            assert torch.equal(op(x, w, bias, strategy=strategy), F.linear(x, w, bias))
            ran = flux_ops.last_dispatch()
            assert (ran.op, ran.strategy, ran.world, ran.n, ran.k) == (op.__name__, "local", 1, 5, 8)
            assert ran.m == x.numel() // 8
            assert ran.reason
    counts = flux_ops.dispatch_counts(reset=True)
    assert counts == dict.fromkeys(((op, *why) for op in ("ag_gemm", "gemm_rs", "gemm_ar")), 8)


def test_threads_may_share_a_group_of_one_rank(one_rank):
    def calls(seed):
        for i in range(200):
            x, w, b = operands((1 + (seed * i) % 97, 8), n=1 + i % 7)
            for op in OPS:
                assert torch.equal(op(x, w, b), F.linear(x, w, b))

    flux_ops.dispatch_counts(reset=True)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(calls, range(1, 9)))
    assert set(flux_ops.dispatch_counts(reset=True).values()) == {8 * 200}


@pytest.mark.parametrize("m,n,k", ((0, 5, 8), (6, 0, 8), (6, 5, 0), (0, 0, 0)))
def test_empty_products(one_rank, m, n, k):
    x, w, b = operands((m, k), n)
    for op in OPS:
        assert torch.equal(op(x, w), torch.zeros(m, n))
        assert torch.equal(op(x, w, b), b.expand(m, n))


@pytest.mark.parametrize("shape", ((6, 8), (4, 3, 8)))
@pytest.mark.parametrize("transposed", (False, True))
def test_shapes_and_strides_without_data(one_rank, shape, transposed):
    x, w, b = operands(shape)
    x = x.transpose(0, 1).contiguous().transpose(0, 1)  # strides that are not the default ones
    w = w.t().contiguous().t() if transposed else w
    real = [
        *torch.ops.flux.ag_gemm(x, w, b, one_rank, True, "auto"),
        *torch.ops.flux.ag_gemm(x, w, b, one_rank, False, "auto"),
        torch.ops.flux.gemm_rs(x, w, b, one_rank, "auto"),
        torch.ops.flux.gemm_ar(x, w, b, one_rank, "auto"),
    ]
    x, w, b = (t.to("meta") for t in (x, w, b))
    fake = [
        *torch.ops.flux.ag_gemm(x, w, b, one_rank, True, "auto"),
        *torch.ops.flux.ag_gemm(x, w, b, one_rank, False, "auto"),
        torch.ops.flux.gemm_rs(x, w, b, one_rank, "auto"),
        torch.ops.flux.gemm_ar(x, w, b, one_rank, "auto"),
    ]
    for r, f in zip(real, fake, strict=True):
        assert (r.shape, r.stride(), r.dtype) == (f.shape, f.stride(), f.dtype)
        assert f.device.type == "meta"


def test_symbolic_sizes(one_rank):
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(torch.empty(6, 8))
        w = mode.from_tensor(torch.empty(5, 8))
        y, _ = torch.ops.flux.ag_gemm(x, w, None, one_rank, False, "auto")
        z = torch.ops.flux.gemm_rs(x, w, None, one_rank, "auto")
        a = torch.ops.flux.gemm_ar(x, w, None, one_rank, "auto")
    assert tuple(y.shape) == tuple(z.shape) == tuple(a.shape) == (6, 5)


def test_without_data_refuses_like_with(one_rank):
    x, w = torch.empty(6, 8, device="meta"), torch.empty(5, 7, device="meta")
    for op in (torch.ops.flux.gemm_rs, torch.ops.flux.gemm_ar):
        with pytest.raises(ValueError, match="K is 7 in weight and 8 in x"):
            op(x, w, None, one_rank, "auto")
        with pytest.raises(ValueError, match="'warp'"):
            op(x, w, None, one_rank, "warp")


@pytest.mark.parametrize("requires_grad", (False, True))
@pytest.mark.parametrize("with_bias", (False, True))
def test_opcheck(one_rank, requires_grad, with_bias):
    x, w, b = operands(requires_grad=requires_grad)
    b = b if with_bias else None
    torch.library.opcheck(torch.ops.flux.ag_gemm.default, (x, w, b, one_rank, False, "auto"))
    torch.library.opcheck(torch.ops.flux.ag_gemm.default, (x, w, b, one_rank, True, "auto"))
    torch.library.opcheck(torch.ops.flux.gemm_rs.default, (x, w, b, one_rank, "auto"))
    torch.library.opcheck(torch.ops.flux.gemm_ar.default, (x, w, b, one_rank, "auto"))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", ((6, 8), (4, 3, 8), (0, 8), (6, 0)))
def test_gradients_are_those_of_a_linear_layer(one_rank, op, shape):
    ours = operands(shape, dtype=torch.float64, requires_grad=True)
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    op(*ours).sum().backward()  # a gradient of stride 0
    F.linear(*theirs).sum().backward()
    for a, b in zip(ours, theirs, strict=True):
        assert a.grad.shape == b.shape
        torch.testing.assert_close(a.grad, b.grad)


def test_gradient_of_the_gathered_operand(one_rank):
    x, w, _ = operands(dtype=torch.float64, requires_grad=True)
    y, gathered = flux_ops.ag_gemm(x, w, return_gathered=True)
    (y.sum() + (gathered * 3).sum()).backward()
    torch.testing.assert_close(x.grad, w.detach().sum(0).expand(6, 8) + 3)


@pytest.mark.parametrize("wanted", ((1, 0, 0), (0, 1, 0), (0, 0, 1)))
def test_only_gradients_that_are_wanted(one_rank, wanted):
    tensors = operands()
    for t, wants in zip(tensors, wanted, strict=True):
        t.requires_grad_(bool(wants))
    for op in OPS:
        op(*tensors).sum().backward()
    assert [t.grad is not None for t in tensors] == [bool(w) for w in wanted]


FORKED = """
import os
import torch, torch.distributed as dist
import flux_ops

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
x = torch.ones(2, 4)
flux_ops.ag_gemm(x, x)
child = os.fork()
if child == 0:
    try:
        flux_ops.ag_gemm(x, x)
    except RuntimeError as error:
        os._exit(0 if "forked" in str(error) else 2)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
flux_ops.ag_gemm(x, x)
"""


def test_a_forked_process_cannot_use_the_groups_of_its_parent():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=100)
