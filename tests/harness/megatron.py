"""Megatron inside the rank processes of the tests. It is imported there alone: that costs seconds."""

import contextlib
import importlib.util
from unittest import mock

import pytest
import torch
from torch import nn


def _is_installed():
    return importlib.util.find_spec("megatron") is not None and importlib.util.find_spec("megatron.core") is not None


needs_megatron = pytest.mark.skipif(
    not _is_installed(),
    reason="needs megatron.core: pip install --no-deps -r requirements/megatron.txt (Python 3.12 or newer)",
)


def _norm(config, hidden_size, eps=1e-5, **_):
    """In place of apex's norm: torch's, which Megatron itself refuses to use under sequence parallelism."""
    norm = nn.LayerNorm(hidden_size, eps, dtype=config.params_dtype)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


@contextlib.contextmanager
def megatron(ctx):
    """Megatron's parallel state, with all ranks as one tensor-parallel group.

    Megatron puts its buffers on the current CUDA device, draws dropout from CUDA's generator, whose state it keeps for
    a recomputation, and asks for the current stream before it sums gradients. Where there is no CUDA, device and
    generator are the CPU's, whose state it keeps too, and the stream is one that is never used.
    """
    from megatron.core import parallel_state
    from megatron.core.models import backends
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block

    with contextlib.ExitStack() as stack:
        if not parallel_state.is_initialized():  # once for a rank: Megatron never destroys its groups
            parallel_state.initialize_model_parallel(ctx.world, create_gloo_process_groups=False)
        if ctx.is_cuda:
            random.model_parallel_cuda_manual_seed(1, tp_rank=ctx.rank, ep_rank=0, etp_rank=0)
        else:
            fork = mock.Mock(side_effect=lambda *_: contextlib.nullcontext())
            stack.enter_context(mock.patch.object(torch.cuda, "current_device", return_value=ctx.device))
            stack.enter_context(mock.patch.object(torch.cuda, "current_stream"))
            stack.enter_context(mock.patch.object(random.CudaRNGStatesTracker, "fork", fork))
            for name in ("_get_cuda_rng_state", "_set_cuda_rng_state"):
                stack.enter_context(mock.patch.object(random, name))
        stack.enter_context(mock.patch.object(backends, "LNImpl", _norm))
        stack.enter_context(mock.patch.object(transformer_block, "LayerNormImpl", _norm))
        yield
