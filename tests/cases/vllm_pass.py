"""OverlapPass on vLLM's compiled graphs, by itself and inside vLLM's manager of passes: results stay what they were."""

import copy
import os
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import flux_ops
from flux_ops import inductor
from flux_ops.integrations.vllm import COLLECTIVES
from tests.cases.base import BF16, FP64
from tests.cases.inductor_pass import Form, K, N, backend, operands, run_form
from tests.cases.vllm import InsideVllm, integers
from tests.harness.compare import Findings, assert_same
from tests.harness.vllm import in_range, manager_of, needs_vllm, with_passes, with_plugin

MIN_TOKENS = 8  # for sequence parallelism


def group():
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group()


def gather(x, dim=0):
    return group().all_gather(x, dim)


def scatter(x, dim=0):
    return group().reduce_scatter(x, dim)


def reduce(x):
    return group().all_reduce(x)


def other_group(x):
    """Over the same ranks, as the group of vLLM's experts may be."""
    return torch.ops.vllm.all_gather(x, 0, group().world_size, group_name="other:0")


def scaled(x, w):
    """A product in float8, as vLLM's quantised layers have it."""
    one = torch.ones((), device=x.device)
    x, w = (operand.repeat(1, 2)[:, :32].to(torch.float8_e4m3fn) for operand in (x, w[:32]))
    return torch._scaled_mm(x, w.t(), one, one, out_dtype=BF16)


FORMS = {
    "gather": Form(lambda x, w, b: F.linear(gather(x), w), (5, K), ("ag_gemm",)),
    "gather, bias": Form(lambda x, w, b: F.linear(gather(x), w, b), (5, K), ("ag_gemm",)),
    "gather, shared": Form(
        lambda x, w, b: (F.linear(g := gather(x), w[:8]), F.linear(g, w), g),
        (5, K),
        ("ag_gemm",),
        note="1 more products",
    ),
    "gather, 3-D, dimension 1": Form(
        lambda x, w, b: F.linear(gather(x, 1), w, b), (3, 5, K), ("ag_gemm",), note="dimension 1 is moved"
    ),
    "scatter": Form(lambda x, w, b: scatter(F.linear(x, w)), (-1, K), ("gemm_rs",)),
    "scatter, shared bias": Form(
        lambda x, w, b: scatter(F.linear(x, w, b / group().world_size)), (-1, K), ("gemm_rs",), note="added once"
    ),
    "scatter, 3-D, dimension 1": Form(
        lambda x, w, b: scatter(F.linear(x, w), -2), (3, -1, K), ("gemm_rs",), note="dimension 1 is moved"
    ),
    "reduce": Form(lambda x, w, b: reduce(F.linear(x, w)), (5, K), ("gemm_ar",)),
    "reduce, 3-D": Form(lambda x, w, b: reduce(F.linear(x, w)), (5, 3, K), ("gemm_ar",)),
    "both": Form(
        lambda x, w, b: scatter(F.linear(torch.relu(F.linear(gather(x), w, b)), w.t())), (5, K), ("ag_gemm", "gemm_rs")
    ),
    "last dimension gathered": Form(
        lambda x, w, b: F.linear(gather(x, -1), w[:, :6].repeat(1, group().world_size)),
        (5, 6),
        left=("the last dimension",),
    ),
    "last dimension scattered": Form(
        lambda x, w, b: scatter(F.linear(x, w), -1), (5, K), left=("the columns of the product",)
    ),
    "logits": Form(lambda x, w, b: gather(F.linear(x, w), -1), (5, K), left=("the last dimension",)),
    "other group": Form(lambda x, w, b: F.linear(other_group(x), w), (5, K), left=("vLLM's group 'other:0'",)),
    "bias of rank 0": Form(lambda x, w, b: reduce(F.linear(x, w, b)), (5, K), left=("a bias of its own",)),
    "float8": Form(lambda x, w, b: scatter(scaled(x, w)), (-1, K), left=("the result of _scaled_mm",)),
}
SYMBOLIC = ("gather, shared", "gather, 3-D, dimension 1", "scatter", "reduce, 3-D", "both")


def forms(ctx, folder, names, dynamic):
    findings = Findings()
    with with_passes(ctx, folder, MIN_TOKENS), torch.inference_mode():
        from vllm.distributed import parallel_state

        if not hasattr(ctx, "other_group"):  # once for a rank
            ranks = [list(range(ctx.world))]
            ctx.other_group = parallel_state.init_model_parallel_group(ranks, ctx.rank, "gloo", group_name="other")
        for name in names:
            flux_ops.dispatch_counts(reset=True)
            findings.add(name, run_form(ctx, FORMS[name], dynamic, inductor.OverlapPass(collectives=COLLECTIVES)))
            ran = tuple(sorted(op for op, *_ in flux_ops.dispatch_counts()))
            findings.add(name, None if ran == FORMS[name].ops else f"ran: {ran}")
    return findings.finish()


class Decoder(nn.Module):
    """What vLLM's decoders have around their norms: the embedding's all-reduce, then layers up and down.

    In float64 and with whole numbers, all sums but those of the norms are exact; a norm is computed row by row.
    """

    def __init__(self, ctx, layers=2, bias=True):
        from vllm.model_executor.layers import linear

        super().__init__()
        self.table = integers(16, K, seed=ctx.rank).to(FP64)  # a partial sum, like that of a part of the vocabulary
        self.norm = torch.ones(K, dtype=FP64)
        self.up, self.down = nn.ModuleList(), nn.ModuleList()
        for i in range(layers):
            self.up.append(linear.ColumnParallelLinear(K, N, bias=bias, params_dtype=FP64, prefix=f"{i}.up"))
            self.down.append(linear.RowParallelLinear(N, K, bias=bias, params_dtype=FP64, prefix=f"{i}.down"))
        for seed, parameter in enumerate(self.parameters()):
            parameter.data.copy_(integers(*parameter.shape, seed=10 * seed + ctx.rank * (parameter.dim() - 1)))
        for layer in (*self.up, *self.down):
            layer.quant_method.process_weights_after_loading(layer)

    def forward(self, tokens):
        from vllm import ir

        residual = group().all_reduce(F.embedding(tokens, self.table))
        x = ir.ops.rms_norm(residual, self.norm, 1e-5)
        for up, down in zip(self.up, self.down, strict=True):
            x = down(torch.relu(up(x)[0]))[0]
            x, residual = ir.ops.fused_add_rms_norm(x, residual, self.norm, 1e-5)
        return x


def through_passes(config, model, tokens, compile_range):
    """What the model computes, compiled with vLLM's own passes for this range of numbers of tokens, and the reports."""
    reports = []
    torch._dynamo.reset()
    made = backend(manager_of(config), reports)
    with in_range(*compile_range):
        return torch.compile(model, fullgraph=True, dynamic=True, backend=made)(tokens), reports


def sequence_parallel(ctx, folder):
    """vLLM's pass cuts the all-reduces of many tokens; ours takes the halves, and the whole ones of few tokens."""
    halves = ["ag_gemm", "gemm_rs", "ag_gemm", "gemm_rs"]
    with with_passes(ctx, folder, MIN_TOKENS) as config, torch.inference_mode():
        for tokens, compile_range, ops, left in (
            (torch.arange(12), (MIN_TOKENS, 64), halves, ["result of embedding", "used by output"]),
            (torch.arange(5), (1, MIN_TOKENS - 1), ["gemm_ar", "gemm_ar"], ["result of embedding"]),
        ):
            want = Decoder(ctx)(tokens)
            with with_plugin():
                model = Decoder(ctx)
                assert type(model.down[0]).__name__ == "FluxRowParallelLinear"
                flux_ops.dispatch_counts(reset=True)
                got, (report,) = through_passes(config, model, tokens, compile_range)
            assert_same(got, want, rank=ctx.rank, what=f"{len(tokens)} tokens")
            assert [replaced.op for replaced in report.replaced] == ops, str(report)
            assert all(words in one.reason for words, one in zip(left, report.left, strict=True)), str(report)
            ran = {op: sum(n for (name, *_), n in flux_ops.dispatch_counts().items() if name == op) for op in ops}
            assert ran == {op: ops.count(op) for op in ops}, ran


def batch_invariant(ctx, folder):
    """With VLLM_BATCH_INVARIANT=1 the bias is added as vLLM adds it, by rank 0, and the pass does nothing."""
    with with_passes(ctx, folder, MIN_TOKENS) as config, torch.inference_mode():
        tokens = torch.arange(12)
        want = Decoder(ctx)(tokens)
        with with_plugin(), mock.patch.dict(os.environ, {"VLLM_BATCH_INVARIANT": "1"}):
            model = Decoder(ctx)
            shared = mock.patch.object(type(model.down[0]), "_with_shared_bias", side_effect=AssertionError)
            flux_ops.dispatch_counts(reset=True)
            with shared:
                got, _ = through_passes(config, model, tokens, (1, MIN_TOKENS - 1))
        assert_same(got, want, rank=ctx.rank)
        assert not flux_ops.dispatch_counts()


def quantised_left_to_vllm(ctx, folder):
    """AsyncTPPass puts its own operator for a product in float8: into a copy of the graph, as it is made for GPUs."""
    targets = []

    def on_a_copy(graph):
        copied = copy.deepcopy(graph.owning_module).graph
        manager(copied)
        targets.extend(str(node.target) for node in copied.nodes)

    form = FORMS["float8"]
    with with_passes(ctx, folder, MIN_TOKENS) as config, with_plugin(), torch.inference_mode():
        manager = manager_of(config)
        torch._dynamo.reset()
        with in_range(MIN_TOKENS, 64):
            x, w, b = operands(ctx, form.shape)
            torch.compile(form.function, fullgraph=True, backend=backend(on_a_copy, []))(x, w, b)
    assert any("fused_scaled_matmul_reduce_scatter" in target for target in targets), targets


def in_inductor(ctx, folder):
    """Without a pointwise operator: Inductor would spend minutes on compiling C++."""
    gen = torch.Generator().manual_seed(ctx.rank)
    up, down = (torch.randint(-2, 3, shape, generator=gen).to(FP64) for shape in ((N, K), (K, N)))

    def mlp(x):
        return scatter(F.linear(F.linear(gather(x), up), down))

    with with_passes(ctx, folder, MIN_TOKENS) as config, torch.inference_mode(), with_plugin():
        torch._dynamo.reset()
        options = {"post_grad_custom_post_pass": manager_of(config)}
        compiled = torch.compile(mlp, fullgraph=True, dynamic=True, options=options)
        with in_range(MIN_TOKENS, 64):
            for rows in (8, 5):
                x = integers(rows, K, seed=ctx.rank).to(FP64)
                flux_ops.dispatch_counts(reset=True)
                assert_same(compiled(x), mlp(x), rank=ctx.rank)
                assert sorted(op for op, *_ in flux_ops.dispatch_counts()) == ["ag_gemm", "gemm_rs"]


def keys_differ(ctx, folder):
    """Inductor's key of a compiled graph has the passes in it."""

    def key():
        with in_range(1, 64):
            return manager_of(config).uuid()

    with with_passes(ctx, folder, MIN_TOKENS) as config:
        without = key()
        with with_plugin():
            assert key() == key() != without
        assert key() == without


@needs_vllm
class VllmPassCases(InsideVllm):
    def test_forms(self, ranks_with_vllm, folder, record_property):
        record_property("cells", ranks_with_vllm.run(forms, folder, tuple(FORMS), False)[0])

    def test_forms_with_symbolic_sizes(self, ranks_with_vllm, folder, record_property):
        record_property("cells", ranks_with_vllm.run(forms, folder, SYMBOLIC, True)[0])

    def test_sequence_parallel(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(sequence_parallel, folder)

    def test_in_inductor(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(in_inductor, folder)

    def test_keys_differ(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(keys_differ, folder)

    def test_batch_invariant(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(batch_invariant, folder)

    def test_quantised_left_to_vllm(self, ranks_with_vllm, folder):
        ranks_with_vllm.run(quantised_left_to_vllm, folder)
