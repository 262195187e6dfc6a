"""Turns the compilers' output into something to watch: one line per file, and whatever is a warning or an error.

The whole output goes to a log file.
"""

import contextlib
import os
import re
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_STEP = re.compile(r"^\[(\d+)/(\d+)\] .* -c (\S+) -o ")
_COMMAND = re.compile(r"^\S*(cc|\+\+|clang|python)[\w.-]*(?= ).* (-c (?P<source>\S+) -o|-shared) ")
_FAILED = re.compile(r"^FAILED: (\[code=\d+\] )?(\S+)")
_NOISE = re.compile(
    r"^ptxas info|^\s+\d+ bytes stack frame|^\s*$"
    r"|^(running|creating|building|copying|adding|writing|reading) "
    r"|No CUDA runtime is found|There are no .* version bounds defined|Emitting ninja build file"
    r"|^Compiling objects\.\.\.|^Allowing ninja to set|^Using envvar MAX_JOBS|^ninja: build stopped"
)


class LineFilter:
    """Maps a line of output to the line to show, or None."""

    def __init__(self, root: Path):
        self.root = root
        self.done = 0
        self.total = 0
        self.started = time.monotonic()

    def elapsed(self) -> str:
        seconds = int(time.monotonic() - self.started)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _short(self, path: str) -> str:
        return os.path.relpath(path, self.root) if os.path.isabs(path) else path

    def __call__(self, line: str) -> str | None:
        if step := _STEP.match(line):
            self.done, self.total = int(step.group(1)), int(step.group(2))
            return f"  [{self.done}/{self.total}] {self.elapsed():>5}  {self._short(step.group(3))}"
        if line.startswith("nvcc_checked: "):
            return " " * 14 + line.removeprefix("nvcc_checked: ")
        if line == "ninja: no work to do.":
            return "  every object is up to date"
        if failed := _FAILED.match(line):
            return f"  FAILED {self._short(failed.group(2))}"
        if command := _COMMAND.match(line):
            source = command.group("source")
            if source is None:
                return f"  linking  {self.elapsed():>5}"
            return None if self.total else f"  {self._short(source)}"  # ninja has named it already
        return None if _NOISE.search(line) else line


def _pump(read_fd: int, out_fd: int, log_path: Path, show: LineFilter, quiet_seconds: float) -> None:
    pending = b""
    with open(log_path, "wb") as log:
        while True:
            if not select.select([read_fd], [], [], quiet_seconds)[0]:
                progress = f"{show.done} of {show.total} done" if show.total else "the first files are compiling"
                os.write(out_fd, f"  ... {show.elapsed():>7}  {progress}\n".encode())
                continue
            block = os.read(read_fd, 65536)
            if not block:
                if not pending:
                    return
                block = b"\n"
            log.write(block)
            log.flush()
            *lines, pending = (pending + block).split(b"\n")
            for line in lines:
                shown = show(line.decode(errors="replace"))
                if shown is not None:
                    os.write(out_fd, f"{shown}\n".encode())


@contextlib.contextmanager
def readable(log_path: Path, root: Path, quiet_seconds: float = 30.0) -> Iterator[None]:
    """Filters what this process and its children write, and says every `quiet_seconds` that work goes on."""
    log_path.parent.mkdir(parents=True, exist_ok=True)
    read_fd, write_fd = os.pipe()
    saved = [os.dup(1), os.dup(2)]
    pump = threading.Thread(target=_pump, args=(read_fd, saved[0], log_path, LineFilter(root), quiet_seconds))
    pump.start()
    for fd in (1, 2):
        os.dup2(write_fd, fd)
    os.close(write_fd)
    try:
        yield
    finally:
        for fd, original in zip((1, 2), saved, strict=True):
            os.dup2(original, fd)
        pump.join()
        for fd in (read_fd, *saved):
            os.close(fd)
