"""What the environment variables say is taken, and junk in one is a clear error.

That the number of threads acts is shown here. The cases of faults (FLUX_TIMEOUT, FLUX_CHECK), of the tuner
(FLUX_TUNE_CACHE) and of shared GPUs show it of the others.
"""

import os
import subprocess
import sys

import pytest

from flux_ops.config import check_timeout, read_environment
from tests.cases.base import OPS, Case, check


def test_defaults():
    settings = read_environment({})
    assert (settings.timeout_s, settings.check_ranks, settings.cpu_threads) == (30.0, True, 0)
    assert settings.ranks_per_gpu == 1
    assert (settings.tune_cache, settings.shipped_caches) == ("", True)  # there is no home


def test_values():
    env = {"FLUX_TIMEOUT": "2.5", "FLUX_CHECK": "0", "FLUX_CPU_THREADS": "3", "FLUX_RANKS_PER_GPU": "4"}
    settings = read_environment(env)
    assert (settings.timeout_s, settings.check_ranks, settings.cpu_threads) == (2.5, False, 3)
    assert settings.ranks_per_gpu == 4


@pytest.mark.parametrize(
    "env,path,shipped",
    (
        ({"HOME": "/home/a"}, "/home/a/.cache/flux_ops/tune.json", True),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "/cache"}, "/cache/flux_ops/tune.json", True),
        ({"HOME": "/home/a", "XDG_CACHE_HOME": "relative"}, "/home/a/.cache/flux_ops/tune.json", True),
        ({"HOME": "/home/a", "FLUX_TUNE_CACHE": "x.json"}, "x.json", True),
        ({"HOME": "/home/a", "FLUX_TUNE_CACHE": "off"}, "", False),
        ({"HOME": ""}, "", True),
    ),
)
def test_file_of_tuned_choices(env, path, shipped):
    settings = read_environment(env)
    assert (settings.tune_cache, settings.shipped_caches) == (path, shipped)


@pytest.mark.parametrize(
    "name,junk",
    (
        *(("FLUX_TIMEOUT", junk) for junk in ("", "soon", "0", "-1", "nan", "inf", "1e999")),
        *(("FLUX_CHECK", junk) for junk in ("", "yes", "2", "false")),
        *(("FLUX_CPU_THREADS", junk) for junk in ("", "many", "0", "-2", "1.5", "100000")),
        *(("FLUX_RANKS_PER_GPU", junk) for junk in ("", "two", "0", "17")),
        *(("FLUX_TUNE_CACHE", junk) for junk in ("", "  ")),
    ),
)
def test_junk_is_an_error_that_names_variable_and_value(name, junk):
    with pytest.raises(ValueError, match=name) as error:
        read_environment({name: junk})
    assert repr(junk) in str(error.value)


def new_threads(ctx, op):
    """How many threads the first call of this rank starts."""
    before = len(os.listdir("/proc/self/task"))
    assert check(ctx, Case(op, 256, 136, 64), strategy="fused") is None
    return len(os.listdir("/proc/self/task")) - before


@pytest.mark.parametrize("threads", (1, 3, 6))
def test_number_of_threads_of_a_call(spawn, threads):
    for op in OPS:
        assert spawn(2, {"FLUX_CPU_THREADS": str(threads)}).run(new_threads, op) == [threads] * 2


def test_usual_number_of_threads_of_a_call(spawn):
    threads = max(min(4, len(os.sched_getaffinity(0)) // 2), 1)
    assert spawn(2).run(new_threads, "gemm_rs") == [threads] * 2


@pytest.mark.parametrize("junk", (0, -1, float("nan"), None, "x"))
def test_set_timeout_refuses_junk(junk):
    with pytest.raises(ValueError, match="positive number"):
        check_timeout(junk, "set_timeout: seconds")


def test_junk_is_found_at_import():
    code = "import os; os.environ['FLUX_TIMEOUT'] = 'soon'; import flux_ops"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode != 0
    assert "FLUX_TIMEOUT is 'soon'" in result.stderr.splitlines()[-1]
