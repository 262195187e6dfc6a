"""The file of tuned choices: versioned JSON, merged under a lock and replaced in one step.

    {"schema": 1, "flux_ops": "0.1.0", "kernels": {"cpu": "...", "cuda": "..."}, "entries": [
    {"op": "ag_gemm", "m": 8192, "n": 5504, "k": 4096, "dtype": "bfloat16", "layout": "nk", "tp": 2,
     "device": "NVIDIA H100 80GB HBM3, 132 SMs", "choice": "fused:c128x256_2x1/m4/p1", "us": 581.2, ...}]}

A choice holds for an op, a bucket of M, N, K, dtype, layout of the weight, TP and device: whatever decides which
configurations may run, or moves their ranking. A bias and `return_gathered` are no part of the key: they allow the same
configurations, a bias costs nothing, and the copy that `return_gathered` asks for is the same after each of them.

A file of another schema or version of the package, or of a build with kernels that this one lacks, is foreign: its
choices name other things. It is neither used nor overwritten, nor is a damaged one.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import stat
import sys
import threading

SCHEMA = 1
MAX_BYTES = 64 << 20
LOCK_S = 20.0  # a writer holds the lock for milliseconds
BUCKETS_PER_OCTAVE = 8

OPS = ("ag_gemm", "gemm_rs", "gemm_ar")
LAYOUTS = ("nk", "kn")  # weight [N, K] as nn.Linear has it; transposed view of [K, N]


class CacheError(Exception):
    """Why a file of tuned choices can't be used, as a sentence that begins with its path."""


def bucket(m: int) -> int:
    """M rounded up to an eighth of the power of two below it: products within it run alike."""
    octave = 1 << max((m - 1).bit_length() - 1, 0)
    granule = max(octave // BUCKETS_PER_OCTAVE, 1)
    return -(-m // granule) * granule


@dataclasses.dataclass(frozen=True)
class Product:
    """What is tuned: M over all ranks; N and K of this rank's product, whose weight is [n, k]."""

    op: str
    m: int
    n: int
    k: int
    dtype: str  # without "torch."
    layout: str
    tp: int
    device: str

    def family(self) -> tuple:
        """All that has to be the same where M may differ."""
        return self.op, self.n, self.k, self.dtype, self.layout, self.tp, self.device

    def key(self) -> tuple:
        return (bucket(self.m), *self.family())


@dataclasses.dataclass(frozen=True)
class Entry:
    """One tuned choice. Times are microseconds, the median over the rounds of the slowest rank's."""

    product: Product
    choice: str  # as `strategy` takes it
    us: float
    sequential_us: float
    gemm_us: float  # of the product alone
    model: str  # what runs where nothing is tuned
    model_us: float  # 0: it failed
    rounds: int
    date: str

    def to_json(self) -> dict:
        product = {name: getattr(self.product, name) for name in _PRODUCT_FIELDS}
        return product | {name: getattr(self, name) for name in _ENTRY_FIELDS}

    @staticmethod
    def from_json(fields: object) -> "Entry":
        """Raises ValueError for what is no entry."""
        if not isinstance(fields, dict):
            raise ValueError(f"{fields!r} is no JSON object")
        product = Product(**{name: _checked(fields, name, kind) for name, kind in _PRODUCT_FIELDS.items()})
        rest = {name: _checked(fields, name, kind) for name, kind in _ENTRY_FIELDS.items()}
        if product.op not in OPS or product.layout not in LAYOUTS:
            raise ValueError(f"op is {product.op!r} and layout {product.layout!r}")
        return Entry(product, **rest)


_PRODUCT_FIELDS = {f.name: f.type for f in dataclasses.fields(Product)}
_ENTRY_FIELDS = {f.name: f.type for f in dataclasses.fields(Entry) if f.name != "product"}


def _checked(fields: dict, name: str, kind: type):
    value = fields.get(name)
    if kind is str and type(value) is str and value and value.isprintable():
        return value
    if kind is int and type(value) is int and 1 <= value < 2**40:
        return value
    if kind is float and type(value) in (int, float) and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ValueError(f"{name} is {value!r}")


@dataclasses.dataclass(frozen=True)
class Build:
    """What reads and writes a file."""

    version: str
    kernels: dict[str, str]  # names of the configurations by kind of device; "" where this build has none

    def header(self) -> dict:
        return {"schema": SCHEMA, "flux_ops": self.version, "kernels": {k: v for k, v in self.kernels.items() if v}}

    def why_foreign(self, content: dict) -> str:
        """Why a file with this content says nothing about this build; empty if it does."""
        if content.get("schema") != SCHEMA:
            return f"its schema is {content.get('schema')!r}, not {SCHEMA}"
        if content.get("flux_ops") != self.version:
            return f"it is of flux_ops {content.get('flux_ops')!r}, and this is {self.version}"
        kernels = content.get("kernels")
        if not isinstance(kernels, dict):
            return f"its kernels are {kernels!r}, not an object"
        for kind, names in self.kernels.items():
            lacks = set(str(kernels.get(kind, "")).split()) - set(names.split())
            if names and lacks:
                return f"it is of a build with other {kind} kernels: this one has no {', '.join(sorted(lacks))}"
        return ""


def read(path: str, build: Build) -> dict[tuple, Entry]:
    """The entries of a file by key; none if there is no file. Raises CacheError for a foreign or damaged one."""
    return _read(path, build)[0]


def _read(path: str, build: Build) -> tuple[dict[tuple, Entry], dict]:
    try:
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise CacheError(f"{path}: it is a {'directory' if stat.S_ISDIR(status.st_mode) else 'device'}, not a file")
        if status.st_size > MAX_BYTES:
            raise CacheError(f"{path}: it has {status.st_size} bytes; at most {MAX_BYTES} are read")
        with open(path, encoding="utf-8") as file:
            content = json.loads(file.read())
    except FileNotFoundError:
        return {}, {}
    except OSError as error:
        raise CacheError(f"{path}: it can't be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, or no JSON
        raise CacheError(f"{path}: it is no whole JSON document: {str(error)[:100]}") from None
    if not isinstance(content, dict):
        raise CacheError(f"{path}: it holds a JSON {type(content).__name__}, not an object")
    if why_foreign := build.why_foreign(content):
        raise CacheError(f"{path}: {why_foreign}")
    listed = content.get("entries")
    if not isinstance(listed, list):
        raise CacheError(f"{path}: its entries are {type(listed).__name__}, not a list")
    entries = {}
    for index, fields in enumerate(listed):
        try:
            entry = Entry.from_json(fields)
        except ValueError as error:
            raise CacheError(f"{path}: entry {index} is damaged: {str(error)[:200]}") from None
        entries[entry.product.key()] = entry
    return entries, content["kernels"]


def store(path: str, new: list[Entry], build: Build) -> int:
    """Adds entries to a file; of two with one key the later one stays. Returns how many it holds then.

    Any number of processes may do so at once, and any of them may be killed: readers see the file as it was before or
    after, never in between. The lock is the kernel's, on a hidden file beside it, and ends with its holder.
    Raises CacheError if the file can't be written, or is foreign or damaged; then it is left as it is.
    """
    path = os.path.realpath(path)
    try:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _locked(path):
            entries, kernels = ({}, {}) if _is_empty(path) else _read(path, build)
            entries |= {entry.product.key(): entry for entry in new}
            header = build.header()
            header["kernels"] = {**kernels, **header["kernels"]}
            _replace(path, header, list(entries.values()))
            return len(entries)
    except OSError as error:
        raise CacheError(f"{path}: it can't be written: {error.strerror or error}") from None


def _is_empty(path: str) -> bool:
    return os.path.isfile(path) and os.path.getsize(path) == 0


@contextlib.contextmanager
def _locked(path: str):
    folder, name = os.path.split(path)
    fd = os.open(os.path.join(folder, f".{name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    _lock(fd)
    try:
        yield
    finally:
        _free(fd)


def _lock(fd: int) -> None:
    """Raises OSError, and gives the file up, if that takes more than LOCK_S.

    flock has no time limit, hence the thread. To try again and again has one, but may find it taken each time.
    """
    ended, last_word, errors = threading.Event(), threading.Lock(), []

    def wait():
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            errors.append(error)
        if not last_word.acquire(blocking=False):  # nobody waits for it any more
            _free(fd)
        ended.set()

    try:
        threading.Thread(target=wait, daemon=True).start()
    except RuntimeError as error:  # the system has no thread left
        os.close(fd)
        raise OSError(f"its lock can't be waited for: {error}") from None
    ended.wait(LOCK_S)
    if last_word.acquire(blocking=False):
        raise OSError(f"other processes have held its lock for {LOCK_S:g} s")
    if errors:
        os.close(fd)
        raise errors[0]


def _free(fd: int) -> None:
    fcntl.flock(fd, fcntl.LOCK_UN)  # closing alone would leave it to processes that were forked meanwhile
    os.close(fd)


def _replace(path: str, header: dict, entries: list[Entry]) -> None:
    folder, name = os.path.split(path)
    scratch = os.path.join(folder, f".{name}.new")  # only the holder of the lock writes it; it may be a dead one's
    lines = ",\n".join(json.dumps(entry.to_json()) for entry in entries)
    try:
        with open(scratch, "w", encoding="utf-8") as file:
            file.write(f'{json.dumps(header)[:-1]}, "entries": [\n{lines}\n]}}\n')
        os.replace(scratch, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
