"""What stands in for the functional collectives of CUDA tensors where ranks share a GPU, here on tensors of the CPU."""

import torch
import torch.distributed as dist

from flux_ops import shared_gpu


def collectives(ctx):
    name, functional = dist.group.WORLD.group_name, torch.ops._c10d_functional
    x = torch.arange(6.0).view(3, 2).t() + 10 * ctx.rank  # not contiguous, as `whole` below
    gathered = shared_gpu._all_gather_into_tensor(x, ctx.world, name)
    wanted = functional.wait_tensor(functional.all_gather_into_tensor(x.contiguous(), ctx.world, name))
    assert torch.equal(gathered, wanted)
    y = gathered * (ctx.rank + 1)
    whole = torch.cat([y.t()] * ctx.world, dim=1).t()
    reduced = shared_gpu._reduce_scatter_tensor(whole, "sum", ctx.world, name)
    assert torch.equal(reduced, gathered * sum(range(1, ctx.world + 1)))


def test_collectives(ranks):
    ranks.run(collectives)
