"""Megatron inside the rank processes of the tests. It is imported there alone: that costs seconds."""

import contextlib
import importlib.util
from unittest import mock

import torch
from torch import nn


def why_no_megatron():
    """Why the tests with Megatron can't run here, or None."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return "needs megatron.core: pip install --no-deps -r requirements/megatron.txt (Python 3.12 or newer)"
    return None


def _norm(config, hidden_size, eps=1e-5, **_):
    """In place of apex's norm: torch's, which Megatron itself refuses to use under sequence parallelism."""
    norm = nn.LayerNorm(hidden_size, eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


@contextlib.contextmanager
def megatron(ctx):
    """Megatron's parallel state, with all ranks as one tensor-parallel group.

    Megatron puts its buffers on the current CUDA device and draws dropout from CUDA's generator: where there is none,
    both are the CPU's.
    """
    from megatron.core import parallel_state
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block

    with contextlib.ExitStack() as stack:
        if ctx.is_cuda:
            random.model_parallel_cuda_manual_seed(1, tp_rank=ctx.rank, ep_rank=0, etp_rank=0)
        else:
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", lambda: ctx.device))
            stack.enter_context(
                mock.patch.object(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
            )
        stack.enter_context(mock.patch.object(backends, "LNImpl", _norm))
        stack.enter_context(mock.patch.object(transformer_block, "LayerNormImpl", _norm))
        if not parallel_state.is_initialized():  # once for a rank: Megatron never destroys its groups
            parallel_state.initialize_model_parallel(ctx.world, create_gloo_process_groups=False)
        yield
