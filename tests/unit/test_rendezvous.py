"""Ranks that talk through a store; here each is a thread."""

import concurrent.futures
import os
import threading

import pytest
import torch.distributed as dist

from flux_ops import config, rendezvous
from flux_ops.rendezvous import Members, Site
from flux_ops.workspace import HostBlock


def make_members(world):
    """Members as they would be on the ranks of a group, without a group."""
    store = dist.HashStore()
    return [Members("g", rank, world, store) for rank in range(world)]


def site(call=0):
    return Site(("g", 1, call, "ag_gemm"))


def on_all(members, fn):
    with concurrent.futures.ThreadPoolExecutor(len(members)) as pool:
        return [f.exception() or f.result() for f in [pool.submit(fn, m) for m in members]]


@pytest.fixture
def short_timeout(monkeypatch):
    monkeypatch.setattr(config.settings, "timeout_s", 0.3)


def test_exchange_is_in_rank_order():
    assert on_all(make_members(3), lambda m: m.exchange(site(), "k", f"v{m.rank}")) == [["v0", "v1", "v2"]] * 3


def test_who_does_not_come_is_named(short_timeout):
    members = make_members(3)
    errors = on_all(members[:1], lambda m: m.exchange(site(7), "k", ""))
    assert isinstance(errors[0], dist.DistBackendError)
    for word in ("ag_gemm", "group 'g'", "ranks 1, 2", "0.3 s", "number 7"):
        assert word in str(errors[0])


def test_a_rank_that_has_begun_anew_is_named_at_once():
    store = dist.HashStore()
    late, *_ = [Members("g", rank, 2, store) for rank in (0, 1, 1)]  # rank 1 has joined twice
    with pytest.raises(dist.DistBackendError, match=r"rank 1 has begun anew.*destroy"):
        late.exchange(site(), "k", "")


class Ended:
    """A store whose server has ended, or is frozen until `event` is set."""

    def __init__(self, event=None):
        self._event = event

    def __getattr__(self, name):
        def call(*_):
            if self._event is None:
                raise dist.DistNetworkError("Broken pipe")
            self._event.wait()

        return call


@pytest.mark.parametrize("is_frozen", (False, True), ids=("ended", "frozen"))
def test_a_store_that_does_not_answer(short_timeout, monkeypatch, is_frozen):
    monkeypatch.setattr(rendezvous, "_ANSWER_S", 0.2)
    event = threading.Event()
    members = make_members(2)[0]
    members._store = Ended(event if is_frozen else None)
    asks = (
        lambda: members.exchange(site(7), "k", ""),
        lambda: members.peers_doing(site(7)),
        lambda: members.refuse(site(7), "no"),
        lambda: Members("g", 0, 2, members._store),
    )
    for ask in asks:
        with pytest.raises(dist.DistBackendError, match=r"group 'g'.*store.*rank 0's") as caught:
            ask()
        assert ("frozen" if is_frozen else "Broken pipe") in str(caught.value)
    event.set()


class Interrupted:
    """A store in which something happens right after the first look into it."""

    def __init__(self, store, event):
        self._store, self._event = store, event

    def __getattr__(self, name):
        return getattr(self._store, name)

    def check(self, keys):
        found = self._store.check(keys)
        event, self._event = self._event, None
        if event:
            event()
        return found


def test_a_rank_that_has_answered_may_begin_anew():
    late, early = make_members(2)

    def answer_and_begin_anew():
        early._store.set("k/1", "v1")
        Members("g", 1, 2, early._group_store)

    late._store = Interrupted(late._store, answer_and_begin_anew)
    assert late.exchange(site(), "k", "v0") == ["v0", "v1"]


def test_a_refusal_ends_the_wait_of_the_others():
    def call(m):
        if m.rank == 1:
            return m.refuse(site(), "x is too long")
        return m.exchange(site(), "k", "")

    first, _, third = on_all(make_members(3), call)
    for error in (first, third):
        assert isinstance(error, ValueError)
        assert "rank 1 refused this call: x is too long" in str(error)


def test_a_refusal_does_not_touch_the_next_call():
    members = make_members(2)
    members[1].refuse(site(0), "no")
    assert on_all(members, lambda m: m.exchange(site(1), "k", "v")) == [["v", "v"]] * 2


def test_a_timeout_is_explained_by_what_the_peers_said():
    members = make_members(3)
    members[1]._store.set("check/0/1", "gemm_rs(...)")
    members[2].refuse(site(), "x is too long")
    text = members[0].peers_doing(site())
    assert "Rank 1 was about to run gemm_rs(...)" in text
    assert "Rank 2 refused this call: x is too long" in text
    assert members[0].peers_doing(site(1)) == ""


def test_host_memory_is_shared_zero_and_leaves_nothing():
    members = make_members(2)
    before = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    blocks = on_all(members, lambda m: HostBlock(m, site(), 1 << 20))
    first, second = blocks
    assert bytes(first._maps[1][:64]) == bytes(64)
    second.fill(10, 20, 7)
    assert bytes(first._maps[1][8:22]) == bytes(2) + bytes([7]) * 10 + bytes(2)
    assert bytes(first._maps[0][8:22]) == bytes(14)
    assert len(first.bases) == 2
    for block in blocks:
        block.close()
    assert (set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))) == before


def test_memory_that_one_rank_lacks_is_an_error_on_all(monkeypatch):
    members = make_members(2)
    real = os.ftruncate

    def ftruncate(fd, size):
        if size == 1 << 21:
            raise OSError(12, "Cannot allocate memory")
        real(fd, size)

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    errors = on_all(members, lambda m: HostBlock(m, site(), (1 + m.rank) << 20))
    for error in errors:
        assert isinstance(error, RuntimeError)
        assert "rank 1 can't allocate 2097152 bytes" in str(error)
