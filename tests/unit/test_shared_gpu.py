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
def test_place_of(monkeypatch, allowed, gpus, world, rank, device, backend):
    mended = []
    monkeypatch.setattr(shared_gpu.settings, "ranks_per_gpu", allowed)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(shared_gpu, "_mend_gloo", lambda: mended.append(True))
    assert shared_gpu.place_of(rank, world) == (torch.device(device), backend)
    assert bool(mended) == (backend == "gloo")
