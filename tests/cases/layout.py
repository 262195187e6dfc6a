"""Strided operands: right, and never changed."""

import pytest
import torch

import flux_ops
from tests.cases.base import FP32, OPS, REFUSALS, WITH_STRATEGY, Case, make
from tests.harness.compare import Findings, first_difference


def views_of_x(x):
    """The values of x under several strides, by name."""
    m, k = x.shape
    every_other = x.new_zeros(m, 2 * k)
    every_other[:, ::2] = x
    wide = x.new_zeros(m + 1, k + 16)
    wide[1:, 8 : k + 8] = x
    return {
        "x[:, ::2]": every_other[:, ::2],
        "x.t() of [K, M]": x.t().contiguous().t(),
        "row stride > K": wide[1:, 8 : k + 8],
        "rows repeated by expand": x[:1].expand(m, k),
    }


def views_of_weight(weight):
    n, k = weight.shape
    every_other_row = weight.new_zeros(2 * n, k)
    every_other_row[::2] = weight
    every_other_col = weight.new_zeros(n, 2 * k)
    every_other_col[:, ::2] = weight
    wide = weight.new_zeros(n, k + 8)
    wide[:, :k] = weight
    return {
        "weight.t() of [K, N]": weight.t().contiguous().t(),
        "weight[::2]": every_other_row[::2],
        "weight[:, ::2]": every_other_col[:, ::2],
        "weight row stride > K": wide[:, :k],
    }


def strided(ctx, op, strategy):
    findings = Findings()
    case = Case(op, 64, 136, 264, seed=11)
    operands = make(ctx, case)
    fn = getattr(flux_ops, op)
    for name, x in views_of_x(operands.x).items():
        plain, before = x.contiguous(), x.clone()
        want = fn(plain, operands.weight, strategy=strategy)
        findings.add(name, _difference(ctx, lambda x=x: fn(x, operands.weight, strategy=strategy), want))
        findings.add(f"{name} unchanged", None if torch.equal(x, before) else f"rank {ctx.rank}: x changed")
    want = operands.expected().to(case.dtype)
    for name, weight in views_of_weight(operands.weight).items():
        before = weight.clone()
        transposed = name.startswith("weight.t()")  # which the kernels of a gemm_ar for few rows don't take
        may_refuse = transposed and ctx.is_cuda and op == "gemm_ar" and strategy == "fused"
        problem = _difference(ctx, lambda w=weight: fn(operands.x, w, strategy=strategy), want, may_refuse)
        findings.add(name, problem)
        findings.add(f"{name} unchanged", None if torch.equal(weight, before) else f"rank {ctx.rank}: weight changed")
    bias = torch.arange(2 * case.n, device=ctx.device).remainder(5).to(case.dtype)[::2]
    want = (operands.expected() + bias.float()).to(case.dtype)
    problem = _difference(ctx, lambda: fn(operands.x, operands.weight, bias, strategy=strategy), want)
    findings.add("bias[::2]", problem)
    return findings.finish()


def _difference(ctx, make_call, want, may_refuse=False):
    try:
        return first_difference(make_call(), want, rank=ctx.rank)
    except REFUSALS as error:
        return None if may_refuse and str(error) else f"rank {ctx.rank}: refused: {error}"


def output_strides(ctx, op):
    """Real and fake outputs have the same shape, stride and dtype, whatever the strides of the inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    findings = Findings()
    case = Case(op, 8, 24, 40, dtype=FP32 if not ctx.is_cuda else torch.bfloat16)
    operands = make(ctx, case)
    name = torch.distributed.group.WORLD.group_name
    for what, x in views_of_x(operands.x).items():
        args = (name, True, "auto") if op == "ag_gemm" else (name, "auto")
        real = _as_tuple(getattr(torch.ops.flux, op)(x, operands.weight, None, *args))
        with FakeTensorMode() as mode:
            fakes = mode.from_tensor(x), mode.from_tensor(operands.weight)
            fake = _as_tuple(getattr(torch.ops.flux, op)(*fakes, None, *args))
        for r, f in zip(real, fake, strict=True):
            same = (r.shape, r.stride(), r.dtype, r.device) == (f.shape, f.stride(), f.dtype, f.device)
            findings.add(what, None if same else f"real {r.shape} {r.stride()}, fake {f.shape} {f.stride()}")
    return findings.finish()


def _as_tuple(result):
    return result if isinstance(result, (tuple, list)) else (result,)


class LayoutCases:
    @pytest.mark.parametrize("op, strategy", WITH_STRATEGY)
    def test_strided_operands(self, ranks, op, strategy, record_property):
        record_property("cells", ranks.run(strided, op, strategy)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_output_strides_real_and_fake(self, ranks, op, record_property):
        record_property("cells", ranks.run(output_strides, op)[0])
