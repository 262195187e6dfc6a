"""vLLM: its row-parallel layers with gemm_ar, and its sequence parallelism with gemm_rs and ag_gemm.

    FLUX_VLLM=1 vllm serve ... --tensor-parallel-size 4
    FLUX_VLLM=1 vllm serve ... --tensor-parallel-size 4 -cc.pass_config.fuse_gemm_comms=True

vLLM's tensor parallelism keeps all tokens on all ranks: a column-parallel layer has no collective ahead of its product,
so there is nothing to overlap, and a row-parallel layer ends with an all-reduce. That one is replaced, as vLLM has it
replaced out of its tree: vLLM builds the class that is registered here wherever a model asks for its RowParallelLinear.

With fuse_gemm_comms, which the second line asks for and which vLLM turns on by itself for large dense models, vLLM's
SequenceParallelismPass cuts the all-reduces of its compiled graph in two, for many tokens, and its AsyncTPPass overlaps
the halves:

    mm -> all_reduce -> rms_norm -> mm    ->    mm -> reduce_scatter -> rms_norm -> all_gather -> mm

Then the layers leave their all-reduce in the graph, and OverlapPass runs ahead of AsyncTPPass: it puts gemm_rs and
ag_gemm around the norm, and gemm_ar where the tokens are too few to be cut. Quantised products remain AsyncTPPass's.

Tested inside vLLM 0.26, the newest version for torch 2.11, with CPU processes (make test). Layers with LoRA adapters
compute as vLLM has them.
"""

import functools
import os

import torch

from flux_ops import config


def row_parallel_forward(layer, x, group_name: str, strategy: str = "auto"):
    """vLLM's RowParallelLinear.forward, Y = all_reduce(X · Wᵀ) + b, as one operator. Returns what vLLM's returns.

    gemm_ar adds the bias once, after the reduction, so each rank passes it; vLLM has rank 0 add it ahead.
    """
    bias = None if layer.skip_bias_add else layer.bias
    y = torch.ops.flux.gemm_ar(x, layer.weight, bias, group_name, strategy)
    if not layer.return_bias:
        return y
    return y, layer.bias if layer.skip_bias_add else None


def collective(node):
    """A node of torch.ops.vllm.{all_gather, reduce_scatter, all_reduce}, as flux_ops.inductor.collective has it.

    It has its result by itself, on any dimension, and names a group of vLLM's.
    """
    from vllm.distributed.parallel_state import get_tp_group

    from flux_ops.inductor.collective import Collective
    from flux_ops.inductor.graph import NotMatchedError, value

    names = (argument.name for argument in node.target._schema.arguments)
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    tp, operand = get_tp_group(), given["tensor"]
    if given["group_name"] != tp.unique_name:
        raise NotMatchedError(f"it is of vLLM's group '{given['group_name']}', not of '{tp.unique_name}'")
    dim = given.get("dim", 0) % value(operand).ndim
    group_name = tp.device_group.group_name
    return Collective(node.target._opname, node, operand, node, group_name, tp.world_size, dim)


COLLECTIVES = {
    "vllm.all_gather.default": collective,
    "vllm.reduce_scatter.default": collective,
    "vllm.all_reduce.default": collective,
}


@functools.cache  # vLLM may call its plugins more than once
def register(strategy: str = "auto") -> type:
    """Registers the layer and the pass with vLLM, in this process and ahead of the model's construction.

    The layer runs gemm_ar where the weight is neither quantised nor packed (as vLLM does for CPUs), the input is
    sharded already and the result is reduced, in bfloat16 or float16; everywhere else vLLM's own forward. With
    pass_config.enable_sp that runs everywhere: vLLM's pass for sequence parallelism needs all the all-reduces of a
    model. With VLLM_BATCH_INVARIANT=1 neither the layer nor the pass does anything.

    Returns the layer's class.
    """
    from vllm import envs
    from vllm.compilation.passes import pass_manager
    from vllm.config import get_current_vllm_config_or_none
    from vllm.distributed import split_tensor_along_last_dim, tensor_model_parallel_all_reduce
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.custom_op import PluggableLayer
    from vllm.model_executor.layers import linear

    from flux_ops.inductor import OverlapPass

    overlap = OverlapPass(strategy, collectives=COLLECTIVES)
    key = repr(overlap.uuid())

    class FluxRowParallelLinear(linear.RowParallelLinear):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            config = get_current_vllm_config_or_none()
            self.has_passes = config is not None and bool(config.compilation_config.pass_config.enable_sp)

        def forward(self, input_):
            if envs.VLLM_BATCH_INVARIANT:
                return super().forward(input_)
            reduces = self.reduce_results and self.tp_size > 1
            if self.has_passes:
                adds_bias = reduces and self.bias is not None and not self.skip_bias_add
                return self._with_shared_bias(input_) if adds_bias else super().forward(input_)
            plain = type(self.quant_method) is linear.UnquantizedLinearMethod and self.weight.numel() > 0
            overlapped = plain and reduces and self.input_is_parallel
            if not overlapped or input_.dtype not in (torch.bfloat16, torch.float16):
                return super().forward(input_)
            return row_parallel_forward(self, input_, get_tp_group().device_group.group_name, strategy)

        def _with_shared_bias(self, x):
            """Each rank adds its share of the bias, as DTensor has it. In vLLM, rank 0 adds all of it: then the ranks
            have unlike graphs, and a pass would replace the product on all ranks but that one."""
            if not self.input_is_parallel:
                x = split_tensor_along_last_dim(x, num_partitions=self.tp_size)[self.tp_rank].contiguous()
            y = self.quant_method.apply(self, x, self.bias / self.tp_size)
            y = tensor_model_parallel_all_reduce(y)
            return (y, None) if self.return_bias else y

    PluggableLayer.register_oot(FluxRowParallelLinear, name="RowParallelLinear")

    if hasattr(pass_manager, "AsyncTPPass"):  # on CUDA

        class FluxAsyncTPPass(pass_manager.AsyncTPPass):
            """OverlapPass, then vLLM's own for what that has left. vLLM's manager of passes makes one by this name."""

            def __call__(self, graph):
                if not envs.VLLM_BATCH_INVARIANT:
                    overlap(graph)
                super().__call__(graph)

            def uuid(self):
                return f"{super().uuid()} {key}"

        pass_manager.AsyncTPPass = FluxAsyncTPPass

    # vLLM finds compiled graphs on disk by its variables and its configuration, ahead of tracing: a graph from a run
    # without this layer and this pass must not be found.
    envs.environment_variables["FLUX_VLLM"] = lambda: key
    return FluxRowParallelLinear


def plugin() -> None:
    """vLLM calls this in each of its processes (entry point of vllm.general_plugins); FLUX_VLLM=1 turns it on."""
    if config.read_flag(os.environ, "FLUX_VLLM", default=False):
        register()
