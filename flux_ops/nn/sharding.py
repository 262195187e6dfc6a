"""Which part of a whole parameter a rank holds, and how a whole one is drawn."""

import contextlib
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from flux_ops import ops, reference


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


def common_seed(generator: torch.Generator | None, group: dist.ProcessGroup, layer: str) -> int:
    """A number that all ranks of the group share: rank 0 draws it. Collective; `layer`, what they make, is compared.

    Every rank draws, so that generators that were in step stay so.
    """
    device = generator.device if generator is not None else "cpu"
    drawn = int(torch.randint(2**62, (), generator=generator, device=device, dtype=torch.int64))
    return int(ops.agree(group, layer, str(drawn)))


@contextlib.contextmanager
def seeded(seed: int, device: torch.device):
    """The default generators of CPU and device begin at `seed`, and are afterwards what they were."""
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index])
    states = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


# ---- A parameter is the rank's piece, or a DTensor of it where FSDP2 has cut that over the data-parallel ranks.


def is_cut_again(parameter: torch.Tensor) -> bool:
    return hasattr(parameter, "full_tensor")


def read(parameter: torch.Tensor) -> torch.Tensor:
    """The rank's piece. Collective over the data-parallel ranks where they have cut it."""
    return parameter.full_tensor().detach() if is_cut_again(parameter) else parameter.detach()


@torch.no_grad()
def write(parameter: torch.Tensor, piece: torch.Tensor) -> None:
    """Sets the rank's piece. Collective likewise: the first data-parallel rank's piece is everyone's."""
    if is_cut_again(parameter):
        from torch.distributed.tensor import distribute_tensor  # its import takes long

        piece = piece.to(parameter.device, parameter.dtype)
        piece = distribute_tensor(piece, parameter.device_mesh, parameter.placements)
    parameter.copy_(piece)


@torch.no_grad()
def draw(
    parameter: torch.Tensor, sharding: Sharding, rank: int, shape: Sequence[int], init: Callable[[torch.Tensor], object]
) -> None:
    """Draws the whole parameter of `shape`, part by part, and keeps this rank's piece: the same model for every TP."""

    def empty(size):
        return torch.empty(size, dtype=parameter.dtype, device=parameter.device)

    piece = empty(parameter.shape) if is_cut_again(parameter) else parameter
    for part, of_part in zip(sharding.parts, piece.split(sharding.local_parts, sharding.dim), strict=True):
        whole = empty([part if dim == sharding.dim else size for dim, size in enumerate(shape)])
        init(whole)
        of_part.copy_(whole.chunk(sharding.world, sharding.dim)[rank])
    if piece is not parameter:
        write(parameter, piece)
