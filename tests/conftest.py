"""Fixtures of the multi-rank tests.

`ranks` is a set of rank processes that the whole session shares: pytest runs all tests of one world size, then those
of the next. The folder of a test module chooses the device, `@pytest.mark.worlds(...)` the world sizes.
"""

import os
import pathlib

import pytest
import torch

from tests.harness.ranks import Ranks

CPU_WORLDS = (2, 3, 4)
MAX_RANKS = 16
RANK_ENV = {"FLUX_TIMEOUT": "20", "OMP_NUM_THREADS": "1", "FLUX_TUNE_CACHE": "off"}
os.environ.pop("FLUX_CPU_THREADS", None)
os.environ["FLUX_TUNE_CACHE"] = "off"  # nor does this process use what its user has tuned


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="on GPUs, run what the CPU backend tests as well")
    parser.addoption("--worlds", default="", metavar="N[,...]", help="numbers of CPU ranks, in place of the usual ones")
    parser.addoption(
        "--force-config",
        default="",
        metavar="STRATEGY:CONFIG[,...]",
        help="run the tests that hold for every configuration, once with each of these in place of fused and auto",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "worlds(*sizes): world sizes that a multi-rank test runs at")
    config.addinivalue_line("markers", "cpu_is_enough: on GPUs only with --thorough")
    config.addinivalue_line("markers", "any_config: holds whatever configuration runs; alone with --force-config")
    for forced in _forced_configs(config):
        if not forced.startswith(("fused:", "decomposed:")):
            raise pytest.UsageError(f"--force-config has '{forced}'; it must be fused:CONFIG or decomposed:CONFIG")


def pytest_collection_modifyitems(config, items):
    left_out = []
    if not config.getoption("--thorough"):
        left_out += [i for i in items if i.get_closest_marker("cpu_is_enough") and _device_of(i.path) == "cuda"]
    if _forced_configs(config):
        left_out += [i for i in items if not i.get_closest_marker("any_config")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [i for i in items if i not in left_out]


def _forced_configs(config):
    return [name for name in config.getoption("--force-config").split(",") if name]


def _device_of(path):
    return "cuda" if "gpu" in pathlib.Path(path).parts else "cpu"


def gpu_ranks():
    """How many ranks the GPUs of this machine take."""
    return min(torch.cuda.device_count() * int(os.environ.get("FLUX_RANKS_PER_GPU", "1")), MAX_RANKS)


def why_no_gpus(needed=2):
    """Why the GPU tests can't run here, or None. Creates no CUDA context in this process."""
    if gpu_ranks() < needed:
        return f"needs {needed} ranks on GPUs, this machine takes {gpu_ranks()}"
    import flux_ops

    return None if flux_ops.has_cuda_kernels() else f"no CUDA kernels: {flux_ops.why_not_cuda()}"


def pytest_generate_tests(metafunc):
    if "ranks" not in metafunc.fixturenames:
        return
    device = _device_of(metafunc.definition.path)
    marker = metafunc.definition.get_closest_marker("worlds")
    asked = tuple(int(world) for world in metafunc.config.getoption("--worlds").split(",") if world)
    worlds = marker.args if marker else asked or CPU_WORLDS
    if marker and asked:
        worlds = [world for world in worlds if world in asked]
    params = []
    if device == "cpu":
        params = [pytest.param((device, world), id=f"cpu{world}") for world in worlds]
    else:
        present = gpu_ranks()
        wanted = marker.args if marker else range(2, max(present, 2) + 1)
        for world in [w for w in wanted if w <= present] or [min(wanted)]:
            reason = why_no_gpus(world)
            marks = [pytest.mark.skip(reason=reason)] if reason else []
            params.append(pytest.param((device, world), id=f"gpu{world}", marks=marks))
    metafunc.parametrize("ranks", params, indirect=True, scope="session")
    if forced := _forced_configs(metafunc.config):
        metafunc.fixturenames.append("forced_config")
        metafunc.parametrize("forced_config", forced, indirect=True, scope="session")


@pytest.fixture(scope="session")
def ranks(request):
    device, world = request.param
    with Ranks(world, device, RANK_ENV) as running:
        yield running


@pytest.fixture
def forced_config(ranks, request):
    """For one test, the ranks run this configuration (cases/base.py)."""
    from tests.cases import base

    ranks.run(base.force, request.param)
    yield request.param
    ranks.run(base.force, "")


@pytest.fixture
def spawn(request):
    """spawn(world, env=..., ...): rank processes of a test's own, for what would spoil the shared ones."""
    device = _device_of(request.path)
    started = []

    def start(world=2, env=None, **options):
        if device == "cuda" and (reason := why_no_gpus(world)):
            pytest.skip(reason)
        envs = env if isinstance(env, list) else [env or {}] * world
        running = Ranks(world, device, [{**RANK_ENV, **one} for one in envs], **options)
        started.append(running)
        running.start()
        return running

    yield start
    for running in started:
        running.close()
