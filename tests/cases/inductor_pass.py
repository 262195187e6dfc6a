"""flux_ops.inductor.OverlapPass: what it replaces and what it leaves, and that results stay what they were."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import flux_ops
from flux_ops import inductor
from tests.cases.parallel_styles import mesh_of, training_step, with_exact_parameters
from tests.harness.compare import Findings, assert_same, first_difference
from tests.harness.data import exact_x, generator

K, N = 24, 40


def backend(overlap, reports):
    """AOTAutograd as Inductor drives it, and the pass; the graphs then run as they are, without code generation."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import view_to_reshape
    from torch._inductor.decomposition import select_decomp_table

    def compile_graph(module, _):
        view_to_reshape(module)
        overlap(module.graph)
        module.recompile()
        reports.append(inductor.last_report())
        return make_boxed_func(module.forward)

    return aot_autograd(
        fw_compiler=compile_graph,
        bw_compiler=compile_graph,
        decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )


def gather(x, dim=0):
    gathered = torch.distributed._functional_collectives.all_gather_tensor(x, 0, dist.group.WORLD)
    return torch.cat(gathered.chunk(tp()), dim) if dim else gathered


def scatter(x, dim=0, how="sum"):
    return torch.distributed._functional_collectives.reduce_scatter_tensor(x, how, dim, dist.group.WORLD)


def reduce(x, how="sum"):
    return torch.distributed._functional_collectives.all_reduce(x, how, dist.group.WORLD)


def tp():
    return dist.get_world_size()


@dataclasses.dataclass(frozen=True)
class Form:
    """A graph, the shape of its x, the operators that it has after the pass, and words of the reasons for the rest."""

    function: Callable  # of x, weight [N, K], bias [N]
    shape: tuple  # of x; -1 stands for 4 TP
    ops: tuple = ()
    left: tuple = ()
    note: str = ""


def shared_gather(x, w, b):
    """Three products and a sum of one gathered operand; the second product is the largest."""
    g = gather(x)
    return F.linear(g, w[:8]), F.linear(g, w, b), F.linear(g, w[8:24]), g.sum(0)


def used_twice(x, w, b):
    y = F.linear(x, w)
    return scatter(y), y.sum(0)


def depends(x, w, b):
    g = gather(x)
    return g @ g[:K, :K]


FORMS = {
    "gather": Form(lambda x, w, b: F.linear(gather(x), w), (5, K), ("ag_gemm",)),
    "gather, bias": Form(lambda x, w, b: F.linear(gather(x), w, b), (5, K), ("ag_gemm",)),
    "gather, columns contiguous": Form(lambda x, w, b: gather(x) @ w.t().contiguous(), (5, K), ("ag_gemm",)),
    "gather, bias of rows": Form(
        lambda x, w, b: torch.addmm(w[:1, :1].expand(5 * tp(), 1), gather(x), w.t()), (5, K), ("ag_gemm",)
    ),
    "gather, 3-D": Form(lambda x, w, b: F.linear(gather(x), w, b), (5, 3, K), ("ag_gemm",)),
    "gather, 3-D, dimension 1": Form(
        lambda x, w, b: F.linear(gather(x, 1), w, b), (3, 5, K), ("ag_gemm",), note="dimension 1 is moved"
    ),
    "gather, 3-D, dimension 1, one sequence": Form(
        lambda x, w, b: F.linear(gather(x, 1), w, b), (1, 5, K), ("ag_gemm",)
    ),
    "gather, 3-D, one sequence, as a view": Form(
        lambda x, w, b: F.linear(gather(x).view(1, -1, K), w, b), (1, 5, K), ("ag_gemm",)
    ),
    "gather, 4-D, dimension 2": Form(lambda x, w, b: F.linear(gather(x, 2), w), (2, 3, 5, K), ("ag_gemm",)),
    "gather, result returned": Form(lambda x, w, b: (F.linear(gather(x), w), gather(x)), (5, K), ("ag_gemm",)),
    "gather, 3-D, dimension 1, result returned": Form(
        lambda x, w, b: (F.linear(g := gather(x, 1), w), g * 2), (3, 5, K), ("ag_gemm",)
    ),
    "gather, as a slice of all": Form(
        lambda x, w, b: F.linear(gather(x)[: x.shape[0] * tp()], w), (5, K), ("ag_gemm",)
    ),
    "gather, shared": Form(shared_gather, (5, K), ("ag_gemm",), note="2 more products"),
    "scatter": Form(lambda x, w, b: scatter(F.linear(x, w)), (-1, K), ("gemm_rs",)),
    "scatter, columns contiguous": Form(lambda x, w, b: scatter(x @ w.t().contiguous()), (-1, K), ("gemm_rs",)),
    "scatter, average": Form(
        lambda x, w, b: scatter(F.linear(x, w), how="avg"), (-1, K), ("gemm_rs",), note="divided by TP"
    ),
    "scatter, replicated bias": Form(
        lambda x, w, b: scatter(F.linear(x, w, b / tp())), (-1, K), ("gemm_rs",), note="added once"
    ),
    "scatter, 3-D": Form(lambda x, w, b: scatter(F.linear(x, w)), (-1, 3, K), ("gemm_rs",)),
    "scatter, 3-D, dimension 1": Form(
        lambda x, w, b: scatter(F.linear(x, w), 1), (3, -1, K), ("gemm_rs",), note="dimension 1 is moved"
    ),
    "scatter, 3-D, dimension 1, one sequence": Form(
        lambda x, w, b: scatter(F.linear(x, w), 1), (1, -1, K), ("gemm_rs",)
    ),
    "reduce": Form(lambda x, w, b: reduce(F.linear(x, w)), (5, K), ("gemm_ar",)),
    "reduce, 3-D": Form(lambda x, w, b: reduce(F.linear(x, w)), (5, 3, K), ("gemm_ar",)),
    "reduce, average": Form(lambda x, w, b: reduce(F.linear(x, w), "avg"), (5, K), ("gemm_ar",), note="divided by TP"),
    "reduce, replicated bias": Form(
        lambda x, w, b: reduce(F.linear(x, w, b / tp())), (5, K), ("gemm_ar",), note="added once"
    ),
    "both": Form(
        lambda x, w, b: scatter(F.linear(torch.relu(F.linear(gather(x), w, b)), w.t())), (5, K), ("ag_gemm", "gemm_rs")
    ),
    "last dimension gathered": Form(
        lambda x, w, b: F.linear(gather(x, 1), w[:, :6].repeat(1, tp())), (5, 6), left=("the last dimension",)
    ),
    "last dimension scattered": Form(
        lambda x, w, b: scatter(F.linear(x, w), 1), (5, K), left=("the columns of the product",)
    ),
    "cast in between": Form(lambda x, w, b: F.linear(gather(x).float(), w.float()), (5, K), left=("converted from",)),
    "integers": Form(lambda x, w, b: gather(x.int()), (5, K), left=("torch.int32",)),
    "weight gathered": Form(lambda x, w, b: F.linear(x, gather(w)), (5, K), left=("as its rows",)),
    "contracted over the tokens": Form(lambda x, w, b: gather(x).t() @ gather(x), (5, K), left=("as its rows",)),
    "both operands": Form(depends, (K, K), left=("depends on what it gathers",)),
    "no product ahead": Form(lambda x, w, b: scatter(x + 1), (-1, K), left=("not of a matrix product",)),
    "product used twice": Form(used_twice, (-1, K), left=("used elsewhere too",)),
    "maximum": Form(lambda x, w, b: scatter(F.linear(x, w), how="max"), (-1, K), left=("'max'",)),
    "bias of each rank": Form(lambda x, w, b: scatter(F.linear(x, w, b)), (-1, K), left=("a bias of its own",)),
}
KINDS = {
    "gather": [name for name in FORMS if name.startswith("gather")],
    "scatter": [name for name in FORMS if name.startswith(("scatter", "reduce", "both"))],
    "left": [name for name, form in FORMS.items() if not form.ops],
}
SYMBOLIC = (
    "gather, 3-D",
    "gather, 3-D, dimension 1",
    "gather, as a slice of all",
    "gather, shared",
    "scatter, 3-D, dimension 1",
    "reduce, 3-D",
    "both",
)


def operands(ctx, shape):
    dtype = torch.bfloat16 if ctx.is_cuda else torch.float64
    gen = generator(ctx.device, 1, "weight", ctx.rank)
    shape = [4 * ctx.world if size == -1 else size for size in shape]
    bias = torch.arange(N, device=ctx.device).remainder(3).mul(ctx.world).to(dtype)
    return exact_x(shape, dtype, gen), exact_x((N, K), dtype, gen), bias


def as_tuple(result):
    return result if isinstance(result, (tuple, list)) else (result,)


def run_form(ctx, form, dynamic, overlap=None):
    """None, or what is wrong."""
    args = operands(ctx, form.shape)
    want = as_tuple(form.function(*args))
    torch._dynamo.reset()
    reports = []
    made = backend(overlap or inductor.OverlapPass(), reports)
    compiled = torch.compile(form.function, fullgraph=True, dynamic=dynamic, backend=made)
    for got, expected in zip(as_tuple(compiled(*args)), want, strict=True):
        if (got.shape, got.stride()) != (expected.shape, expected.stride()):
            return f"shape {got.shape}, stride {got.stride()}; expected {expected.shape}, {expected.stride()}"
        if problem := first_difference(got, expected, rank=ctx.rank):
            return problem
    (report,) = reports
    ops = tuple(replaced.op for replaced in report.replaced)
    reasons = [left.reason for left in report.left]
    fits = len(reasons) == len(form.left) and all(words in r for words, r in zip(form.left, reasons, strict=True))
    noted = not form.note or any(form.note in replaced.note for replaced in report.replaced)
    return None if ops == form.ops and fits and noted else f"report: {report}"


def forms(ctx, names, dynamic):
    findings = Findings()
    for name in names:
        findings.add(name, run_form(ctx, FORMS[name], dynamic))
    return findings.finish()


class Block(nn.Module):
    """Attention-like: three products on one gathered operand, one that is reduced."""

    def __init__(self):
        super().__init__()
        self.q, self.k = nn.Linear(K, N), nn.Linear(K, N)
        self.o = nn.Linear(N, K)

    def forward(self, x):
        return self.o(torch.relu(self.q(x) + self.k(x)))


def dtensor_block(ctx, dim):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    module = with_exact_parameters(ctx, Block(), torch.float64)
    there = Shard(dim)
    plan = {
        "q": ColwiseParallel(input_layouts=there),
        "k": ColwiseParallel(input_layouts=there),
        "o": RowwiseParallel(output_layouts=there),
    }
    return parallelize_module(module, mesh_of(ctx), plan)


def dtensor_training(ctx, dim, dynamic):
    """DTensor's own styles; both graphs have the overlapped operators, and nothing is left that could be one."""
    module = dtensor_block(ctx, dim)
    reports = []
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=backend(inductor.OverlapPass(), reports), dynamic=dynamic)
    for size in (4, 5) if dynamic else (4,):
        gen = generator(ctx.device, 2, "x", ctx.rank)
        x = exact_x((3, size, K) if dim == 1 else (size, K), torch.float64, gen)
        want = training_step(module, module, x)
        for name, got in training_step(compiled, module, x).items():
            assert_same(got, want[name], rank=ctx.rank, what=name)
    found = [[replaced.op for replaced in report.replaced] for report in reports]
    assert found == [["ag_gemm", "gemm_rs"], ["ag_gemm", "gemm_rs", "gemm_rs"]], "\n".join(map(str, reports))
    assert not any(report.left for report in reports), "\n".join(map(str, reports))


def dtensor_in_inductor(ctx):
    """DTensor's own styles, forward and backward, compiled by Inductor itself, which alone lays out buffers."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = nn.Sequential(nn.Linear(K, N, bias=False), nn.Linear(N, K, bias=False))
    module = with_exact_parameters(ctx, layers, torch.bfloat16 if ctx.is_cuda else torch.float64)
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "1": RowwiseParallel(output_layouts=Shard(0))}
    module = parallelize_module(module, mesh_of(ctx), plan)
    x = exact_x((8, K), module[0].weight.dtype, generator(ctx.device, 2, "x", ctx.rank))
    want = training_step(module, module, x)
    options = {"post_grad_custom_post_pass": inductor.OverlapPass(), "fx_graph_cache": False}
    torch._dynamo.reset()
    flux_ops.dispatch_counts(reset=True)
    got = training_step(torch.compile(module, fullgraph=True, options=options), module, x)
    ran = sorted(op for (op, *_), count in flux_ops.dispatch_counts().items() for _ in range(count))
    assert ran == ["ag_gemm", "ag_gemm", "gemm_rs", "gemm_rs"], ran
    for name, expected in want.items():
        assert_same(got[name], expected, rank=ctx.rank, what=name)


def with_inductor(ctx):
    """On the CPU without a pointwise operator: Inductor would spend minutes on compiling C++."""
    dtype = torch.bfloat16 if ctx.is_cuda else torch.float64
    gen = generator(ctx.device, 1, "weight", ctx.rank)
    x, up, down = (exact_x(shape, dtype, gen) for shape in ((8, K), (N, K), (K, N)))

    def mlp(x, up, down):
        return scatter(F.linear(gather(x), up) @ down.t())

    options = {"post_grad_custom_post_pass": inductor.OverlapPass(), "fx_graph_cache": False}
    torch._dynamo.reset()
    compiled = torch.compile(mlp, fullgraph=True, options=options)
    assert_same(compiled(x, up, down), mlp(x, up, down), rank=ctx.rank)
    ops = [replaced.op for replaced in inductor.last_report().replaced]
    assert ops == ["ag_gemm", "gemm_rs"], str(inductor.last_report())


class InductorPassCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", KINDS)
    def test_forms(self, ranks, kind, record_property):
        record_property("cells", ranks.run(forms, KINDS[kind], False)[0])

    @pytest.mark.worlds(2, 4)
    def test_forms_with_symbolic_sizes(self, ranks, record_property):
        record_property("cells", ranks.run(forms, SYMBOLIC, True)[0])

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("dim", (0, 1))
    def test_training_with_dtensor(self, ranks, dim):
        ranks.run(dtensor_training, dim, False)

    @pytest.mark.worlds(2, 4)
    def test_training_with_dtensor_and_symbolic_sizes(self, ranks):
        ranks.run(dtensor_training, 1, True)

    @pytest.mark.worlds(2, 4)
    def test_in_inductor(self, ranks):
        ranks.run(with_inductor)

    @pytest.mark.worlds(2, 4)
    def test_dtensor_in_inductor(self, ranks):
        ranks.run(dtensor_in_inductor)
