"""The operators as PyTorch sees them: opcheck, and what last_dispatch() tells."""

import pytest
import torch
import torch.distributed as dist

import flux_ops
from tests.cases.base import BF16, FP32, OPS, WITH_STRATEGY, Case, call, check, make
from tests.harness.compare import Findings


def opcheck(ctx, op, strategy, bias):
    """torch.library's own checks: schema, fake kernel, autograd registration, AOT dispatch with dynamic shapes.

    The cases with a bias ask for the gathered operand too.
    """
    case = Case(op, 16, 64, 64, dtype=BF16 if ctx.is_cuda else FP32, bias=bias)
    operands = make(ctx, case)
    tensors = [operands.x.requires_grad_(), operands.weight.requires_grad_(), operands.bias]
    name = dist.group.WORLD.group_name
    rest = (name, bias, strategy) if op == "ag_gemm" else (name, strategy)
    torch.library.opcheck(getattr(torch.ops.flux, op).default, (*tensors, *rest))


def dispatch_record(ctx, op):
    small, large = (16, 72, 64), (512, 4096, 2048)
    cells = [("fused", small, "fused"), ("sequential", small, "sequential"), ("auto", small, "fused")]
    if ctx.is_cuda and op != "gemm_ar":  # for that it is too few
        cells.append(("auto", large, "fused"))
    flux_ops.dispatch_counts(reset=True)
    for strategy, (rows, n, k), ran in cells:
        case = Case(op, rows, n, k)
        call(make(ctx, case), strategy=strategy)
        record = flux_ops.last_dispatch()
        assert (record.op, record.strategy) == (op, ran), record
        assert (record.m, record.n, record.k, record.world) == (case.m(ctx.world), n, k, ctx.world), record
        assert record.reason, record
        assert bool(record.config) == (ran == "fused"), record
    counts = {(op, "fused", "asked for"): 1, (op, "sequential", "asked for"): 1}
    for _, _, ran in cells[2:]:
        counts[op, ran, "model"] = 1 + counts.get((op, ran, "model"), 0)
    assert flux_ops.dispatch_counts() == counts
    with pytest.raises(ValueError, match="K is 9"):
        getattr(flux_ops, op)(torch.zeros(8, 8, device=ctx.device), torch.zeros(8, 9, device=ctx.device))
    assert flux_ops.dispatch_counts(reset=True) == counts, "a refused call was counted"
    assert flux_ops.dispatch_counts() == {}


def poisoned_workspace(ctx, op, strategies=("fused",), sizes=()):
    """NaN in every byte that peers write, but for slots, which are empty: a tile read before it has come, or never
    sent, would show.
    """
    findings = Findings()
    # In the last size little is computed and much is sent: the reader waits while the data is on its way.
    much = (1024, 64, 1024) if op == "ag_gemm" else (1024, 1024, 64)
    if ctx.is_cuda:
        much = tuple(4 * size for size in much)
    flux_ops.prepare(op=op, max_m=much[0] * ctx.world, n=max(much[1], 264), k=max(much[2], 264), dtype=BF16)
    workspace = flux_ops.ops._hooks.workspace(dist.group.WORLD.group_name, ctx.device.type)
    for rows, n, k in sizes or ((40, 72, 64), (129, 264, 136), (8, 24, 264), much):
        for turn in range(max(len(strategies), 4 if rows == much[0] else 2)):
            strategy = strategies[turn % len(strategies)]
            case = Case(op, rows, n, k, seed=rows + turn)
            ctx.sync()
            dist.barrier()
            workspace.poison()
            ctx.sync()
            dist.barrier()
            findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


class DispatchCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("bias", (False, True), ids=("no bias", "bias"))
    @pytest.mark.parametrize("op, strategy", (*WITH_STRATEGY, *((op, "auto") for op in OPS)))
    def test_opcheck(self, ranks, op, strategy, bias):
        ranks.run(opcheck, op, strategy, bias)

    @pytest.mark.parametrize("op", OPS)
    def test_last_dispatch(self, ranks, op):
        ranks.run(dispatch_record, op)

    @pytest.mark.parametrize("op", OPS)
    def test_poisoned_workspace(self, ranks, op, record_property):
        record_property("cells", ranks.run(poisoned_workspace, op)[0])
