"""What is done once for a whole model of parallel layers."""

import torch
import torch.distributed as dist
from torch import nn

from flux_ops import ops
from flux_ops.nn.base import ParallelLinear
from flux_ops.ops import _group_name as group_name_of


def prepare(module: nn.Module, max_tokens: int, *, training: bool = True) -> None:
    """Makes ready what the parallel layers in `module` need: flux_ops.prepare for each of their overlapped products,
    and the communicators of their groups.

    Before a CUDA graph is captured, or to bound memory. Collective: all ranks call it on the same module.

    Args:
        module: a layer, or anything that has some inside.
        max_tokens: the most rows M of x, flattened to [M, K], over all ranks: tokens of a batch, s · b.
        training: for the backward too.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, ParallelLinear)]
    products = dict.fromkeys(
        (op, n, k, layer.weight.dtype, layer.weight.device, layer.group)
        for layer in layers
        for op, n, k in layer.products(training)
    )
    for op, n, k, dtype, device, group in products:
        ops.prepare(op=op, max_m=max_tokens, n=n, k=k, dtype=dtype, group=group, device=device)
    for group, device in dict.fromkeys((layer.group, layer.weight.device) for layer in layers):
        if group.size() > 1:
            dist.all_reduce(torch.zeros(1, device=device), group=group)


@torch.no_grad()
def allreduce_sequence_parallel_grads(module: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Sums the gradients of replicated parameters over the ranks, once after the backward of a step. Collective.

    Under sequence parallelism each rank has the gradient of its own tokens for a parameter that all hold whole: the
    bias of a RowParallelLinear, a norm's weight. They are known by a true attribute `sequence_parallel`, as in
    Megatron, which does the same in finalize_model_grads; set it on such parameters of other layers.

    Args:
        module: the model.
        group: the tensor-parallel group; by default all ranks.

    The gradient is `main_grad` where the parameter has one, else `grad`; of a DTensor, as FSDP2 cuts them, this rank's
    part. A parameter without a gradient is left out: on all ranks alike. fully_shard puts parameters of its own in the
    place of those it finds: give them the attribute again.

    Raises, before anything is added up: TypeError for what is no group; ValueError for one that has been destroyed, or
    that this rank is no member of.
    """
    group_name_of("allreduce_sequence_parallel_grads", group)
    grads = []
    for parameter in module.parameters():
        if parameter.requires_grad and getattr(parameter, "sequence_parallel", False):
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
