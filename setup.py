"""Builds the extension module flux_ops._C. What is built, and why, is decided in tools/build_config.py."""

import fcntl
import logging
import os
import shlex
import sys
from pathlib import Path

try:
    from setuptools import Extension, errors, setup
    from setuptools.command.build_ext import build_ext
except ImportError:
    sys.exit(f"flux_ops: error: building needs setuptools in {sys.executable}: pip install setuptools wheel")

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools import build_config, build_output  # noqa: E402

os.environ["PATH"] += os.pathsep + str(Path(sys.executable).parent)  # ninja of a virtual environment
CUDA_HOME, _ = build_config.find_cuda_home(os.environ)
if CUDA_HOME:
    os.environ["CUDA_HOME"] = str(CUDA_HOME)  # read by torch.utils.cpp_extension when it is imported

try:
    import torch

    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns that there is no GPU
    from torch.utils import cpp_extension
except ImportError as e:
    torch, NO_TORCH = None, e
    BaseBuildExt = build_ext
else:
    BaseBuildExt = cpp_extension.BuildExtension


def configure(extension: Extension, plan: build_config.Plan, probe: build_config.Probe) -> None:
    """Fills in what depends on the machine."""
    device = "cuda" if plan.with_cuda else "cpu"
    extension.sources = build_config.sources(plan.with_cuda)
    extension.include_dirs = [str(ROOT / "csrc"), *cpp_extension.include_paths(device)]
    extension.library_dirs = cpp_extension.library_paths(device)
    extension.libraries = ["c10", "torch", "torch_cpu", "torch_python"]
    extension.extra_link_args = ["-pthread", "-lrt"]
    extension.extra_compile_args = {"cxx": build_config.cxx_flags(plan, probe)}
    if plan.with_cuda:
        extension.libraries += ["cudart", "c10_cuda", "torch_cuda"]
        extension.extra_compile_args["nvcc"] = build_config.nvcc_flags(probe)


def use_checked_nvcc(cuda_home: Path) -> None:
    """Puts the log checker in front of nvcc; a compiler launcher in PYTORCH_NVCC is kept."""
    nvcc = shlex.split(os.environ.get("PYTORCH_NVCC", "")) or [str(cuda_home / "bin" / "nvcc")]
    os.environ["PYTORCH_NVCC"] = shlex.join([sys.executable, str(ROOT / "tools" / "nvcc_checked.py"), *nvcc])


class BuildExt(BaseBuildExt):
    def run(self):
        if torch is None:
            sys.exit(
                f"flux_ops: error: building needs torch {build_config.torch_range()} in {sys.executable}: {NO_TORCH}"
            )
        try:
            probe = build_config.probe(os.environ, torch.__version__, torch.version.cuda)
            plan = build_config.decide(probe)
        except build_config.BuildError as e:
            sys.exit(f"flux_ops: error: {e}")
        configure(self.extensions[0], plan, probe)
        if plan.with_cuda:
            use_checked_nvcc(probe.cuda_home)
        # The two variants differ in every object, so each has its folder and both stay incremental.
        variant = "cuda" if plan.with_cuda else "cpu"
        self.build_temp = str(ROOT / "build" / f"{variant}-{sys.implementation.cache_tag}")
        memory = build_config.free_memory_gb()
        jobs = build_config.num_jobs(plan.with_cuda, len(os.sched_getaffinity(0)), memory)
        jobs = os.environ.setdefault("MAX_JOBS", str(jobs))
        self._run_logged(f"{plan.sentence()}\n  {len(self.extensions[0].sources)} files, {jobs} at a time", variant)

    def _run_logged(self, headline: str, variant: str) -> None:
        log_path = ROOT / "build" / f"{variant}.log"
        log_path.parent.mkdir(exist_ok=True)
        with open(ROOT / "build" / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print("flux_ops: another build runs in this folder; waiting for it to end.", flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
            print(headline, flush=True)
            try:
                with build_output.readable(log_path, ROOT):
                    super().run()
                    sys.stdout.flush()
                    sys.stderr.flush()
            except (RuntimeError, OSError, errors.BaseError, errors.CCompilerError) as e:
                reason = str(e).splitlines()[0] if str(e) else type(e).__name__
                sys.exit(f"flux_ops: error: the build failed ({reason}); the whole log is in {log_path}")


setup(
    ext_modules=[Extension("flux_ops._C", sources=build_config.sources(with_cuda=False), language="c++")],
    cmdclass={"build_ext": BuildExt},
)
