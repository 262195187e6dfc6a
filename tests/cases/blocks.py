"""Layers in a model: an MLP and a transformer block against the same with whole layers; derivatives as slopes."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, FP64
from tests.harness.compare import Findings
from tests.harness.data import generator


class Mlp(nn.Module):
    """Column-parallel layer, activation, row-parallel layer."""

    def __init__(self, up, down, activation=torch.tanh):
        super().__init__()
        self.up, self.down, self.activation = up, down, activation

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


class Block(nn.Module):
    """A transformer block; x is [s, b, h]."""

    def __init__(self, hidden, head_size, qkv, out, mlp, **tensor_options):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, **tensor_options) for _ in range(2))
        self.head_size, self.qkv, self.out, self.mlp = head_size, qkv, out, mlp

    def forward(self, x):
        heads = [part.unflatten(-1, (-1, self.head_size)).permute(1, 2, 0, 3) for part in self.qkv(self.norms[0](x))]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.permute(2, 0, 1, 3).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Merged(nn.Module):
    """Several layers of one input."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        return tuple(layer(x) for layer in self.layers)


def linear(inputs, outputs, seed, dtype, device):
    made = nn.Linear(inputs, outputs, dtype=dtype, device=device)
    gen = generator(device, seed, "weight")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=gen, device=device) * inputs**-0.5)
    return made


def whole_mlp(hidden, inner, dtype, device, activation=torch.tanh):
    return Mlp(linear(hidden, inner, 1, dtype, device), linear(inner, hidden, 2, dtype, device), activation)


def whole_block(hidden, inner, head_size, dtype, device):
    qkv = Merged(*(linear(hidden, hidden, seed, dtype, device) for seed in (3, 4, 5)))
    out, mlp = linear(hidden, hidden, 6, dtype, device), whole_mlp(hidden, inner, dtype, device, F.gelu)
    return Block(hidden, head_size, qkv, out, mlp, dtype=dtype, device=device)


def parallel_mlp(whole, **options):
    up = ColumnParallelLinear.from_linear(whole.up, **options)
    return Mlp(up, RowParallelLinear.from_linear(whole.down, **options), whole.activation)


def parallel_block(whole, **options):
    qkv = ColumnParallelLinear.from_linear(whole.qkv.layers, **options)
    out, mlp = RowParallelLinear.from_linear(whole.out, **options), parallel_mlp(whole.mlp, **options)
    norm = whole.norms[0]
    hidden = norm.normalized_shape[0]
    block = Block(hidden, whole.head_size, qkv, out, mlp, dtype=norm.weight.dtype, device=norm.weight.device)
    block.norms.load_state_dict(whole.norms.state_dict())
    for parameter in block.norms.parameters():
        parameter.sequence_parallel = options["sequence_parallel"]
    return block


def whole_grads(model):
    """{name: whole gradient} of a parallel model, by the names of the whole one. Collective."""
    grads = {}
    for name, module in model.named_modules():
        for key, parameter in module.named_parameters(recurse=False):
            cut = getattr(parameter, "tensor_model_parallel", False)
            grads[f"{name}.{key}"] = module.sharding.gather(parameter.grad, module.group) if cut else parameter.grad
    return grads


def step(ctx, model, whole, x_whole, sequence_parallel, limit):
    """A training step of both models on the same tokens: results and all gradients agree."""
    findings = Findings()

    def own(tensor):
        return tensor.chunk(ctx.world)[ctx.rank] if sequence_parallel else tensor

    x, x_whole = own(x_whole).clone().requires_grad_(), x_whole.double().requires_grad_()
    factor = torch.randn(x_whole.shape, generator=generator("cpu", 9, "grad")).to(ctx.device)
    y = model(x)
    y.backward(own(factor).to(y.dtype))
    flux_ops.nn.allreduce_sequence_parallel_grads(model)
    whole = whole.double()
    y_whole = whole(x_whole)
    y_whole.backward(factor.double())

    def close(what, got, want):
        error = ((got.double() - want).norm() / want.norm()).item()
        findings.add(what, None if error < limit else f"rank {ctx.rank}: off by {error:.2e} of its norm")

    close("y", y.detach(), own(y_whole.detach()))
    close("x", x.grad, own(x_whole.grad))
    wants = {name: parameter.grad for name, parameter in whole.named_parameters()}
    for kind in ("weight", "bias"):  # merged: the parts one after the other
        parts = [wants.pop(f"qkv.layers.{i}.{kind}", None) for i in range(3)]
        if parts[0] is not None:
            wants[f"qkv.{kind}"] = torch.cat(parts)
    gots = whole_grads(model)
    assert gots.keys() == wants.keys(), (gots.keys(), wants.keys())
    for name, want in wants.items():
        close(name, gots[name], want)
    return findings.finish()


def block_step(ctx, sequence_parallel):
    hidden, head_size = 32 * ctx.world, 16
    dtype = BF16 if ctx.is_cuda else FP64
    whole = whole_block(hidden, 48 * ctx.world, head_size, dtype, ctx.device)
    x = torch.randn(4 * ctx.world, 2, hidden, generator=generator("cpu", 1, "x")).to(ctx.device, dtype)
    model = parallel_block(whole, sequence_parallel=sequence_parallel)
    return step(ctx, model, whole, x, sequence_parallel, 5e-2 if ctx.is_cuda else 1e-12)


def slopes(ctx, sequence_parallel):
    """fp64: along random directions through inputs and parameters of all ranks, the loss rises as its gradient says."""
    findings = Findings()
    hidden, inner = 6, 5 * ctx.world
    whole = whole_mlp(hidden, inner, FP64, ctx.device)
    for leading, save_gathered in itertools.product(((), (2,)), (False, True)):
        model = parallel_mlp(whole, sequence_parallel=sequence_parallel)
        model.up.save_gathered = save_gathered
        rows = 3 if sequence_parallel else 3 * ctx.world
        common = ctx.rank if sequence_parallel else 0  # what ranks hold alike is drawn alike

        def draw(shape, rank, seed):
            return torch.randn(shape, generator=generator("cpu", seed, "x", rank), dtype=FP64).to(ctx.device)

        x = draw((rows, *leading, hidden), common, 1).requires_grad_()
        factor = draw((rows, *leading, hidden), common, 2)

        def loss(model=model, x=x, factor=factor):
            own = (torch.sin(model(x)) * factor).sum()
            total = own.detach().clone()
            if sequence_parallel:
                dist.all_reduce(total)
            return own, total.item()

        loss()[0].backward()
        flux_ops.nn.allreduce_sequence_parallel_grads(model)
        tensors = {"x": (x, common)}
        for name, parameter in model.named_parameters():
            tensors[name] = parameter, 0 if name == "down.bias" else ctx.rank
        for i, (name, (tensor, rank)) in enumerate(tensors.items()):
            direction = draw(tensor.shape, rank, 10 + i)
            slope = (tensor.grad * direction).sum()
            if name != "down.bias" and (name != "x" or sequence_parallel):  # the others are the same on all ranks
                dist.all_reduce(slope)
            eps, values = 1e-6, []
            for sign in (1, -2):
                tensor.data.add_(direction, alpha=sign * eps)
                with torch.no_grad():
                    values.append(loss()[1])
            tensor.data.add_(direction, alpha=eps)
            measured = (values[0] - values[1]) / (2 * eps)
            error = abs(measured - slope.item()) / max(abs(measured), 1.0)
            findings.add(
                f"{name}, leading {leading}, save_gathered {save_gathered}",
                None if error < 1e-7 else f"rank {ctx.rank}: slope {measured}, gradient says {slope.item()}",
            )
    return findings.finish()


def compiled_step(ctx, sequence_parallel):
    """torch.compile of the whole MLP, forward and backward, without a graph break, for several sizes."""
    torch._dynamo.reset()
    hidden, dtype = 32, BF16 if ctx.is_cuda else FP64
    whole = whole_mlp(hidden, 48 * ctx.world, dtype, ctx.device)
    for m in (4, 6, 10):
        model = parallel_mlp(whole, sequence_parallel=sequence_parallel)
        model.compile(fullgraph=True, backend="aot_eager", dynamic=m > 4)
        x = torch.randn(m * ctx.world, hidden, generator=generator("cpu", 1, "x")).to(ctx.device, dtype)
        step(ctx, model, copy.deepcopy(whole), x, sequence_parallel, 5e-2 if ctx.is_cuda else 1e-12)


class BlockCases:
    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_a_training_step_of_a_transformer_block(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(block_step, sequence_parallel)[0])

    @pytest.mark.cpu_is_enough
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_gradients_are_slopes(self, ranks, sequence_parallel, record_property):
        record_property("cells", ranks.run(slopes, sequence_parallel)[0])

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("sequence_parallel", (False, True))
    def test_compiled(self, ranks, sequence_parallel):
        ranks.run(compiled_step, sequence_parallel)
