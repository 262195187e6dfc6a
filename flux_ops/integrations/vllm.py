"""vLLM: its row-parallel layers with gemm_ar.

    FLUX_VLLM=1 vllm serve ... --tensor-parallel-size 4

vLLM's tensor parallelism keeps all tokens on all ranks: a column-parallel layer has no collective ahead of its product,
so there is nothing to overlap, and a row-parallel layer ends with an all-reduce. That one is replaced, as vLLM has it
replaced out of its tree: vLLM builds the class that is registered here wherever a model asks for its RowParallelLinear.

Tested inside vLLM 0.26, the newest version for torch 2.11, with CPU processes (make test). Layers with LoRA adapters
compute as vLLM has them.

OverlapPass is not for vLLM: its compiled graphs have collectives of its own, torch.ops.vllm.*, on groups of its own.
"""

import functools
import os

import torch


def row_parallel_forward(layer, x, group_name: str, strategy: str = "auto"):
    """vLLM's RowParallelLinear.forward, Y = all_reduce(X · Wᵀ) + b, as one operator. Returns what vLLM's returns.

    gemm_ar adds the bias once, after the reduction, so each rank passes it; vLLM has rank 0 add it ahead.
    """
    bias = None if layer.skip_bias_add else layer.bias
    y = torch.ops.flux.gemm_ar(x, layer.weight, bias, group_name, strategy)
    if not layer.return_bias:
        return y
    return y, layer.bias if layer.skip_bias_add else None


@functools.cache  # vLLM may call its plugins more than once
def register(strategy: str = "auto") -> type:
    """Registers the layer with vLLM, in this process and ahead of the model's construction; returns its class.

    It runs gemm_ar where the weight is neither quantised nor packed (as vLLM does for CPUs), the input is sharded
    already and the result is reduced, in bfloat16 or float16; everywhere else, and with VLLM_BATCH_INVARIANT=1, vLLM's
    own forward.
    """
    from vllm import envs
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers import linear

    class FluxRowParallelLinear(linear.RowParallelLinear):
        def forward(self, input_):
            plain = type(self.quant_method) is linear.UnquantizedLinearMethod and self.weight.numel() > 0
            reduces = self.reduce_results and self.input_is_parallel and self.tp_size > 1
            overlapped = plain and reduces and input_.dtype in (torch.bfloat16, torch.float16)
            if not overlapped or envs.VLLM_BATCH_INVARIANT:
                return super().forward(input_)
            return row_parallel_forward(self, input_, get_tp_group().device_group.group_name, strategy)

    PluggableLayer.register_oot(FluxRowParallelLinear, name="RowParallelLinear")
    # vLLM finds compiled graphs on disk by its variables and its configuration, ahead of tracing: a graph from a run
    # without this layer must not be found.
    envs.environment_variables["FLUX_VLLM"] = lambda: strategy
    return FluxRowParallelLinear


def plugin() -> None:
    """vLLM calls this in each of its processes (entry point of vllm.general_plugins); FLUX_VLLM=1 turns it on."""
    if os.environ.get("FLUX_VLLM") == "1":
        register()
