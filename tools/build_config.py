"""What to build: `probe` reads the machine once, `decide` is a pure function of what it read.

The CPU part of flux_ops is always built. The CUDA part is built where torch is a CUDA build and nvcc, ninja and the
CUTLASS headers are found; FLUX_BUILD_CUDA=1 makes anything missing an error, FLUX_BUILD_CUDA=0 leaves the part out.
"""

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from third_party import cutlass

ROOT = Path(__file__).resolve().parent.parent
SWITCH = "FLUX_BUILD_CUDA"
MIN_TORCH, MAX_TORCH = (2, 11), (2, 14)  # minor versions; what is tested, as the interfaces change with each of them
MIN_NVCC = (12, 8)
CUDA_LOCATION = Path("/usr/local/cuda")


class BuildError(Exception):
    """Its text is one sentence: what is missing, and the variable or the command that mends it."""


@dataclass(frozen=True)
class Probe:
    """What the build depends on, as found on this machine."""

    switch: str  # value of FLUX_BUILD_CUDA
    cxx: str | None  # C++ compiler
    has_ninja: bool
    torch_version: str
    torch_cuda: str | None  # CUDA version of torch, None for a CPU build
    cuda_home: Path | None
    nvcc_version: tuple[int, int] | None
    nvcc_missing: str  # why there is no usable nvcc
    cutlass_dir: Path | None
    cutlass_missing: str  # why there are no CUTLASS headers


@dataclass(frozen=True)
class Plan:
    """What to build. `no_cuda_reason` is empty where the CUDA part is built."""

    with_cuda: bool
    no_cuda_reason: str

    def sentence(self) -> str:
        if self.with_cuda:
            return "flux_ops: building the CPU backend and the CUDA kernels for sm_90a."
        return f"flux_ops: building the CPU backend only, without CUDA kernels: {self.no_cuda_reason}."


def _release(text: str) -> tuple[int, int]:
    major, minor = re.match(r"(\d+)\.(\d+)", text).groups()
    return int(major), int(minor)


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def torch_range() -> str:
    return f"{_dotted(MIN_TORCH)} to {_dotted(MAX_TORCH)}"


def find_cuda_home(environ: Mapping[str, str], location: Path = CUDA_LOCATION) -> tuple[Path | None, str]:
    """The CUDA toolkit's folder and "", or None and the reason. A variable that is set is not second-guessed."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(name):
            home = Path(environ[name])
            if (home / "bin" / "nvcc").is_file():
                return home, ""
            return None, f"{name}={home} has no bin/nvcc: set it to the folder of a CUDA toolkit"
    homes = [location]
    on_path = shutil.which("nvcc", path=environ.get("PATH", ""))
    if on_path:
        homes = [Path(on_path).parent.parent, Path(on_path).resolve().parent.parent, *homes]
    for home in homes:
        # An nvcc on the PATH may be a script that calls the real one: the headers tell.
        if (home / "bin" / "nvcc").is_file() and (home / "include" / "cuda_runtime.h").is_file():
            return home, ""
    return None, f"nvcc is neither on the PATH nor in {location}: install a CUDA toolkit, or set CUDA_HOME"


def _nvcc_version(home: Path) -> tuple[tuple[int, int] | None, str]:
    nvcc = home / "bin" / "nvcc"
    try:
        text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
        return _release(re.search(r"release (\d+\.\d+)", text).group(1)), ""
    except (OSError, subprocess.CalledProcessError, AttributeError):
        return None, f"{nvcc} --version does not run: set CUDA_HOME to another CUDA toolkit"


def probe(environ: Mapping[str, str], torch_version: str, torch_cuda: str | None) -> Probe:
    """Reads the machine. Nothing is decided here, so that every decision can be tested without it."""
    path = environ.get("PATH", "")
    home, nvcc_missing = find_cuda_home(environ)
    nvcc_version = None
    if home:
        nvcc_version, nvcc_missing = _nvcc_version(home)
    cutlass_dir, cutlass_missing = None, ""
    try:
        cutlass_dir = cutlass.include_dir(environ)
    except cutlass.CutlassNotFound as e:
        cutlass_missing = str(e)
    cxx = environ.get("CXX", "").split() or ["c++"]
    return Probe(
        switch=environ.get(SWITCH, ""),
        cxx=shutil.which(cxx[0], path=path) or shutil.which("g++", path=path),
        has_ninja=shutil.which("ninja", path=path) is not None,
        torch_version=torch_version,
        torch_cuda=torch_cuda,
        cuda_home=home,
        nvcc_version=nvcc_version,
        nvcc_missing=nvcc_missing,
        cutlass_dir=cutlass_dir,
        cutlass_missing=cutlass_missing,
    )


def missing_for_cuda(p: Probe) -> str:
    """The first thing that keeps the CUDA part from being built, with its remedy; "" if nothing does."""
    if p.torch_cuda is None:
        return f"torch {p.torch_version} is a CPU build: install a CUDA build of torch"
    if p.nvcc_version is None:
        return p.nvcc_missing
    if p.nvcc_version < MIN_NVCC:
        return (
            f"nvcc in {p.cuda_home} is of CUDA {_dotted(p.nvcc_version)}, {_dotted(MIN_NVCC)} or newer is needed: "
            "set CUDA_HOME to another toolkit"
        )
    if p.nvcc_version[0] != _release(p.torch_cuda)[0]:
        return (
            f"nvcc in {p.cuda_home} is of CUDA {_dotted(p.nvcc_version)}, but torch {p.torch_version} was built with "
            f"CUDA {p.torch_cuda}: set CUDA_HOME to a toolkit of the same major version"
        )
    if p.cutlass_dir is None:
        return p.cutlass_missing
    if not p.has_ninja:
        return "ninja is not on the PATH: pip install ninja"
    return ""


def decide(p: Probe) -> Plan:
    """What to build on a machine like `p`.

    Raises:
        BuildError: not even the CPU part can be built, the switch is not understood, or it forces what can't be had.
    """
    if p.switch not in ("", "0", "1"):
        raise BuildError(
            f"{SWITCH}={p.switch} is not understood: set it to 1 (the CUDA kernels are required), to 0 (they are left "
            "out), or unset it (they are built if nvcc and what else they need is found)"
        )
    if not MIN_TORCH <= _release(p.torch_version) <= MAX_TORCH:
        age = "old" if _release(p.torch_version) < MIN_TORCH else "new"
        raise BuildError(f"torch {p.torch_version} is too {age}, {torch_range()} is needed")
    if p.cxx is None:
        raise BuildError("no C++ compiler was found: install g++, or set CXX")
    if p.switch == "0":
        return Plan(False, f"built with {SWITCH}=0")
    missing = missing_for_cuda(p)
    if missing and p.switch == "1":
        raise BuildError(f"{SWITCH}=1 requires the CUDA kernels, but {missing}")
    return Plan(not missing, missing)


def num_jobs(with_cuda: bool, cpus: int, free_gb: float) -> int:
    """Compilers to run at once: a CUDA kernel takes about 3.5 GB of memory, a C++ source that includes torch 2 GB."""
    return max(1, min(cpus, int(free_gb / (3.5 if with_cuda else 2.0))))


def free_memory_gb() -> float:
    """Memory that can be used without swapping; a guess of 4 GB where the system does not say."""
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return int(found.group(1)) / 2**20
    except (OSError, AttributeError):
        return 4.0


def sources(with_cuda: bool, root: Path = ROOT) -> list[str]:
    """The files to compile, relative to `root`."""
    patterns = ["csrc/bindings.cpp", "csrc/ops/*.cpp", "csrc/cpu/*.cpp"]
    if with_cuda:
        patterns += [f"csrc/{folder}/*.{ext}" for folder in ("cuda", "comm", "kernels") for ext in ("cpp", "cu")]
    return [str(path.relative_to(root)) for pattern in patterns for path in sorted(root.glob(pattern))]


def c_string(text: str) -> str:
    """`text` as a C string literal that survives a -D option in ninja's file and a shell."""
    return '"' + re.sub(r"[^ -~]|[$`]", "?", text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def cxx_flags(plan: Plan, p: Probe) -> list[str]:
    """Flags of the .cpp files, which include torch: from 2.14 on its headers take C++20."""
    flags = ["-O3", "-g0", "-std=c++20", "-fvisibility=hidden", "-Wall", "-DNDEBUG"]
    flags.append(f"-DFLUX_TORCH_VERSION={c_string(p.torch_version)}")
    if plan.with_cuda:
        return [*flags, "-DFLUX_WITH_CUDA", *_system_includes(p)]
    return [*flags, f"-DFLUX_NO_CUDA_REASON={c_string(plan.no_cuda_reason)}"]


def nvcc_flags(p: Probe) -> list[str]:
    """Flags of the .cu files, which do without torch. The architecture is fixed: TORCH_CUDA_ARCH_LIST has no say."""
    return [
        "-O3",
        "-std=c++17",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-DNDEBUG",  # without it ptxas serialises wgmma
        "-DFLUX_WITH_CUDA",
        "--expt-relaxed-constexpr",
        "--expt-extended-lambda",
        "-Xptxas=-v",  # read by nvcc_checked.py
        "-Xcompiler=-fvisibility=hidden",
        # BuildExtension defines these; CUTLASS uses the operators.
        "-U__CUDA_NO_HALF_OPERATORS__",
        "-U__CUDA_NO_HALF_CONVERSIONS__",
        "-U__CUDA_NO_HALF2_OPERATORS__",
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
        *_system_includes(p),
    ]


def _system_includes(p: Probe) -> list[str]:
    """CUTLASS, and the CUDA library headers (cuBLAS and others) that come in torch's wheels."""
    spec = importlib.util.find_spec("nvidia")
    wheels = list(spec.submodule_search_locations) if spec else []
    headers = [path for folder in wheels for path in sorted(Path(folder).glob("*/include"))]
    return [part for path in (p.cutlass_dir, *headers) for part in ("-isystem", os.fspath(path))]
