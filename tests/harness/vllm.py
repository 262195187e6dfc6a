"""vLLM inside rank processes of a test's own. It is imported there alone, from a folder of its own: that costs seconds.

vLLM's wheel is built for GPUs. Without one it imports, but finds no platform: here it is set to vLLM's CPU platform.
The wheel lacks the kernels of that platform; the layers need none, whole models do. FLUX_TEST_VLLM names the folder of
another build. vLLM's passes for compiled graphs are made for GPUs, but need none: with_passes() has them on CPUs.
"""

import contextlib
import os
import pathlib
import sys
from unittest import mock

import pytest
import torch
import torch._functorch.config

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
    reason=f"needs vLLM in {FOLDER}: make test installs it there (for torch 2.11 alone; Python 3.12 or newer)",
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

        onednn = mock.patch.object(_custom_ops, "_supports_onednn", False)  # or vLLM packs the weights
        # vLLM's all_reduce returns its input; where the environment has CI, torch makes an error of that warning.
        aliasing = torch._functorch.config.patch(error_on_custom_op_aliasing=False)
        with onednn, aliasing:
            yield current


# Of the CUDA kernels that vLLM's passes know, those that they look up when they are imported. No test calls one.
LOOKED_UP = (
    "rotary_embedding",
    "silu_and_mul",
    "static_scaled_fp8_quant",
    "dynamic_scaled_fp8_quant",
    "dynamic_per_token_scaled_fp8_quant",
)
_kernels = []  # the library, which has to outlive its operators


@contextlib.contextmanager
def with_passes(ctx, folder, min_tokens):
    """vLLM's configuration with pass_config.fuse_gemm_comms, and its manager of passes with those that it has for CUDA.

    Sequence parallelism begins at `min_tokens`. `folder` has a model's config.json in `model`.
    """
    with vllm(ctx, folder):
        from vllm import ir
        from vllm.config import CompilationConfig, ModelConfig, ParallelConfig, PassConfig
        from vllm.distributed.parallel_state import get_tp_group

        model_config = ModelConfig(str(folder / "model"), skip_tokenizer_init=True, max_model_len=64)
    if not _kernels:
        _kernels.append(torch.library.Library("_C", "FRAGMENT"))
        for name in LOOKED_UP:
            if not hasattr(torch.ops._C, name):
                _kernels[0].define(f"{name}() -> ()")
    from vllm.compilation.passes import pass_manager
    from vllm.compilation.passes.fusion import collective_fusion, sequence_parallelism

    passes = {
        "AsyncTPPass": collective_fusion.AsyncTPPass,
        "SequenceParallelismPass": sequence_parallelism.SequenceParallelismPass,
    }
    asked_for = PassConfig(enable_sp=True, fuse_gemm_comms=True, sp_min_token_num=min_tokens)
    launched = {"tensor_parallel_size": ctx.world, "distributed_executor_backend": "external_launcher"}
    config = {
        "model_config": model_config,
        "compilation_config": CompilationConfig(pass_config=asked_for),
        "parallel_config": ParallelConfig(**launched),
    }
    with (
        vllm(ctx, folder, **config) as current,
        mock.patch.dict(vars(pass_manager), passes),
        mock.patch.object(get_tp_group(), "use_custom_op_call", True),  # its collectives are operators, as on CUDA
        ir.enable_torch_wrap(True),  # and so are its norms
    ):
        yield current


def manager_of(config):
    """vLLM's manager of passes, as its backend configures it."""
    from vllm.compilation.passes.pass_manager import PostGradPassManager

    manager = PostGradPassManager()
    manager.configure(config)
    return manager


def in_range(first, last):
    """Inside, a graph is compiled for these numbers of tokens."""
    from vllm.compilation.passes.inductor_pass import pass_context
    from vllm.config.utils import Range

    return pass_context(Range(first, last))


@contextlib.contextmanager
def with_plugin():
    """Inside, vLLM has loaded its plugins with FLUX_VLLM=1: what it builds there has our layer and our pass."""
    from vllm import envs, plugins
    from vllm.compilation.passes import pass_manager
    from vllm.model_executor import custom_op

    from flux_ops.integrations.vllm import register

    with (
        mock.patch.dict(os.environ, {"FLUX_VLLM": "1"}),
        mock.patch.dict(custom_op.op_registry_oot),
        mock.patch.dict(envs.environment_variables),
        mock.patch.dict(vars(pass_manager)),
        mock.patch.object(plugins, "plugins_loaded", False),
    ):
        register.cache_clear()
        plugins.load_general_plugins()
        yield


def has_cpu_kernels(ctx, folder):
    """Whether this vLLM has the kernel that its Llama's MLP needs for its activation."""
    with vllm(ctx, folder):
        return hasattr(torch.ops._C, "silu_and_mul")
