"""The operators under torch.autocast: they take their operands in its dtype, as the products of PyTorch do."""

import torch


def in_autocast_dtype(*tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The tensors as a product takes them: if autocast is on for the first one's device, in its dtype, but float64."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t if t is None or not t.is_floating_point() or t.dtype == torch.float64 else t.to(dtype) for t in tensors
    )


def register() -> torch.library.Library:
    """It lasts as long as the library that is returned."""
    library = torch.library.Library("flux", "IMPL")
    for device in ("cpu", "cuda"):
        for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
            library.impl(op, _cast(op, device), f"Autocast{device.upper()}")
    return library


def _cast(op, device):
    def call(x, weight, bias, *options):
        x, weight, bias = in_autocast_dtype(x, weight, bias)
        with torch.autocast(device, enabled=False):
            return getattr(torch.ops.flux, op)(x, weight, bias, *options)

    return call
