"""Refusals: on every rank, before anything is launched, with the values; the next good call works."""

import re

import pytest
import torch
import torch.distributed as dist

import flux_ops
from tests.cases.autograd import expected_grads, grad_of
from tests.cases.base import (
    BF16,
    FP16,
    FP32,
    OPS,
    WITH_STRATEGY,
    Case,
    call,
    check,
    make,
    refused,
)
from tests.harness.compare import Findings, first_difference


def _bad_calls(ctx, op):
    """name -> (exception classes, words that the message must hold, the call)."""
    world = ctx.world

    def zeros(*shape, dtype=BF16, device=None):
        return torch.zeros(*shape, dtype=dtype, device=device or ctx.device)

    fn = getattr(flux_ops, op)
    rows = 8 * world
    x, weight = zeros(rows, 64), zeros(48, 64)
    other = "meta" if not ctx.is_cuda else "cpu"
    bad_type = (TypeError, NotImplementedError, ValueError)
    calls = {
        "contraction lengths differ": (ValueError, ["64", "56"], lambda: fn(x, zeros(48, 56))),
        "x and weight of different dtypes": (TypeError, ["bfloat16", "float16"], lambda: fn(x, weight.to(FP16))),
        "weight with one dimension": (ValueError, ["weight", "64"], lambda: fn(x, zeros(64))),
        "weight with three dimensions": (ValueError, ["weight", "2"], lambda: fn(x, zeros(2, 48, 64))),
        "x with one dimension": (ValueError, ["x", "64"], lambda: fn(zeros(64), weight)),
        "int8": (bad_type, ["int8"], lambda: fn(zeros(rows, 64, dtype=torch.int8), zeros(48, 64, dtype=torch.int8))),
        "float8": (
            bad_type,
            ["float8_e4m3fn"],
            lambda: fn(zeros(rows, 64).to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)),
        ),
        "bias of another dtype": (TypeError, ["bias", "float32"], lambda: fn(x, weight, zeros(48, dtype=FP32))),
        "bias one short": (ValueError, ["bias", "47", "48"], lambda: fn(x, weight, zeros(47))),
        "bias [1, N]": (ValueError, ["bias", "48"], lambda: fn(x, weight, zeros(1, 48))),
        "bias [M, N]": (ValueError, ["bias", "48"], lambda: fn(x, weight, zeros(rows, 48))),
        "bias on another device": (
            (ValueError, TypeError),
            ["bias", other],
            lambda: fn(x, weight, zeros(48, device=other)),
        ),
        "weight on another device": (
            (ValueError, TypeError),
            ["weight", other],
            lambda: fn(x, zeros(48, 64, device=other)),
        ),
        "strategy that does not exist": (ValueError, ["warp9", "fused"], lambda: fn(x, weight, strategy="warp9")),
        "group that is no group": ((TypeError, ValueError), ["group"], lambda: fn(x, weight, group=17)),
    }
    if op == "gemm_rs" and world > 1:
        m = rows + 1
        words = [str(m), str(world)]
        calls["M not a multiple of the world"] = (ValueError, words, lambda: fn(zeros(m, 64), weight))
        calls["fewer rows than ranks"] = (ValueError, ["1", str(world)], lambda: fn(zeros(1, 64), weight))
        if world > 2:
            calls["s not a multiple, s * b is"] = (
                ValueError,
                [str(world)],
                lambda: fn(zeros(world - 1, world, 64), weight),
            )
    if ctx.is_cuda:
        for dtype in (torch.float32, torch.float64):
            name = str(dtype).removeprefix("torch.")
            calls[f"fused in {name}"] = (
                bad_type,
                [name],
                lambda d=dtype: fn(x.to(d), weight.to(d), strategy="fused"),
            )
    return calls


ATEN_NAMES = {"bfloat16": "BFloat16", "float16": "Half", "float32": "Float", "float64": "Double", "int8": "Char"}
ATEN_NAMES["float8_e4m3fn"] = "Float8_e4m3fn"


def holds(message, word):
    """Whether the message holds the word; a dtype may go by torch's name or by ATen's."""
    return any(
        re.search(rf"(?<![a-zA-Z0-9]){re.escape(w)}(?![a-zA-Z0-9])", message)
        for w in (word, ATEN_NAMES.get(word, word))
    )


def refusals(ctx, op):
    problems, messages = [], {}
    for name, (kinds, words, make_call) in _bad_calls(ctx, op).items():
        try:
            kind, message = refused(ctx, make_call)
        except AssertionError:
            problems.append(f"{name}: not refused")
            continue
        except Exception as error:  # noqa: BLE001 (any other class is a finding)
            problems.append(f"{name}: {type(error).__name__}: {error}")
            continue
        messages[name] = f"{kind}: {message}"
        allowed = [k.__name__ for k in (kinds if isinstance(kinds, tuple) else (kinds,))]
        if kind not in allowed:
            problems.append(f"{name}: {kind} in place of {' or '.join(allowed)}: {message}")
        missing = [word for word in words if not holds(message, word)]
        if missing:
            problems.append(f"{name}: the message lacks {missing}: {message}")
    after = check(ctx, Case(op, 16, 72, 64, seed=1))
    if after:
        problems.append(f"a good call afterwards: {after}")
    assert not problems, f"rank {ctx.rank}:\n" + "\n".join(problems)
    return messages


def disagreement(ctx, op, what):
    """The ranks call with different arguments. Returns (class name, message) per rank, or fails if it was taken."""
    rows, n, k, dtype, bias = 8 * ctx.world, 48, 64, BF16, False
    odd_one = ctx.rank == ctx.world - 1
    if odd_one:
        rows = rows + ctx.world if what == "rows" else rows
        n = 56 if what == "n" else n
        k = 72 if what == "k" else k
        dtype = FP16 if what == "dtype" else dtype
        bias = what == "bias"
        if what == "empty":
            rows = 0
    x = torch.zeros(rows, k, dtype=dtype, device=ctx.device)
    weight = torch.zeros(n, k, dtype=dtype, device=ctx.device)
    b = torch.zeros(n, dtype=dtype, device=ctx.device) if bias else None
    result = refused(ctx, lambda: getattr(flux_ops, op)(x, weight, b, strategy="fused"))
    torch.distributed.barrier()
    problem = check(ctx, Case(op, 16, 72, 64, seed=1))
    assert problem is None, f"the next good call: {problem}"
    return result


def one_rank_refuses(ctx, op, culprit):
    """One rank passes arguments that are wrong by themselves: the others hear of it in place of waiting for it."""
    x = torch.zeros(8 * ctx.world, 64, dtype=BF16, device=ctx.device)
    weight = torch.zeros(104, 56 if ctx.rank == culprit else 64, dtype=BF16, device=ctx.device)  # N of no other test
    try:
        getattr(flux_ops, op)(x, weight, strategy="fused")
    except Exception as error:  # noqa: BLE001 (the class is part of the answer)
        answer = type(error).__name__, str(error)
    else:
        raise AssertionError(f"rank {ctx.rank}: the call went through")
    torch.distributed.barrier()
    problem = check(ctx, Case(op, 16, 80, 64, seed=1))
    assert problem is None, f"the next good call: {problem}"
    return answer


def some_uneven(world):
    """Numbers of rows M, most of which `world` ranks can't have equal shares of; of one row, rank 0 has all."""
    return sorted({1, world - 1, world + 1, 2 * world - 1, 17, 127, 1001, 4026})


def uneven_rows(ctx, op, strategy):
    """M that TP does not divide, cut as torch.tensor_split does: refused on every rank. M = 16 TP is right after each,
    forward and backward. Returns (M, class name, message) of each.
    """
    findings, messages = Findings(), []
    group = dist.new_group(list(range(ctx.world)))  # no rank has run its share of what is refused before
    dtype, n, k = BF16 if ctx.is_cuda else FP32, 72, 64
    fn, weight = getattr(flux_ops, op), torch.ones(n, k, dtype=dtype, device=ctx.device)
    for m in (m for m in some_uneven(ctx.world) if m % ctx.world):
        x = torch.ones(m, k, dtype=dtype, device=ctx.device)
        x = x.tensor_split(ctx.world)[ctx.rank] if op == "ag_gemm" else x
        messages.append((m, *refused(ctx, lambda x=x: fn(x, weight, strategy=strategy, group=group))))
        case = Case(op, 16, n, k, dtype=dtype, bias=True, seed=m)
        operands = make(ctx, case, group)
        tensors = operands.x, operands.weight, operands.bias
        grads = [grad_of(ctx, case, rank) for rank in range(ctx.world)]
        wants = [operands.expected().to(dtype), *expected_grads(ctx, operands, grads)]
        for tensor in tensors:
            tensor.requires_grad_()
        y = call(operands, strategy=strategy, group=group)
        y.backward(grads[ctx.rank])
        gots = y.detach(), *(tensor.grad for tensor in tensors)
        for name, got, want in zip(("y", "x", "weight", "bias"), gots, wants, strict=True):
            findings.add(f"after M = {m}: {name}", first_difference(got, want, rank=ctx.rank))
    flux_ops.destroy(group)
    findings.finish()
    return messages


UNEVEN = tuple((op, strategy) for op, strategy in WITH_STRATEGY if op != "gemm_ar")


class ErrorCases:
    @pytest.mark.worlds(2, 3, 4, 8)
    @pytest.mark.parametrize("op, strategy", UNEVEN)
    def test_rows_that_tp_does_not_divide(self, ranks, op, strategy):
        for messages in ranks.run(uneven_rows, op, strategy):
            for m, kind, message in messages:
                assert kind == "ValueError", message
                values = {part.numel() for part in torch.tensor_split(torch.arange(m), ranks.world)}
                if op == "gemm_rs":
                    values = (m, ranks.world)
                assert all(holds(message, str(value)) for value in values), message

    @pytest.mark.worlds(2, 3, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_refusals(self, ranks, op, record_property):
        messages = ranks.run(refusals, op)
        record_property("cells", len(messages[0]))
        alike = [{name: re.sub(r"cuda:\d+", "cuda", text) for name, text in m.items()} for m in messages]
        assert all(m == alike[0] for m in alike), f"the ranks gave different reasons: {alike}"

    @pytest.mark.worlds(2, 3, 4)
    @pytest.mark.parametrize(
        "what, values",
        (
            ("rows", None),
            ("n", ["48", "56"]),
            ("k", ["64", "72"]),
            ("dtype", ["bfloat16", "float16"]),
            ("bias", ["bias"]),
            ("empty", ["0"]),
        ),
        ids=lambda v: v if isinstance(v, str) else "",
    )
    @pytest.mark.parametrize("op", OPS)
    def test_ranks_that_disagree(self, ranks, op, what, values):
        for rank, (_, message) in enumerate(ranks.run(disagreement, op, what)):
            for value in values or []:
                assert holds(message, value), f"rank {rank}'s message lacks {value}: {message}"
            for peer in range(ranks.world):
                assert holds(message, str(peer)), f"rank {rank}'s message doesn't list rank {peer}: {message}"

    @pytest.mark.worlds(2, 3, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_one_rank_with_bad_arguments(self, ranks, op):
        culprit = ranks.world - 1
        for rank, (_, message) in enumerate(ranks.run(one_rank_refuses, op, culprit)):
            assert rank == culprit or holds(message, str(culprit)), f"rank {rank} isn't told who: {message}"
            assert holds(message, "56"), f"rank {rank} isn't told why: {message}"
