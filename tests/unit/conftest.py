"""Unit tests run in one process; where an operator needs a process group, it has one rank."""

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def one_rank():
    """The name of a group of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
