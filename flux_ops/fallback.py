"""torch.ops.flux without the compiled part: the same schemas, with the sequential strategy alone."""

import collections

import torch
from torch.distributed import distributed_c10d

from flux_ops import autocast, autograd, reference
from flux_ops.hooks import warn_once

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)  # of the operators
_STRATEGIES = ("auto", "sequential", "fused", "decomposed")
last_call: dict | None = None
_counts: collections.Counter = collections.Counter()


def dispatch_counts(reset: bool) -> dict:
    counts = dict(_counts)
    if reset:
        _counts.clear()
    return counts


def define(why_not_loaded: str) -> torch.library.Library:
    """Defines the operators. They live as long as the library that is returned."""
    library = torch.library.Library("flux", "DEF")
    library.define(
        "ag_gemm(Tensor x, Tensor weight, Tensor? bias, str group_name, bool return_gathered, str strategy)"
        " -> (Tensor, Tensor)"
    )
    for op in ("gemm_rs", "gemm_ar"):
        library.define(f"{op}(Tensor x, Tensor weight, Tensor? bias, str group_name, str strategy) -> Tensor")

    def ag_gemm(x, weight, bias, group_name, return_gathered, strategy):
        group = _check("ag_gemm", x, weight, bias, group_name, strategy, why_not_loaded)
        y, gathered = reference.ag_gemm(x, weight, bias, group=group, return_gathered=True)
        return y, gathered if return_gathered else x.new_empty(0)

    def gemm_rs(x, weight, bias, group_name, strategy):
        group = _check("gemm_rs", x, weight, bias, group_name, strategy, why_not_loaded)
        return reference.gemm_rs(x, weight, bias, group=group)

    def gemm_ar(x, weight, bias, group_name, strategy):
        group = _check("gemm_ar", x, weight, bias, group_name, strategy, why_not_loaded)
        return reference.gemm_ar(x, weight, bias, group=group)

    def ag_gemm_meta(x, weight, bias, group_name, return_gathered, strategy):
        world = distributed_c10d._resolve_process_group(group_name).size()
        shape = [x.shape[0] * world, *x.shape[1:-1]]
        gathered = x.new_empty([*shape, x.shape[-1]] if return_gathered else [0])
        return x.new_empty([*shape, weight.shape[0]]), gathered

    def gemm_rs_meta(x, weight, bias, group_name, strategy):
        world = distributed_c10d._resolve_process_group(group_name).size()
        return x.new_empty([x.shape[0] // world, *x.shape[1:-1], weight.shape[0]])

    def gemm_ar_meta(x, weight, bias, group_name, strategy):
        return x.new_empty([*x.shape[:-1], weight.shape[0]])

    for key in ("CPU", "CUDA"):
        library.impl("ag_gemm", ag_gemm, key)
        library.impl("gemm_rs", gemm_rs, key)
        library.impl("gemm_ar", gemm_ar, key)
    library.impl("ag_gemm", ag_gemm_meta, "Meta")
    library.impl("gemm_rs", gemm_rs_meta, "Meta")
    library.impl("gemm_ar", gemm_ar_meta, "Meta")
    autograd.register()
    autocast.register(library)
    return library


def check_strategy(op: str, strategy: str) -> str:
    """Refuses a strategy that does not exist; returns it without its configuration."""
    asked, colon, config = strategy.partition(":") if isinstance(strategy, str) else ("", "", "")
    if asked not in _STRATEGIES or (colon and (not config or asked in ("auto", "sequential"))):
        raise ValueError(f"{op}: strategy is {strategy!r}; allowed are {', '.join(map(repr, _STRATEGIES))}.")
    return asked


def _check(op, x, weight, bias, group_name, strategy, why_not_loaded):
    """Refuses what the compiled operators refuse; returns the group."""
    global last_call
    asked = check_strategy(op, strategy)
    if x.dim() < 2 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{op}: x has shape {list(x.shape)}, weight {list(weight.shape)}; they must be [..., K], [N, K]."
        )
    if x.dtype not in DTYPES:
        raise NotImplementedError(f"{op}: x has dtype {x.dtype}; supported are float32, float64, bfloat16 and float16.")
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{op}: {name} has dtype {tensor.dtype} but x has dtype {x.dtype}; they must be the same.")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{op}: {name} is on {tensor.device} but x is on {x.device}; they must be on the same device."
            )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"{op}: bias must have shape [{weight.shape[0]}]; it has shape {list(bias.shape)}.")
    if asked in ("fused", "decomposed"):
        raise NotImplementedError(f"{op}: strategy '{asked}' can't run: {why_not_loaded}.")
    if strategy == "auto":
        warn_once(f"falls back to strategy 'sequential': {why_not_loaded}")
    try:
        group = distributed_c10d._resolve_process_group(group_name)
    except RuntimeError:
        raise ValueError(f"{op}: there is no process group '{group_name}' in this process.") from None
    _counts[op, "sequential", "fell back" if strategy == "auto" else "asked for"] += 1
    last_call = {
        "op": op,
        "strategy": "sequential",
        "config": "",
        "reason": why_not_loaded if strategy == "auto" else "asked for",
        "m": x.numel() // max(x.shape[-1], 1) * (group.size() if op == "ag_gemm" else 1),
        "n": weight.shape[0],
        "k": weight.shape[1],
        "dtype": str(x.dtype).removeprefix("torch."),
        "world": group.size(),
    }
    return group
