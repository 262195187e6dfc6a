"""The search for the fastest way to run a product: all candidates briefly, then the best of them at length."""

import contextlib
import dataclasses
import datetime
import json

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import flux_ops
from flux_ops.config import settings
from flux_ops.launch import Place
from flux_ops.rendezvous import Members, Site
from flux_ops.tuner import timing
from flux_ops.tuner.cache import LAYOUTS, OPS, CacheError, Entry, Product, store
from flux_ops.tuner.lookup import device_name
from flux_ops.tuner.measure import GEMM, SEQUENTIAL, Operands, as_graph, attempt, comparable, make_call, why_wrong
from flux_ops.tuner.shapes import takes_rows

FIRST_ROUNDS = 5
FINALISTS = 8
ROUNDS = 15
AS_FAST = 1.02  # two measurements of one choice differ by as much


class TunerStopped(RuntimeError):
    """The search can't go on in this process."""


@dataclasses.dataclass
class StorePlace(Place):
    """A place whose ranks talk through the group's store, which works when the GPU doesn't."""

    members: Members | None = None
    said: int = 0

    def everyone(self, value):
        self.said += 1
        site = Site((self.members.group_name, 0, self.said, "tune"))
        patience = 3 * settings.timeout_s  # others may wait out a timeout, for this rank, before they answer
        said = self.members.exchange(site, f"said/{self.said}", json.dumps(value), timeout_s=patience)
        return [json.loads(one) for one in said]


_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


def _members_of(group: dist.ProcessGroup) -> Members:
    store = dist.PrefixStore("flux_tune", distributed_c10d._get_process_group_store(group))
    return Members(group.group_name, group.rank(), group.size(), store)


def _group_for_tuning(parent: dist.ProcessGroup) -> dist.ProcessGroup:
    """A group with the ranks of `parent`, made once: one that is made anew would find the keys of the one that is gone.

    Where the members alone make a group, torch's name for it depends on how many groups each of them has, and members
    with unlike names would wait for each other: they compare their numbers first.
    """
    ranks = tuple(sorted(dist.get_process_group_ranks(parent)))
    if _groups.get(ranks) not in distributed_c10d._world.pg_map:
        everyone = len(ranks) == dist.get_world_size()
        if not everyone:
            site = Site((parent.group_name, 0, 0, "tune"))
            counts = _members_of(parent).exchange(site, "groups", str(len(distributed_c10d._world.pg_names)))
            if len(set(counts)) > 1:
                raise ValueError(
                    f"{site}: ranks {', '.join(map(str, ranks))} are in {', '.join(counts)} process groups. They can "
                    "make another one only where they are in equally many: tune before the groups are made, or with "
                    "python -m flux_ops tune."
                )
        _groups[ranks] = dist.new_group(ranks, use_local_synchronization=not everyone)
    return _groups[ranks]


def pick(times: dict[str, float], model: str) -> str:
    """The fastest of what was measured, or the model's choice if that is as fast but for the noise of a measurement. If
    the plain sequence is the fastest, it is that one.
    """
    fastest = min((name for name in times if name != GEMM), key=lambda name: (times[name], name != SEQUENTIAL))
    is_as_fast = model in times and times[model] <= AS_FAST * times[fastest]
    return model if is_as_fast and fastest != SEQUENTIAL else fastest


class Tuner:
    """Measures on a group of its own with the members of `group`, so that nothing of it is left in the group's state.

    Collective: all ranks of the group make it, and make the same calls. `log` gets a line for each candidate that is
    out of the race, on rank 0; `progress(done, total)` is called on each rank.
    """

    def __init__(self, group=None, device=None, log=None, progress=None):
        core = flux_ops.ops._core
        if core is None:
            raise RuntimeError(f"tune: {flux_ops.why_not_cuda()}")
        if device is None:
            device = "cuda" if flux_ops.has_cuda_kernels() and torch.cuda.is_available() else "cpu"
        device = torch.device(device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        flux_ops.ops._group_name("tune", group)
        group = dist.group.WORLD if group is None else group
        if group.size() == 1:
            raise ValueError("tune: the group has one rank, so there is nothing to overlap.")
        self._core, self._log, self._progress = core, log or (lambda line: None), progress or (lambda done, total: None)
        self._own = _group_for_tuning(group)
        members = _members_of(self._own)
        self.place = StorePlace(members.rank, members.world, device, None, self._own, members)
        self.clock = timing.Clock(self.place)
        self.device_name = device_name(device.type, -1 if device.index is None else device.index)

    def __enter__(self):
        return self

    def __exit__(self, error, *_):
        with contextlib.suppress(RuntimeError) if error else contextlib.nullcontext():  # the GPU may have met a fault
            flux_ops.destroy(self._own)

    def product(self, op, m, n, k, dtype, layout="nk") -> Product:
        """The product as entries name it; ValueError if it can't be tuned here."""
        for name, value, allowed in (("op", op, OPS), ("layout", layout, LAYOUTS)):
            if value not in allowed:
                raise ValueError(f"tune: {name} is {value!r}; allowed are {', '.join(map(repr, allowed))}.")
        for name, value in (("m", m), ("n", n), ("k", k)):
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"tune: {name} is {value!r}; it must be an int from 1 to 2^31 - 1.")
        if not takes_rows(op, m, self.place.world):
            raise ValueError(f"tune: m is {m}; it must be a multiple of the number of ranks, {self.place.world}.")
        return Product(op, m, n, k, str(dtype).removeprefix("torch."), layout, self.place.world, self.device_name)

    def measure(self, product: Product, rounds: int = ROUNDS) -> Entry:
        """The candidate of a product to choose (see pick), "sequential" among them; the same on every rank."""
        dtype = getattr(torch, product.dtype)
        self._renew(product)
        operands = Operands(self.place, product.op, product.m, product.n, product.k, dtype, product.layout)
        args = product.op, self.place.device.type, product.tp, product.m, product.n, product.k
        args = (*args, product.dtype, product.layout == "kn")
        model = self._core.model_choice(*args)
        calls = self._checked(product, operands, self._core.candidates(*args))
        calls[GEMM] = make_call(GEMM, product.op, operands)
        counts = {name: timing.calls_per_sample(self.place, self.clock, call) for name, call in calls.items()}
        works, graphs = self._works(product, calls, counts)

        times = timing.interleave(self.place, self.clock, works, min(FIRST_ROUNDS, rounds), warmup=1)
        ranked = sorted((name for name in works if name != GEMM), key=lambda name: times[name].median)
        finalists = {GEMM, SEQUENTIAL, model, *ranked[:FINALISTS]}
        works = {name: work for name, work in works.items() if name in finalists}
        times = {name: t.median for name, t in timing.interleave(self.place, self.clock, works, rounds).items()}
        del works, graphs
        choice = self.place.everyone(pick(times, model))[0]
        us = {name: round(time, 2) for name, time in times.items()}
        return Entry(
            product,
            choice,
            us[choice],
            us[SEQUENTIAL],
            us[GEMM],
            model,
            us.get(model, 0.0),
            rounds,
            datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        )

    def _checked(self, product, operands, choices):
        """The candidates that run and agree with the sequence: name -> call."""
        calls = {}
        want = make_call(SEQUENTIAL, product.op, operands, self._own)(0)
        for done, choice in enumerate(choices):
            self._progress(done, len(choices))
            call = make_call(choice, product.op, operands, self._own)
            got, reason = attempt(self.place, lambda call=call: call(0))
            if reason is None:
                reason = why_wrong(self.place, got, want)
            if reason is None:
                calls[choice] = call
            else:
                self._leave_out(product, choice, reason)
                self._renew(product)
        self._progress(len(choices), len(choices))
        if SEQUENTIAL not in calls:
            raise TunerStopped(f"tune: the plain sequence of {product.op} does not work, so nothing can be compared.")
        return calls

    def _works(self, product, calls, counts):
        """What a sample of each candidate executes: a CUDA graph, or on the CPU a few calls; and what must be kept."""
        if not self.place.is_cuda:
            return {name: (timing.repeated(call, counts[name]), counts[name]) for name, call in calls.items()}, []
        works, graphs = {}, []
        want = calls[SEQUENTIAL](0)
        for name, call in calls.items():
            compared = want if comparable(name, product.op) else None
            made, reason = as_graph(self.place, call, counts[name], compared)
            if reason and name in (GEMM, SEQUENTIAL):
                raise TunerStopped(f"tune: {name} of {product.op} can't be measured under a CUDA graph: {reason}")
            if reason:
                self._leave_out(product, name, reason)
                continue
            graphs.append(made[1])
            works[name] = made[0], counts[name]
        return works, graphs

    def _renew(self, product):
        """A workspace of this product's size, which every candidate finds large enough; whatever was broken is gone."""
        p = product
        flux_ops.destroy(self._own)
        dtype, device = getattr(torch, p.dtype), self.place.device
        flux_ops.prepare(op=p.op, max_m=p.m, n=p.n, k=p.k, dtype=dtype, group=self._own, device=device)

    def _leave_out(self, product, choice, reason):
        if self.place.rank == 0:
            self._log(f"{product.op} M,N,K = {product.m},{product.n},{product.k}: {choice} is left out: {reason}")
        _, lost = attempt(self.place, self.place.sync)
        if lost:
            raise TunerStopped(
                f"tune: '{choice}' met a fault on a GPU ({reason}), which costs the process its CUDA context. What was "
                "tuned before is in the file; start again to go on behind it."
            )


def tune(
    *,
    op: str,
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "nk",
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
    rounds: int = ROUNDS,
    path: str | None = None,
    strict: bool = False,
) -> str:
    """Measures how a product runs fastest, stores the choice, and lets the next strategy="auto" call of it use that.

    Collective: all ranks of the group call it with the same values, between the same two calls of the operators. It
    takes some seconds; nothing is ever tuned inside a call of an operator. The first time, it makes a process group of
    its own: where the default group is bound to a device (device_id=...), all ranks of that one tune at once, each in
    its group, as NCCL makes groups.

    Args:
        op: "ag_gemm", "gemm_rs" or "gemm_ar".
        m: rows M of the whole product, over all ranks; a multiple of TP, but for gemm_ar. The choice holds for M of
            about this size.
        n, k: columns and contraction length of this rank's product: weight is [n, k].
        dtype: of the operands.
        layout: of the weight: "nk" as in nn.Linear, "kn" for a transposed view of [k, n].
        device: of the operands; by default the current GPU where there is one and CUDA kernels, else the CPU.
        rounds: samples of each of the best candidates.
        path: of the file; by default the user's (FLUX_TUNE_CACHE). Rank 0 writes it.
        strict: raise flux_ops.tuner.CacheError if the file can't be written, or is foreign or damaged. Otherwise that
            is one warning, and the choice holds in this process.

    Returns the choice, as `strategy` takes it: "sequential", "fused:CONFIG" or "decomposed:CONFIG". Every candidate is
    checked against the plain sequence before it may win, and the plain sequence is one. On a GPU, what runs is a CUDA
    graph.

    Raises ValueError for sizes that can't be run, and for a group of some of the ranks that are not in equally many
    process groups; TunerStopped if a candidate costs the process its CUDA context.
    """
    hooks = flux_ops.ops._hooks
    with Tuner(group, device) as tuner:
        place = tuner.place
        entry = tuner.measure(tuner.product(op, m, n, k, dtype, layout), rounds)
        path = settings.tune_cache if path is None else path
        error = ""
        if place.rank == 0 and path:
            try:
                store(path, [entry], hooks.caches.build)
            except CacheError as caught:
                error = str(caught)
        error = place.everyone(error)[0]
        if error and strict:
            raise CacheError(error)
        if error and place.rank == 0:
            flux_ops.hooks.warn_once(f"a tuned choice holds in this process only. {error}")
        entry = Entry.from_json(place.everyone(entry.to_json())[0])
        hooks.caches.remember(entry)
        flux_ops.ops._core.forget_plans((dist.group.WORLD if group is None else group).group_name)
    return entry.choice
