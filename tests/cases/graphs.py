"""CUDA graphs: capture and replay of all ops, mixed with eager calls, with slow ranks, in several sizes."""

import gc
import random

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import flux_ops
from tests.cases.base import BF16, OPS, Case, call, check, make
from tests.harness.compare import Findings, first_difference

MAX_M, MAX_N, MAX_K = 4096, 2048, 2048
IN_PIECES = tuple(
    f"fused:{config}"
    for config in ("p128x192_2x1/m1/p4/s2", "p128x128_2x1/n1/p2/s4", "c128x256_2x1/m1/p8/s1", "p128x128_2x1/m4/p1/s1")
)


def prepared_group(ctx, max_m=MAX_M):
    """A group of the test's own, so that its graphs pin no memory of the others."""
    group = dist.new_group(list(range(ctx.world)))
    for op in OPS:
        flux_ops.prepare(op=op, max_m=max_m, n=MAX_N, k=MAX_K, dtype=BF16, group=group, device=ctx.device)
    return group


def release(ctx, group, *graphs):
    del graphs
    gc.collect()
    ctx.sync()
    dist.barrier()
    flux_ops.destroy(group)


def capture(fn, pool=None):
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = fn()
    return graph, result


SIZES = ((8, 256, 512), (0, 1024, MAX_K), (200, 520, 1032))  # 0: as many rows as the group has
FEW_ROWS = ((8, 256, 512), (200, 520, 1032), (500, 1024, MAX_K))  # of x fit into 8 MiB at four ranks


def replays(ctx, op, slow_s, strategy="fused", sizes=SIZES, rows_between=0):
    """One graph, new data in its static inputs before each replay. In between eager calls of other shapes: by "fused",
    or of `rows_between` rows by the strategy of the graph.
    """
    findings = Findings()
    group = prepared_group(ctx, max(MAX_M, *(rows for rows, _, _ in sizes)))
    for rows, n, k in sizes:
        rows = rows or MAX_M // ctx.world // 8 * 8
        case = Case(op, rows, n, k, bias=True)
        static = make(ctx, case, group)
        first = call(static, group=group, strategy=strategy)
        findings.add(f"before the capture, {case}", first_difference(first, static.expected().to(BF16), rank=ctx.rank))
        graph, y = capture(lambda static=static: call(static, group=group, strategy=strategy))
        outputs = []
        for turn in range(12):
            fresh = make(ctx, Case(op, rows, n, k, bias=True, seed=turn), group)
            static.x.copy_(fresh.x)
            static.weight.copy_(fresh.weight)
            static.bias.copy_(fresh.bias)
            if slow_s and turn % ctx.world == ctx.rank:
                ctx.stall(slow_s)
            y.fill_(float("nan"))
            graph.replay()
            outputs.append((turn, fresh, y.clone()))
            if turn % 3 == 2:
                eager = Case(op, rows_between or 64 + turn, 264, 520, seed=turn)
                by = strategy if rows_between else "fused"
                findings.add(f"eager between, {eager}", check(ctx, eager, strategy=by, group=group))
        for turn, fresh, got in outputs:
            want = fresh.expected().to(BF16)
            findings.add(f"replay {turn} of {case}", first_difference(got, want, rank=ctx.rank, rows_per_chunk=rows))
    release(ctx, group, graph)
    return findings.finish()


def replays_in_pieces(ctx, slow_s):
    """gemm_ar by the kernels for many rows: the reduced rows travel in pieces, and a second kernel collects them."""
    rows = 1024 * ctx.world  # 256 of each chunk, if cut into four sections

    def of(strategy):
        fewer = rows if strategy.endswith("/s4") else rows // 2
        return replays(ctx, "gemm_ar", slow_s, strategy, ((rows, MAX_N - 8, 1032), (fewer, 1032, 520)), rows)

    return sum(map(of, IN_PIECES))


def back_to_back(ctx, replays_, slow_s, strategies=("fused",)):
    """A graph of a small stack of layers, replayed without a pause while one rank in turn is late.

    The layers take the strategies in turn; a gemm_ar with the last of them ends the stack.
    """
    findings = Findings()
    group = prepared_group(ctx)
    rows, hidden, inner = 256, 1024, 512
    x = torch.zeros(rows, hidden, dtype=BF16, device=ctx.device)
    up = make(ctx, Case("ag_gemm", rows, inner, hidden, seed=1), group).weight
    down = make(ctx, Case("gemm_rs", rows, hidden, inner, seed=2), group).weight
    head = make(ctx, Case("gemm_ar", rows, inner, hidden, seed=3), group).weight

    def layers(*strategies):
        h = x
        for i in range(3):
            strategy = strategies[i % len(strategies)]
            h = F.relu(flux_ops.ag_gemm(h, up, group=group, strategy=strategy)).clamp(max=1)
            h = flux_ops.gemm_rs(h, down, group=group, strategy=strategy).clamp(-1, 1)
        return flux_ops.gemm_ar(h, head, group=group, strategy=strategies[-1])

    layers(*strategies)
    graph, y = capture(lambda: layers(*strategies))
    outputs = []
    for turn in range(replays_):
        x.copy_(make(ctx, Case("ag_gemm", rows, inner, hidden, seed=turn), group).x)
        if turn % (2 * ctx.world) == 2 * ctx.rank:
            ctx.stall(slow_s)
        graph.replay()
        if turn % (2 * ctx.world) == 2 * ctx.rank + 1:
            ctx.stall(slow_s)
        outputs.append(y.clone())
    for turn, got in enumerate(outputs):
        x.copy_(make(ctx, Case("ag_gemm", rows, inner, hidden, seed=turn), group).x)
        findings.add(f"replay {turn}", first_difference(got, layers("sequential"), rank=ctx.rank))
    release(ctx, group, graph)
    return findings.finish()


def many_sizes(ctx, turns, slow_s):
    """Graphs of descending sizes in one pool, by fused kernels and by what exchanges data beside a library GEMM, noise
    in the allocator, replays in random order with new inputs.
    """
    findings = Findings()
    group = prepared_group(ctx)
    pool, graphs = torch.cuda.graph_pool_handle(), []
    beside = (("ag_gemm", "decomposed:gather"), ("gemm_ar", "decomposed:one-shot"), ("gemm_ar", "decomposed:two-shot"))
    for rows in (512, 256, 128, 64, 8, 1):
        for op, strategy in (*((op, "fused") for op in OPS), *beside):
            static = make(ctx, Case(op, rows, 520, 1032), group)

            def run(static=static, strategy=strategy):
                return call(static, group=group, strategy=strategy)

            run()
            graphs.append((static, *capture(run, pool)))
    gc.collect()
    torch.cuda.empty_cache()
    noise = torch.full((1 << 28,), float("nan"), device=ctx.device)
    rng, outputs = random.Random(3), []
    for turn in range(turns):
        static, graph, y = rng.choice(graphs)
        fresh = make(ctx, Case(static.case.op, static.case.rows, 520, 1032, seed=turn), group)
        static.x.copy_(fresh.x)
        static.weight.copy_(fresh.weight)
        if turn % ctx.world == ctx.rank and turn % 5 == 0:
            ctx.stall(slow_s)
        graph.replay()
        outputs.append((fresh, y.clone()))
    for turn, (fresh, got) in enumerate(outputs):
        want = fresh.expected().to(BF16)
        problem = first_difference(got, want, rank=ctx.rank, rows_per_chunk=fresh.case.rows)
        findings.add(f"replay {turn} of {fresh.case}", problem)
    del noise
    release(ctx, group, graphs)
    return findings.finish()


def capture_unprepared(ctx, op):
    """Capture before anything was prepared, or of more than was: an error that says what to do; then it works."""
    group = dist.new_group(list(range(ctx.world)))
    small, large = Case(op, 64, 256, 512, seed=1), Case(op, 2048, 4096, 2048, seed=2)
    messages = []

    def refused_capture(case):
        operands = make(ctx, case, group)
        with pytest.raises(Exception) as caught:  # noqa: PT011 (words are checked below)
            capture(lambda: call(operands, group=group))
        assert not torch.cuda.is_current_stream_capturing()
        chain, error = [], caught.value
        while error is not None:
            chain.append(str(error))
            error = error.__context__
        messages.append("\n".join(chain))

    def captured_and_right(case):
        operands = make(ctx, case, group)
        call(operands, group=group)
        graph, y = capture(lambda: call(operands, group=group))
        want = operands.expected().to(BF16)

        def replay(keep=operands):  # the graph reads them where they are
            y.fill_(float("nan"))
            graph.replay()
            problem = first_difference(y, want, rank=ctx.rank)
            assert problem is None, f"{case}: {problem}"

        replay()
        return replay

    refused_capture(small)
    assert check(ctx, small, group=group) is None
    refused_capture(large)
    replay_small = captured_and_right(small)
    flux_ops.prepare(op=op, max_m=large.rows * ctx.world, n=large.n, k=large.k, dtype=BF16, group=group)
    replay_large = captured_and_right(large)
    for replay in (replay_small, replay_large, replay_small):  # the workspace has grown since the first was captured
        replay()
    release(ctx, group, replay_small, replay_large)
    return messages


class GraphCases:
    slow_s = 0.004

    @pytest.mark.parametrize("op", OPS)
    def test_replay_with_new_data_and_eager_calls_between(self, ranks, op, record_property):
        record_property("cells", ranks.run(replays, op, 0.0)[0])

    @pytest.mark.parametrize("op", OPS)
    def test_replay_with_a_slow_rank(self, ranks, op, record_property):
        record_property("cells", ranks.run(replays, op, self.slow_s)[0])

    def test_replay_of_reduced_rows_in_pieces(self, ranks, record_property):
        record_property("cells", ranks.run(replays_in_pieces, self.slow_s)[0])

    def test_layers_back_to_back_with_a_slow_rank(self, ranks, record_property):
        record_property("cells", ranks.run(back_to_back, 60, self.slow_s)[0])

    def test_many_sizes_in_one_pool(self, ranks, record_property):
        record_property("cells", ranks.run(many_sizes, 150, self.slow_s)[0])

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_capture_of_what_was_not_prepared(self, ranks, op):
        for messages in ranks.run(capture_unprepared, op):
            for message in messages:
                assert "prepare" in message, message


CONFIGURATIONS = (
    ("ag_gemm", "decomposed"),
    ("ag_gemm", "decomposed:uniform-fused-1d/c2"),
    ("ag_gemm", "decomposed:hetero-fused-1d/c2"),
    ("ag_gemm", "decomposed:hetero-unfused-1d/c4"),
    ("ag_gemm", "decomposed:uniform-fused-2d/c2"),
    ("ag_gemm", "decomposed:uniform-fused-2d/c4"),
    ("ag_gemm", "decomposed:gather"),
    ("gemm_rs", "decomposed"),
    ("gemm_rs", "decomposed:chunks/c1"),
    ("gemm_rs", "decomposed:chunks/c4"),
    ("gemm_ar", "decomposed"),
    ("gemm_ar", "decomposed:one-shot"),
    ("gemm_ar", "decomposed:two-shot"),
)


class DecomposedGraphCases:
    slow_s = 0.004

    @pytest.mark.parametrize("op, strategy", CONFIGURATIONS)
    def test_replay_with_a_slow_rank(self, ranks, op, strategy, record_property):
        sizes = FEW_ROWS if strategy.endswith(":gather") else SIZES
        record_property("cells", ranks.run(replays, op, self.slow_s, strategy, sizes)[0])

    @pytest.mark.parametrize("strategies", (("decomposed",), ("fused", "decomposed")), ids=("alone", "mixed"))
    def test_layers_back_to_back(self, ranks, strategies, record_property):
        record_property("cells", ranks.run(back_to_back, 60, self.slow_s, strategies)[0])
