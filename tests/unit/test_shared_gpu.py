"""Which GPU a rank takes, and what its group is made of."""

import pytest
import torch

from flux_ops import shared_gpu


@pytest.mark.parametrize(
    "allowed, gpus, world, rank, device, backend",
    (
        (1, 2, 2, 1, "cuda:1", "nccl"),
        (1, 1, 2, 1, "cuda:0", "nccl"),  # each rank sees one GPU
        (1, 0, 2, 1, "cuda:0", "nccl"),  # torch says what is wrong
        (2, 1, 2, 1, "cuda:0", "gloo"),
        (2, 2, 4, 3, "cuda:1", "gloo"),
        (2, 2, 2, 1, "cuda:1", "nccl"),  # none has to share
    ),
)
def test_device_and_backend(monkeypatch, allowed, gpus, world, rank, device, backend):
    patched = []
    monkeypatch.setattr(shared_gpu.settings, "ranks_per_gpu", allowed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(shared_gpu, "_patch_functional_collectives", lambda: patched.append(True))
    assert shared_gpu.device_and_backend(rank, world) == (torch.device(device), backend)
    assert bool(patched) == (backend == "gloo")
