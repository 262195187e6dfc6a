"""torch.autocast where the compiled operators don't see to it: the fallback, and layers with a node of their own.

See csrc/ops/autocast.cpp.
"""

import contextlib

import torch


def in_autocast_dtype(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors as a product takes them: if autocast is on for the first one's device, in its dtype, but float64."""
    device = tensors[0].device.type
    if not _is_on(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors
    )


def off(device: torch.device) -> contextlib.AbstractContextManager:
    """For operands that have their dtype already, as those of a backward have."""
    return torch.autocast(device.type, enabled=False) if _is_on(device.type) else contextlib.nullcontext()


def _is_on(device):
    return device != "meta" and torch.is_autocast_enabled(device)


def register(library: torch.library.Library) -> None:
    """The operators of the fallback under autocast."""
    for device in ("cpu", "cuda"):
        for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
            library.impl(op, _cast(op, device), f"Autocast{device.upper()}")


def _cast(op, device):
    def call(x, weight, bias, *options):
        operands = in_autocast_dtype(x, weight, bias)
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.flux, op)(*operands, *options)

    return call
