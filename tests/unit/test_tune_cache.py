"""The file of tuned choices: what makes a key, what makes a file useless, and writers that meet or die."""

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import time

import pytest

from flux_ops.tuner import cache
from flux_ops.tuner.cache import CacheError, Entry, bucket, read, store
from tests.unit.tuning import BUILD, PRODUCT, content, entry

# name -> (what the file holds, words of the reason)
USELESS = {
    "empty": (b"", "no whole JSON"),
    "truncated": (content(entry()).encode()[:-30], "no whole JSON"),
    "a list": (b"[1, 2]", "a JSON list"),
    "a number": (b"17", "a JSON int"),
    "null": (b"null", "a JSON NoneType"),
    "binary junk": (bytes(range(256)) * 8, "no whole JSON"),
    "deeply nested": (b"[" * 200_000, "no whole JSON"),
    "an empty object": (b"{}", "its schema is None"),
    "another schema": (content(entry(), schema=99).encode(), "its schema is 99"),
    "another version": (content(entry(), flux_ops="0.0.9").encode(), "flux_ops '0.0.9'"),
    "metadata null": (content(entry(), schema=None, flux_ops=None, kernels=None).encode(), "its schema is None"),
    "kernels null": (content(entry(), kernels=None).encode(), "its kernels are None"),
    "other kernels": (content(entry(), kernels={"cuda": "c64"}).encode(), "other cuda kernels"),
    "entries null": (content(entries=None).encode(), "entries are NoneType"),
    "an entry that is a string": (content(entries=["x"]).encode(), "entry 0 is damaged"),
    "an entry without a choice": (content(entries=[{**entry().to_json(), "choice": ""}]).encode(), "choice is ''"),
    "a time that is no number": (content(entries=[{**entry().to_json(), "us": "fast"}]).encode(), "us is 'fast'"),
    "a time that is NaN": (content(entries=[{**entry().to_json(), "us": float("nan")}]).encode(), "us is nan"),
    "a time of 400 digits": (content(entries=[{**entry().to_json(), "us": 10**399}]).encode(), "us is 1000"),
    "a choice of half a character": (content(entry(choice="\ud800")).encode(), r"choice is '\ud800'"),
    "a choice of two lines": (content(entry(choice="auto\nauto")).encode(), r"choice is 'auto\nauto'"),
    "M that is true": (content(entries=[{**entry().to_json(), "m": True}]).encode(), "m is True"),
    "an op that does not exist": (content(entries=[{**entry().to_json(), "op": "gemm_xx"}]).encode(), "'gemm_xx'"),
}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "tune.json")


def write(path, data):
    with open(path, "wb") as file:
        file.write(data)


# ---- keys


def test_bucket_is_within_an_eighth():
    for m in [*range(1, 3000), 8191, 8192, 8193, 65537]:
        assert m <= bucket(m) < m * 1.125 + 1
        assert bucket(bucket(m)) == bucket(m)
    assert [bucket(m) for m in (1, 15, 16, 17, 18, 19, 8192, 8193, 9216)] == [1, 15, 16, 18, 18, 20, 8192, 9216, 9216]


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(PRODUCT)])
def test_key_differs_with_each_item(field):
    value = getattr(PRODUCT, field)
    other = value * 2 if isinstance(value, int) else {"ag_gemm": "gemm_rs", "nk": "kn"}.get(value, value + "x")
    assert dataclasses.replace(PRODUCT, **{field: other}).key() != PRODUCT.key()


def test_key_differs_with_the_sms_of_a_device_of_one_name():
    assert entry(device="GPU, 114 SMs").product.key() != entry(device="GPU, 132 SMs").product.key()


# ---- files


def test_what_is_stored_is_read(path):
    entries = [entry(), entry(op="gemm_rs", choice="sequential"), entry(m=64)]
    assert store(path, entries, BUILD) == 3
    assert list(read(path, BUILD).values()) == entries


def test_no_file_has_no_entries(path):
    assert read(path, BUILD) == {}


def test_of_one_key_the_later_stays(path):
    store(path, [entry(us=100.0)], BUILD)
    store(path, [entry(m=8100, us=90.0)], BUILD)  # the same bucket
    assert [e.us for e in read(path, BUILD).values()] == [90.0]


@pytest.mark.parametrize("name", USELESS)
def test_useless_file_is_told_and_left_alone(path, name):
    data, reason = USELESS[name]
    write(path, data)
    with pytest.raises(CacheError) as error:
        read(path, BUILD)
    assert str(error.value).startswith(path + ": ")
    assert reason in str(error.value)
    if data:
        with pytest.raises(CacheError):
            store(path, [entry()], BUILD)
        with open(path, "rb") as file:
            assert file.read() == data
    else:
        assert store(path, [entry()], BUILD) == 1  # nothing is lost


def test_directory(tmp_path):
    for act in (lambda: read(str(tmp_path), BUILD), lambda: store(str(tmp_path), [entry()], BUILD)):
        with pytest.raises(CacheError, match="it is a directory"):
            act()


def test_fifo_is_not_waited_for(path):
    os.mkfifo(path)
    with pytest.raises(CacheError, match="not a file"):
        read(path, BUILD)


def test_folder_that_can_not_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="can't be written"):
        store(str(tmp_path / "file" / "tune.json"), [entry()], BUILD)


@pytest.mark.parametrize("where", ("open", "write", "replace"))
def test_disk_full_leaves_the_old_file_and_nothing_else(path, monkeypatch, where):
    store(path, [entry(us=1.0)], BUILD)

    def full(*_):
        raise OSError(28, "No space left on device")

    class Full:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self._file.close()

        write = full

    def opened(name, mode="r", **options):
        if mode != "w":
            return open(name, mode, **options)
        return full() if where == "open" else Full(open(name, mode, **options))

    if where == "replace":
        monkeypatch.setattr(os, "replace", full)
    else:
        monkeypatch.setattr(cache, "open", opened, raising=False)
    with pytest.raises(CacheError, match=r"can't be written: No space left"):
        store(path, [entry(us=2.0)], BUILD)
    monkeypatch.undo()
    assert [e.us for e in read(path, BUILD).values()] == [1.0]
    assert sorted(os.listdir(os.path.dirname(path))) == [".tune.json.lock", "tune.json"]


def test_read_only_file_system(path, monkeypatch):
    def refused(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(CacheError, match=r"can't be written: Read-only"):
        store(path, [entry()], BUILD)


def test_a_lock_that_is_never_freed_is_an_error(path, monkeypatch):
    monkeypatch.setattr(cache, "LOCK_S", 0.05)
    store(path, [entry()], BUILD)
    with cache._locked(path), pytest.raises(CacheError, match="held its lock for"):
        store(path, [entry()], BUILD)
    monkeypatch.undo()
    assert store(path, [entry()], BUILD) == 1  # who has given up does not have it


def test_a_lock_that_no_thread_can_wait_for_is_an_error(path, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    store(path, [entry()], BUILD)
    monkeypatch.setattr(cache.threading.Thread, "start", start)
    open_before = os.listdir("/proc/self/fd")
    with pytest.raises(CacheError, match="can't start new thread"):
        store(path, [entry()], BUILD)
    assert os.listdir("/proc/self/fd") == open_before
    monkeypatch.undo()
    store(path, [entry()], BUILD)


def test_link_stays_a_link(tmp_path, path):
    os.symlink(tmp_path / "real.json", path)
    store(path, [entry()], BUILD)
    assert os.path.islink(path)
    assert len(read(str(tmp_path / "real.json"), BUILD)) == 1


def test_build_without_cuda_keeps_what_is_known_of_it(path):
    store(path, [entry()], BUILD)
    cpu_only = dataclasses.replace(BUILD, kernels={"cpu": BUILD.kernels["cpu"], "cuda": ""})
    assert store(path, [entry(device="CPU, 2 cores")], cpu_only) == 2
    assert json.loads(open(path).read())["kernels"] == BUILD.kernels  # noqa: SIM115
    assert len(read(path, BUILD)) == 2


def test_a_build_with_more_kernels_goes_on_with_the_file(path):
    store(path, [entry()], dataclasses.replace(BUILD, kernels={"cpu": "t64", "cuda": "p64"}))
    assert len(read(path, BUILD)) == 1
    assert store(path, [entry(device="CPU, 2 cores")], BUILD) == 2
    assert json.loads(open(path).read())["kernels"] == BUILD.kernels  # noqa: SIM115


def test_entry_survives_json():
    assert Entry.from_json(json.loads(json.dumps(entry().to_json()))) == entry()


# ---- many processes

fork = multiprocessing.get_context("fork")
WRITERS, STORES, PER_STORE, READERS = 16, 10, 5, 4


def _write(path, writer):
    for turn in range(STORES):
        store(path, [entry(n=1 + (writer * STORES + turn) * PER_STORE + i) for i in range(PER_STORE)], BUILD)


def _write_until_killed(path, writer):
    while True:
        store(path, [entry(n=100_000 + writer)], BUILD)


def _read(path, stop, reads):
    while not stop.is_set():
        read(path, BUILD)
        with reads.get_lock():
            reads.value += 1
        time.sleep(0.05)


def test_writers_and_readers_at_once_and_writers_that_are_killed(path):
    stop, reads = fork.Event(), fork.Value("i", 0)
    readers = [fork.Process(target=_read, args=(path, stop, reads)) for _ in range(READERS)]
    writers = [fork.Process(target=_write, args=(path, w)) for w in range(WRITERS)]
    doomed = [fork.Process(target=_write_until_killed, args=(path, w)) for w in range(3)]
    for process in (*readers, *writers, *doomed):
        process.start()
    for process in doomed:
        time.sleep(random.uniform(0.05, 0.3))
        os.kill(process.pid, signal.SIGKILL)
    for process in (*writers, *doomed):
        process.join(60)
    stop.set()
    for process in readers:
        process.join(10)
    assert [p.exitcode for p in writers] == [0] * WRITERS
    assert [p.exitcode for p in readers] == [0] * READERS
    assert reads.value > 0
    written = {e.product.n for e in read(path, BUILD).values()}
    assert written >= set(range(1, 1 + WRITERS * STORES * PER_STORE))
    store(path, [entry()], BUILD)  # no lock has stayed behind
    assert sorted(os.listdir(os.path.dirname(path))) == [".tune.json.lock", "tune.json"]
