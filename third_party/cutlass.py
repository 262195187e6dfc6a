"""Finds the CUTLASS headers: in $CUTLASS_DIR, or in the nvidia-cutlass wheel."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

WHEEL = "nvidia-cutlass==4.2.0.0"
MIN_VERSION = (4, 2)
MARKER = "cutlass/version.h"


class CutlassNotFound(Exception):
    """Its text is one sentence: what was looked for, and what to do."""


def version(include_dir: Path) -> tuple[int, int]:
    """(major, minor) of the headers in `include_dir`."""
    text = (include_dir / MARKER).read_text()
    found = {name: int(value) for name, value in re.findall(r"#define CUTLASS_(MAJOR|MINOR)\s+(\d+)", text)}
    return found.get("MAJOR", 0), found.get("MINOR", 0)


def _wheel_source() -> Path | None:
    # find_spec does not import the package, which would pull in its own dependencies.
    spec = importlib.util.find_spec("cutlass_library")
    return Path(next(iter(spec.submodule_search_locations))) / "source" if spec else None


def include_dir(environ: Mapping[str, str], wheel_source: Path | None = None) -> Path:
    """The folder to pass to the compiler with -I.

    Args:
        environ: the environment; $CUTLASS_DIR overrides the wheel.
        wheel_source: the wheel's copy of CUTLASS; looked up in this Python's packages where it is None.

    Raises:
        CutlassNotFound: there is no such folder, or its CUTLASS is older than MIN_VERSION.
    """
    override = environ.get("CUTLASS_DIR", "")
    if override:
        candidates = [Path(override) / "include", Path(override)]
        missing = f"CUTLASS_DIR={override} has no include/{MARKER}: set it to a CUTLASS checkout, or unset it"
    else:
        source = wheel_source or _wheel_source()
        candidates = [source / "include"] if source else []
        missing = f"the CUTLASS headers are missing: pip install --no-deps {WHEEL}, or set CUTLASS_DIR"
    for folder in candidates:
        if (folder / MARKER).is_file():
            if version(folder) < MIN_VERSION:
                have, want = (".".join(map(str, v)) for v in (version(folder), MIN_VERSION))
                raise CutlassNotFound(f"CUTLASS in {folder} is {have}, {want} or newer is needed: {WHEEL} has it")
            return folder.resolve()
    raise CutlassNotFound(missing)
