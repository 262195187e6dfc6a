"""Column- and row-parallel linear layers, with the conventions of Megatron and vLLM."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist

from flux_ops.nn import functional
from flux_ops.nn.base import ParallelLinear

Result = torch.Tensor | tuple


class ColumnParallelLinear(ParallelLinear):
    """Linear layer whose weight is cut along its outputs: Y = X · Wᵀ + b, each rank with its columns of Y.

    Args:
        in_features: K.
        out_features: N of the whole layer, a multiple of TP; or several, of layers that are merged (gate and up; query,
            key and value): one product computes all of them, and each is cut by itself.
        bias: whether there is one; it is cut as the weight is.
        group: the process group; by default all ranks.
        sequence_parallel: x holds this rank's tokens, [M/TP, ..., K], and is gathered along dimension 0 by
            flux_ops.ag_gemm. Else x is [M, ..., K], the same on all ranks, and the gradient of x is summed over the
            ranks while that of the weight is computed.
        gather_output: Y has the columns of all ranks, which hold it alike, and its gradient. Not with skip_bias_add.
        skip_bias_add: the bias is not added but returned beside Y.
        split_output: with several out_features, return a tuple with one Y for each (views of one tensor, unless they
            are gathered); else one Y with this rank's columns of each, one after the other.
        save_gathered: keep the gathered x for the backward, which takes TP times the memory; else it is gathered again,
            which overlaps with the product.
        strategy: as for flux_ops.ag_gemm; without sequence_parallel there is nothing to choose.
        gradient_accumulation_fusion: the weight's gradient is added to `weight.main_grad` (float32, or the weight's
            dtype) and `weight.grad` stays None; see flux_ops/nn/main_grad.py.
        init_method: fills the whole weight [N, K], in place; the bias is zero then. By default as nn.Linear does.
        generator: see reset_parameters.
        dtype, device: of the parameters.

    weight is [N/TP, K]. Returns Y [M, ..., N/TP], as `split_output` says; (Y, bias) with skip_bias_add.

    Raises ValueError for sizes that TP does not divide and for options that exclude each other. The forward raises as
    flux_ops.ag_gemm does: with sequence_parallel all ranks need the same number of rows.

    The same in plain PyTorch, on each rank::

        torch.nn.functional.linear(gathered_x, whole.weight.chunk(tp)[rank], whole.bias.chunk(tp)[rank])

    Method: Megatron-LM; the overlap is that of flux_ops.ag_gemm.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        split_output: bool = True,
        save_gathered: bool = False,
        strategy: str = "auto",
        gradient_accumulation_fusion: bool = False,
        init_method: Callable[[torch.Tensor], object] | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if gather_output and skip_bias_add:
            raise ValueError(
                "ColumnParallelLinear: gather_output and skip_bias_add are both True; they exclude each other."
            )
        merged = isinstance(out_features, Sequence) and not isinstance(out_features, str)
        if merged and not len(out_features):
            raise ValueError("ColumnParallelLinear: out_features is empty; it must have at least one size.")
        super().__init__(
            in_features,
            list(out_features) if merged else [out_features],
            cut_dim=0,
            bias=bias,
            group=group,
            sequence_parallel=sequence_parallel,
            skip_bias_add=skip_bias_add,
            strategy=strategy,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            init_method=init_method,
            generator=generator,
            dtype=dtype,
            device=device,
        )
        self.gather_output, self.save_gathered = gather_output, save_gathered
        self.split_output = merged and split_output

    def forward(self, x: torch.Tensor) -> Result:
        y = self._product(x, "ag_gemm" if self.sequence_parallel else "copy", self.save_gathered)
        if self.split_output or self.gather_output:
            y = y.split(self.sharding.local_parts, dim=-1)
            if self.gather_output:
                y = tuple(functional.gather_last(part, self.group_name, self.rank) for part in y)
            if not self.split_output:
                y = torch.cat(y, dim=-1)
        if not self.skip_bias_add:
            return y
        if self.bias is None or not self.split_output:
            return y, self.bias
        return y, self.bias.split(self.sharding.local_parts)

    def products(self, training: bool = True) -> Iterator[tuple[str, int, int]]:
        n, k = self.weight.shape
        if self.sequence_parallel:
            yield "ag_gemm", n, k
        if self.sequence_parallel and training:
            yield "gemm_rs", k, n


class RowParallelLinear(ParallelLinear):
    """Linear layer whose weight is cut along its inputs: Y = sum over the ranks of X · Wᵀ, + b.

    Args:
        in_features: K of the whole layer, a multiple of TP.
        out_features: N.
        bias: whether there is one; all ranks hold it whole, and it is added once, after the sum.
        group: the process group; by default all ranks.
        sequence_parallel: Y holds this rank's tokens, [M/TP, ..., N]: dimension 0 is scattered by flux_ops.gemm_rs, and
            M must be a multiple of TP. The gradient of the bias is then the sum over this rank's tokens; see
            flux_ops.nn.allreduce_sequence_parallel_grads. Else Y is [M, ..., N], the same on all ranks.
        input_is_parallel: x has this rank's columns, [M, ..., K/TP]. Else x is [M, ..., K], the same on all ranks, and
            is cut; not with sequence_parallel.
        skip_bias_add: the bias is not added but returned beside Y.
        strategy, gradient_accumulation_fusion, init_method, generator, dtype, device: as for ColumnParallelLinear.

    weight is [N, K/TP]. Returns Y, or (Y, bias) with skip_bias_add.

    Raises ValueError for an in_features that TP does not divide and for options that exclude each other. The forward
    raises as flux_ops.gemm_rs and flux_ops.gemm_ar do.

    The same in plain PyTorch::

        partial = torch.nn.functional.linear(x, whole.weight.chunk(tp, dim=1)[rank])
        dist.all_reduce(partial, group=group)              # sequence_parallel: dist.reduce_scatter_tensor
        y = partial + whole.bias

    Method: Megatron-LM; the overlap is that of flux_ops.gemm_rs and flux_ops.gemm_ar.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: dist.ProcessGroup | None = None,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        strategy: str = "auto",
        gradient_accumulation_fusion: bool = False,
        init_method: Callable[[torch.Tensor], object] | None = None,
        generator: torch.Generator | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if sequence_parallel and not input_is_parallel:
            raise ValueError(
                "RowParallelLinear: input_is_parallel is False and sequence_parallel is True; they exclude each other."
            )
        super().__init__(
            in_features,
            [out_features],
            cut_dim=1,
            bias=bias,
            group=group,
            sequence_parallel=sequence_parallel,
            skip_bias_add=skip_bias_add,
            strategy=strategy,
            gradient_accumulation_fusion=gradient_accumulation_fusion,
            init_method=init_method,
            generator=generator,
            dtype=dtype,
            device=device,
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> Result:
        if not self.input_is_parallel:
            x = functional.split_last(x, self.group_name, self.rank)
        y = self._product(x, "gemm_rs" if self.sequence_parallel else "gemm_ar")
        return (y, self.bias) if self.skip_bias_add else y

    def products(self, training: bool = True) -> Iterator[tuple[str, int, int]]:
        n, k = self.weight.shape
        yield "gemm_rs" if self.sequence_parallel else "gemm_ar", n, k
        if self.sequence_parallel and training:
            yield "ag_gemm", k, n
