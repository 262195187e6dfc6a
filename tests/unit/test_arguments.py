"""Refusals of one rank: each a sentence with the argument, its value, and what is allowed."""

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops.tuner.search import Tuner

OPS = (flux_ops.ag_gemm, flux_ops.gemm_rs, flux_ops.gemm_ar)
ops = pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)


@pytest.fixture(autouse=True)
def _group(one_rank):
    pass


def refused(op, kind, *words, args, **options):
    with pytest.raises(kind) as error:
        op(*args, **options)
    message = str(error.value)
    assert op.__name__ in message
    for word in words:
        assert word in message, message
    ok = op(torch.ones(4, 8), torch.ones(3, 8))
    assert torch.equal(ok, torch.full((4, 3), 8.0))


@ops
def test_shapes(op):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    refused(op, ValueError, "x", "[8]", args=(torch.ones(8), w))
    refused(op, ValueError, "weight", "[8]", args=(x, torch.ones(8)))
    refused(op, ValueError, "weight", "[1, 3, 8]", args=(x, torch.ones(1, 3, 8)))
    refused(op, ValueError, "K is 7 in weight and 8 in x", args=(x, torch.ones(3, 7)))
    for shape in ((2,), (1, 3), (4, 3), ()):
        refused(op, ValueError, "bias", "[3]", args=(x, w, torch.ones(shape)))


@ops
def test_dtypes(op):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    refused(op, TypeError, "weight", "Half", "Float", args=(x, w.half()))
    refused(op, TypeError, "bias", "BFloat16", "Float", args=(x, w, torch.ones(3, dtype=torch.bfloat16)))
    for dtype, name in ((torch.int8, "Char"), (torch.int64, "Long"), (torch.float8_e4m3fn, "Float8_e4m3fn")):
        refused(op, NotImplementedError, name, args=(x.to(dtype), w.to(dtype)))


@ops
def test_devices(op):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    refused(op, ValueError, "bias", "meta", "cpu", args=(x, w, torch.ones(3, device="meta")))


@ops
def test_strategy(op):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    refused(op, ValueError, "'warp'", "'auto', 'sequential', 'fused'", args=(x, w), strategy="warp")


@ops
def test_groups(op):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    refused(op, TypeError, "group is 17", args=(x, w), group=17)
    refused(op, ValueError, "not a member", args=(x, w), group=dist.GroupMember.NON_GROUP_MEMBER)
    gone = dist.new_group([0])
    assert op(x, w, group=gone).shape == (4, 3)
    dist.destroy_process_group(gone)
    refused(op, ValueError, "destroyed", args=(x, w), group=gone)
    with pytest.raises(ValueError, match="no process group 'nowhere'"):
        getattr(torch.ops.flux, op.__name__)(x, w, None, "nowhere", *[False] * (op is flux_ops.ag_gemm), "auto")


@ops
def test_no_tensor(op):
    x, w = torch.ones(4, 8), torch.ones(3, 8)
    refused(op, TypeError, "x is None", args=(None, w))
    refused(op, TypeError, "weight is None", args=(x, None))


def test_groups_of_destroy_and_tune():
    for name, call in (("destroy", flux_ops.destroy), ("tune", Tuner)):
        with pytest.raises(ValueError, match=f"{name}: this rank is not a member of group"):
            call(dist.GroupMember.NON_GROUP_MEMBER)
        with pytest.raises(TypeError, match=f"{name}: group is 17"):
            call(17)


def test_prepare():
    flux_ops.prepare(max_m=64, n=8, k=8, device="cpu")
    with pytest.raises(ValueError, match="op is 'gemm_xx'"):
        flux_ops.prepare(op="gemm_xx", max_m=64, n=8, k=8)
    with pytest.raises(ValueError, match="max_m is 0"):
        flux_ops.prepare(max_m=0, n=8, k=8)
    with pytest.raises(ValueError, match="more than any memory holds"):
        flux_ops.prepare(op="ag_gemm", max_m=2**31 - 1, n=8, k=2**31 - 1)


def test_destroy_is_harmless():
    flux_ops.destroy()
    flux_ops.destroy()
    assert flux_ops.ag_gemm(torch.ones(4, 8), torch.ones(3, 8)).shape == (4, 3)
