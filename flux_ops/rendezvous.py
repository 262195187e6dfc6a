"""How the ranks of a process group talk outside the collectives: through the group's store, always with a timeout.

A store keeps every key for ever, and a name of a group may be used again after destroy_process_group. So all keys carry
the number of times that this rank has joined under that name; the ranks count alike.
"""

import threading
import time

import torch.distributed as dist
from torch.distributed import distributed_c10d

from flux_ops.config import settings

_POLL_S = 0.001
_ANSWER_S = 5.0  # of a store, at least
_GIVE_UP_S = 0.1


def ask_store(what: object, ask, timeout_s: float):
    """The value of ask(given_up), which calls a store: some of these calls end only when its server answers, or not at
    all. It has to end soon after the event given_up.
    """
    outcome, given_up = [], threading.Event()

    def run():
        try:
            outcome.append((ask(given_up), None))
        except BaseException as error:  # noqa: BLE001 (raised again below)
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True, name="flux_ops store")
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends
        run()
    try:
        if not outcome:
            thread.join(timeout_s)
    except BaseException:  # a handler of a signal
        given_up.set()
        thread.join(_GIVE_UP_S)
        raise
    whose = "the process that serves it, rank 0's or the launcher's, "
    if not outcome:
        given_up.set()
        raise dist.DistBackendError(
            f"{what}: the store of the process group has not answered in time: {whose}is frozen."
        )
    value, error = outcome.pop()
    try:
        if type(error) in (RuntimeError, dist.DistError, dist.DistNetworkError, dist.DistStoreError):
            raise dist.DistBackendError(
                f"{what}: the store of the process group does not answer: {whose}has ended. ({error})"
            ) from error
        if error is not None:
            raise error
    finally:
        del error  # its traceback holds this frame
    return value


class Site:
    """One call on a group: the ranks count their calls alike, so `call` names the same call on each."""

    def __init__(self, site):
        self.group_name, self.state_id, self.call, self.op = site

    def __str__(self):
        return f"{self.op} on group '{self.group_name}'"


class Members:
    """The ranks of one process group."""

    @classmethod
    def of(cls, group_name: str) -> "Members":
        group = distributed_c10d._resolve_process_group(group_name)
        return cls(group_name, group.rank(), group.size(), distributed_c10d._get_process_group_store(group))

    def __init__(self, group_name: str, rank: int, world: int, store: dist.Store):
        self.group_name, self.rank, self.world = group_name, rank, world
        self._group_store = store
        joined = f"flux/joined/{self.rank}"
        self._life = ask_store(
            f"group '{group_name}'", lambda _: store.add(joined, 1), max(settings.timeout_s, _ANSWER_S)
        )
        self._store = dist.PrefixStore(f"flux/{self._life}", store)

    def exchange(self, site: Site, key: str, value: str, timeout_s: float | None = None) -> list[str]:
        """Every rank's value, in rank order. Raises if a rank has refused the call, or does not come in time."""
        timeout_s = settings.timeout_s if timeout_s is None else timeout_s
        return ask_store(
            site, lambda given_up: self._exchange(site, key, value, timeout_s, given_up), timeout_s + _ANSWER_S
        )

    def _exchange(self, site: Site, key: str, value: str, timeout_s: float, given_up: threading.Event) -> list[str]:
        self._store.set(f"{key}/{self.rank}", value)
        values = {self.rank: value}
        deadline = time.monotonic() + timeout_s
        while True:
            for rank in range(self.world):
                if rank not in values and self._store.check([f"{key}/{rank}"]):
                    values[rank] = self._store.get(f"{key}/{rank}").decode()
            if len(values) == self.world:
                return [values[rank] for rank in range(self.world)]
            missing = [rank for rank in range(self.world) if rank not in values]
            for rank in missing:
                if (refusal := self._refusal(site.call, rank)) is not None:
                    raise ValueError(f"{site}: rank {rank} refused this call: {refusal}")
            for rank in missing:
                anew = self._group_store.add(f"flux/joined/{rank}", 0) > self._life
                if anew and not self._store.check([f"{key}/{rank}"]):  # it may have answered just before
                    raise dist.DistBackendError(
                        f"{site}: rank {rank} has begun anew on this group, after flux_ops.destroy, and rank "
                        f"{self.rank} has not; call flux_ops.destroy(group) on this rank too."
                    )
            if time.monotonic() > deadline or given_up.is_set():
                raise dist.DistBackendError(self._timeout_text(site, missing, timeout_s))
            time.sleep(_POLL_S)

    def store(self, prefix: str) -> dist.Store:
        """The group's store, with keys of its own."""
        return dist.PrefixStore(prefix, self._store)

    def barrier(self, site: Site, key: str) -> None:
        self.exchange(site, key, "")

    def refuse(self, site: Site, message: str) -> None:
        ask_store(site, lambda _: self._store.set(f"refused/{site.call}/{self.rank}", message), _ANSWER_S)

    def peers_doing(self, site: Site) -> str:
        """What the other ranks have said about this call; empty if they have said nothing."""
        return ask_store(site, lambda _: self._peers_doing(site), _ANSWER_S)

    def _peers_doing(self, site: Site) -> str:
        parts = []
        for rank in range(self.world):
            if rank == self.rank:
                continue
            if (refusal := self._refusal(site.call, rank)) is not None:
                parts.append(f" Rank {rank} refused this call: {refusal}")
            elif self._store.check([f"check/{site.call}/{rank}"]):
                text = self._store.get(f"check/{site.call}/{rank}").decode().partition("\n")[0]
                parts.append(f" Rank {rank} was about to run {text} and waits for the others to agree.")
        return "".join(parts)

    def _refusal(self, call: int, rank: int) -> str | None:
        key = f"refused/{call}/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _timeout_text(self, site: Site, missing: list[int], timeout_s: float) -> str:
        ranks = ("rank " if len(missing) == 1 else "ranks ") + ", ".join(map(str, missing))
        return (
            f"{site}: rank {self.rank} waited {timeout_s:g} s for {ranks} to make the same call (number "
            f"{site.call} on this group). Late, dead, or busy with another call; flux_ops.set_timeout(seconds) allows "
            "more time."
        )
