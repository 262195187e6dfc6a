"""Ranks that can't reach each other's memory: `auto` falls back with one warning, `fused` says what is missing."""

import contextlib
import dataclasses
import warnings

import pytest
import torch
import torch.distributed as dist

import flux_ops
import flux_ops.hooks
from flux_ops import topology
from tests.cases import base
from tests.cases.base import OPS, Case, call, check, check_or_refusal, make

# name -> (device type, change of this rank's probe, words of the reason)
LACKS = {
    "other hosts": (None, lambda ctx, p: {"host": f"host{ctx.rank}"}, ["host0", "host1"]),
    "other process-id namespaces": ("cpu", lambda ctx, p: {"pid_namespace": f"pid:[{ctx.rank}]"}, ["namespace"]),
    "no P2P": ("cuda", lambda ctx, p: {"peer_access": dict.fromkeys(p.peer_access, False)}, ["peer-to-peer"]),
    "peers not visible": ("cuda", lambda ctx, p: {"peer_access": {}}, ["does not see"]),
    "an older GPU": ("cuda", lambda ctx, p: {"capability": "8.0"} if ctx.rank == 0 else {}, ["of rank 0", "has 8.0"]),
    "blocking launches": ("cuda", lambda ctx, p: {"launches_block": True}, ["CUDA_LAUNCH_BLOCKING"]),
    "no kernels on one rank": (
        "cuda",
        lambda ctx, p: {"why_not_cuda": "planted reason" if ctx.rank == 0 else ""},
        ["planted reason"],
    ),
}


@contextlib.contextmanager
def probes_changed(ctx, change):
    plain = topology.probe
    topology.probe = lambda *args: (lambda p: dataclasses.replace(p, **change(ctx, p)))(plain(*args))
    try:
        yield
    finally:
        topology.probe = plain


def lacking(ctx, op, what):
    _, change, words = LACKS[what]
    group = dist.new_group(list(range(ctx.world)))
    flux_ops.hooks._warned.clear()
    case = Case(op, 24, 72, 64, seed=1)
    with probes_changed(ctx, change):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(3):
                problem = check(ctx, dataclasses.replace(case, seed=seed), strategy="auto", group=group)
                assert problem is None, problem
        ran = flux_ops.last_dispatch()
        assert ran.strategy == "sequential", ran
        ours = [str(w.message) for w in caught if "flux_ops" in str(w.message)]
        assert len(ours) == 1, ours
        assert [w.filename for w in caught if ours[0] == str(w.message)] == [base.__file__]  # which makes the call
        operands = make(ctx, case, group)
        with pytest.raises(NotImplementedError) as refusal:
            call(operands, strategy="fused", group=group)
    pairs = ["ranks 0 and 1"] if what in ("other hosts", "other process-id namespaces", "no P2P") else []
    for text in (ours[0], ran.reason, str(refusal.value)):
        for word in words + pairs:
            assert word in text, f"{word!r} is not in: {text}"


def unlike_versions(ctx):
    group = dist.new_group(list(range(ctx.world)))
    operands = make(ctx, Case("ag_gemm", 24, 72, 64), group)
    with (
        probes_changed(ctx, lambda ctx, p: {"version": f"0.{ctx.rank}"}),
        pytest.raises(ValueError, match=r"0\.0.*0\.1"),
    ):
        call(operands, strategy="auto", group=group)


def masked(ctx, op):
    """Each process sees one GPU only: right through `auto`; `fused` works, or says how to launch."""
    problem = check(ctx, Case(op, 64, 256, 512, seed=1), strategy="auto")
    assert problem is None, problem
    problem, refusal = check_or_refusal(ctx, Case(op, 64, 256, 512, seed=2))
    assert problem is None, problem
    assert refusal is None or "CUDA_VISIBLE_DEVICES" in refusal, refusal
    return refusal or "works"


def one_gpu_for_all(ctx):
    """Nobody called torch.cuda.set_device, so all ranks are on GPU 0."""
    assert ctx.device.index == 0
    x = torch.zeros(16, 64, dtype=torch.bfloat16, device=ctx.device)
    with pytest.raises(ValueError, match="set_device") as caught:
        flux_ops.ag_gemm(x, x, strategy="fused")
    return str(caught.value)


class TopologyCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("what", tuple(LACKS))
    @pytest.mark.parametrize("op", OPS)
    def test_no_way_to_the_peers(self, ranks, op, what):
        if LACKS[what][0] not in (None, ranks.device):
            pytest.skip(f"only on {LACKS[what][0]}")
        ranks.run(lacking, op, what)

    @pytest.mark.worlds(2, 4)
    def test_unlike_versions(self, ranks):
        ranks.run(unlike_versions)
