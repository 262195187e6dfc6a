"""The process group of ranks on GPUs that may share one (FLUX_RANKS_PER_GPU). NCCL takes one rank a GPU only, so theirs
is gloo's, whose functional collectives of CUDA tensors end in a crash where they gather or scatter.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group as group_of

from flux_ops.config import settings
from flux_ops.reference import all_gather_single, reduce_scatter_single


def _all_gather_into_tensor(x, world, group_name):
    out = x.new_empty((world * x.shape[0], *x.shape[1:]))
    all_gather_single(out, x.contiguous(), group=group_of(group_name))
    return out


def _reduce_scatter_tensor(x, op, world, group_name):
    out = x.new_empty((x.shape[0] // world, *x.shape[1:]))
    reduce_scatter_single(out, x.contiguous(), getattr(dist.ReduceOp, op.upper()), group=group_of(group_name))
    return out


@functools.cache
def _patch_functional_collectives() -> torch.library.Library:
    """The functional collectives of CUDA tensors become those of torch.distributed, which gloo has."""
    library = torch.library.Library("_c10d_functional", "IMPL")  # it undoes itself when it is gone
    library.impl("all_gather_into_tensor", _all_gather_into_tensor, "CUDA")
    library.impl("reduce_scatter_tensor", _reduce_scatter_tensor, "CUDA")
    return library


def device_and_backend(local_rank: int, local_world: int) -> tuple[torch.device, str]:
    """Of a rank of this host: its GPU, which is the only one where it sees no other, and its group's backend."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local_rank % max(gpus, 1))
    if settings.ranks_per_gpu == 1 or local_world <= gpus:
        return device, "nccl"
    _patch_functional_collectives()
    return device, "gloo"
