"""The all-gather as bare copies: every rank's shard to every other rank, no signals, no kernel of ours.

    push   rank r writes its shard to r+1, r+2, ...
    pull   rank r reads the shards of r-1, r-2, ...

one peer after another on one stream, or to (from) all at once, a stream each. Buffers are torch's symmetric memory on
GPUs, where the copies are torch copies, which the driver gives to the copy engines; on the CPU files that all map.
"""

import contextlib
import shutil
import tempfile

import torch
import torch.distributed as dist

from flux_ops import reference

GATHER = "all_gather"


class Transfers:
    PUSH, PUSH_ALL, PULL, PULL_ALL = "push", "push, at once", "pull", "pull, at once"
    NAMES = (PUSH, PUSH_ALL, PULL, PULL_ALL, GATHER)

    def __init__(self, place, dtype, products):
        self.place, self.dtype = place, getattr(torch, dtype)
        shard = max(m // place.world * k for m, _, k in products)
        self._blocks, self._kept = _shared_blocks(place, place.world * shard, self.dtype)
        self._streams = [torch.cuda.Stream() for _ in range(place.world - 1)] if place.is_cuda else [None]

    def make(self, name, operands):
        """call(i) -> [(world - 1) * rows, K]: the shards of ranks r+1, r+2, ..., as they lie in this rank's memory."""
        if name == GATHER:
            return lambda i: reference.all_gather(operands.at(i)[0])
        x = operands.at(0)[0]
        rank, world, pushes = self.place.rank, self.place.world, name in (self.PUSH, self.PUSH_ALL)
        shards = [self._view(r, x)[0] for r in range(world)]
        received = [self._view(r, x)[1:] for r in range(world)]
        shards[rank].copy_(x)
        copies = []
        for step in range(1, world):
            peer = (rank + step) % world if pushes else (rank - step) % world
            to, source = (peer, rank) if pushes else (rank, peer)
            copies.append((received[to][(source - to) % world - 1], shards[source]))
        streams = self._streams if name in (self.PUSH_ALL, self.PULL_ALL) else self._streams[:1]

        def call(_):
            with _forked(streams):
                for step, (to, source) in enumerate(copies):
                    with _on(streams[step % len(streams)]):
                        to.copy_(source, non_blocking=True)
            return received[rank].flatten(0, 1)

        return call

    def expected(self, name, operands):
        x, gathered = operands.at(0)[0], operands.full[0]
        if name == GATHER:
            return gathered
        shards = gathered.view(self.place.world, *x.shape).roll(-self.place.rank, 0)
        return shards[1:].reshape(-1, x.shape[1])

    def _view(self, rank, x):
        """[world, rows, K] of the rank's block: its own shard, then those of the ranks behind it."""
        return self._blocks[rank][: self.place.world * x.numel()].view(self.place.world, *x.shape)


def _on(stream):
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


@contextlib.contextmanager
def _forked(streams):
    """What runs inside on the streams begins after, and is over before, what the current stream does."""
    if streams[0] is None:
        yield
        return
    current = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(current)
    yield
    for stream in streams:
        current.wait_stream(stream)


def _shared_blocks(place, numel, dtype):
    """(blocks of all ranks, what has to be kept alive): `numel` elements that every rank has mapped. Collective."""
    if place.is_cuda:
        from torch.distributed import _symmetric_memory as symm_mem

        own = symm_mem.empty(numel, dtype=dtype, device=place.device)
        handle = symm_mem.rendezvous(own, dist.group.WORLD)
        blocks = [own if r == place.rank else handle.get_buffer(r, (numel,), dtype) for r in range(place.world)]
        return blocks, handle
    folder = place.everyone(tempfile.mkdtemp(prefix="flux_bench_") if place.rank == 0 else None)[0]
    blocks = [
        torch.from_file(f"{folder}/{r}", shared=True, size=numel, dtype=dtype) if r == place.rank else None
        for r in range(place.world)
    ]
    place.everyone(None)  # the files are there
    for r in range(place.world):
        if blocks[r] is None:
            blocks[r] = torch.from_file(f"{folder}/{r}", shared=True, size=numel, dtype=dtype)
    place.everyone(None)
    if place.rank == 0:
        shutil.rmtree(folder)
    return blocks, None
