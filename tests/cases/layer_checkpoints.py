"""Layers whose parameters FSDP2 has cut once more, and layers in torch.distributed.checkpoint."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import prune

import flux_ops
from flux_ops.nn import ColumnParallelLinear, RowParallelLinear
from tests.cases.base import FP32
from tests.harness.compare import Findings, first_difference

HIDDEN, INNER = 8, 12


class Model(nn.Module):
    """Each kind of cut: a merged layer, a plain one, a bias that is whole, and a module that is not ours."""

    def __init__(self, group, sequence_parallel=True, **options):
        super().__init__()
        options |= {"group": group, "sequence_parallel": sequence_parallel, "dtype": FP32}
        self.qkv = ColumnParallelLinear(HIDDEN, [INNER, 2 * INNER, INNER], **options)
        self.up = ColumnParallelLinear(HIDDEN, INNER, bias=False, **options)
        self.down = RowParallelLinear(INNER, HIDDEN, **options)
        self.norm = nn.LayerNorm(HIDDEN, device=options.get("device"))

    def wholes(self):
        layers = {"qkv": self.qkv, "up": self.up, "down": self.down}
        return {name: layer.full_state_dict() for name, layer in layers.items()}


def compare_wholes(ctx, findings, what, model, wants):
    for name, got in model.wholes().items():
        for key, want in wants[name].items():
            findings.add(f"{what}: {name}.{key}", first_difference(got[key], want, rank=ctx.rank))


def drawn_under_fsdp(ctx):
    """Meta, fully_shard, to_empty, reset_parameters: the model that is drawn without FSDP. Then whole state dicts in
    and out.
    """
    findings = Findings()
    mesh = init_device_mesh(ctx.device.type, (2, ctx.world // 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    inits = (None, lambda whole: nn.init.normal_(whole, std=0.02))
    for init in inits:
        torch.manual_seed(5)
        wants = Model(group, init_method=init, device=ctx.device).wholes()
        model = Model(group, init_method=init, device="meta")
        fully_shard(model, mesh=mesh["dp"]).to_empty(device=ctx.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(float("nan"))
        torch.manual_seed(5)
        for name in wants:
            getattr(model, name).reset_parameters()
        compare_wholes(ctx, findings, f"drawn, init {init}", model, wants)
    loaded = {
        name: {key: torch.randn(whole.shape, generator=torch.Generator().manual_seed(3)) for key, whole in want.items()}
        for name, want in wants.items()
    }
    for name, state in loaded.items():
        getattr(model, name).load_full_state_dict(state)
    wants = {name: {key: whole.to(ctx.device) for key, whole in state.items()} for name, state in loaded.items()}
    compare_wholes(ctx, findings, "loaded", model, wants)
    with pytest.raises(NotImplementedError, match=r"FSDP2 has cut qkv\.weight"):
        flux_ops.nn.sharded_state_dict(model)
    return findings.finish()


def biases_are_found(ctx):
    """allreduce_sequence_parallel_grads adds up the bias of a row-parallel layer whatever has replaced it."""
    mesh = init_device_mesh(ctx.device.type, (2, ctx.world // 2), mesh_dim_names=("dp", "tp"))
    group = mesh["tp"].get_group()
    total = sum(dist.get_process_group_ranks(group))
    for sequence_parallel in (True, False):
        made = [Model(group, sequence_parallel, device=ctx.device) for _ in range(2)]
        made[0].load_state_dict(made[1].state_dict(), assign=True)
        assert made[0].down.bias.sequence_parallel is sequence_parallel
        assert made[0].up.weight.partition_dim == 0
        fully_shard(made[1], mesh=mesh["dp"])
        for model in made:
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(ctx.rank))
            flux_ops.nn.allreduce_sequence_parallel_grads(model, group)
            for name, parameter in model.named_parameters():
                grad = parameter.grad.to_local() if hasattr(parameter.grad, "to_local") else parameter.grad
                want = total if name == "down.bias" and sequence_parallel else ctx.rank
                assert (grad == want).all(), (name, sequence_parallel, grad)


def adapters_are_not_the_layers(ctx):
    """What others add to a layer (LoRA) is neither marked nor part of its whole state dict."""
    for layer in (RowParallelLinear(INNER, HIDDEN, sequence_parallel=True), ColumnParallelLinear(HIDDEN, INNER)):
        layer.adapter = nn.Linear(layer.weight.shape[1], 2)
        layer.to(torch.float64)
        marks = ("sequence_parallel", "tensor_model_parallel", "allreduce")
        for name, parameter in layer.adapter.named_parameters():
            assert not any(hasattr(parameter, mark) for mark in marks), name
        state = layer.full_state_dict()
        assert sorted(state) == ["bias", "weight"]
        layer.load_full_state_dict(state)


def wrapped_and_parametrized(ctx):
    """Wrappers change names, not what a parameter is. What makes the weight of other parameters (a parametrization, or
    the older weight_norm and prune) has no whole, and is refused.
    """
    for wrap in (checkpoint_wrapper, nn.Sequential, lambda layer: torch.compile(layer, backend="eager")):
        layer = ColumnParallelLinear(HIDDEN, INNER, device=ctx.device)
        model = nn.Sequential(wrap(layer))
        model.tied = layer.weight
        state = flux_ops.nn.sharded_state_dict(model)
        assert state.keys() == model.state_dict().keys()
        for name, value in state.items():
            assert value.shape[0] == INNER, name
            assert value.to_local().data_ptr() == model.state_dict()[name].data_ptr(), name
    makers = {
        "weight has a parametrization": nn.utils.parametrizations.weight_norm,
        "weight is no parameter.* weight_g, weight_v": nn.utils.weight_norm,
        "weight is no parameter.* weight_orig": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        "bias is no parameter.* bias_orig": lambda layer: prune.random_unstructured(layer, "bias", 0.5),
    }
    for words, make in makers.items():
        layer = ColumnParallelLinear(HIDDEN, INNER, device=ctx.device)
        state = layer.full_state_dict()
        layer = make(layer)
        layer.to(torch.float64)
        for refused in (
            layer.full_state_dict,
            lambda layer=layer: flux_ops.nn.sharded_state_dict(nn.Sequential(layer)),
            lambda layer=layer, state=state: layer.load_full_state_dict(state),
        ):
            with pytest.raises(NotImplementedError, match=words):
                refused()


def through_a_checkpoint(ctx, folder):
    """torch.distributed.checkpoint: saved by groups of all ranks, loaded by groups of two and of one, and back."""
    findings = Findings()

    def groups_of(size):
        made = [dist.new_group(range(begin, begin + size)) for begin in range(0, ctx.world, size)]
        return made[ctx.rank // size]

    groups = {size: groups_of(size) for size in (ctx.world, 2, 1)}
    for number, (saved, loaded) in enumerate(itertools.permutations(groups, 2)):
        torch.manual_seed(number)
        model = Model(groups[saved], device=ctx.device)
        nn.init.normal_(model.norm.weight, generator=torch.Generator(ctx.device).manual_seed(number))
        state, path = flux_ops.nn.sharded_state_dict(model), folder / str(number)
        dcp.save(state, checkpoint_id=path)
        torch.manual_seed(100)
        other = Model(groups[loaded], device=ctx.device)
        dcp.load(flux_ops.nn.sharded_state_dict(other), checkpoint_id=path)
        what = f"TP = {saved} to {loaded}"
        compare_wholes(ctx, findings, what, other, model.wholes())
        problem = first_difference(other.norm.weight, model.norm.weight, rank=ctx.rank)
        findings.add(f"{what}: norm", problem)
    assert {"qkv.weight.0", "qkv.bias.2", "up.weight", "down.weight", "down.bias"} < state.keys(), sorted(state)
    return findings.finish()


class LayerCheckpointCases:
    @pytest.mark.worlds(2, 4)
    def test_fsdp_draws_the_same_model(self, ranks, record_property):
        record_property("cells", ranks.run(drawn_under_fsdp)[0])

    @pytest.mark.worlds(2, 4)
    def test_biases_whose_gradients_are_added_up(self, ranks):
        ranks.run(biases_are_found)

    @pytest.mark.worlds(2)
    def test_adapters(self, ranks):
        ranks.run(adapters_are_not_the_layers)

    @pytest.mark.worlds(2)
    def test_wrapped_and_parametrized(self, ranks):
        ranks.run(wrapped_and_parametrized)

    @pytest.mark.worlds(2, 4)
    def test_checkpoints(self, ranks, tmp_path, record_property):
        record_property("cells", ranks.run(through_a_checkpoint, tmp_path)[0])
