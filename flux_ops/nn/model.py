"""What is done once for a whole model of parallel layers."""

import torch
import torch.distributed as dist
from torch import nn

from flux_ops import ops
from flux_ops.nn import sharding
from flux_ops.nn.base import ParallelLinear
from flux_ops.ops import _group_name as group_name_of


def prepare(module: nn.Module, max_tokens: int, *, training: bool = True, dtype: torch.dtype | None = None) -> None:
    """Makes ready what the parallel layers in `module` need: flux_ops.prepare for each of their overlapped products,
    and the communicators of their groups.

    Before a CUDA graph is captured, or to bound memory. Collective: all ranks call it on the same module.

    Args:
        module: a layer, or anything that has some inside.
        max_tokens: the most rows M of x, flattened to [M, K], over all ranks: tokens of a batch, s · b.
        training: for the backward too.
        dtype: of the products; by default that of autocast, under which this is called then, or of the parameters.

    Raises ValueError for layers on the meta device, and as flux_ops.prepare does.
    """

    def dtype_of(weight):
        kind = weight.device.type
        return dtype or (torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype)

    layers = _layers(module)
    if any(layer.weight.is_meta for layer in layers):
        raise ValueError(
            "prepare: the module has parameters on the meta device, which say nothing of where its products will run. "
            "Call it after to_empty(device=...)."
        )
    products = dict.fromkeys(
        (op, n, k, dtype_of(layer.weight), layer.weight.device, layer.group)
        for layer in layers
        for op, n, k in layer.products(training)
    )
    for op, n, k, kind, device, group in products:
        ops.prepare(op=op, max_m=max_tokens, n=n, k=k, dtype=kind, group=group, device=device)
    for group, device in dict.fromkeys((layer.group, layer.weight.device) for layer in layers):
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


@torch.no_grad()
def allreduce_sequence_parallel_grads(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sums the gradients of replicated parameters over the ranks, once after the backward of a step. Collective.

    Under sequence parallelism each rank has the gradient of its own tokens for a parameter that all hold whole: the
    bias of a RowParallelLinear, a norm's weight. The former are found by themselves, all others by a true attribute
    `sequence_parallel`, as in Megatron, which does the same in finalize_model_grads.

    Args:
        module: the model.
        group: the tensor-parallel group; by default that of the layers, or all ranks if there is no layer.

    The gradient is `main_grad` where the parameter has one, else `grad`; of a DTensor, as FSDP2 cuts them, this rank's
    part. A parameter without a gradient is left out: on all ranks alike. fully_shard puts parameters of its own in the
    place of those it finds, and load_state_dict(assign=True) those that it loads: give them the attribute again.

    Raises, before anything is added up: TypeError for what is no group; ValueError for one that has been destroyed, or
    that this rank is no member of, and where the layers have several groups and none is given.
    """
    if group is None and (groups := {layer.group_name: layer.group for layer in _layers(module)}):
        if len(groups) > 1:
            raise ValueError(f"allreduce_sequence_parallel_grads: the layers have {len(groups)} groups; say which.")
        (group,) = groups.values()
    group_name_of("allreduce_sequence_parallel_grads", group)
    biases = {id(layer.bias) for layer in _layers(module) if layer.sequence_parallel and not layer.is_cut("bias")}
    grads = []
    for parameter in module.parameters():
        is_marked = getattr(parameter, "sequence_parallel", False) or id(parameter) in biases
        if parameter.requires_grad and is_marked:
            main_grad = getattr(parameter, "main_grad", None)
            grad = parameter.grad if main_grad is None else main_grad
            grads.append(grad.to_local() if hasattr(grad, "to_local") else grad)  # of a DTensor
    of_kind: dict[tuple, list[torch.Tensor]] = {}
    for grad in grads:
        if grad is not None:
            of_kind.setdefault((grad.dtype, grad.device), []).append(grad)
    for alike in of_kind.values():
        flat = torch.cat([grad.flatten() for grad in alike])
        dist.all_reduce(flat, group=group)
        for grad, total in zip(alike, flat.split([grad.numel() for grad in alike]), strict=True):
            grad.copy_(total.view_as(grad))


def sharded_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """module.state_dict() for torch.distributed.checkpoint, which would take a piece of a weight for the whole of it.

    ::

        dcp.save(flux_ops.nn.sharded_state_dict(model), checkpoint_id=path)
        dcp.load(flux_ops.nn.sharded_state_dict(model), checkpoint_id=path)  # fills the model, whatever TP saved it

    What a layer's ranks have cut is a DTensor over its group here, of the parameter's own memory; of a layer that
    merges several, one for each (weight.0, weight.1). All else is as in module.state_dict().

    Raises NotImplementedError for a layer that is parametrized, pruned or under weight_norm, and where FSDP2 has cut
    the parameters once more: there use flux_ops.parallel, whose parameters are DTensors from the start.
    """
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    # By what they are: wrappers change names.
    layer_of = {
        id(parameter): layer
        for layer in _layers(module)
        for key, parameter in layer.own_parameters().items()
        if layer.is_cut(key)
    }
    state = {}
    for name, value in module.state_dict(keep_vars=True).items():
        layer = layer_of.get(id(value))
        if layer is None:
            state[name] = value.detach() if isinstance(value, torch.Tensor) else value
            continue
        if sharding.is_cut_again(value):
            raise NotImplementedError(
                f"sharded_state_dict: FSDP2 has cut {name} over other ranks, too. The parameters that "
                "flux_ops.parallel leaves are DTensors, which torch.distributed.checkpoint takes as they are."
            )
        cut, mesh = layer.sharding, DeviceMesh.from_group(layer.group, value.device.type)
        parts = value.detach().split(cut.local_parts, cut.dim)
        for i, part in enumerate(parts):
            state[f"{name}.{i}" if len(parts) > 1 else name] = DTensor.from_local(part, mesh, [Shard(cut.dim)])
    return state


def _layers(module: nn.Module) -> list[ParallelLinear]:
    return [layer for layer in module.modules() if isinstance(layer, ParallelLinear)]
