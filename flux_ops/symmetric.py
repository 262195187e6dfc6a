"""Rendezvous of symmetric CUDA memory on any process group.

torch.distributed._symmetric_memory exchanges memory handles through a store, under keys "prefix/number/rank" where
`number` counts the exchanges of the process. Ranks that have met in different groups before count differently and would
wait for each other for ever: a subgroup first, then the world, hangs. So each rendezvous here gets a store of its own,
in which the exchanges are numbered from 0, with a timeout.
"""

import itertools
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    ProcessGroup,
    _register_process_group,
    _SymmetricMemory,
    _unregister_process_group,
)

from flux_ops.config import settings

_POLL_S = 0.0005
_names = itertools.count()


class _ExchangeStore(dist.Store):
    """What torch's rendezvous asks of a store: set, get and wait."""

    def __init__(self, store, what: str):
        super().__init__()
        self._store = store
        self._what = what
        self._first = None

    def _key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        if self._first is None:
            self._first = int(number)
        return f"{prefix}/{int(number) - self._first}/{rank}"

    def set(self, key, value):
        self._store.set(self._key(key), value)

    def get(self, key):
        return self._store.get(self._key(key))

    def wait(self, keys, timeout=None):
        deadline = time.monotonic() + settings.timeout_s
        keys = [self._key(key) for key in keys]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                missing = sorted({int(k.rsplit("/", 1)[1]) for k in keys if not self._store.check([k])})
                raise dist.DistBackendError(f"{self._what}: timed out after {settings.timeout_s} s; missing: {missing}")
            time.sleep(_POLL_S)


def rendezvous(memory: torch.Tensor, store, rank: int, world: int, what: str):
    """Maps the symmetric `memory` of all ranks into each. Collective; `store` is used by this rendezvous alone.

    Returns (base addresses in rank order, what has to be kept alive).
    """
    exchange = _ExchangeStore(store, what)
    # torch asks the group of this name for its rank, its size and its store, and for nothing else.
    name, group = f"flux_ops/{next(_names)}", ProcessGroup(exchange, rank, world)
    _register_process_group(name, group)
    try:
        handle = _SymmetricMemory.rendezvous(memory, name)
    finally:
        _unregister_process_group(name)
    offset = getattr(handle, "offset", 0)
    return [pointer + offset for pointer in handle.buffer_ptrs], (memory, handle, group, exchange)
