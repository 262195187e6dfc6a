"""Settings from the environment. A value that makes no sense is an error, not a default.

==================  =======================================================================  =======
variable            meaning                                                                  default
==================  =======================================================================  =======
FLUX_TIMEOUT        seconds that a rank waits for a peer before it raises                    30
FLUX_CHECK          1: the ranks compare their arguments on the first call of a shape;       1
                    0: they don't, and ranks that disagree end in an error of a wait
FLUX_CPU_THREADS    worker threads of one call on the CPU                                    min(4, cores / ranks)
FLUX_RANKS_PER_GPU  ranks that may share a GPU, which then compute in turn: for tests only   1
FLUX_TUNE_CACHE     file of tuned choices; off: neither it nor those of the package          see default_tune_cache
==================  =======================================================================  =======
"""

import dataclasses
import math
import os
from collections.abc import Mapping

MAX_TIMEOUT_S = 10_000_000  # four months; nanoseconds of it fit 64 bits


@dataclasses.dataclass
class Settings:
    timeout_s: float = 30.0
    check_ranks: bool = True
    cpu_threads: int = 0  # 0: the default
    ranks_per_gpu: int = 1
    tune_cache: str = ""  # path of the user's file; empty: none
    shipped_caches: bool = True


def check_timeout(value: object, name: str) -> float:
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        seconds = math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise ValueError(f"{name} is {value!r}; it must be a positive number of seconds, at most {MAX_TIMEOUT_S}.")
    return seconds


def default_tune_cache(env: Mapping[str, str]) -> str:
    """flux_ops/tune.json in $XDG_CACHE_HOME or in $HOME/.cache; empty if neither is known."""
    folder = env.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(folder):  # also where it is unset: a relative path is to be ignored
        folder = os.path.join(env["HOME"], ".cache") if env.get("HOME") else ""
    return os.path.join(folder, "flux_ops", "tune.json") if folder else ""


def _count(env: Mapping[str, str], name: str, most: int, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not text.isdecimal() or not 1 <= int(text) <= most:
        raise ValueError(f"the environment variable {name} is {text!r}; it must be 1 to {most}.")
    return int(text)


def read_flag(env: Mapping[str, str], name: str, default: bool) -> bool:
    text = env.get(name, str(int(default)))
    if text not in ("0", "1"):
        raise ValueError(f"the environment variable {name} is {text!r}; it must be 0 or 1.")
    return text == "1"


def read_environment(env: Mapping[str, str] = os.environ) -> Settings:
    settings = Settings()
    if "FLUX_TIMEOUT" in env:
        settings.timeout_s = check_timeout(env["FLUX_TIMEOUT"], "the environment variable FLUX_TIMEOUT")
    settings.check_ranks = read_flag(env, "FLUX_CHECK", default=True)
    settings.cpu_threads = _count(env, "FLUX_CPU_THREADS", 256, default=0)
    settings.ranks_per_gpu = _count(env, "FLUX_RANKS_PER_GPU", 16, default=1)
    settings.tune_cache = env.get("FLUX_TUNE_CACHE", default_tune_cache(env))
    if "FLUX_TUNE_CACHE" in env and not settings.tune_cache.strip():
        raise ValueError(
            f"the environment variable FLUX_TUNE_CACHE is {settings.tune_cache!r}; it must be a file's path, or off."
        )
    if settings.tune_cache == "off":
        settings.tune_cache, settings.shipped_caches = "", False
    return settings


settings = read_environment()
