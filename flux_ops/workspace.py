"""Symmetric memory of a process group: one block per rank, of the same size, mapped by all ranks.

A workspace belongs to the group, not to an op or a layer. It grows, collectively, when a call needs more than there is.
The layout inside a block is csrc/schedule/workspace_layout.hpp.
"""

import contextlib
import ctypes
import json
import mmap
import os
from concurrent.futures import ThreadPoolExecutor

import torch

from flux_ops.config import settings
from flux_ops.rendezvous import Members, Site
from flux_ops.symmetric import rendezvous

Needs = tuple[int, int]  # bytes of a region, and of a parity's slots (WorkspaceNeeds)

_GRANULE = 2 << 20


def _round_up(size: int) -> int:
    return -(-size // _GRANULE) * _GRANULE


class HostBlock:
    """Shared memory between processes of one host.

    It has no name: each rank makes an anonymous file in memory, and the others map it through /proc while it is open.
    When the last process that maps it ends, however it ends, the memory is gone.
    """

    def __init__(self, members: Members, site: Site, total_bytes: int):
        self._maps: list[mmap.mmap] = []
        key = f"grow/{site.call}"
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            fd, error = -1, ""
            try:
                fd = os.memfd_create("flux_ops", os.MFD_CLOEXEC)
                stack.callback(os.close, fd)
                os.ftruncate(fd, total_bytes)
            except OSError as e:
                error = f"can't allocate {total_bytes} bytes of shared memory: {e}"
            answer = {"pid": os.getpid(), "fd": fd, "error": error}
            answers = [json.loads(v) for v in members.exchange(site, f"{key}/made", json.dumps(answer))]
            _raise_first_error(site, [a["error"] for a in answers])
            try:
                for a in answers:
                    self._maps.append(self._map(a["pid"], a["fd"], total_bytes))
            except OSError as e:
                error = f"can't map the memory of another rank: {e}"
            _raise_first_error(site, members.exchange(site, f"{key}/mapped", error))
            self.bases = [ctypes.addressof(ctypes.c_char.from_buffer(m)) for m in self._maps]
            self._own = self._maps[members.rank]
            stack.pop_all()
            os.close(fd)

    @staticmethod
    def _map(pid: int, fd: int, total_bytes: int) -> mmap.mmap:
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return mmap.mmap(file, total_bytes)
        finally:
            os.close(file)

    def fill(self, begin: int, end: int, byte: int) -> None:
        self._own[begin:end] = bytes([byte]) * (end - begin)

    def close(self) -> None:
        self.bases = []
        for m in self._maps:
            m.close()
        self._maps.clear()


class DeviceBlock:
    """Device memory that the GPUs of one host have mapped from each other."""

    def __init__(self, members: Members, site: Site, total_bytes: int, slots: tuple[int, int], device: torch.device):
        import torch.distributed._symmetric_memory as symm_mem

        if settings.ranks_per_gpu > 1:  # torch refuses it otherwise; it reads this at each rendezvous
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        key = f"grow/{site.call}"
        error = ""
        self._memory = None
        try:
            self._memory = symm_mem.empty(total_bytes, dtype=torch.uint8, device=device)
        except RuntimeError as e:
            error = f"can't allocate {total_bytes} bytes on {device}: {e}"
        _raise_first_error(site, members.exchange(site, f"{key}/made", error))
        store = members.store(f"{key}/rendezvous")
        # Tables that torch allocates there stay. While Inductor warms up what it will capture, all that its thread
        # allocates comes from the memory of its graphs, where it suffers nothing that it doesn't know.
        with ThreadPoolExecutor(1, initializer=torch.cuda.set_device, initargs=(device,)) as thread:
            meeting = thread.submit(rendezvous, self._memory, store, members.rank, members.world, str(site))
        self.bases, self._kept = meeting.result()
        self._memory.zero_()
        self.fill(*slots, 0xFF)
        torch.cuda.synchronize(device)
        members.barrier(site, f"{key}/zeroed")

    def fill(self, begin: int, end: int, byte: int) -> None:
        self._memory[begin:end].fill_(byte)

    def close(self) -> None:
        self._memory = self._kept = None
        self.bases = []


class Workspace:
    """The symmetric memory of one group on one device."""

    def __init__(self, core, members: Members, device: torch.device):
        self._core = core
        self.members = members
        self.device = device
        self.size: Needs = (0, 0)
        self.block: HostBlock | DeviceBlock | None = None
        self._kept = []  # blocks whose addresses live on in CUDA graphs

    def grow(self, site: Site, needs: Needs) -> None:
        """Collective: makes the workspace at least this large. What it held is lost, which no call relies on."""
        region, slots = needs
        size = tuple(map(max, self.size, map(_round_up, (max(region, 1), slots))))
        if size == self.size:
            return
        wanted = "regions of {} bytes and slots of {}".format(*size)
        answers = self.members.exchange(site, f"grow/{site.call}/size", wanted)
        if any(answer != wanted for answer in answers):
            listed = "; ".join(f"rank {rank}: {answer}" for rank, answer in enumerate(answers))
            raise ValueError(f"{site}: the ranks need workspaces of unlike sizes, so they make unlike calls ({listed})")
        if self.block is not None:
            self._retire(site)
        total_bytes = self._core.workspace_total_bytes(size)
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                block = DeviceBlock(self.members, site, total_bytes, self._core.workspace_slots(size), self.device)
        else:
            block = HostBlock(self.members, site, total_bytes)
        index = self.device.index if self.device.type == "cuda" else -1
        name = self.members.group_name
        self._core.attach_workspace(name, self.device.type, index, block.bases, size)
        old, self.block = self.block, block
        self.size = size
        if old is not None and old not in self._kept:
            old.close()

    def _retire(self, site: Site) -> None:
        """Waits until no rank uses the block any more."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.members.barrier(site, f"grow/{site.call}/idle")
        if self._core.workspace_captured(self.members.group_name, self.device.type):
            self._kept.append(self.block)

    def poison(self, byte: int = 0xFF) -> None:
        """For tests: fills the gathered rows and both regions of this rank's block; 0xFF bytes are NaN in every
        floating-point type. The slots are as they are: empty, which the same bytes mean there.

        No rank may be in a call meanwhile.
        """
        if self.block is None:
            return
        _, begin = self._core.workspace_slots(self.size)
        self.block.fill(begin, self._core.workspace_region_offset(self.size, 2), byte)

    def destroy(self) -> None:
        if self.device.type == "cuda" and torch.cuda.is_initialized():
            torch.cuda.synchronize(self.device)
        if self.block is not None:
            self.block.close()
        self.block = None
        self._kept.clear()
        self.size = (0, 0)


def _raise_first_error(site: Site, errors: list[str]) -> None:
    for rank, error in enumerate(errors):
        if error:
            raise RuntimeError(f"{site}: rank {rank} {error}")
