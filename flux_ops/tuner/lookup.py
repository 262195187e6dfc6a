"""What `auto` asks: the tuned choice for a product, from the user's file and from those that the package brings."""

import math
import os
import pathlib
from collections.abc import Callable, Iterable

import torch

from flux_ops.tuner.cache import Build, CacheError, Entry, Product, bucket, read

SHIPPED = pathlib.Path(__file__).parent / "caches"
MOST_OCTAVES = 1.0  # how far the M of an entry may be from the one that is asked for


def device_name(kind: str, index: int = -1) -> str:
    """The device as entries name it: GPUs of one name differ by the SMs that they may use."""
    if kind != "cuda":
        return f"CPU, {os.cpu_count()} cores"
    properties = torch.cuda.get_device_properties(index if index >= 0 else torch.cuda.current_device())
    return f"{properties.name}, {properties.multi_processor_count} SMs"


def shipped_paths() -> list[str]:
    return sorted(str(path) for path in SHIPPED.glob("*.json"))


class CacheFile:
    """The entries of one file, read anew when it has changed."""

    def __init__(self, path: str, build: Build):
        self.path, self._build = path, build
        self.error = ""  # why it is ignored
        self._status: tuple | None = None
        self._families: dict[tuple, dict[int, Entry]] = {}

    def families(self) -> dict[tuple, dict[int, Entry]]:
        """The entries by bucket of M, by all that has to be the same."""
        try:
            found = os.stat(self.path)
            status = found.st_mtime_ns, found.st_size, found.st_ino
        except OSError as error:
            status = (type(error),)
        if status != self._status:
            self._status, self.error = status, ""
            try:
                self._families = by_family(read(self.path, self._build).values())
            except CacheError as error:
                self._families, self.error = {}, str(error)
        return self._families

    def num_entries(self) -> int:
        return sum(map(len, self.families().values()))


class Caches:
    """All that this process knows: what it has tuned itself, the user's file, the package's files, in this order."""

    def __init__(self, user_path: str, shipped: Iterable[str], build: Build, warn: Callable[[str], None]):
        self.build = build
        self.user = CacheFile(user_path, build) if user_path else None
        self.shipped = [CacheFile(path, build) for path in shipped]
        self._own: dict[tuple, dict[int, Entry]] = {}
        self._warn = warn
        self._warned: set[str] = set()

    def remember(self, entry: Entry) -> None:
        """From now on this process uses the entry, whether or not it is in a file."""
        self._own.setdefault(entry.product.family(), {})[bucket(entry.product.m)] = entry

    def lookup(self, product: Product, suits: Callable[[Entry], bool] = lambda entry: True) -> tuple[Entry, str] | None:
        """The entry for a product, and where it is from: that of its bucket of M, else the nearest one that suits it.

        A file that can't be used, or the user's if it has nothing for this device and TP, costs one warning.
        """
        sources = [("in this process", self._own)]
        for file in [self.user, *self.shipped] if self.user else self.shipped:
            families = file.families()
            self._warn_of(file, families, product)
            sources.append((file.path, families))
        wanted = bucket(product.m)
        alike = [(origin, families.get(product.family(), {})) for origin, families in sources]
        for origin, by_m in alike:
            if wanted in by_m and suits(by_m[wanted]):
                return by_m[wanted], _origin(origin, by_m[wanted], product)
        for origin, by_m in alike:
            near = [m for m, entry in by_m.items() if _is_near(entry.product.m, product.m) and suits(entry)]
            if near:
                entry = by_m[min(near, key=lambda m: (abs(math.log2(m / wanted)), -m))]
                return entry, _origin(origin, entry, product)
        return None

    def _warn_of(self, file: CacheFile, families: dict, product: Product) -> None:
        reason = file.error
        if not reason and file is self.user and families:
            device, tp = product.device, product.tp
            if not any((f[-1], f[-2]) == (device, tp) for f in families):
                others = sorted({f"{f[-1]} at TP = {f[-2]}" for f in families})
                reason = f"{file.path}: its entries are for {'; '.join(others)}, none for {device} at TP = {tp}"
        if reason and file.path not in self._warned:
            self._warned.add(file.path)
            self._warn(f"the tuned choices of a file are not used. {reason}")


def _is_near(m: int, wanted: int) -> bool:
    return abs(math.log2(bucket(m) / bucket(wanted))) <= MOST_OCTAVES


def by_family(entries: Iterable[Entry]) -> dict[tuple, dict[int, Entry]]:
    families: dict[tuple, dict[int, Entry]] = {}
    for entry in entries:
        families.setdefault(entry.product.family(), {})[bucket(entry.product.m)] = entry
    return families


def _origin(origin: str, entry: Entry, product: Product) -> str:
    near = "" if bucket(entry.product.m) == bucket(product.m) else f", the nearest to {product.m}"
    return f"{origin}, M = {entry.product.m}{near}"
