"""Runs nvcc, and fails the compile where ptxas reports what a kernel of this package must not have:

- a register spill, or a stack frame of a kernel that spills;
- serialised wgmma instructions (message C7510): the tensor cores wait for each other.

Usage: python nvcc_checked.py NVCC [argument of nvcc ...], with -Xptxas=-v among the arguments.
"""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_FUNCTION = re.compile(r"(?:Compiling entry function|Function properties for) '?([\w$.]+)'?")
_SPILL = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SERIALISED = re.compile(r"\(C7510\)|wgmma\.mma_async instructions are serialized")


@dataclass(frozen=True)
class LogReport:
    """What ptxas said about one source."""

    num_kernels: int
    max_registers: int
    faults: tuple[str, ...]  # one sentence each


def _readable(symbol: str) -> str:
    if shutil.which("c++filt"):
        symbol = subprocess.run(["c++filt", symbol], capture_output=True, text=True).stdout.strip() or symbol
    return symbol if len(symbol) <= 80 else symbol[:80] + "..."


def check_log(log: str) -> LogReport:
    """Reads the output of `nvcc -Xptxas=-v`."""
    function, num_kernels, registers = "an unnamed function", 0, 0
    faults = []
    for line in log.splitlines():
        if found := _FUNCTION.search(line):
            function = found.group(1)
        if "Compiling entry function" in line:
            num_kernels += 1
        if found := _REGISTERS.search(line):
            registers = max(registers, int(found.group(1)))
        if (found := _SPILL.search(line)) and (int(found.group(2)) or int(found.group(3))):
            _, stores, loads = found.groups()
            faults.append(f"{_readable(function)} spills registers: {stores} bytes stored, {loads} loaded")
        if _SERIALISED.search(line):
            faults.append(f"wgmma is serialised: {line.strip()}")
    return LogReport(num_kernels, registers, tuple(faults))


def _argument_after(args: list[str], option: str) -> str | None:
    """The argument that follows the last `option`."""
    places = [i for i, arg in enumerate(args[:-1]) if arg == option]
    return args[places[-1] + 1] if places else None


def main(command: list[str]) -> int:
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    sys.stdout.write(result.stdout)
    if result.returncode != 0:
        return result.returncode
    source = _argument_after(command, "-c") or "the source"
    report = check_log(result.stdout)
    if report.faults:
        if output := _argument_after(command, "-o"):
            Path(output).unlink(missing_ok=True)
        for fault in report.faults:
            print(f"{source}: error: {fault}")
        return 1
    if report.num_kernels:
        print(f"nvcc_checked: {report.num_kernels} kernels, at most {report.max_registers} registers, no spill")
    return 0


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
