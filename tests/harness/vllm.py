"""vLLM inside rank processes of a test's own. It is imported there alone, from a folder of its own: that costs seconds.

vLLM's wheel is built for GPUs. Without one it imports, but finds no platform: here it is set to vLLM's CPU platform.
The wheel lacks the kernels of that platform; the layers need none, whole models do. FLUX_TEST_VLLM names the folder of
another build.
"""

import contextlib
import os
import pathlib
import sys
from unittest import mock

import pytest
import torch

from tools.build_config import ROOT

# Where `make test` installs it, apart from what the other tests import.
FOLDER = pathlib.Path(os.environ.get("FLUX_TEST_VLLM", pathlib.Path(sys.prefix) / "vllm"))
ENV = {
    "PYTHONPATH": str(FOLDER),  # vLLM looks at its models in processes of their own
    "CUDA_VISIBLE_DEVICES": "",  # the same vLLM, on a machine with GPUs too
    "VLLM_PLUGINS": "flux_ops",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}

needs_vllm = pytest.mark.skipif(
    not (FOLDER / "vllm").is_dir(),
    reason="needs vLLM in .venv/vllm: make test installs it there (Python 3.12 or newer)",
)


def describe_package(folder):
    """Writes what an installed flux_ops has for vLLM's loader of plugins: the entry point of pyproject.toml."""
    import tomllib

    group = "vllm.general_plugins"
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    described = folder / "flux_ops-0.dist-info"
    described.mkdir()
    lines = [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (described / "entry_points.txt").write_text("\n".join(lines))


@contextlib.contextmanager
def vllm(ctx, folder, **config):
    """vLLM's configuration and its parallel state, with all ranks as one tensor-parallel group.

    `folder` is that of describe_package().
    """
    for path in (str(FOLDER), str(folder)):
        if path not in sys.path:
            sys.path.append(path)
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    platforms.current_platform = CpuPlatform()  # ahead of the imports that read it
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    current = VllmConfig(**config)
    with set_current_vllm_config(current):
        if not parallel_state.model_parallel_is_initialized():  # once for a rank
            parallel_state.init_distributed_environment(ctx.world, ctx.rank, "env://", ctx.rank, backend="gloo")
            parallel_state.initialize_model_parallel(ctx.world)
        from vllm import _custom_ops  # loads the CPU kernels that there are: the group above does without them

        with mock.patch.object(_custom_ops, "_supports_onednn", False):  # or vLLM packs the weights
            yield current


@contextlib.contextmanager
def with_plugin():
    """Inside, vLLM has loaded its plugins with FLUX_VLLM=1: what it builds there has our layer, and keeps it."""
    from vllm import envs, plugins
    from vllm.model_executor import custom_op

    from flux_ops.integrations.vllm import register

    with (
        mock.patch.dict(os.environ, {"FLUX_VLLM": "1"}),
        mock.patch.dict(custom_op.op_registry_oot),
        mock.patch.dict(envs.environment_variables),
        mock.patch.object(plugins, "plugins_loaded", False),
    ):
        register.cache_clear()
        plugins.load_general_plugins()
        yield


def has_cpu_kernels(ctx, folder):
    """Whether this vLLM has the kernel that its Llama's MLP needs for its activation."""
    with vllm(ctx, folder):
        return hasattr(torch.ops._C, "silu_and_mul")
