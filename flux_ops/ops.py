"""The public functions."""

import dataclasses

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from flux_ops import config, extension, fallback
from flux_ops.config import settings
from flux_ops.hooks import Hooks
from flux_ops.tuner.cache import OPS
from flux_ops.version import __version__

_core = extension.module


def has_cuda_kernels() -> bool:
    """Whether this build has the CUDA kernels and could be loaded. Does not touch a GPU."""
    return _core is not None and _core.has_cuda_kernels


def why_not_cuda() -> str:
    """Why has_cuda_kernels() is false; empty if it is true."""
    if _core is None:
        return extension.why_not_loaded
    return "" if _core.has_cuda_kernels else _core.no_cuda_reason


if _core is None:
    _library = fallback.define(extension.why_not_loaded)
    _hooks = None
else:
    _hooks = Hooks(_core, __version__, why_not_cuda())
    _core.set_hooks(_hooks)
    _core.set_timeout(settings.timeout_s)
    _core.set_check_ranks(settings.check_ranks)
    _core.set_cpu_threads(settings.cpu_threads)
    if settings.ranks_per_gpu > 1 and _core.has_cuda_kernels:
        _core.set_spare_sms(4)  # a few are enough: the pushes are kernels then, and the grids of ours wait for them
_ag_gemm, _gemm_rs = torch.ops.flux.ag_gemm.default, torch.ops.flux.gemm_rs.default
_gemm_ar = torch.ops.flux.gemm_ar.default


def ag_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    return_gathered: bool = False,
    strategy: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Column-parallel linear layer with its all-gather: Y = all_gather(X) · Wᵀ + b.

    Args:
        x: [M/TP, ..., K], this rank's tokens; dimension 0 is gathered in rank order. Any strides.
        weight: [N, K], this rank's rows, as nn.Linear has them, or a transposed view of [K, N] (not copied).
        bias: [N], or None.
        group: the process group; by default all ranks. All its ranks make the same calls in the same order.
        return_gathered: also return all_gather(X), [M, ..., K].
        strategy: "auto" (what the tuner has found for the shape; else fused where it can run and pays, else, on CUDA,
            "decomposed:gather" where that can run, else sequential, with one warning where nothing else can run),
            "sequential", "fused", "decomposed", or the last two as "fused:CONFIG" and "decomposed:CONFIG" with a
            configuration's name as last_dispatch() gives it.

    Returns Y [M, ..., N], or (Y, gathered). dtypes: float32, float64, bfloat16, float16 ("fused" on CUDA: bfloat16 and
    float16 alone); products are accumulated in at least fp32. Under torch.autocast the operands are taken in its dtype.

    Differentiable. The backward of x is gemm_rs; that of weight gathers x again unless `return_gathered`.

    Raises, on every rank and before anything is launched: TypeError for unlike dtypes; ValueError for shapes, devices,
    groups, an unknown strategy, and ranks that do not make the same call (compared on the first call of a shape);
    NotImplementedError for a dtype that is not supported, and for "fused" or "decomposed" where it can't run.
    torch.distributed.DistBackendError if a rank does not come within the timeout (see set_timeout).

    The same in plain PyTorch::

        gathered = x.new_empty(x.shape[0] * dist.get_world_size(group), *x.shape[1:])
        dist.all_gather_into_tensor(gathered, x, group=group)
        y = torch.nn.functional.linear(gathered, weight, bias)

    "decomposed" is a sequence of library GEMMs on chunks that copy engines move; "decomposed:gather", for few rows, one
    kernel that gathers X, and one library GEMM.

    Method: FLUX (papers/flux.txt), section 3.2; "decomposed": FiCCO (papers/ficco.txt), section V.
    """
    y, gathered = _ag_gemm(x, weight, bias, _group_name("ag_gemm", group), return_gathered, strategy)
    return (y, gathered) if return_gathered else y


def gemm_rs(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
) -> torch.Tensor:
    """Row-parallel linear layer with its reduce-scatter: Y = reduce_scatter(X · Wᵀ) + b.

    Args:
        x: [M, ..., K], all tokens, this rank's columns. M must be a multiple of TP. Any strides.
        weight: [N, K], this rank's columns of the whole weight, or a transposed view of [K, N] (not copied).
        bias: [N], or None; added once, after the reduction.
        group: the process group; by default all ranks. All its ranks make the same calls in the same order.
        strategy: "auto" (what the tuner has found for the shape; else fused where it can run and pays, else sequential,
            with one warning where it can't run), "sequential", "fused", "decomposed", or the last two as
            "fused:CONFIG" and "decomposed:CONFIG" with a configuration's name as last_dispatch() gives it.

    Returns Y [M/TP, ..., N]: rank r has rows r·M/TP and on of dimension 0. dtypes as for ag_gemm. "fused" and
    "decomposed" add the ranks' partials in rank order in fp32 (fp64 for float64): the result is bitwise repeatable. A
    partial travels in the dtype of x, so in float16 it has to stay below 65520, as in any reduce-scatter of that dtype;
    "decomposed" rounds this rank's own partial too.

    Differentiable. The backward of x is ag_gemm. The gradient of bias is the sum over this rank's rows; adding it up
    over the ranks is the caller's, as for every replicated parameter under sequence parallelism.

    Raises as ag_gemm does; ValueError, too, if M is not a multiple of TP.

    The same in plain PyTorch::

        partial = torch.nn.functional.linear(x, weight)
        y = partial.new_empty(x.shape[0] // dist.get_world_size(group), *partial.shape[1:])
        dist.reduce_scatter_tensor(y, partial, group=group)
        y = y + bias

    Method: FLUX (papers/flux.txt), section 3.1; the reduction is in the last tiles' epilogue (section 4.2).
    "decomposed": the chunks of FiCCO (papers/ficco.txt), with a reduction at the end.
    """
    return _gemm_rs(x, weight, bias, _group_name("gemm_rs", group), strategy)


def gemm_ar(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
) -> torch.Tensor:
    """Row-parallel linear layer with its all-reduce: Y = all_reduce(X · Wᵀ) + b.

    Args:
        x: [M, ..., K], all tokens, this rank's columns. Any M, any strides.
        weight: [N, K], this rank's columns of the whole weight, or a transposed view of [K, N] (not copied).
        bias: [N], or None; the same on all ranks. It is added once, after the reduction.
        group: the process group; by default all ranks. All its ranks make the same calls in the same order.
        strategy: as for ag_gemm, but with "decomposed" in the place of "decomposed:gather".

    Returns Y [M, ..., N], all of it on every rank. dtypes as for ag_gemm ("decomposed" on CUDA, too: bfloat16 and
    float16 alone). "fused" and "decomposed" add the ranks' partials in rank order in fp32 (fp64 for float64): the
    result has the same bits on every rank, and in every run. A partial travels in the dtype of x, so in float16 it has
    to stay below 65520, as in any all-reduce of that dtype. Configurations have one of two forms: in "one-shot", every
    rank gets all partials (few rows); in "two-shot", each rank adds up some of the rows and sends them to the others,
    "fused" while it computes the next ones. "decomposed" is a library GEMM, and one all-reduce kernel behind it.

    Differentiable. The gradient of Y has to be the same on all ranks, as Y is: then the backward needs no
    communication, and the gradient of bias is complete on each rank.

    Raises as ag_gemm does.

    The same in plain PyTorch::

        y = torch.nn.functional.linear(x, weight)
        dist.all_reduce(y, group=group)
        y = y + bias

    Method: the kernel of gemm_rs, FLUX (papers/flux.txt), section 3.1, whose reduced tiles go on to all ranks.
    """
    return _gemm_ar(x, weight, bias, _group_name("gemm_ar", group), strategy)


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """What the last call ran. The product had M rows over all ranks; N and K are this rank's."""

    op: str
    strategy: str  # "fused", "decomposed", "sequential", or "local" where no communication was needed
    config: str  # of "fused": tiles and pieces; of "decomposed": schedule and chunks, or the form of the all-reduce
    reason: str  # "tuned: FILE, M = ..." where the tuner has chosen
    m: int
    n: int
    k: int
    dtype: str
    world: int


def last_dispatch() -> Dispatch | None:
    """What the last call of an operator in this process ran, and why; None before the first call."""
    record = fallback.last_call if _core is None else _core.last_dispatch()
    return None if record is None else Dispatch(**record)


def dispatch_counts(*, reset: bool = False) -> dict[tuple[str, str, str], int]:
    """How many calls of this process ran how: {(op, strategy, why): calls}, with `reset` counted from zero afterwards.

    `why` is "asked for" (by name), "tuned", "model" (the default where nothing is tuned), "fell back" (`auto` would
    have run "fused", and could not: the warning has said why) or "no communication" (one rank, or an empty product).
    A call that was refused is not counted; nor is a replay of a CUDA graph, only the call that was captured.
    """
    return dict(fallback.dispatch_counts(reset) if _core is None else _core.dispatch_counts(reset))


def prepare(
    *,
    op: str | None = None,
    max_m: int,
    n: int,
    k: int,
    dtype: torch.dtype = torch.bfloat16,
    group: dist.ProcessGroup | None = None,
    device: torch.device | str | None = None,
) -> None:
    """Allocates the workspace now, for products of up to max_m rows: before a CUDA graph capture, or to bound memory.

    Collective: all ranks of the group call it with the same values.

    Args:
        op: "ag_gemm", "gemm_rs", "gemm_ar", or None for all of them.
        max_m: rows M of the whole product, over all ranks.
        n, k: columns and contraction length of this rank's product: weight is [n, k].
        dtype: of the operands.
        device: of the operands; by default the current GPU where there is one and CUDA kernels, else the CPU.

    Does nothing where no strategy but the plain sequence can run, and never makes a workspace smaller.
    """
    if op not in (None, *OPS):
        raise ValueError(f"prepare: op is {op!r}; allowed are {', '.join(map(repr, OPS))} and None (all of them).")
    for name, value in (("max_m", max_m), ("n", n), ("k", k)):
        if type(value) is not int or not 1 <= value < 2**31:
            raise ValueError(f"prepare: {name} is {value!r}; it must be an int from 1 to 2^31 - 1.")
    if max_m * max(n, k) > 2**48:
        raise ValueError(f"prepare: {max_m} rows of {max(n, k)} are more than any memory holds.")
    if device is None:
        device = "cuda" if has_cuda_kernels() and torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"prepare: device is {str(device)!r}; it must be on 'cpu' or 'cuda'.")
    group_name = _group_name("prepare", group)
    world = distributed_c10d._resolve_process_group(group_name).size()
    if _core is None or world == 1 or (device.type == "cuda" and not torch.cuda.is_available()):
        return
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    where = (device.type, index if device.type == "cuda" else -1)

    name = str(dtype).removeprefix("torch.")
    with _core.Step(group_name, "prepare") as site:
        if settings.check_ranks:
            _hooks.agree(site, f"prepare(op {op}, max_m {max_m}, n {n}, k {k}, {name} on {device.type})")
        if _hooks.why_not_connected(site, where):
            return
        ops = [one for one in ((op,) if op else OPS) if _core.may_overlap(one, device.type, world, n, k, name)]
        if not ops:
            return
        needs = [_core.workspace_needs(one, device.type, world, max_m, n, k, name) for one in ops]
        _hooks.grow(site, where, tuple(map(max, zip(*needs, strict=True))))


def agree(group: dist.ProcessGroup, text: str, proposal: str) -> str:
    """Rank 0's proposal, on all ranks, which do the same thing there: `text` says what. Collective.

    Raises ValueError if their texts differ, and torch.distributed.DistBackendError for a rank that comes too late.
    """
    if group.size() == 1:
        return proposal
    if _core is None:
        said = [None] * group.size()
        dist.all_gather_object(said, (text, proposal), group=group)
        texts, proposals = zip(*said, strict=True)
        if len(set(texts)) > 1:
            raise ValueError(f"{text}: the ranks do not make the same: {', '.join(texts)}.")
        return proposals[0]
    with _core.Step(group.group_name, text.partition("(")[0]) as site:
        return _hooks.agree(site, text, (proposal, ""))[0]


def destroy(group: dist.ProcessGroup | None = None) -> None:
    """Frees what flux_ops holds for the group; call it on every rank, equally often. The next call begins anew.

    This is also the way out after a timeout, which leaves the group's ranks out of step. After
    torch.distributed.destroy_process_group, destroy() frees what is left of all groups.
    """
    if _core is None:
        return
    if group is None and not dist.is_initialized():
        for name in _hooks.known_groups():
            _core.drop_group(name)
        return
    name = _group_name("destroy", group, may_be_destroyed=True)
    has_joined = name in _hooks.known_groups()
    _core.drop_group(name)
    if not has_joined and (group is None or group in distributed_c10d._world.pg_map):
        _hooks.end_unused(name)


def set_timeout(seconds: float) -> None:
    """How long a rank waits for a peer before it raises; 30 at first, or FLUX_TIMEOUT.

    The collectives of the sequential strategy wait as long as the process group's own timeout says.
    """
    settings.timeout_s = config.check_timeout(seconds, "set_timeout: seconds")
    if _core is not None:
        _core.set_timeout(settings.timeout_s)


def _group_name(op: str, group: dist.ProcessGroup | None, may_be_destroyed: bool = False) -> str:
    if group is None:
        world = dist.group.WORLD
        if world is None:
            raise ValueError(f"{op}: group is None, which means all ranks, but torch.distributed is not initialised.")
        return world.group_name
    if not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"{op}: this rank is not a member of group.")
        raise TypeError(f"{op}: group is {group!r}; it must be a torch.distributed.ProcessGroup or None.")
    known = may_be_destroyed or torch.compiler.is_compiling() or group in distributed_c10d._world.pg_map
    if not known:
        raise ValueError(f"{op}: group has been destroyed.")
    return group.group_name
