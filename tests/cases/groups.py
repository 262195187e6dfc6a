"""Process groups: subgroups, groups side by side, groups that come and go."""

import dataclasses
import os
import pathlib

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops import shared_gpu
from tests.cases.base import BF16, OPS, Case, call, check, make
from tests.cases.layers import KINDS, Cell
from tests.harness.compare import Findings


def use(ctx, findings, what, group, seed, rows=40):
    for op in OPS:
        case = Case(op, rows, 72, 136, seed=seed)
        findings.add(f"{what}: {case}", check(ctx, case, group=group))


def subgroup_then_world(ctx):
    """A subgroup first, then the whole world, then the subgroup, then another group of the same members."""
    findings = Findings()
    pair = dist.new_group([0, 1])
    again = dist.new_group([0, 1])
    if ctx.rank < 2:
        use(ctx, findings, "pair", pair, seed=1)
    dist.barrier()
    use(ctx, findings, "world", dist.group.WORLD, seed=2)
    if ctx.rank < 2:
        use(ctx, findings, "pair after world", pair, seed=3)
        use(ctx, findings, "same members", again, seed=4)
    use(ctx, findings, "world again", None, seed=5)
    return findings.finish()


def reversed_order(ctx):
    """Group rank is not global rank: the group lists its members backwards."""
    findings = Findings()
    members = list(range(ctx.world - 1, -1, -1))
    group = dist.new_group(members, sort_ranks=False) if _can_keep_order() else dist.new_group(members)
    use(ctx, findings, "reversed", group, seed=6)
    tail = dist.new_group(list(range(1, ctx.world)))
    if ctx.rank >= 1:
        use(ctx, findings, "without rank 0", tail, seed=7)
    return findings.finish()


def _can_keep_order():
    import inspect

    return "sort_ranks" in inspect.signature(dist.new_group).parameters


def side_by_side(ctx):
    """World 4 as two pairs at the same time, with different sizes and data; then one of them is replaced."""
    findings = Findings()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[ctx.rank // 2]
    for turn in range(6):
        use(
            ctx,
            findings,
            f"half {ctx.rank // 2}",
            mine,
            seed=20 * (ctx.rank // 2) + turn,
            rows=24 + 40 * (ctx.rank // 2),
        )
    second = dist.new_group([0, 1])
    if ctx.rank < 2:
        use(ctx, findings, "second group of the pair", second, seed=70)
        use(ctx, findings, "first group beside it", mine, seed=71)
        flux_ops.destroy(mine)
        dist.destroy_process_group(mine)
    third = dist.new_group([0, 1])
    if ctx.rank < 2:
        use(ctx, findings, "third group", third, seed=72)
        use(ctx, findings, "second group after it", second, seed=73)
    else:
        use(ctx, findings, "the other half", mine, seed=74)
    use(ctx, findings, "world", None, seed=75)
    return findings.finish()


def interleaved_groups(ctx):
    """Two overlapping groups of the same ranks used in turn: no shared signals, no mixed data."""
    findings = Findings()
    first, second = dist.new_group(), dist.new_group()
    for turn in range(6):
        if turn % ctx.world == ctx.rank:
            ctx.stall(0.002)
        use(ctx, findings, f"first {turn}", first, seed=turn, rows=16 + turn)
        use(ctx, findings, f"second {turn}", second, seed=100 + turn, rows=48 - turn)
    return findings.finish()


def cycles(ctx, count):
    """Groups that come and go leave nothing behind: open files and shared memory stay as they were."""
    findings = Findings()
    held = []
    for turn in range(count):
        group = dist.new_group()
        use(ctx, findings, f"cycle {turn}", group, seed=turn, rows=16)
        if not ctx.is_cuda:
            assert _shared_mappings() >= ctx.world, "the memory of a workspace has another name"
        dist.barrier()
        flux_ops.destroy(group)
        dist.destroy_process_group(group)
        held.append(_held(ctx))
    _flat(findings, ctx, held[2:3], held[-1:])
    return findings.finish()


def lives(ctx, count, folder):
    """torch.distributed begins and ends, with layers on all ranks and on halves of them in turn. What flux_ops holds
    does not pile up: destroy() before the end or after it frees it, and without destroy() the next call does.
    """
    findings, held = Findings(), []
    backend = shared_gpu.device_and_backend(ctx.rank, ctx.world)[1] if ctx.is_cuda else "gloo"
    for turn in range(count):
        life = f"life {turn}"
        dist.init_process_group(backend, init_method=f"file://{folder}/{turn}", rank=ctx.rank, world_size=ctx.world)
        size = ctx.world // (1 + turn % 2)
        groups = [dist.new_group(list(range(first, first + size))) for first in range(0, ctx.world, size)]
        group = groups[ctx.rank // size]
        use(ctx, findings, life, None, seed=turn, rows=16)
        for kind in KINDS:
            place = dataclasses.replace(ctx, rank=group.rank(), world=size)
            cell = Cell(place, kind, True, seed=turn, group=group).require((1, 1, 1))
            y = cell.layer(cell.x)
            cell.compare(findings, life, y.detach(), cell.expected()[0])
            y.backward(cell.grad)
            cell.compare_grads(findings, life)
        dist.barrier()
        if turn % 3 == 0:
            flux_ops.destroy(group)
            flux_ops.destroy()
        dist.destroy_process_group()
        if turn % 3 == 1:
            flux_ops.destroy()
        held.append(_held(ctx))
    period = 6  # of the sizes and of the ways to end; the first is the warm-up
    whole = count // period * period
    _flat(findings, ctx, held[period : 2 * period], held[whole - period : whole])
    return findings.finish()


def _held(ctx):
    return _open_files(), _shared_mappings(), _device_megabytes(ctx)


def _flat(findings, ctx, early, late):
    """What is held late is what was held early. NCCL opens files of its own."""
    allowed = {"open files": 10**6 if ctx.is_cuda else 3, "shared mappings": 0, "MB of the GPU": 64}
    for before, after in zip(early, late, strict=True):
        for (what, extra), a, b in zip(allowed.items(), before, after, strict=True):
            findings.add(what, None if b <= a + extra else f"rank {ctx.rank}: {a} at first, {b} at the end")


def _open_files():
    return len(os.listdir("/proc/self/fd"))


def _shared_mappings():
    """Of workspaces on the CPU, whose memory has a name nowhere but here."""
    return pathlib.Path("/proc/self/maps").read_text().count("/memfd:flux_ops")


def _device_megabytes(ctx):
    if not ctx.is_cuda:
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) >> 20


def use_after_destroy(ctx):
    """A group that torch.distributed has destroyed is refused by name, and the others go on."""
    group = dist.new_group()
    operands = make(ctx, Case("ag_gemm", 16, 64, 64, seed=1), group)
    call(operands, group=group)
    name = group.group_name
    dist.barrier()
    flux_ops.destroy(group)
    dist.destroy_process_group(group)
    messages = []
    for attempt in (
        lambda: flux_ops.ag_gemm(operands.x, operands.weight, group=group),
        lambda: torch.ops.flux.ag_gemm(operands.x, operands.weight, None, name, False, "fused"),
        lambda: torch.ops.flux.gemm_rs(operands.x, operands.weight, None, "no such group", "auto"),
    ):
        with pytest.raises(Exception) as caught:  # noqa: PT011 (the class depends on who notices)
            attempt()
        assert not isinstance(caught.value, dist.DistBackendError), "a timeout is no answer"
        messages.append(str(caught.value))
    problem = check(ctx, Case("gemm_rs", 16, 64, 64, seed=2))
    assert problem is None, problem
    return messages


def one_rank_group(ctx):
    """A group of one: no peers, the plain product."""
    findings = Findings()
    groups = [dist.new_group([rank]) for rank in range(ctx.world)]
    mine = groups[ctx.rank]
    use(ctx, findings, "alone", mine, seed=ctx.rank, rows=40)
    for op in OPS:
        for strategy in ("auto", "sequential"):
            case = Case(op, 33, 72, 64, seed=9, bias=True, dtype=BF16)
            findings.add(f"alone, {strategy} {case}", check(ctx, case, strategy=strategy, group=mine))
    return findings.finish()


class GroupCases:
    @pytest.mark.worlds(3, 4)
    def test_subgroup_then_world(self, ranks):
        ranks.run(subgroup_then_world)

    @pytest.mark.worlds(3, 4)
    def test_rank_order_of_the_group_counts(self, ranks):
        ranks.run(reversed_order)

    @pytest.mark.worlds(4)
    def test_two_groups_at_the_same_time(self, ranks):
        ranks.run(side_by_side)

    def test_groups_of_the_same_ranks_in_turn(self, ranks):
        ranks.run(interleaved_groups)

    @pytest.mark.worlds(2, 4)
    def test_create_use_destroy_cycles(self, ranks):
        ranks.run(cycles, self.cycles)

    def test_begin_and_end_of_torch_distributed(self, spawn, tmp_path):
        ranks = spawn(self.world_of_lives, {"GLOO_SOCKET_IFNAME": "lo"}, init_group=False)
        ranks.run(lives, self.lives, str(tmp_path))

    @pytest.mark.worlds(2, 4)
    def test_destroyed_group_is_refused(self, ranks):
        for messages in ranks.run(use_after_destroy):
            assert "no such group" in messages[2]

    @pytest.mark.worlds(2, 4)
    def test_group_of_one(self, ranks):
        ranks.run(one_rank_group)
