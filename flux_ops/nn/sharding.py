"""Which part of a whole parameter a rank holds, and how a whole one is drawn."""

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flux_ops import reference


class Sharding:
    """A parameter that is cut along one dimension, each of its parts by itself.

    Whole, the parameter is `parts` one after the other along `dim` (several where layers are merged: gate and up, or
    query, key and value). Rank r has the r-th of `world` equal pieces of each part, one after the other.
    """

    def __init__(self, dim: int, parts: Sequence[int], world: int):
        self.dim, self.parts, self.world = dim, tuple(parts), world
        self.local_parts = tuple(part // world for part in self.parts)

    def shard(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """The rank's piece of a whole parameter."""
        cut = [part.chunk(self.world, self.dim)[rank] for part in whole.split(self.parts, self.dim)]
        return torch.cat(cut, self.dim)

    def unshard(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole parameter from the pieces of all ranks."""
        cut = [shard.split(self.local_parts, self.dim) for shard in shards]
        return torch.cat([piece for of_part in zip(*cut, strict=True) for piece in of_part], self.dim)

    def gather(self, shard: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """The whole parameter on every rank. Collective."""
        shards = reference.all_gather(shard.detach().unsqueeze(0), group)
        return self.unshard(shards.unbind(0))


def common_seed(generator: torch.Generator | None, group: dist.ProcessGroup) -> int:
    """A number that all ranks of the group share: rank 0 draws it. Collective.

    Every rank draws, so that generators that were in step stay so.
    """
    device = generator.device if generator is not None else "cpu"
    drawn = [int(torch.randint(2**62, (), generator=generator, device=device, dtype=torch.int64))]
    if group.size() > 1:
        dist.broadcast_object_list(drawn, group=group, group_src=0)
    return drawn[0]


@contextlib.contextmanager
def seeded(seed: int, device: torch.device):
    """The default generators begin at `seed`, and are afterwards what they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@torch.no_grad()
def fill_sharded(
    shard: torch.Tensor, sharding: Sharding, rank: int, shape: Sequence[int], init: Callable[[torch.Tensor], object]
) -> None:
    """Draws the whole parameter of `shape`, part by part, and keeps this rank's piece: the same model for every TP."""
    pieces = shard.split(sharding.local_parts, sharding.dim)
    for part, piece in zip(sharding.parts, pieces, strict=True):
        whole = shard.new_empty([part if dim == sharding.dim else size for dim, size in enumerate(shape)])
        init(whole)
        piece.copy_(whole.chunk(sharding.world, sharding.dim)[rank])
