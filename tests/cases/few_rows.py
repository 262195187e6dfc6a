"""ag_gemm and gemm_rs by the kernels for few rows: every kernel on exact data, for any M, beside the other ops."""

import random

import torch

import flux_ops
from flux_ops import extension
from tests.cases.base import BF16, FP16, OPS, Case, call, check, make, run
from tests.harness.compare import Findings, first_difference

FEW_ROWS_OPS = ("ag_gemm", "gemm_rs")
ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 128)
NK = ((256, 512), (72, 40), (1032, 2056), (8192, 1024), (264, 8192))


def strategies(ctx, op, rows, n=256, k=256, dtype="bfloat16"):
    """The kernels for few rows among what the tuner tries for the product: their names have no knobs."""
    m = Case(op, rows, n, k).m(ctx.world)
    candidates = extension.module.candidates(op, ctx.device.type, ctx.world, m, n, k, dtype, False)
    return [c for c in candidates if c.startswith("fused:") and (op == "gemm_ar" or "/" not in c)]


def every_row_count(ctx, op):
    findings = Findings()
    rng = random.Random(21)
    cells = [(rows, n, k) for rows in ROWS for n, k in NK if rows * ctx.world <= 512]
    rng.shuffle(cells)
    for rows, n, k in cells:
        found = strategies(ctx, op, rows, n, k)
        assert found or rows * ctx.world > 256, f"{op}: no kernel for {rows} rows a rank"
        for strategy in found:
            case = Case(op, rows, n, k, seed=rows + n, dtype=rng.choice((BF16, FP16)), bias=rng.random() < 0.5)
            findings.add(f"{strategy} {case}", check(ctx, case, strategy=strategy))
    return findings.finish()


def more_rows(ctx, op):
    """Up to 2048 rows where they are reduced: several tiles of each thread block, slots that grow, a rank late now and
    then.
    """
    findings, results = Findings(), []
    rng = random.Random(23)
    cells = [(m, n, k) for m in (513, 640, 1000, 1024, 1537, 2048) for n, k in ((72, 40), (1032, 2056), (8192, 512))]
    rng.shuffle(cells)
    for turn, (m, n, k) in enumerate(cells):
        rows = m if op == "gemm_ar" else -(-m // ctx.world)
        found = [name for name in strategies(ctx, op, rows, n, k) if not name.endswith("/one-shot")]
        too_large = op == "gemm_rs" and 2 * (rows + 30) * ctx.world * n > 16 << 20  # its partials have 16 MiB
        assert found or too_large or rows * ctx.world > 2048, f"no kernel for {m} x {n} x {k}"
        for strategy in (*found, "auto"):
            case = Case(op, rows, n, k, seed=turn, dtype=rng.choice((BF16, FP16)), bias=rng.random() < 0.5)
            operands = make(ctx, case)
            if turn % (2 * ctx.world) == ctx.rank:
                ctx.stall(2e-3)
            results.append((f"{strategy} {case}", operands, call(operands, strategy=strategy)))
        for name, operands, y in results:
            findings.add(name, first_difference(y, operands.expected().to(y.dtype), rank=ctx.rank))
        results.clear()
    return findings.finish()


def gathered_operand(ctx):
    """ag_gemm returns the gathered rows too, while the next calls come in."""
    findings, results = Findings(), []
    few = [rows for rows in (1, 8, 33, 128, 16) if rows * ctx.world <= 512]
    for turn, rows in enumerate(few * 4):
        case = Case("ag_gemm", rows, 264, 2048, seed=turn)
        operands = make(ctx, case)
        names = strategies(ctx, "ag_gemm", rows)
        strategy = names[turn % len(names)]
        y, gathered = flux_ops.ag_gemm(operands.x, operands.weight, strategy=strategy, return_gathered=True)
        results.append((f"{strategy} {case}", operands, y, gathered))
    for name, operands, y, gathered in results:
        shards = [torch.empty_like(operands.x) for _ in range(ctx.world)]
        torch.distributed.all_gather(shards, operands.x)
        findings.add(f"{name}, gathered", first_difference(gathered, torch.cat(shards), rank=ctx.rank))
        findings.add(name, first_difference(y, operands.expected().to(y.dtype), rank=ctx.rank))
    return findings.finish()


def endurance(ctx, calls):
    """All ops in turn by random kernels, no look at the results in between, a rank late now and then."""
    rng = random.Random(22)
    cells = []
    for op in OPS:
        for rows in (1, 2, 8, 16, 40):
            operands = make(ctx, Case(op, rows, 1024, 1024, seed=rows, bias=rows % 2 == 0))
            cells.append((operands, operands.expected().to(operands.case.dtype), strategies(ctx, op, rows)))
    many = make(ctx, Case("gemm_rs", 256, 512, 256))
    wrong = torch.zeros((), dtype=torch.int64, device=ctx.device)
    for turn in range(calls):
        operands, want, names = rng.choice(cells)
        strategy, is_late, lag = rng.choice(names), rng.randrange(100 * ctx.world), rng.random() * 1e-3
        if is_late == ctx.rank:
            ctx.stall(lag)
        if turn % 50 == 0:  # a call that exchanges its data otherwise
            call(many)
        wrong += (call(operands, strategy=strategy) != want).any()
    assert wrong.item() == 0, f"{wrong.item()} of {calls} results are wrong"
    return calls


def replayed(ctx, rounds):
    """A graph of all three ops, replayed with new data, eager calls between."""
    findings = Findings()
    cases = [Case(op, rows, 512, 1024, seed=rows) for op in OPS for rows in (1, 16, 64)]
    cells = [(make(ctx, case), strategies(ctx, case.op, case.rows)[0]) for case in cases]
    for operands, strategy in cells:
        call(operands, strategy=strategy)
    graph = torch.cuda.CUDAGraph()
    ctx.sync()
    with torch.cuda.graph(graph):
        results = [call(operands, strategy=strategy) for operands, strategy in cells]
    wanted = [operands.expected() for operands, _ in cells]
    for turn in range(rounds):
        scale = 2.0 ** (turn % 3)
        if turn % ctx.world == ctx.rank:
            ctx.stall(1e-3)
        for operands, _ in cells:
            operands.x.mul_(scale)
        graph.replay()
        if turn % 2:
            call(cells[turn % len(cells)][0], strategy=cells[turn % len(cells)][1])
        for (operands, strategy), y, want in zip(cells, results, wanted, strict=True):
            findings.add(f"{strategy} {operands.case}", first_difference(y, (want * scale).to(y.dtype), rank=ctx.rank))
            operands.x.div_(scale)
    return findings.finish()


def weight_of_the_product_before(ctx, calls):
    """A weight that the kernel right before has written, each time anew in the same memory: it is not read too early.
    The ranks are late in turn, so that the other ranks' second kernel is there while their first one waits. Each row of
    x picks a column of that weight, where the op adds up on the first rank alone.
    """
    findings = Findings()
    first = make(ctx, Case("gemm_ar", 128, 1024, 256))
    name, weight = strategies(ctx, "gemm_ar", 128, 1024, 256)[0], first.expected().to(BF16)
    for op, rows in ((op, rows) for op in OPS for rows in (8, 32)):
        m = rows * ctx.world
        picked = torch.arange(m) * (weight.shape[1] // m + 1) % weight.shape[1]
        own = slice(rows * ctx.rank, rows * (ctx.rank + 1))
        x = torch.zeros(m, weight.shape[1], dtype=BF16, device=ctx.device)
        if op == "ag_gemm" or ctx.rank == 0:
            x[torch.arange(m), picked] = 1
        x = x[own] if op == "ag_gemm" else x
        want = weight[:, picked].t()
        want = want[own] if op == "gemm_rs" else want
        for strategy in strategies(ctx, op, m if op == "gemm_ar" else rows, 128, 1024):

            def both(op=op, x=x, strategy=strategy):
                return run(op, x, call(first, strategy=name), strategy=strategy)

            for way, step in (("eager", both), ("replayed", captured(ctx, both))):
                for turn in range(calls):
                    scale = 2.0 ** (turn % 4)
                    first.x.mul_(scale)
                    if turn % ctx.world == ctx.rank:
                        ctx.stall(1e-3)
                    y = step()
                    label = f"{op}, {rows} rows, {strategy}, {way}"
                    findings.add(label, first_difference(y, want * scale, rank=ctx.rank))
                    first.x.div_(scale)
    return findings.finish()


def captured(ctx, step):
    """A function that replays a CUDA graph of `step` and returns its result."""
    step()
    graph = torch.cuda.CUDAGraph()
    ctx.sync()
    with torch.cuda.graph(graph):
        result = step()
    ctx.sync()

    def replay():
        graph.replay()
        return result

    return replay


def faulty(ctx, op, case, *args):
    case(ctx, op, *args, strategy=strategies(ctx, op, 8)[0])
