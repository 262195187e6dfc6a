"""What the compiled operators ask of Python (csrc/ops/hooks.hpp): once per shape or group, never on the fast path."""

import contextlib
import os
import sys
import warnings

import torch
import torch.distributed as dist

from flux_ops import topology
from flux_ops.config import settings
from flux_ops.rendezvous import Members, Site
from flux_ops.tuner.cache import Build, Product
from flux_ops.tuner.lookup import Caches, device_name, shipped_paths
from flux_ops.workspace import Needs, Workspace

_warned: set[str] = set()
_INSIDE = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))


def warn_once(message: str) -> None:
    """Warns of a line of the user's: the last one on the stack that is neither in flux_ops nor in torch."""
    if message in _warned:
        return
    _warned.add(message)
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(f"flux_ops: {message}", RuntimeWarning, stacklevel=level)


class Hooks:
    def __init__(self, core, version: str, why_not_cuda: str):
        self._core = core
        self._version = version
        self._why_not_cuda = why_not_cuda
        self._members: dict[int, Members] = {}  # by state id
        self._connections: dict[tuple[int, str], str] = {}
        self._workspaces: dict[tuple[int, str], Workspace] = {}
        build = Build(version, {kind: core.config_names(kind) for kind in ("cpu", "cuda")})
        shipped = shipped_paths() if settings.shipped_caches else []
        self.caches = Caches(settings.tune_cache, shipped, build, warn_once)

    # ---- called by the operators

    def tuned(self, op, m, n, k, dtype, transposed, world, device) -> tuple[str, str]:
        """(choice, where it is from), or two empty strings."""

        def suits(entry):
            return self._core.suits(op, device[0], world, m, n, k, dtype, transposed, entry.choice, entry.product.m)

        try:
            product = Product(op, m, n, k, dtype, "kn" if transposed else "nk", world, device_name(*device))
            found = self.caches.lookup(product, suits)
        except Exception as error:  # noqa: BLE001 (the other ranks wait for this one's choice)
            found = None
            with contextlib.suppress(Warning):  # where warnings are errors
                warn_once(f"the tuned choices can't be used: {error!r}")
        # A path need not be text.
        return (found[0].choice, found[1].encode(errors="backslashreplace").decode()) if found else ("", "")

    def agree(self, site, text: str, proposal: tuple[str, str] = ("", "")) -> tuple[str, str]:
        """Rank 0's proposal, on all ranks."""
        site = Site(site)
        with self._broken_by_timeout(site):
            said = self._of(site).exchange(site, f"check/{site.call}", "\n".join((text, *proposal)))
        texts, choices, origins = zip(*(one.split("\n", 2) for one in said), strict=True)
        if len(set(texts)) > 1:
            lines = "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(texts))
            raise ValueError(f"{site}: the ranks do not make the same call:{lines}")
        return choices[0], origins[0]

    def refuse(self, site, message: str) -> None:
        site = Site(site)
        # Without the check a rank may never meet the others; then joining here would set it apart from them.
        if settings.check_ranks or site.state_id in self._members:
            with contextlib.suppress(RuntimeError):  # the refusal itself says more than that the store is gone
                self._of(site).refuse(site, message)

    def why_not_connected(self, site, device) -> str:
        site, (kind, index) = Site(site), device
        key = site.state_id, kind
        if key not in self._connections:
            members = self._of(site)
            mine = topology.probe(members.rank, kind, index, self._version, self._why_not_cuda)
            with self._broken_by_timeout(site):
                texts = members.exchange(site, f"probe/{kind}", mine.to_json())
            probes = [topology.Probe.from_json(text) for text in texts]
            try:
                self._connections[key] = topology.decide(probes, kind)
            except ValueError as error:
                raise ValueError(f"{site}: {error}") from None
        return self._connections[key]

    def grow(self, site, device, needs: Needs) -> None:
        site, (kind, index) = Site(site), device
        key = site.state_id, kind
        if key not in self._workspaces:
            where = torch.device(kind, index) if kind == "cuda" else torch.device(kind)
            self._workspaces[key] = Workspace(self._core, self._of(site), where)
        with self._broken_by_timeout(site):
            self._workspaces[key].grow(site, needs)

    def explain_timeout(self, site) -> str:
        site = Site(site)
        try:
            return self._of(site).peers_doing(site)
        except RuntimeError:  # the store may be gone with its rank; the timeout has been explained well enough
            return ""

    @staticmethod
    def warn_once(message: str) -> None:
        warn_once(message)

    @staticmethod
    def traced(group_name: str, world: int) -> None:
        """Torch finds compiled graphs on disk by this tag and by their text, in which no number of ranks stands."""
        mark, tag = f"flux_ops:{group_name}={world}", torch.compiler.config.cache_key_tag
        if mark not in tag.split():
            torch.compiler.config.cache_key_tag = f"{tag} {mark}".lstrip()

    def dropped(self, state_id: int) -> None:
        self._members.pop(state_id, None)
        for of_state in (self._connections, self._workspaces):
            for key in [key for key in of_state if key[0] == state_id]:
                gone = of_state.pop(key)
                if isinstance(gone, Workspace):
                    gone.destroy()

    # ---- for prepare() and tests

    def workspace(self, group_name: str, kind: str) -> Workspace | None:
        for (_, of_kind), workspace in self._workspaces.items():
            if of_kind == kind and workspace.members.group_name == group_name:
                return workspace
        return None

    def known_groups(self) -> list[str]:
        return sorted({members.group_name for members in self._members.values()})

    @staticmethod
    def end_unused(group_name: str) -> None:
        """Counts a life of the group in which this rank has made no call: the others may have."""
        with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
            Members.of(group_name)

    def _of(self, site: Site) -> Members:
        if site.state_id not in self._members:
            self._members[site.state_id] = Members.of(site.group_name)
        return self._members[site.state_id]

    @contextlib.contextmanager
    def _broken_by_timeout(self, site: Site):
        """A rank that waited in vain no longer counts its calls like the others."""
        try:
            yield
        except dist.DistError as error:
            self._core.mark_broken(site.group_name, str(error))
            raise
