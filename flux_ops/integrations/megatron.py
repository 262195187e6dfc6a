"""Megatron-LM's tensor-parallel layers with the overlapped operators inside.

    from flux_ops.integrations import megatron
    megatron.patch()          # before or after the model is built

or, to choose layer by layer, `ColumnParallelLinear` and `RowParallelLinear` of this module, or `FluxSpecProvider`
where Megatron takes a backend for its layer specs.

The layers are Megatron's own classes but for their product: constructor, parameters, their attributes, initialisation,
state_dict and sharded_state_dict are those of the megatron.core that is installed.

    sequence_parallel    ColumnParallelLinear                  RowParallelLinear
    True                 ag_gemm; backward of x: gemm_rs       gemm_rs; backward of x: ag_gemm
    False                product; backward of x: all-reduce    gemm_ar
                         beside the product of the weight

A layer whose communication is not its own remains what it is in Megatron: of experts, with `disable_grad_reduce`, with
`defer_embedding_wgrad_compute`, or with weights that are sharded once more (generalized tensor parallelism). The layers
of Transformer Engine are not touched.
"""

import copy

from megatron.core.models.backends import LocalSpecProvider
from megatron.core.tensor_parallel import layers

from flux_ops import fallback
from flux_ops.nn import functional

_megatron_init = layers.ColumnParallelLinear.__init__
_megatron_product = layers.ColumnParallelLinear._forward_impl
_megatron_row_forward = layers.RowParallelLinear.forward


def _overlaps(layer) -> bool:
    """Whether the layer communicates by itself, and in no other way than over its tensor-parallel group."""
    return not (
        layer.is_expert
        or layer.tp_group is None
        or getattr(layer, "disable_grad_reduce", False)
        or layer.config.defer_embedding_wgrad_compute
        or getattr(layer, "gtp_remat_size", 1) > 1
    )


class ColumnParallelLinear(layers.ColumnParallelLinear):
    """megatron.core.tensor_parallel.ColumnParallelLinear: Y = X · Wᵀ + b, W cut along its outputs.

    x is [s/TP, b, K] with config.sequence_parallel, else [s, b, K]; Y is [s, b, N/TP]. Arguments and results are
    Megatron's. `config.gradient_accumulation_fusion` takes no apex: the weight's gradient is added to weight.main_grad
    (float32, or the weight's dtype) as flux_ops.nn.ColumnParallelLinear does it.

    `strategy` is that of flux_ops.ag_gemm, and `save_gathered` that of flux_ops.nn.ColumnParallelLinear: whether the
    gathered x is kept for the backward, where Megatron gathers it again. Set them on a layer, or on the class.

    Raises NotImplementedError for gradient_accumulation_fusion in a layer that remains Megatron's, without apex. The
    forward raises as flux_ops.ag_gemm does.

    The same in plain PyTorch::

        y = torch.nn.functional.linear(gathered_x, weight, None if skip_bias_add else bias)
        return y, bias if skip_bias_add else None

    Method: Megatron-LM; the overlap is that of flux_ops.ag_gemm.
    """

    strategy, save_gathered = "auto", False

    def __init__(self, *args, config, **options):
        without_fusion = copy.copy(config)
        without_fusion.gradient_accumulation_fusion = False  # which Megatron's constructor refuses without apex
        _megatron_init(self, *args, config=without_fusion, **options)
        self.config, self.gradient_accumulation_fusion = config, config.gradient_accumulation_fusion
        if self.gradient_accumulation_fusion and not (_overlaps(self) or layers._grad_accum_fusion_available):
            raise NotImplementedError(
                "ColumnParallelLinear: gradient_accumulation_fusion is True in a layer that remains Megatron's "
                "(is_expert, disable_grad_reduce or defer_embedding_wgrad_compute) and takes apex's "
                "fused_weight_gradient_mlp_cuda. Install apex, or set gradient_accumulation_fusion to False."
            )

    def _forward_impl(self, input, weight, bias=None, **options):
        if not _overlaps(self):
            return _megatron_product(self, input, weight, bias=bias, **options)
        form = "ag_gemm" if self.sequence_parallel else "copy"
        return _product(self, input, weight, bias, form, self.save_gathered)


class RowParallelLinear(layers.RowParallelLinear):
    """megatron.core.tensor_parallel.RowParallelLinear: Y = sum over the ranks of X · Wᵀ, + b, W cut along its inputs.

    x is [s, b, K/TP], or [s, b, K] without input_is_parallel; Y is [s/TP, b, N] with config.sequence_parallel, else
    [s, b, N]. For the rest see ColumnParallelLinear.

    The forward raises as flux_ops.gemm_rs and flux_ops.gemm_ar do.

    The same in plain PyTorch::

        y = torch.nn.functional.linear(x, weight)
        dist.all_reduce(y, group=tp_group)                 # sequence_parallel: dist.reduce_scatter_tensor
        return (y, bias) if skip_bias_add else (y + bias, None)

    Method: Megatron-LM; the overlap is that of flux_ops.gemm_rs and flux_ops.gemm_ar.
    """

    strategy = "auto"

    def forward(self, input_):
        if not _overlaps(self):
            return _megatron_row_forward(self, input_)
        if not self.input_is_parallel:
            input_ = functional.split_last(input_, self.tp_group.group_name, self.tp_group.rank())
        form = "gemm_rs" if self.sequence_parallel else "gemm_ar"
        y = _product(self, input_, self.weight, None if self.skip_bias_add else self.bias, form)
        return y, self.bias if self.skip_bias_add else None


def _product(layer, x, weight, bias, form, save_gathered=False):
    return functional.linear(
        x,
        weight,
        bias,
        form,
        layer.tp_group.group_name,
        layer.strategy,
        save_gathered,
        main_grad=layer.gradient_accumulation_fusion,
    )


class FluxSpecProvider(LocalSpecProvider):
    """Megatron's local backend with the two layers of this module, for get_mlp_module_spec_for_backend and the like.

    The linear layers of experts, whose communication is that of the token dispatcher, are Megatron's.
    """

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        return RowParallelLinear


_PATCHED = {
    layers.ColumnParallelLinear: (
        ColumnParallelLinear,
        {"__init__": _megatron_init, "_forward_impl": _megatron_product},
    ),
    layers.RowParallelLinear: (RowParallelLinear, {"forward": _megatron_row_forward}),
}


def patch(strategy: str = "auto", save_gathered: bool = False) -> None:
    """Gives Megatron's ColumnParallelLinear and RowParallelLinear the products of this module's.

    It holds for all their instances, those that are there already too, for the classes that are derived from them, and
    for every name under which a module has imported them: layer specs and models need no change.

    Args:
        strategy: as for flux_ops.ag_gemm.
        save_gathered: under sequence_parallel, ColumnParallelLinear keeps the gathered x for its backward: faster, for
            TP times the memory of x. Megatron gathers again.

    Raises ValueError for an unknown strategy.
    """
    fallback.check_strategy("patch", strategy)
    for megatrons, (ours, originals) in _PATCHED.items():
        for name in originals:
            setattr(megatrons, name, vars(ours)[name])
        megatrons.strategy, megatrons.save_gathered = strategy, save_gathered


def unpatch() -> None:
    """Gives Megatron's layers their own products back, if patch() has taken them."""
    for megatrons, (_, originals) in _PATCHED.items():
        for name, original in originals.items():
            setattr(megatrons, name, original)
        for name in {"strategy", "save_gathered"} & vars(megatrons).keys():
            delattr(megatrons, name)
