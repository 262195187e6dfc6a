"""One workspace, many calls: changing shapes, slow ranks, refused calls in between, growth."""

import random
import re

import pytest
import torch

import flux_ops
from flux_ops import extension
from tests.cases.base import BF16, FP16, OPS, REFUSALS, Case, call, check, make, run
from tests.harness.compare import Findings, first_difference

SHAPES = {
    "cpu": ((8, 64, 64), (33, 72, 136), (64, 128, 128), (100, 200, 40), (17, 24, 8), (128, 136, 264)),
    "cuda": (
        (8, 1024, 1024),
        (33, 520, 2048),
        (256, 1024, 1024),
        (1000, 2056, 512),
        (128, 4096, 1024),
        (512, 768, 4096),
    ),
}


def sequence_of(ctx, rounds, seed):
    """`rounds` cases, the same on each rank: op, shape, dtype and data change from call to call."""
    rng = random.Random(seed)
    for turn in range(rounds):
        rows, n, k = rng.choice(SHAPES[ctx.device.type])
        options = {"dtype": rng.choice((BF16, FP16)), "bias": rng.random() < 0.3, "layout": rng.choice(("nk", "kn"))}
        yield Case(rng.choice(OPS), rows, n, k, seed=seed * 10000 + turn, **options)


def bad_call(ctx, turn):
    """A call that every rank has to refuse."""
    kind = turn % 5
    x = torch.zeros(8 * ctx.world, 64, dtype=BF16, device=ctx.device)
    weight = torch.zeros(64, 64, dtype=BF16, device=ctx.device)
    if kind == 0:
        flux_ops.ag_gemm(x, weight[:, :56].contiguous())
    elif kind == 1:
        flux_ops.gemm_rs(x[1:], weight)
    elif kind == 2:
        flux_ops.gemm_rs(x, weight.to(FP16))
    elif kind == 3:
        flux_ops.gemm_ar(x[:, :8], weight)
    else:
        flux_ops.ag_gemm(x, weight, torch.zeros(63, dtype=BF16, device=ctx.device))


def many_calls(ctx, rounds, bad_every, slow_every, slow_s):
    """No reset, no synchronisation by the caller: calls of all ops, checked at the end.

    A rotating rank is slow before or after every `slow_every`-th call; every `bad_every`-th call is refused.
    """
    results, refusals = [], 0
    for turn, case in enumerate(sequence_of(ctx, rounds, seed=5)):
        slow = slow_every and turn % slow_every == 0 and (turn // slow_every) % ctx.world == ctx.rank
        operands = make(ctx, case)
        if slow and turn % 2:
            ctx.stall(slow_s)
        results.append((case, call(operands)))
        if slow and not turn % 2:
            ctx.stall(slow_s)
        if bad_every and turn % bad_every == bad_every - 1:
            try:
                bad_call(ctx, turn // bad_every)
            except REFUSALS:
                refusals += 1
    findings = Findings()
    for case, y in results:
        want = make(ctx, case).expected().to(case.dtype)
        findings.add(case, first_difference(y, want, rank=ctx.rank, rows_per_chunk=case.rows))
    if bad_every:
        findings.add("refused calls", None if refusals == rounds // bad_every else f"{refusals} were refused")
    return findings.finish()


def chained(ctx, rounds, slow_s):
    """gemm_rs feeds ag_gemm, and that gemm_ar; one rank in turn is slow, between any two ops."""
    rows, hidden, inner = (256, 1024, 512) if ctx.is_cuda else (32, 64, 40)
    pick = torch.eye(hidden, dtype=BF16, device=ctx.device)[:inner]  # ag_gemm then gives columns of what it gathered
    ours = (torch.arange(inner, device=ctx.device) % ctx.world == ctx.rank).to(BF16)
    spread = torch.diag(ours)  # gemm_ar then gives its operand, column c of it from rank c % world
    outputs = []
    for turn in range(rounds):
        operands = make(ctx, Case("gemm_rs", rows, hidden, inner, seed=100 + turn))
        if turn % (2 * ctx.world) == 2 * ctx.rank:
            ctx.stall(slow_s)
        y = call(operands)
        if turn % (2 * ctx.world) == 2 * ctx.rank + 1:
            ctx.stall(slow_s)
        z = run("ag_gemm", y, pick)
        if turn % (3 * ctx.world) == 3 * ctx.rank + 2:
            ctx.stall(slow_s)
        outputs.append((turn, y, z, run("gemm_ar", z[turn % 5 :], spread)))
    findings = Findings()
    for turn, y, z, a in outputs:
        case = Case("gemm_rs", rows, hidden, inner, seed=100 + turn)
        mine = make(ctx, case)
        findings.add(
            f"gemm_rs {turn}", first_difference(y, mine.expected().to(BF16), rank=ctx.rank, rows_per_chunk=rows)
        )
        whole = []
        for rank in range(ctx.world):
            mine.rank = rank
            whole.append(mine.expected().to(BF16))
        want = torch.cat(whole)[:, :inner]
        findings.add(f"ag_gemm {turn}", first_difference(z, want, rank=ctx.rank, rows_per_chunk=rows))
        findings.add(f"gemm_ar {turn}", first_difference(a, want[turn % 5 :], rank=ctx.rank))
    return findings.finish()


def constant_lag(ctx, op, laggard, rounds, slow_s, strategies=("fused",), size=()):
    """The same rank is always late: its peers run ahead as far as the protocol lets them."""
    findings = Findings()
    results = []
    rows, n, k = size or SHAPES[ctx.device.type][2]
    for turn in range(rounds):
        case = Case(op, rows, n, k, seed=turn)
        operands = make(ctx, case)
        if ctx.rank == laggard:
            ctx.stall(slow_s)
        strategy = strategies[turn % len(strategies)]
        results.append((strategy, case, call(operands, strategy=strategy)))
    for strategy, case, y in results:
        want = make(ctx, case).expected().to(BF16)
        findings.add(f"{strategy} {case}", first_difference(y, want, rank=ctx.rank, rows_per_chunk=rows))
    return findings.finish()


def short_k(ctx, rounds):
    """One step of K, many tiles: the warps of a kernel may run ahead of each other as far as it lets them.

    A race of these warps may show only where ranks share a GPU: partials that overtook their readers did so only there.
    """
    findings, results = Findings(), []
    # Those for many rows: the names of the others begin with digits.
    kernels = [name for name in extension.module.config_names("cuda").split() if name[0] in "cp"]
    knobs = {
        "gemm_rs": ("m1/p1", "m1/p5"),
        # Each piece of a result is a block of rows or of columns: as many as the walk has, of all sizes.
        "gemm_ar": ("m1/p1/s2", "m1/p4/s2", "n4/p8/s1", "m4/p3/s2", "n1/p2/s4"),
    }
    configs = [(op, f"{kernel}/{more}") for op, names in knobs.items() for more in names for kernel in kernels]
    configs = [one for one in configs if not re.match("c256.*/s4", one[1])]  # a chunk would fill half a tile
    for op, config in configs:
        strategy = f"fused:{config}"
        case = Case(op, 1000 if op == "gemm_rs" else 1024 * ctx.world, 4104, 64, seed=len(results), dtype=BF16)
        operands = make(ctx, case)
        results.append((strategy, operands, [call(operands, strategy=strategy) for _ in range(rounds)]))
    for strategy, operands, outputs in results:
        want = operands.expected().to(BF16)
        for y in outputs:
            findings.add(f"{strategy} {operands.case}", first_difference(y, want, rank=ctx.rank))
    return findings.finish()


def grow_and_shrink(ctx):
    """A small shape, a large one (the workspace grows), the small one again; all ops, both strategies."""
    findings = Findings()
    small, large = SHAPES[ctx.device.type][0], SHAPES[ctx.device.type][5]
    for factor in (1, 2, 4):
        for rows, n, k in (small, (large[0] * factor, large[1], large[2]), small):
            for op in OPS:
                for strategy in ("fused", "sequential"):
                    case = Case(op, rows, n, k, seed=factor)
                    findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


def workspace_of(ctx):
    return flux_ops.ops._hooks.workspace(torch.distributed.group.WORLD.group_name, ctx.device.type)


def begin_prepared(ctx, max_m, n, k, op=None):
    """The workspace has what prepare() asks for, and nothing that earlier calls needed."""
    torch.distributed.barrier()
    flux_ops.destroy()
    flux_ops.prepare(op=op, max_m=max_m, n=n, k=k, dtype=BF16, device=ctx.device)


def check_in_place(ctx, findings, case):
    """The result is right, and the call allocates no workspace."""
    workspace = workspace_of(ctx)
    block, size = workspace.block, workspace.size
    findings.add(case, check(ctx, case, strategy="auto"))
    same = workspace_of(ctx) is workspace and workspace.block is block and workspace.size == size
    findings.add(f"workspace of {case}", None if same else f"rank {ctx.rank}: allocated anew, {size}, {workspace.size}")


def prepared(ctx):
    """prepare() bounds the memory: no call within its sizes allocates a workspace again."""
    max_m, n, k = (4096, 2048, 2048) if ctx.is_cuda else (4096, 264, 264)
    begin_prepared(ctx, max_m, n, k)
    findings = Findings()
    for op in OPS:
        most = max_m if op == "gemm_ar" else max_m // ctx.world
        for rows in (1, 7, most // 2, most):
            check_in_place(ctx, findings, Case(op, rows, n, k, seed=rows))
    return findings.finish()


def any_row_count(ctx, op, turns):
    """`turns` random M within what was prepared need no more memory; a call of twice as many rows does, once."""
    max_m, n, k = (4096, 2048, 2048) if ctx.is_cuda else (4096, *((8, 264) if op == "ag_gemm" else (264, 8)))
    begin_prepared(ctx, max_m, n, k, op)
    rng, findings, workspace = random.Random(13), Findings(), workspace_of(ctx)
    for seed in range(turns):
        if seed == turns * 4 // 5:
            before, max_m = workspace.size, 2 * max_m
            if ctx.is_cuda:  # where "auto" may run such a call without the workspace
                flux_ops.prepare(op=op, max_m=max_m, n=n, k=k, dtype=BF16, device=ctx.device)
            large = Case(op, max_m if op == "gemm_ar" else max_m // ctx.world, n, k, seed=turns)
            findings.add(large, check(ctx, large, strategy="auto"))
            findings.add(f"workspace of {large}", None if workspace.size > before else f"it stays at {before}")
        rows = rng.randint(1, max_m if op == "gemm_ar" else max_m // ctx.world)
        check_in_place(ctx, findings, Case(op, rows, n, k, dtype=rng.choice((BF16, FP16)), seed=seed))
    return findings.finish()


def destroyed(ctx):
    """destroy() frees the workspace of the default group; the next call makes a new one."""
    findings = Findings()
    for turn in range(4):
        for op in OPS:
            case = Case(op, 24, 72, 64, seed=turn)
            findings.add(case, check(ctx, case))
        torch.distributed.barrier()
        flux_ops.destroy()
    return findings.finish()


@pytest.mark.any_config
class ReuseCases:
    rounds = 1000
    chain = 500

    def test_many_calls_with_changing_shapes(self, ranks, record_property):
        record_property("cells", ranks.run(many_calls, self.rounds, 50, 0, 0.0)[0])

    def test_many_calls_with_a_slow_rank(self, ranks, record_property):
        record_property("cells", ranks.run(many_calls, self.rounds, 0, 5, self.slow_s)[0])

    def test_chained_ops_with_a_slow_rank(self, ranks, record_property):
        record_property("cells", ranks.run(chained, self.chain, self.slow_s)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_one_rank_always_late(self, ranks, op, record_property):
        laggard = ranks.world - 1
        record_property("cells", ranks.run(constant_lag, op, laggard, 20, self.slow_s)[0])

    def test_workspace_grows_and_serves_small_shapes(self, ranks, record_property):
        record_property("cells", ranks.run(grow_and_shrink)[0])

    def test_prepare(self, ranks, record_property):
        record_property("cells", ranks.run(prepared)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_prepare_is_enough_for_any_row_count(self, ranks, op, record_property):
        record_property("cells", ranks.run(any_row_count, op, 400)[0])

    def test_destroy_and_use_again(self, ranks, record_property):
        record_property("cells", ranks.run(destroyed)[0])
