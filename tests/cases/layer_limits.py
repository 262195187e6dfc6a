"""Layers at the edge: tokens that TP does not divide, dimensions that are not gathered, sizes that can't be cut."""

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, refused
from tests.cases.errors import some_uneven
from tests.cases.layers import IN, OUT, TOKENS, Cell
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_x, generator


def good_call(ctx, cell, findings, what):
    """A forward and a backward of a cell that had refusals before."""
    for tensor in (cell.x, cell.layer.weight, cell.layer.bias):
        tensor.grad = None
    y = cell.require((1, 1, 1)).layer(cell.x)
    cell.compare(findings, f"{what}: y", y.detach(), cell.expected()[0])
    y.backward(cell.grad)
    cell.compare_grads(findings, what)


def uneven_tokens(ctx, kind):
    """M that TP does not divide: refused on every rank, with M and TP. M that TP divides and 16 TP does not: right,
    forward and backward. So is M = 16 TP after each.
    """
    findings, messages = Findings(), []
    group = dist.new_group(list(range(ctx.world)))  # where no rank has run its share of what is refused before,
    layer = Cell(ctx, kind, True, bias=False, group=group).layer  # nor runs it here: the other layers have a bias
    cell = Cell(ctx, kind, True, seed=8, tokens=16, group=group)
    for m in sorted({*some_uneven(ctx.world), 13 * ctx.world}):
        if m % ctx.world:
            whole = exact_x((m, IN), BF16, generator(ctx.device, m, "x"))
            part = whole.tensor_split(ctx.world)[ctx.rank] if kind == "column" else cell.of_input(whole)
            x = part.clone().requires_grad_()
            messages.append((m, *refused(ctx, lambda x=x: layer(x))))
        else:
            uneven = Cell(ctx, kind, True, seed=m, tokens=m // ctx.world, group=group)
            good_call(ctx, uneven, findings, f"M = {m}")
        good_call(ctx, cell, findings, f"after M = {m}")
    flux_ops.destroy(group)
    findings.finish()
    return messages


def half_known_tokens(ctx):
    """All but rank 0 have run their share before and exchange nothing: the timeout tells what rank 0 wanted to run."""
    findings = Findings()
    cell = Cell(ctx, "column", True, seed=8)
    good_call(ctx, cell, findings, "before")
    extra = 1 if ctx.rank == 0 else 0
    before = flux_ops.ops.settings.timeout_s
    flux_ops.set_timeout(2)
    try:
        with pytest.raises(dist.DistBackendError) as caught:
            cell.layer(torch.ones(TOKENS + extra, IN, dtype=BF16))
    finally:
        flux_ops.set_timeout(before)
    dist.barrier()
    flux_ops.destroy()
    good_call(ctx, cell, findings, "after")
    findings.finish()
    return str(caught.value)


def any_tokens(ctx, kind):
    """Without sequence parallelism M may be anything."""
    findings = Findings()
    cell = Cell(ctx, kind, False, seed=8)
    for m in (1, ctx.world + 1, 17, 127):
        x = exact_x((m, IN), BF16, generator(ctx.device, m, "x"))
        want = cell.of_output(cell.whole(x.double()).detach()).to(BF16)
        problem = first_difference(cell.layer(cell.of_input(x)).detach(), want, rank=ctx.rank)
        findings.add(f"M = {m}", problem)
    return findings.finish()


def dimensions(ctx, kind):
    """x [S, B, K] and [B, S, K]: dimension 0 is gathered or scattered, whatever it means, and no other; so are its
    gradients. Each rank's tokens hold its number.
    """
    findings = Findings()
    for tokens, *leading in [(8, b) for b in (1, 2, 5)] + [(b, 7) for b in (1, 2, 5)] + [(1, 3, 5), (8, 3, 5)]:
        cell = Cell(ctx, kind, True, seed=9, tokens=tokens, leading=leading)
        numbers = torch.arange(ctx.world, device=ctx.device).repeat_interleave(tokens)
        cell.x_whole += numbers.view(-1, *[1] * len(leading), 1)
        cell.x = cell.of_input(cell.x_whole).to(BF16)
        what = f"x {list(cell.x_whole.shape)}"
        y = cell.require((1, 1, 1)).layer(cell.x)
        cell.compare(findings, f"{what}: y", y.detach(), cell.expected()[0])
        y.backward(cell.grad)
        cell.compare_grads(findings, what)
    return findings.finish()


def refused_sizes(ctx):
    world = ctx.world
    makers = {
        "out_features": lambda: ColumnParallelLinear(IN, world * 8 + 1),
        "one of out_features": lambda: ColumnParallelLinear(IN, [world * 8, world * 8 + 1]),
        "in_features": lambda: RowParallelLinear(world * 8 + 1, OUT),
        "columns of x": lambda: RowParallelLinear(world * 8, OUT, input_is_parallel=False, device=ctx.device)(
            torch.ones(2, world * 8 + 1, device=ctx.device)
        ),
        "no dimension": lambda: ColumnParallelLinear(IN, OUT, sequence_parallel=True, device=ctx.device)(
            torch.ones(IN, device=ctx.device)
        ),
    }
    return {what: refused(ctx, make) for what, make in makers.items()}


def unlike_ranks(ctx):
    """A gather of unlike shards is refused for plain tensors too."""
    x = torch.ones(4 + (ctx.rank == 0), IN, dtype=BF16, device=ctx.device)
    weight = torch.ones(16, IN, dtype=BF16, device=ctx.device)
    return refused(ctx, lambda: flux_ops.nn.column_parallel(x, [weight, weight]))


class LayerLimitCases:
    @pytest.mark.worlds(2, 3, 4, 8)
    @pytest.mark.parametrize("kind", ("column", "row"))
    def test_tokens_that_tp_does_not_divide(self, ranks, kind):
        for messages in ranks.run(uneven_tokens, kind):
            assert messages
            for m, error, message in messages:
                assert error == "ValueError"
                if kind == "row":
                    assert f"M = {m}" in message
                    assert f"TP = {ranks.world}" in message
                else:  # the rows of every rank
                    rows = {part.numel() for part in torch.tensor_split(torch.arange(m), ranks.world)}
                    assert all(f"x [{r}, " in message for r in rows), message
                    assert f"rank {ranks.world - 1}:" in message

    @pytest.mark.cpu_is_enough
    @pytest.mark.worlds(2, 4)
    def test_tokens_that_one_rank_does_not_know(self, ranks):
        waited, *behind = ranks.run(half_known_tokens)
        peers = ", ".join(str(rank) for rank in range(1, ranks.world))
        assert f"rank 0 waited 2 s for {'rank' if ranks.world == 2 else 'ranks'} {peers} to make" in waited
        for message in behind:
            assert f"Rank 0 was about to run ag_gemm(x [{TOKENS + 1}, " in message

    @pytest.mark.parametrize("kind", ("column", "row"))
    def test_any_number_of_tokens_without_sequence_parallelism(self, ranks, kind):
        ranks.run(any_tokens, kind)

    @pytest.mark.parametrize("kind", ("column", "row"))
    def test_dimension_0_is_gathered_and_scattered(self, ranks, kind):
        ranks.run(dimensions, kind)

    @pytest.mark.worlds(2, 4)
    def test_sizes_that_can_not_be_cut(self, ranks):
        for refusals in ranks.run(refused_sizes):
            size = ranks.world * 8 + 1
            for what in ("out_features", "one of out_features", "in_features", "columns of x"):
                error, message = refusals[what]
                assert error == "ValueError"
                assert what.split()[-1] in message
                assert str(size) in message
                assert f"TP = {ranks.world}" in message
            assert refusals["no dimension"][0] == "ValueError"

    @pytest.mark.worlds(2, 4)
    def test_ranks_with_unlike_shards(self, ranks):
        for error, message in ranks.run(unlike_ranks):
            assert error == "ValueError"
            assert "x [5, " in message
            assert "x [4, " in message
