"""Loads the compiled part, flux_ops._C, or keeps the reason why it can't be loaded."""

import importlib
import importlib.machinery
import mmap
import pathlib
import re
import struct

import torch

_MARK = re.compile(rb"flux_ops built for torch ([^;\0]{1,40});")


def _extension_file() -> pathlib.Path | None:
    folder = pathlib.Path(__file__).parent
    names = ["_C" + suffix for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((folder / name for name in names if (folder / name).exists()), None)


def _built_for(path: pathlib.Path) -> str | None:
    """The torch version that the extension was compiled for, read from the file without loading it."""
    with open(path, "rb") as file:
        if path.stat().st_size == 0:
            return None
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            found = _MARK.search(data)
            return found[1].decode() if found else None


def _is_whole(path: pathlib.Path) -> bool:
    """Whether the file is as long as its ELF header says: the loader of the system dies of one that was cut short."""
    with open(path, "rb") as file:
        header = file.read(64)
    if len(header) < 64 or header[:5] != b"\x7fELF\x02":
        return False
    (section_table,) = struct.unpack_from("<Q", header, 40)
    entry_size, num_entries = struct.unpack_from("<HH", header, 58)
    return path.stat().st_size >= section_table + entry_size * num_entries > 0


def _minor(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]


def load():
    """(module, "") or (None, reason)."""
    path = _extension_file()
    if path is None:
        return None, (
            "the compiled part flux_ops/_C is missing; build it with `make build` or `pip install .` (if that is done: "
            "Python finds the sources first where they lie; run in another folder)"
        )
    try:
        built_for = _built_for(path)
    except OSError as error:
        return None, f"the compiled part {path} can't be read: {error}"
    if built_for is not None and _minor(built_for) != _minor(torch.__version__):
        return None, (
            f"the compiled part {path} was built for torch {built_for}, but this is torch {torch.__version__}; "
            "build it again"
        )
    if not _is_whole(path):
        return None, f"the compiled part {path} can't be loaded: it is not a whole library; build it again"
    try:
        return importlib.import_module("flux_ops._C"), ""
    except ImportError as error:
        versions = f"built for torch {built_for or 'of unknown version'}, this is torch {torch.__version__}"
        return None, f"the compiled part {path} can't be loaded ({versions}): {error}"


module, why_not_loaded = load()
