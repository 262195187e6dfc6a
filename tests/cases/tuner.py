"""Tuned choices on several ranks: found, kept, used by `auto`, the same on each rank, ignored where they can't run."""

import contextlib
import dataclasses
import itertools
import os
import warnings

import pytest
import torch.distributed as dist

import flux_ops
from flux_ops import extension
from flux_ops import hooks as hooks_module
from flux_ops.tuner import CacheError, search, tune
from flux_ops.tuner.cache import Entry, Product, read, store
from flux_ops.tuner.lookup import Caches, device_name
from tests.cases.base import BF16, FP32, OPS, Case, call, check, make, refused
from tests.harness.compare import Findings

ROWS, N, K = 512, 512, 256


def _hooks():
    return flux_ops.ops._hooks


@contextlib.contextmanager
def caches_of(path):
    """For the time, this rank knows what is in the file, and nothing else."""
    hooks = _hooks()
    before, hooks.caches = hooks.caches, Caches(path, [], hooks.caches.build, hooks_module.warn_once)
    name = dist.group.WORLD.group_name
    flux_ops.ops._core.forget_plans(name)
    try:
        yield
    finally:
        hooks.caches = before
        flux_ops.ops._core.forget_plans(name)


def m_of(ctx, op, rows=ROWS):
    return Case(op, rows, N, K).m(ctx.world)


def entry_for(ctx, op, choice, rows=ROWS, dtype="bfloat16"):
    product = Product(op, m_of(ctx, op, rows), N, K, dtype, "nk", ctx.world, device_name(ctx.device.type))
    return Entry(product, choice, 1.0, 2.0, 1.0, "sequential", 2.0, 1, "2026-01-01T00:00:00+00:00")


def configs(ctx, op, rows=ROWS, n=N, k=K, transposed=False):
    """The candidates but "sequential", the fused one that the model prefers first."""
    choices = flux_ops.ops._core.candidates(
        op, ctx.device.type, ctx.world, m_of(ctx, op, rows), n, k, "bfloat16", transposed
    )
    assert choices[0] == "sequential", choices
    return choices[1:]


def ran():
    record = flux_ops.last_dispatch()
    return f"{record.strategy}:{record.config}" if record.config else record.strategy


def model_choice(ctx, op):
    return flux_ops.ops._core.model_choice(op, ctx.device.type, ctx.world, m_of(ctx, op), N, K, "bfloat16", False)


def same_path(folder, rank=0):
    return os.path.join(folder, f"rank{rank}.json")


def tunes(ctx, op, folder):
    """The choice is in the file, the same on each rank, and what the next call runs, in a new process too."""
    case = Case(op, ROWS, N, K, seed=3)
    model = model_choice(ctx, op)
    with caches_of(same_path(folder)):
        assert check(ctx, case, strategy="auto") is None
        assert (ran(), "tuned" in flux_ops.last_dispatch().reason) == (model, False)
        groups = _hooks().known_groups()
        choice = tune(op=op, m=m_of(ctx, op), n=N, k=K, device=ctx.device, path=same_path(folder), rounds=3)
        assert _hooks().known_groups() == groups, "the tuner's group is still there"
        assert check(ctx, case, strategy="auto") is None
        assert ran() == choice
        assert flux_ops.last_dispatch().reason == f"tuned: in this process, M = {m_of(ctx, op)}"
    with caches_of(same_path(folder)):  # what another process would know
        assert check(ctx, case, strategy="auto") is None
        assert ran() == choice
        assert flux_ops.last_dispatch().reason == f"tuned: {same_path(folder)}, M = {m_of(ctx, op)}"
    (entry,) = read(same_path(folder), _hooks().caches.build).values()
    assert (entry.choice, entry.model) == (choice, model)
    assert 0 < entry.us <= min(entry.sequential_us, entry.model_us or entry.us)
    return choice


def forced(ctx, op):
    """Every candidate gives the exact result on sizes that fill its tiles and on sizes that don't; so does the one that
    is for a study alone. Those of gemm_ar are for some sizes and layouts only.
    """
    findings = Findings()
    sizes = [(256, 512, 128), (8, 72, 64), (129, 264, 136), (300, 136, 264)]
    for (rows, n, k), (bias, layout) in itertools.product(sizes, ((False, "nk"), (True, "kn"))):
        choices = configs(ctx, op, rows, n, k, layout == "kn") if op == "gemm_ar" else configs(ctx, op)
        if layout == "kn":  # which kernels for few rows don't take
            choices = [choice for choice in choices if "/p" in choice or not choice.startswith("fused")]
        if op != "gemm_ar":
            choices.append(f"{next(choice for choice in choices if '/p' in choice)}/same-order")
        for choice in ["sequential", *choices]:
            case = Case(op, rows, n, k, seed=rows, bias=bias, layout=layout)
            operands = make(ctx, case)
            y = call(operands, strategy=choice)
            same = y.equal(operands.expected().to(case.dtype))
            findings.add(f"{choice} {case}", None if same else f"rank {ctx.rank}: wrong result")
            if choice != "sequential":
                findings.add(f"{choice} {case}", None if ran() == choice else f"{ran()} ran")
    return findings.finish()


def prepared_for_all(ctx, op):
    """What prepare() allocates is enough for every candidate of every smaller M."""
    flux_ops.destroy()
    flux_ops.prepare(op=op, max_m=m_of(ctx, op), n=N, k=K, device=ctx.device)
    workspace = _hooks().workspace(dist.group.WORLD.group_name, ctx.device.type)
    size = workspace.size
    for rows in (ROWS, 300, 129, 1):
        for choice in configs(ctx, op, rows) if op == "gemm_ar" else configs(ctx, op):
            call(make(ctx, Case(op, rows, N, K)), strategy=choice)
            assert workspace.size == size, f"{choice} at {rows} rows"


def prepared_for_more_rows(ctx):
    """The same of gemm_ar with slots that grow (GPUs): M up to 2048, a wide Y, then M beyond."""
    flux_ops.destroy()
    wide = 4096
    flux_ops.prepare(op="gemm_ar", max_m=2048, n=wide, k=K, device=ctx.device)
    workspace = _hooks().workspace(dist.group.WORLD.group_name, ctx.device.type)
    size = workspace.size
    assert size[1] >= 2 * 2048 * wide * 2, size
    for rows in (2048, 1537, 513, 300, 1):
        names = extension.module.candidates("gemm_ar", "cuda", ctx.world, rows, wide, K, "bfloat16", False)
        for choice in [name for name in names if name.endswith("-shot")]:
            call(make(ctx, Case("gemm_ar", rows, wide, K)), strategy=choice)
            assert workspace.size == size, f"{choice} at {rows} rows"
    flux_ops.prepare(op="gemm_ar", max_m=4096, n=wide, k=K, device=ctx.device)
    assert workspace.size[1] == size[1], workspace.size


def unlike_files(ctx, op, folder):
    """Each rank's file says something else: rank 0's is taken."""
    choices = configs(ctx, op)
    store(
        same_path(folder, ctx.rank), [entry_for(ctx, op, choices[(ctx.rank + 1) % len(choices)])], _hooks().caches.build
    )
    if ctx.rank == ctx.world - 1:
        os.unlink(same_path(folder, ctx.rank))  # and one has none
    with caches_of(same_path(folder, ctx.rank)):
        assert check(ctx, Case(op, ROWS, N, K, seed=5), strategy="auto") is None
        assert ran() == choices[1], flux_ops.last_dispatch()
        assert flux_ops.last_dispatch().reason == f"tuned: {same_path(folder)}, M = {m_of(ctx, op)}"
        assert check(ctx, Case(op, ROWS, N, K, seed=6), strategy="fused") is None
        assert ran() == choices[0], "what is asked for by name is not tuned"


def useless_entry(ctx, op, choice, folder):
    """A choice that can't run is one warning, and the model's choice runs."""
    if ctx.rank == 0:
        store(same_path(folder), [entry_for(ctx, op, choice)], _hooks().caches.build)
    dist.barrier()
    with caches_of(same_path(folder)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bias in (False, True, False):
            assert check(ctx, Case(op, ROWS, N, K, bias=bias), strategy="auto") is None
            assert ran() == model_choice(ctx, op)
    texts = [str(w.message) for w in caught if "tuned choice" in str(w.message)]
    assert len(texts) == 1, texts
    assert f"'{choice}'" in texts[0]
    assert same_path(folder) in texts[0]


def sequential_entry(ctx, op, folder):
    if ctx.rank == 0:
        store(same_path(folder), [entry_for(ctx, op, "sequential")], _hooks().caches.build)
    dist.barrier()
    with caches_of(same_path(folder)), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert check(ctx, Case(op, ROWS, N, K), strategy="auto") is None
    assert flux_ops.last_dispatch().strategy == "sequential"
    assert flux_ops.last_dispatch().reason.startswith("tuned: ")


def decomposed_entry(ctx, op, folder):
    """GPUs, fp32: the kernels take 16 bits only, so `auto` would fall back; but what is tuned runs."""
    choices = extension.module.candidates(op, "cuda", ctx.world, m_of(ctx, op), N, K, "float32", False)[1:]
    assert choices
    assert all(choice.startswith("decomposed:") for choice in choices), choices
    for choice in choices:
        if ctx.rank == 0:
            store(same_path(folder), [entry_for(ctx, op, choice, dtype="float32")], _hooks().caches.build)
        dist.barrier()
        with caches_of(same_path(folder)), warnings.catch_warnings():
            warnings.simplefilter("error")
            assert check(ctx, Case(op, ROWS, N, K, seed=2, dtype=FP32), strategy="auto") is None
        assert ran() == choice, flux_ops.last_dispatch()
        dist.barrier()
    return len(choices)


def damaged_file(ctx, op, folder):
    """The default runs, the result is right, and rank 0, who asks for all, warns once."""
    with open(same_path(folder, ctx.rank), "w") as file:
        file.write("{")
    with caches_of(same_path(folder, ctx.rank)), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for bias in (False, True):
            assert check(ctx, Case(op, ROWS, N, K, bias=bias), strategy="auto") is None
            assert ran() == model_choice(ctx, op)
        sizes = {"op": op, "m": m_of(ctx, op), "n": N, "k": K, "device": ctx.device, "rounds": 1}
        with pytest.raises(CacheError, match="no whole JSON"):
            tune(**sizes, path=same_path(folder), strict=True)
        choice = tune(**sizes, path=same_path(folder))
        assert check(ctx, Case(op, ROWS, N, K), strategy="auto") is None
        assert ran() == choice, "a choice that could not be written holds in this process"
    texts = [str(w.message) for w in caught if "tuned" in str(w.message)]
    assert len(texts) == (2 if ctx.rank == 0 else 0), texts
    assert all(same_path(folder) in text for text in texts)
    with open(same_path(folder)) as file:
        assert file.read() == "{"


class Planted:
    """The compiled part with one more candidate."""

    def __init__(self, core, choice):
        self._core, self._choice = core, choice

    def __getattr__(self, name):
        return getattr(self._core, name)

    def candidates(self, *args):
        return [*self._core.candidates(*args), self._choice]


def bad_candidate(ctx, op, kind):
    """One candidate is unknown, gives a wrong result, or leaves the others waiting: it loses, the search goes on."""
    good = configs(ctx, op)[-1]
    planted = "fused:none/p1" if kind == "unknown" else good
    make_call = search.make_call

    def sabotaged(name, op, operands, group=None):
        honest = make_call(name, op, operands, group)
        if name != planted or kind == "unknown":
            return honest
        if kind == "wrong":
            return lambda i: honest(i) + (ctx.rank == ctx.world - 1)
        return honest if ctx.rank else lambda i: exec("raise RuntimeError('planted')")

    lines = []
    timeout = flux_ops.config.settings.timeout_s
    flux_ops.set_timeout(2 if kind == "late" else timeout)
    search.make_call = sabotaged
    try:
        with search.Tuner(device=ctx.device, log=lines.append) as tuner:
            tuner._core = Planted(tuner._core, "fused:none/p1") if kind == "unknown" else tuner._core
            entry = tuner.measure(tuner.product(op, m_of(ctx, op), N, K, BF16), rounds=2)
    finally:
        search.make_call = make_call
        flux_ops.set_timeout(timeout)
    assert entry.choice != planted
    if ctx.rank == 0:
        word = {"unknown": "no configuration", "wrong": "wrong result", "late": "planted"}[kind]
        assert len(lines) == 1, lines
        assert planted in lines[0]
        assert word in lines[0]
    assert check(ctx, Case(op, ROWS, N, K)) is None


def bad_arguments(ctx):
    sizes = {"op": "gemm_rs", "m": ROWS * ctx.world, "n": N, "k": K, "device": ctx.device}
    for changes, words in (
        ({"op": "gemm_xx"}, ["op", "gemm_xx"]),
        ({"m": ROWS * ctx.world + 1}, ["multiple", str(ctx.world)]),
        ({"n": 0}, ["n is 0"]),
        ({"layout": "kk"}, ["layout", "kk"]),
    ):
        kind, message = refused(ctx, lambda changes=changes: tune(**{**sizes, **changes}))
        assert kind == "ValueError"
        for word in words:
            assert word in message
    for config in ("none/p1", "t128x128", "t128x128/p0", "t128x128/p17", "t96x128/p4", "t128x128/p4x"):
        case = Case("gemm_rs", 8, 72, 64)
        kind, message = refused(ctx, lambda case=case, config=config: call(make(ctx, case), strategy=f"fused:{config}"))
        assert kind == "NotImplementedError"
        assert config in message


def uneven_groups(ctx):
    """Members that are in unlike numbers of groups can't make another one: an error on each of them, no wait."""
    more, some = dist.new_group([0, 1]), dist.new_group([1, 2])
    message = ""
    if ctx.rank:
        with pytest.raises(ValueError, match="process groups") as caught:
            tune(op="gemm_rs", m=2 * ROWS, n=N, k=K, device=ctx.device, group=some)
        message = str(caught.value)
    dist.barrier()
    for group, ranks in ((more, (0, 1)), (some, (1, 2))):
        if ctx.rank in ranks:
            dist.destroy_process_group(group)
    return message


def auto_runs(ctx, op):
    assert check(ctx, Case(op, ROWS, N, K), strategy="auto") is None
    return ran(), flux_ops.last_dispatch().reason


class TunerCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_tune_then_auto(self, ranks, op, tmp_path):
        assert len(set(ranks.run(tunes, op, str(tmp_path)))) == 1

    @pytest.mark.parametrize("op", OPS)
    def test_every_candidate_is_exact(self, ranks, op, record_property):
        record_property("cells", ranks.run(forced, op)[0])

    @pytest.mark.worlds(2, 3, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_prepare_is_enough_for_every_candidate(self, ranks, op):
        ranks.run(prepared_for_all, op)

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_ranks_with_unlike_files_take_that_of_rank_0(self, ranks, op, tmp_path):
        ranks.run(unlike_files, op, str(tmp_path))

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("choice", ("fused:none/p1", "auto", "telepathy:fast"))
    @pytest.mark.parametrize("op", OPS)
    def test_choice_that_can_not_run(self, ranks, op, choice, tmp_path):
        ranks.run(useless_entry, op, choice, str(tmp_path))

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("op", OPS)
    def test_sequential_can_be_the_choice(self, ranks, op, tmp_path):
        ranks.run(sequential_entry, op, str(tmp_path))

    @pytest.mark.worlds(2)
    @pytest.mark.parametrize("op", OPS)
    def test_damaged_file(self, ranks, op, tmp_path):
        ranks.run(damaged_file, op, str(tmp_path))

    @pytest.mark.worlds(2)
    @pytest.mark.cpu_is_enough
    @pytest.mark.parametrize("kind", ("unknown", "wrong", "late"))
    def test_bad_candidate_loses(self, ranks, kind):
        ranks.run(bad_candidate, "gemm_rs", kind)

    @pytest.mark.worlds(2, 4)
    def test_bad_arguments(self, ranks):
        ranks.run(bad_arguments)

    @pytest.mark.worlds(3)
    @pytest.mark.cpu_is_enough
    def test_members_of_unlike_numbers_of_groups(self, ranks):
        for message in ranks.run(uneven_groups)[1:]:
            assert "1, 2" in message, message

    @pytest.mark.cpu_is_enough
    def test_without_the_check_each_rank_reads_for_itself(self, spawn, tmp_path):
        world, path = 2, str(tmp_path / "tune.json")
        build = dataclasses.replace(_hooks().caches.build)
        product = Product("ag_gemm", ROWS * world, N, K, "bfloat16", "nk", world, device_name("cpu"))
        store(path, [Entry(product, "sequential", 1.0, 2.0, 1.0, "fused", 2.0, 1, "2026-01-01")], build)
        ranks = spawn(world, {"FLUX_CHECK": "0", "FLUX_TUNE_CACHE": path})
        answer = ("sequential", f"tuned: {path}, M = {ROWS * world}")
        assert ranks.run(auto_runs, "ag_gemm") == [answer] * world
