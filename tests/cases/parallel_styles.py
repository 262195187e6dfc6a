"""flux_ops.parallel against torch's styles of the same names, in exact data: results, gradients, parameters, FSDP2."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

from tests.cases.base import OPS, refused
from tests.cases.layers import Calls
from tests.harness.compare import Findings, assert_same, first_difference
from tests.harness.data import exact_x, generator

HIDDEN, INNER = 24, 48


class Mlp(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, INNER, bias=bias), nn.Linear(INNER, HIDDEN, bias=bias)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def make_mlp(ctx, bias=True):
    return with_exact_parameters(ctx, Mlp(bias), torch.float64)


def with_exact_parameters(ctx, module, dtype):
    """The same on every rank; biases that DTensor can cut into TP equal parts exactly."""
    module = module.to(ctx.device, dtype)
    gen = generator(ctx.device, 1, "weight")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(exact_x(parameter.shape, dtype, gen) * (ctx.world if parameter.ndim == 1 else 1))
    return module


def mesh_of(ctx, *shape, names=("tp",)):
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(ctx.device.type, shape or (ctx.world,), mesh_dim_names=names)


def parallelized(module, mesh, styles, column=None, row=None):
    from torch.distributed.tensor.parallel import parallelize_module

    plan = {"up": styles.ColwiseParallel(**(column or {})), "down": styles.RowwiseParallel(**(row or {}))}
    return parallelize_module(module, mesh, plan)


def overlapped(calls):
    return [name for name in calls.made if name in OPS]


def both_styles():
    from torch.distributed.tensor import parallel as torch_styles

    from flux_ops import parallel

    return torch_styles, parallel


def training_step(function, module, x):
    """Results and gradients by name; `function` runs the module, compiled or not."""
    from torch.distributed.tensor import DTensor

    x = x.detach().requires_grad_()
    module.zero_grad()
    y = function(x)
    local = y.to_local() if isinstance(y, DTensor) else y
    grad = torch.arange(local.numel(), device=x.device).reshape(local.shape) % 3 - 1
    local.backward(grad.to(x.dtype))
    grads = {name: p.grad.full_tensor() for name, p in module.named_parameters()}
    return {"y": local.detach(), "x": x.grad.clone(), **grads}


def step(module, x):
    """(results and gradients by name, the operators that ran)"""
    with Calls() as calls:
        results = training_step(module, module, x)
    return results, overlapped(calls)


def compare(ctx, findings, what, ours, theirs):
    for name, want in theirs.items():
        findings.add(f"{what}: {name}", first_difference(ours[name], want, rank=ctx.rank))
        same = ours[name].is_contiguous() == want.is_contiguous()
        findings.add(f"{what}: {name}", None if same else f"stride {ours[name].stride()}, torch has {want.stride()}")


def against_torch(ctx):
    """Tokens of two and three dimensions, sharded along each, with and without bias, local and DTensor results."""
    from torch.distributed.tensor import Shard

    findings, mesh = Findings(), mesh_of(ctx)
    torch_styles, ours = both_styles()
    shapes = [((6,), 0), *(((8, b), 0) for b in (1, 2, 5)), *(((b, 8), dim) for b in (1, 2, 5) for dim in (1, -2))]
    shapes += [((8, 2, 3), 0), ((2, 8, 3), 1), ((2, 3, 8), 2), ((2, 3, 8), -2)]
    for (leading, dim), (bias, local) in itertools.product(shapes, ((False, True), (True, False))):
        shape = (*leading, HIDDEN)
        x = exact_x(shape, torch.float64, generator(ctx.device, 2, "x", ctx.rank))
        layouts = {"input_layouts": Shard(dim)}, {"output_layouts": Shard(dim), "use_local_output": local}
        theirs, none = step(parallelized(make_mlp(ctx, bias), mesh, torch_styles, *layouts), x)
        mine, ran = step(parallelized(make_mlp(ctx, bias), mesh, ours, *layouts), x)
        what = f"{shape}, Shard({dim}), bias {bias}, local {local}"
        compare(ctx, findings, what, mine, theirs)
        want = ["ag_gemm", "gemm_rs", "ag_gemm", "gemm_rs"]
        findings.add(what, None if ran == want and not none else f"ran {ran}, and {none} in torch's")
    return findings.finish()


def other_layouts(ctx):
    """Layouts of inputs and outputs that DTensor has to bring about; DTensors as inputs."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    findings, mesh = Findings(), mesh_of(ctx)
    torch_styles, ours = both_styles()
    up = {"input_layouts": Shard(0), "output_layouts": Replicate()}
    down = {"input_layouts": Replicate(), "output_layouts": Shard(0)}
    x = exact_x((6, HIDDEN), torch.float64, generator(ctx.device, 2, "x", ctx.rank))
    theirs, _ = step(parallelized(make_mlp(ctx), mesh, torch_styles, up, down), x)
    mine, ran = step(parallelized(make_mlp(ctx), mesh, ours, up, down), x)
    compare(ctx, findings, "replicated in between", mine, theirs)
    findings.add("replicated in between", None if ran[:2] == ["ag_gemm", "gemm_rs"] else f"ran {ran}")

    theirs, _ = step(parallelized(make_mlp(ctx), mesh, torch_styles, {"input_layouts": Shard(0)}), x)
    mine, ran = step(parallelized(make_mlp(ctx), mesh, ours, {"input_layouts": Shard(0)}), x)
    compare(ctx, findings, "replicated result", mine, theirs)
    findings.add("replicated result", None if ran == ["ag_gemm", "gemm_ar", "gemm_rs"] else f"ran {ran}")

    layouts = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
    whole = exact_x((6 * ctx.world, HIDDEN), torch.float64, generator(ctx.device, 2, "x"))
    for placement in (Shard(0), Replicate()):
        results = []
        for styles in (torch_styles, ours):
            given = DTensor.from_local(whole, mesh, (Replicate(),), run_check=False).redistribute(
                placements=(placement,)
            )
            results.append(parallelized(make_mlp(ctx), mesh, styles, *layouts)(given))
        findings.add(f"DTensor, {placement}", first_difference(results[1], results[0], rank=ctx.rank))
    return findings.finish()


def fallbacks(ctx):
    """What the operators don't cover runs as torch's style does, after a warning that says why."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    findings, mesh = Findings(), mesh_of(ctx)
    torch_styles, ours = both_styles()
    odd = exact_x((6 * ctx.world + 1, HIDDEN), torch.float64, generator(ctx.device, 2, "x"))
    odd = DTensor.from_local(odd, mesh, (Replicate(),), run_check=False)
    cases = {
        "replicated": (
            {},
            {"input_layouts": Shard(-1), "output_layouts": Shard(-1)},
            lambda: exact_x((6, HIDDEN), torch.float64, generator(ctx.device, 2, "x")),
            "input_layouts",
        ),
        "not of tokens": (
            {"input_layouts": Shard(1)},
            {"output_layouts": Shard(1)},
            lambda: exact_x((6, HIDDEN // ctx.world), torch.float64, generator(ctx.device, 2, "x", ctx.rank)),
            "not one of tokens",
        ),
        "odd number of tokens": (
            {"input_layouts": Shard(0)},
            {"output_layouts": Shard(0)},
            lambda: odd.redistribute(placements=(Shard(0),)),
            "not a multiple of the number of ranks",
        ),
    }
    for name, (up, down, make, words) in cases.items():
        with torch.no_grad():
            want = parallelized(make_mlp(ctx), mesh, torch_styles, up, down)(make())
            with warnings.catch_warnings(record=True) as caught, Calls() as calls:
                warnings.simplefilter("always")
                got = parallelized(make_mlp(ctx), mesh, ours, up, down)(make())
        findings.add(name, first_difference(got, want, rank=ctx.rank))
        findings.add(name, None if not overlapped(calls) else f"ran {overlapped(calls)}")
        said = [str(w.message) for w in caught if "Parallel" in str(w.message)]
        findings.add(name, None if any(words in text for text in said) else f"warned {said}")
    return findings.finish()


def fallbacks_of_a_sum(ctx):
    """A replicated result of what gemm_ar does not take: torch's style runs, forward and backward, and one warning."""
    findings, mesh = Findings(), mesh_of(ctx)
    cases = {
        "x has 1 dimension": ((HIDDEN // ctx.world,), torch.float64),
        "x has dtype torch.complex64": ((6, HIDDEN // ctx.world), torch.complex64),
    }
    for words, (shape, dtype) in cases.items():
        x = exact_x(shape, torch.float64, generator(ctx.device, 2, "x", ctx.rank)).to(dtype)
        results = []
        with warnings.catch_warnings(record=True) as caught, Calls() as calls:
            warnings.simplefilter("always")
            for styles in both_styles():
                linear = with_exact_parameters(ctx, nn.Linear(HIDDEN, INNER), torch.float64).to(dtype)
                linear = styles.RowwiseParallel()._apply(linear, mesh)
                results.append(training_step(linear, linear, x))
                training_step(linear, linear, x)
        compare(ctx, findings, words, results[1], results[0])
        findings.add(words, None if not overlapped(calls) else f"ran {overlapped(calls)}")
        said = [str(w.message) for w in caught if "Parallel" in str(w.message)]
        findings.add(words, None if len(said) == 1 and words in said[0] else f"warned {said}")
    return findings.finish()


def no_such_dimension(ctx):
    """Refused in words on every rank; the next good call works."""
    from torch.distributed.tensor import Shard

    findings, mesh = Findings(), mesh_of(ctx)
    torch_styles, ours = both_styles()
    x = exact_x((6, 3, HIDDEN), torch.float64, generator(ctx.device, 2, "x", ctx.rank))
    for dim, argument in itertools.product((3, -4), ("input_layouts", "output_layouts")):
        layouts = {"input_layouts": Shard(0), "output_layouts": Shard(0), argument: Shard(dim)}
        column, row = ({name: layouts[name]} for name in ("input_layouts", "output_layouts"))
        module = parallelized(make_mlp(ctx), mesh, ours, column, row)
        kind, message = refused(ctx, lambda module=module: module(x))
        style = "ColwiseParallel" if argument == "input_layouts" else "RowwiseParallel"
        words = (f"{style}: {argument} is Shard(dim={dim})", f"no dimension {dim}")
        fine = kind == "ValueError" and all(word in message for word in words)
        findings.add(f"{argument}, {dim}", None if fine else f"{kind}: {message}")
    layouts = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
    theirs, mine = (step(parallelized(make_mlp(ctx), mesh, styles, *layouts), x)[0] for styles in (torch_styles, ours))
    compare(ctx, findings, "afterwards", mine, theirs)
    return findings.finish()


def parameters(ctx):
    """The state dict has torch's keys and layouts, and goes both ways; a copy of the module works."""
    from torch.distributed.tensor import Shard

    mesh = mesh_of(ctx)
    layouts = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
    theirs, ours = (parallelized(make_mlp(ctx), mesh, styles, *layouts) for styles in both_styles())
    want, got = theirs.state_dict(), ours.state_dict()
    assert list(got) == list(want)
    for name, tensor in want.items():
        assert got[name].placements == tensor.placements, name
        assert torch.equal(got[name].to_local(), tensor.to_local()), name
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.mul_(2)
    ours.load_state_dict(theirs.state_dict())
    x = exact_x((6, HIDDEN), torch.float64, generator(ctx.device, 2, "x", ctx.rank))
    want, _ = step(theirs, x)
    for module in (ours, copy.deepcopy(ours)):
        got, ran = step(module, x)
        assert len(ran) == 4
        for name, tensor in want.items():
            assert_same(got[name], tensor, rank=ctx.rank, what=name)


def compiled(ctx, dim):
    from torch.distributed.tensor import Shard

    torch._dynamo.reset()
    layouts = {"input_layouts": Shard(dim)}, {"output_layouts": Shard(dim)}
    module = parallelized(make_mlp(ctx), mesh_of(ctx), both_styles()[1], *layouts)
    fast = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (6, 7):
        shape = (tokens, HIDDEN) if dim == 0 else (3, tokens, HIDDEN)
        x = exact_x(shape, torch.float64, generator(ctx.device, 2, "x", ctx.rank))
        want, _ = step(module, x)
        for name, got in training_step(fast, module, x).items():
            assert_same(got, want[name], rank=ctx.rank, what=f"{tokens} tokens: {name}")
            assert got.stride() == want[name].stride(), f"{tokens} tokens: {name}"


def with_fsdp(ctx):
    """Two groups of two: FSDP2 shards the parameters of the tensor-parallel layers over the other dimension."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    mesh = mesh_of(ctx, 2, ctx.world // 2, names=("dp", "tp"))
    layouts = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
    x = exact_x((6, HIDDEN), torch.float64, generator(ctx.device, 2, "x", ctx.rank))
    results = []
    for styles in both_styles():
        module = parallelized(make_mlp(ctx), mesh["tp"], styles, *layouts)
        results.append(step(fully_shard(module, mesh=mesh["dp"]), x))
    (theirs, _), (ours, ran) = results
    assert len(ran) == 4, ran
    for name, want in theirs.items():
        assert_same(ours[name], want, rank=ctx.rank, what=name)


class ParallelStyleCases:
    @pytest.mark.worlds(2, 4)
    def test_against_torch(self, ranks, record_property):
        record_property("cells", ranks.run(against_torch)[0])

    @pytest.mark.worlds(2, 4)
    def test_other_layouts(self, ranks, record_property):
        record_property("cells", ranks.run(other_layouts)[0])

    @pytest.mark.worlds(2, 4)
    def test_fallbacks(self, ranks, record_property):
        record_property("cells", ranks.run(fallbacks)[0])

    @pytest.mark.worlds(2, 4)
    def test_fallbacks_of_a_sum(self, ranks, record_property):
        record_property("cells", ranks.run(fallbacks_of_a_sum)[0])

    @pytest.mark.worlds(2, 4)
    def test_no_such_dimension(self, ranks):
        ranks.run(no_such_dimension)

    @pytest.mark.worlds(2, 4)
    def test_parameters(self, ranks):
        ranks.run(parameters)

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("dim", (0, 1))
    def test_compiled(self, ranks, dim):
        ranks.run(compiled, dim)

    @pytest.mark.worlds(4)
    def test_with_fsdp(self, ranks):
        ranks.run(with_fsdp)
