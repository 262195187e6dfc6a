"""Parameters of the layers: drawn alike for every TP, cut, loaded and put together again, first used anyhow."""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import BF16, FP32
from tests.cases.layers import FORMS, IN, OUT, TOKENS, Cell
from tests.harness.compare import Findings, first_difference
from tests.harness.data import exact_x, generator

MAKERS = (
    (ColumnParallelLinear, IN, OUT),
    (ColumnParallelLinear, IN, [OUT, 2 * OUT, OUT]),
    (RowParallelLinear, IN, OUT),
)


def same_for_every_tp(ctx):
    """Drawn in groups of one rank and of all, whatever state the other ranks' generators are in: one model."""
    findings = Findings()
    alone = [dist.new_group([rank]) for rank in range(ctx.world)][ctx.rank]
    inits = (None, lambda whole: nn.init.normal_(whole, std=0.02), nn.init.orthogonal_)
    for (cls, inputs, outputs), init in itertools.product(MAKERS, inits):
        drawn = []
        for group in (None, alone):
            torch.manual_seed(7 + (ctx.rank if group is None else 0))  # rank 0's counts
            options = {"group": group, "init_method": init, "dtype": FP32, "device": ctx.device}
            drawn.append(cls(inputs, outputs, **options).full_state_dict())
        for key, want in drawn[1].items():
            what = f"{cls.__name__}, {outputs}, init {init}: {key}"
            findings.add(what, first_difference(drawn[0][key], want, rank=ctx.rank))
            ranks_have = [None] * ctx.world
            dist.all_gather_object(ranks_have, want.double().sum().item())
            findings.add(what, None if len(set(ranks_have)) == 1 else f"differs between ranks: {ranks_have}")
        bias = drawn[0]["bias"]
        findings.add("bias with init_method", None if init is None or not bias.any() else f"is not 0: {bias[:4]}")
        if init is None:
            bound, weight = inputs**-0.5, drawn[0]["weight"]
            fits = weight.abs().max() <= bound and weight.std().sub(bound / 3**0.5).abs() < 0.02 * bound
            findings.add("spread of nn.Linear", None if fits else f"max {weight.abs().max()}, std {weight.std()}")
    return findings.finish()


def generators_stay_in_step(ctx):
    """Making a layer advances the default generator alike on all ranks, and a generator of one's own decides alone."""
    torch.manual_seed(3)
    made = []
    for seed in (1, 1, 2):
        made.append(ColumnParallelLinear(IN, OUT, device=ctx.device, generator=torch.Generator().manual_seed(seed)))
    RowParallelLinear(IN, OUT, device=ctx.device)
    after = [None] * ctx.world
    dist.all_gather_object(after, torch.rand(2).tolist())
    assert all(one == after[0] for one in after), after
    assert torch.equal(made[0].weight, made[1].weight)
    assert not torch.equal(made[0].weight, made[2].weight)


def made_unlike(ctx):
    """Ranks that make unlike layers, or of which one makes none, end in errors that say so; then all is well."""
    group = dist.new_group(list(range(ctx.world)))
    with pytest.raises(ValueError, match="the ranks do not make the same call") as error:
        ColumnParallelLinear(IN, OUT * (2 if ctx.rank == 0 else 1), group=group, device=ctx.device)
    assert f"rank 0: ColumnParallelLinear(in_features={IN}, out_features={2 * OUT}" in str(error.value)
    layer = ColumnParallelLinear(IN, OUT, group=group, device=ctx.device)
    flux_ops.set_timeout(0.5)
    if ctx.rank > 0:
        with pytest.raises(dist.DistBackendError, match=r"RowParallelLinear on group .* waited 0.5 s for rank 0 "):
            RowParallelLinear(IN, OUT, group=group, device=ctx.device)
    flux_ops.set_timeout(30)
    dist.barrier()
    flux_ops.destroy(group)
    layer.reset_parameters()
    RowParallelLinear(IN, OUT, group=group, device=ctx.device)


def round_trips(ctx):
    """Whole state dicts in and out, shards in and out, from nn.Linear, through meta, copies and pickles."""
    findings = Findings()
    for cls, inputs, outputs in MAKERS:
        sizes = outputs if isinstance(outputs, list) else [outputs]
        torch.manual_seed(1)
        linears = [nn.Linear(inputs, size, device=ctx.device) for size in sizes]
        linears[0].weight.requires_grad_(False)
        wholes = {key: torch.cat([getattr(one, key) for one in linears]).detach() for key in ("weight", "bias")}
        if cls is RowParallelLinear:
            wholes["bias"] = linears[0].bias.detach()
        layer = cls.from_linear(linears if len(linears) > 1 else linears[0])
        meta = cls(inputs, outputs, device="meta").to_empty(device=ctx.device)
        meta.load_state_dict(layer.state_dict())
        reset = cls(inputs, outputs, device="meta").to_empty(device=ctx.device)
        reset.reset_parameters()
        reset.load_full_state_dict([one.state_dict() for one in linears])
        file = io.BytesIO()
        torch.save(layer, file)
        file.seek(0)
        copies = {
            "from_linear": layer,
            "shards through meta": meta,
            "whole": reset,
            "copy": copy.deepcopy(layer),
            "pickle": torch.load(file, weights_only=False),
        }
        for what, one in copies.items():
            state = one.full_state_dict()
            findings.add(f"{cls.__name__} {what}", None if state.keys() == wholes.keys() else f"{state.keys()}")
            for key, want in wholes.items():
                problem = first_difference(state[key], want, rank=ctx.rank)
                findings.add(f"{cls.__name__} {outputs} {what}: {key}", problem)
            dim = 1 if cls is RowParallelLinear else 0
            marks = (one.weight.tensor_model_parallel, one.weight.partition_dim, one.weight.allreduce)
            findings.add(f"{cls.__name__} {what}: marks", None if marks == (True, dim, True) else f"{marks}")
            has = getattr(one.bias, "sequence_parallel", None), getattr(one.bias, "partition_dim", None)
            want = (None, 0) if dim == 0 else (False, None)
            findings.add(f"{cls.__name__} {what}: marks of the bias", None if has == want else f"{has}")
        whole_model = nn.Linear(inputs, sum(sizes), device=ctx.device)
        whole_model.load_state_dict(layer.full_state_dict())
        frozen = (layer.weight.requires_grad, meta.weight.requires_grad)
        findings.add("requires_grad", None if frozen == (len(sizes) > 1, True) else f"{frozen}")
    return findings.finish()


def gradients_of_replicated(ctx):
    """allreduce_sequence_parallel_grads adds up what is marked, in grad or main_grad, and nothing else."""
    model = nn.ModuleDict(
        {
            "row": RowParallelLinear(IN, OUT, sequence_parallel=True, device=ctx.device),
            "plain": RowParallelLinear(IN, OUT, device=ctx.device),
            "norm": nn.LayerNorm(IN, device=ctx.device),
            "main": nn.LayerNorm(IN, device=ctx.device),
        }
    )
    marked = [model["norm"].weight, model["main"].weight, model["row"].bias]
    for parameter in marked[:2]:
        parameter.sequence_parallel = True
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, ctx.rank + 1.0)
    model["main"].weight.main_grad = torch.full_like(model["main"].weight, 2.0 * ctx.rank)
    model["norm"].bias.sequence_parallel, model["norm"].bias.grad = True, None
    flux_ops.nn.allreduce_sequence_parallel_grads(model)
    total = ctx.world * (ctx.world + 1) // 2
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        is_summed = name in ("norm.weight", "row.bias")
        want = float(total if is_summed else ctx.rank + 1)
        assert (parameter.grad == want).all(), (name, parameter.grad, want)
    assert (model["main"].weight.main_grad == ctx.world * (ctx.world - 1)).all()
    pairs = [dist.new_group([rank, rank + 1]) for rank in range(0, ctx.world, 2)]
    mine = pairs[ctx.rank // 2]
    layer = RowParallelLinear(IN, OUT, group=mine, sequence_parallel=True, device=ctx.device)
    layer.bias.grad = torch.full_like(layer.bias, ctx.rank + 1.0)
    flux_ops.nn.allreduce_sequence_parallel_grads(layer)  # over the layer's group
    assert (layer.bias.grad == 4 * (ctx.rank // 2) + 3).all(), layer.bias.grad
    layer.other = RowParallelLinear(IN, OUT, device=ctx.device)
    if ctx.world > 2:
        with pytest.raises(ValueError, match="have 2 groups; say which"):
            flux_ops.nn.allreduce_sequence_parallel_grads(layer)


def inference_first(ctx, kind, sequence_parallel, compiles):
    """A process that begins in inference mode, where the workspace grows too, trains like any other."""
    findings = Findings()
    cell = Cell(ctx, kind, sequence_parallel, seed=5)
    layer = torch.compile(cell.layer, backend="aot_eager", dynamic=False) if compiles else cell.layer
    want = cell.expected()[0]
    with torch.inference_mode():
        y = layer(cell.x)
        assert y.is_inference()
        cell.compare(findings, "inference_mode", y, want)
        grown = exact_x((TOKENS * ctx.world * 64, cell.x.shape[-1]), BF16, generator(ctx.device, 6, "x"))
        layer(grown)
        kept = layer(cell.x)
    with torch.no_grad():
        y = layer(cell.x)
        cell.compare(findings, "no_grad", y, want)
        assert not y.requires_grad
    cell.require((1, 1, 1))
    y = layer(cell.x)
    cell.compare(findings, "training: y", y.detach(), want)
    y.backward(cell.grad)
    cell.compare_grads(findings, "training")
    cell.compare(findings, "what inference mode made", kept, want)
    return findings.finish()


class LayerStateCases:
    def test_one_model_for_every_tp(self, ranks, record_property):
        record_property("cells", ranks.run(same_for_every_tp)[0])

    @pytest.mark.worlds(2, 4)
    def test_generators_stay_in_step(self, ranks):
        ranks.run(generators_stay_in_step)

    @pytest.mark.worlds(2, 4)
    def test_unlike_layers(self, ranks):
        ranks.run(made_unlike)

    @pytest.mark.worlds(2, 4)
    def test_state_dicts(self, ranks, record_property):
        record_property("cells", ranks.run(round_trips)[0])

    @pytest.mark.worlds(2, 4)
    def test_gradients_of_replicated_parameters(self, ranks):
        ranks.run(gradients_of_replicated)

    @pytest.mark.parametrize("world", (2, 4))
    @pytest.mark.parametrize("compiles", (False, True), ids=("eager", "compiled"))
    def test_first_use_in_inference_mode(self, spawn, compiles, world):
        for form in FORMS if world == 2 else FORMS[1::2]:  # each costs a start of ranks
            running = spawn(world)
            running.run(inference_first, *form, compiles)
            running.close()
