"""What the two parallel layers share: the parameters, how they are drawn, cut, loaded and marked."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from flux_ops import fallback
from flux_ops.nn import functional, sharding
from flux_ops.nn.sharding import Sharding
from flux_ops.ops import _group_name as group_name_of


class ParallelLinear(nn.Module):
    """A linear layer whose weight [out, in] is cut along `cut_dim`; the arguments are explained by its subclasses."""

    def __init__(
        self,
        in_features: int,
        out_parts: Sequence[int],
        *,
        cut_dim: int,
        bias: bool,
        group: dist.ProcessGroup | None,
        sequence_parallel: bool,
        skip_bias_add: bool,
        strategy: str,
        gradient_accumulation_fusion: bool,
        init_method: Callable[[torch.Tensor], object] | None,
        generator: torch.Generator | None,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ):
        super().__init__()
        name = type(self).__name__
        for argument, value in (("in_features", in_features), *(("out_features", part) for part in out_parts)):
            if type(value) is not int or value < 1:
                raise ValueError(f"{name}: {argument} is {value!r}; it must be an int of at least 1.")
        fallback.check_strategy(name, strategy)
        self.group_name = group_name_of(name, group)  # a name, so that the layer can be copied and pickled
        self.rank, self.world = self.group.rank(), self.group.size()
        argument, cut = ("out_features", out_parts) if cut_dim == 0 else ("in_features", [in_features])
        for size in cut:
            if size % self.world:
                raise ValueError(
                    f"{name}: {argument} is {size}; it is cut into equal pieces and must be a multiple of the number "
                    f"of ranks, TP = {self.world}."
                )
        self.in_features, self.out_features = in_features, sum(out_parts)
        self.sequence_parallel, self.skip_bias_add, self.strategy = sequence_parallel, skip_bias_add, strategy
        self.gradient_accumulation_fusion, self.init_method = gradient_accumulation_fusion, init_method
        self.sharding = Sharding(cut_dim, cut, self.world)
        shape = [self.out_features, self.in_features]
        shape[cut_dim] //= self.world
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(shape[0], dtype=dtype, device=device)) if bias else None
        self._mark_parameters()
        self.reset_parameters(generator)

    @property
    def group(self) -> dist.ProcessGroup:
        return distributed_c10d._resolve_process_group(self.group_name)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draws the parameters: the same model whatever TP is. Collective: it waits as long as set_timeout says.

        Every rank draws the whole weight (of one part, where layers are merged) and keeps its piece. The numbers begin
        at a seed that rank 0 draws from `generator`, by default from torch's generator of the CPU, whose other draws
        are not disturbed. The weight is filled by `init_method`, and then the bias is zero; by default both as in
        nn.Linear. On the meta device nothing is done: call it after `to_empty`.
        """
        if self.weight.is_meta:
            return
        bound = 1 / math.sqrt(self.in_features)  # what kaiming_uniform_(weight, a=sqrt(5)) comes to
        fill_weight = self.init_method or (lambda whole: whole.uniform_(-bound, bound))
        fill_bias = (lambda whole: whole.zero_()) if self.init_method else (lambda whole: whole.uniform_(-bound, bound))
        made = f"{type(self).__name__}({self._common_repr()})"
        with sharding.seeded(sharding.common_seed(generator, self.group, made), self.weight.device):
            shape = [self.out_features, self.in_features]
            sharding.draw(self.weight, self.sharding, self.rank, shape, fill_weight)
            if self.bias is not None:
                cut = (self.sharding, self.rank) if self.is_cut("bias") else (Sharding(0, shape[:1], world=1), 0)
                sharding.draw(self.bias, *cut, shape[:1], fill_bias)

    def is_cut(self, key: str) -> bool:
        """Whether each rank has a piece of this parameter; the bias beside a weight cut along its inputs is whole."""
        return key == "weight" or self.sharding.dim == 0

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Those of the layer itself, without what others have added to it (LoRA). NotImplementedError if
        torch.nn.utils (parametrize, prune, weight_norm) has put others in their place.
        """
        if hasattr(self, "parametrizations"):
            raise NotImplementedError(
                f"{type(self).__name__}: {', '.join(self.parametrizations)} has a parametrization, which acts on this "
                "rank's piece alone: it has no whole. Take it off: torch.nn.utils.parametrize.remove_parametrizations."
            )
        for key in ("weight", "bias"):
            if key not in self._parameters and getattr(self, key, None) is not None:
                others = ", ".join(name for name in self._parameters if name.startswith(f"{key}_")) or "something else"
                raise NotImplementedError(
                    f"{type(self).__name__}: {key} is no parameter any more: it is made of {others}, from this rank's "
                    "piece alone, and has no whole. Take that off: torch.nn.utils.prune.remove, remove_weight_norm or "
                    "remove_spectral_norm."
                )
        return self._marked_parameters()

    def _marked_parameters(self) -> dict[str, nn.Parameter]:
        own = {key: self._parameters.get(key) for key in ("weight", "bias")}
        return {key: parameter for key, parameter in own.items() if parameter is not None}

    # ---- whole parameters

    def load_full_state_dict(self, state: dict | Sequence[dict]) -> None:
        """Takes this rank's pieces from the state dict of the whole nn.Linear. No communication; under FSDP2 it is
        collective over the data-parallel ranks, of which the first one's state counts.

        Args:
            state: {"weight": [out, in], "bias": [out]}; where layers are merged also a list, one for each.

        Raises ValueError where keys or shapes are not those of the whole layer.
        """
        name = type(self).__name__
        states = [state] if isinstance(state, dict) else list(state)
        if len(states) not in (1, len(self.sharding.parts)):
            raise ValueError(f"{name}: state has {len(states)} state dicts; it must be one, or one for each part.")
        own = self.own_parameters()
        for keys in (one.keys() for one in states):
            if keys != own.keys():
                raise ValueError(f"{name}: the state dict has {sorted(keys)}; the layer's has {sorted(own)}.")
        parts = self.sharding.parts
        for i, (one, size) in enumerate(zip(states, parts if len(states) > 1 else [self.out_features], strict=True)):
            shapes = {"weight": [size, self.in_features], "bias": [size]}
            given, meant = "the state dict", "the whole layer's"
            if len(states) > 1:
                given, meant = f"state dict {i}", f"that of part {i} of {list(parts)}"
            for key in own:
                if list(one[key].shape) != shapes[key]:
                    raise ValueError(
                        f"{name}: {key} of {given} has shape {list(one[key].shape)}; {meant} has shape {shapes[key]}."
                    )
        wholes = {key: torch.cat([one[key] for one in states]) if len(states) > 1 else states[0][key] for key in own}
        for key, parameter in own.items():
            whole = wholes[key]
            sharding.write(parameter, self.sharding.shard(whole, self.rank) if self.is_cut(key) else whole)

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The state dict of the whole nn.Linear, on every rank. Collective."""
        pieces = {key: sharding.read(parameter) for key, parameter in self.own_parameters().items()}
        return {
            key: self.sharding.gather(piece, self.group) if self.is_cut(key) else piece.clone()
            for key, piece in pieces.items()
        }

    @classmethod
    def from_linear(cls, linear: nn.Linear | Sequence[nn.Linear], **options) -> "ParallelLinear":
        """The layer that computes what `linear` does, or several that a ColumnParallelLinear merges.

        Dtype, device, bias and what requires a gradient are those of `linear`, which all ranks hold whole; `options`
        are the constructor's others. Raises TypeError for what is no nn.Linear, and for options that are the linear's;
        ValueError for several that are not alike.
        """
        merges = isinstance(linear, (Sequence, nn.ModuleList))
        linears = list(linear) if merges else [linear]
        if not linears or not all(isinstance(one, nn.Linear) for one in linears):
            kinds = ", ".join(type(one).__name__ for one in linears) or "empty"
            raise TypeError(
                f"{cls.__name__}.from_linear: linear is {kinds}; it must be an nn.Linear, or a list of some."
            )
        first = linears[0]
        for argument in ("bias", "dtype", "device"):
            if argument in options:
                raise TypeError(f"{cls.__name__}.from_linear: {argument} is that of the nn.Linear.")
        for other in linears:
            alike = [(one.in_features, one.bias is None, one.weight.dtype) for one in (first, other)]
            if alike[0] != alike[1]:
                raise ValueError(
                    f"{cls.__name__}.from_linear: the layers must have the same in_features, bias or none, and dtype; "
                    f"they are {first} of {first.weight.dtype} and {other} of {other.weight.dtype}."
                )
        sizes = [one.out_features for one in linears]
        layer = cls(
            first.in_features,
            sizes if merges else sizes[0],
            bias=first.bias is not None,
            dtype=first.weight.dtype,
            device="meta",
            **options,
        )
        layer.to_empty(device=first.weight.device)
        layer.load_full_state_dict([one.state_dict() for one in linears])
        for key, parameter in layer.own_parameters().items():
            parameter.requires_grad_(any(getattr(one, key).requires_grad for one in linears))
        return layer.train(first.training)

    # ---- what frameworks read on parameters

    def _mark_parameters(self) -> None:
        """Megatron's attributes."""
        cut_dim, parts = self.sharding.dim, self.sharding.parts
        stride = len(parts) if len(set(parts)) == 1 else 1
        for key, parameter in self._marked_parameters().items():
            parameter.allreduce = True
            if self.is_cut(key):
                parameter.tensor_model_parallel = True
                parameter.partition_dim, parameter.partition_stride = cut_dim, stride
            else:  # each rank has the gradient of its own tokens
                parameter.sequence_parallel = self.sequence_parallel

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._mark_parameters()  # a parameter may have been replaced
        return self

    def _load_from_state_dict(self, *args, **kwargs):
        super()._load_from_state_dict(*args, **kwargs)
        self._mark_parameters()

    def __setstate__(self, state):
        super().__setstate__(state)
        self._mark_parameters()

    # ----

    def _product(self, x: torch.Tensor, form: str, save_gathered: bool = False) -> torch.Tensor:
        return functional.linear(
            x,
            self.weight,
            None if self.skip_bias_add else self.bias,
            form,
            self.group_name,
            self.strategy,
            save_gathered,
            self.gradient_accumulation_fusion,
        )

    def products(self, training: bool = True) -> Iterator[tuple[str, int, int]]:
        """(op, N, K) of the overlapped products that the forward, and with `training` the backward, make."""
        raise NotImplementedError

    def _common_repr(self) -> str:
        """What the ranks have in common."""
        parts = list(self.sharding.parts) if len(self.sharding.parts) > 1 else self.out_features
        return f"in_features={self.in_features}, out_features={parts}, bias={self.bias is not None}"

    def extra_repr(self) -> str:
        return f"{self._common_repr()}, sequence_parallel={self.sequence_parallel}, rank {self.rank} of TP={self.world}"
