"""Parallel styles for torch.distributed.tensor.parallel.parallelize_module, whose linear layers overlap.

parallelize_module(mlp, mesh, {
    "up": flux_ops.parallel.ColwiseParallel(input_layouts=Shard(0)),
    "down": flux_ops.parallel.RowwiseParallel(output_layouts=Shard(0)),
})
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as torch_styles

from flux_ops import fallback
from flux_ops.hooks import warn_once
from flux_ops.nn.functional import SumGrad

__all__ = ["ColwiseParallel", "RowwiseParallel"]


class _OverlappedLinear(nn.Linear):
    """What a style makes of an nn.Linear: the same parameters, as DTensors, and another forward."""

    _style: "ColwiseParallel | RowwiseParallel"
    _mesh: DeviceMesh
    _group_name: str

    def forward(self, x):
        return self._style.run(self, x)


class _Overlapped:
    """What both styles have in common; mixed into torch's style of the same name, which is the fallback."""

    _overlapped: tuple[type[Placement], ...]  # layouts that the operators bring about

    def __init__(self, *, input_layouts=None, output_layouts=None, use_local_output=True, strategy="auto"):
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        fallback.check_strategy(type(self).__name__, strategy)
        self.strategy = strategy

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding):
            return super()._apply(module, device_mesh)
        if reason := self._why_not(module, device_mesh):
            warn_once(f"{type(self).__name__} is torch's style, without overlap: {reason}.")
            return super()._apply(module, device_mesh)
        distribute_module(module, device_mesh, self._partition_linear_fn)
        module.__class__ = _OverlappedLinear
        module._style, module._mesh, module._group_name = self, device_mesh, device_mesh.get_group().group_name
        return module

    def _why_not(self, module: nn.Module, mesh: DeviceMesh) -> str:
        layout, features = self._sharded(module)
        if type(module) is not nn.Linear:
            return f"the module is a {type(module).__name__}, not an nn.Linear"
        if mesh.ndim != 1:
            return f"the mesh has {mesh.ndim} dimensions"
        if not isinstance(layout[0], self._overlapped):
            allowed = " and ".join(kind.__name__ for kind in self._overlapped)
            return f"{layout[1]} is {layout[0]!r}, and there is an operator for {allowed} alone"
        if features[0] % mesh.size():
            return f"{features[1]} = {features[0]} is not a multiple of the number of ranks, {mesh.size()}"
        return ""

    def _check_dim(self, argument: str, layout: Shard, x: torch.Tensor) -> None:
        if not -x.ndim <= layout.dim < x.ndim:
            raise ValueError(
                f"{type(self).__name__}: {argument} is {layout!r}, but x of shape {list(x.shape)} has no dimension "
                f"{layout.dim}; it must be one of {-x.ndim} to {x.ndim - 1}."
            )

    def _why_not_call(self, layout: Placement, x: torch.Tensor, size: int, world: int) -> str:
        """Why the operator can't take this call's x; where it gathers or scatters tokens, there are `size` in all."""
        if x.dtype not in fallback.DTYPES:
            return f"x has dtype {x.dtype}"
        if not isinstance(layout, Shard):
            return f"x has {x.ndim} dimension, and none of tokens" if x.ndim < 2 else ""
        if layout.dim % x.ndim == x.ndim - 1:
            return f"dimension {layout.dim} of {x.ndim} is not one of tokens"
        if size % world:
            return f"{size} tokens are not a multiple of the number of ranks, {world}"
        return ""

    def run_plain(self, linear: _OverlappedLinear, x, reason: str):
        if not torch.compiler.is_compiling():
            warn_once(f"{type(self).__name__}: a call runs as torch's style does, without overlap: {reason}.")
        x = self._prepare_input_fn(self.input_layouts, self.desired_input_layouts, linear, (x,), linear._mesh)
        return self._returned(linear, F.linear(x, linear.weight, linear.bias))

    def _returned(self, linear: _OverlappedLinear, y: DTensor):
        return self._prepare_output_fn(self.output_layouts, self.use_local_output, linear, y, linear._mesh)

    def _wrapped(self, linear: _OverlappedLinear, y: torch.Tensor, layout: Placement):
        """y is this rank's part of a result in `layout`."""
        if self.use_local_output and self.output_layouts == (layout,):
            return y
        return self._returned(linear, DTensor.from_local(y, linear._mesh, (layout,), run_check=False))


class ColwiseParallel(_Overlapped, torch_styles.ColwiseParallel):
    """torch's ColwiseParallel, with the all-gather of its input overlapped: Y = all_gather(X) · Wᵀ + b.

    For nn.Linear with `input_layouts=Shard(dim)`: x [..., M/TP, ..., K] is gathered along `dim` by ag_gemm. Weight
    [N/TP, K] and bias [N/TP] are DTensors, Shard(0), as those of torch's style: state dicts, optimisers and FSDP2 see
    no difference. Y is Shard(-1), or what `output_layouts` says.

    ag_gemm gathers dimension 0. For another `dim` ([b, s, h], Shard(1)), it is moved to the front and back: a copy of
    this rank's x and one of y, where torch's style copies the gathered operand; none of them for b = 1.

    Everything else falls back to torch's style, with one warning that says why: another layout of the input (where it
    is replicated, there is nothing to gather), a subclass of nn.Linear, features that are not a multiple of TP; in a
    call, tokens that are not, x of one dimension, and a dtype that the operators don't take. An nn.Embedding always has
    torch's.

    Raises ValueError, in a call, where x has no dimension `dim`.

    Args:
        input_layouts, output_layouts, use_local_output: as torch.distributed.tensor.parallel.ColwiseParallel has them.
        strategy: as in flux_ops.ag_gemm.
    """

    _overlapped = (Shard,)

    def _sharded(self, module):
        return (self.input_layouts[0], "input_layouts"), (getattr(module, "out_features", 0), "out_features")

    def run(self, linear: _OverlappedLinear, x):
        layout, world = self.input_layouts[0], linear._mesh.size()
        self._check_dim("input_layouts", layout, x)
        size = x.shape[layout.dim] if isinstance(x, DTensor) else x.shape[layout.dim] * world
        if reason := self._why_not_call(layout, x, size, world):
            return self.run_plain(linear, x, reason)
        if isinstance(x, DTensor):
            x = x.redistribute(placements=self.input_layouts).to_local()
        bias = None if linear.bias is None else linear.bias.to_local()
        args = linear.weight.to_local(), bias, linear._group_name, False, self.strategy
        y, _ = torch.ops.flux.ag_gemm(x.movedim(layout.dim, 0), *args)
        return self._wrapped(linear, y.movedim(0, layout.dim).contiguous(), Shard(-1))


class RowwiseParallel(_Overlapped, torch_styles.RowwiseParallel):
    """torch's RowwiseParallel, with the reduction of its output overlapped: Y = reduce_scatter(X · Wᵀ) + b.

    For nn.Linear. With `output_layouts=Shard(dim)`, the sum over the ranks of x [..., M, ..., K/TP] · Wᵀ is scattered
    along `dim` by gemm_rs; with `Replicate()`, the default, all ranks have it: Y = all_reduce(X · Wᵀ) + b, by gemm_ar.
    The weight [N, K/TP] is a DTensor, Shard(1), the bias [N] one that is replicated, as those of torch's style; the
    bias's gradient is summed over the ranks.

    gemm_rs scatters dimension 0. For another `dim`, it is moved to the front and back: a copy of this rank's x and one
    of y, where torch's style copies the product; none of them for b = 1.

    Everything else falls back to torch's style, with one warning that says why, as for ColwiseParallel.

    Raises as ColwiseParallel does.

    Args:
        input_layouts, output_layouts, use_local_output: as torch.distributed.tensor.parallel.RowwiseParallel has them.
        strategy: as in flux_ops.gemm_rs and flux_ops.gemm_ar.
    """

    _overlapped = (Shard, Replicate)
    desired_input_layouts = (Shard(-1),)

    def _sharded(self, module):
        return (self.output_layouts[0], "output_layouts"), (getattr(module, "in_features", 0), "in_features")

    def run(self, linear: _OverlappedLinear, x):
        layout, world = self.output_layouts[0], linear._mesh.size()
        scatters = isinstance(layout, Shard)
        if scatters:
            self._check_dim("output_layouts", layout, x)
        size = self._tokens(x, layout, world) if scatters else 0
        if reason := self._why_not_call(layout, x, size, world):
            return self.run_plain(linear, x, reason)
        if isinstance(x, DTensor) or self.input_layouts != self.desired_input_layouts:
            args = self.input_layouts, self.desired_input_layouts, linear, (x,), linear._mesh
            x = self._prepare_input_fn(*args).redistribute(placements=self.desired_input_layouts).to_local()
        weight, bias = linear.weight.to_local(), None if linear.bias is None else linear.bias.to_local()
        if not scatters:
            y = torch.ops.flux.gemm_ar(x, weight, bias, linear._group_name, self.strategy)
            return self._wrapped(linear, y, layout)
        if bias is not None:
            bias = SumGrad.apply(bias, linear._group_name)  # that of gemm_rs covers this rank's rows alone
        x = x.movedim(layout.dim, 0)
        y = torch.ops.flux.gemm_rs(x, weight, bias, linear._group_name, self.strategy)
        return self._wrapped(linear, y.movedim(0, layout.dim).contiguous(), layout)

    def _tokens(self, x, layout: Shard, world: int) -> int:
        """Size of the scattered dimension over all ranks."""
        source = self.input_layouts[0]
        is_cut = not isinstance(x, DTensor) and isinstance(source, Shard) and source.dim % x.ndim == layout.dim % x.ndim
        return x.shape[layout.dim] * (world if is_cut else 1)
