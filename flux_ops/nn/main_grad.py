"""Gradients of weights that are added to `weight.main_grad` in the backward, in its own dtype."""

import torch

_WIDENING = ((torch.bfloat16, torch.float32), (torch.float16, torch.float32))  # that cuBLAS adds up by itself


class MainGrad:
    """Where the gradient of one weight goes.

    Megatron's agreement (gradient_accumulation_fusion): `weight.main_grad` is a buffer in fp32, or in the weight's
    dtype, to which each backward adds; `weight.grad` stays None. Where the weight has an attribute
    `grad_added_to_main_grad` it is set to True, and the weight gets a gradient without meaning (zeros if
    `weight.zero_out_wgrad`), so that hooks that wait for one are called.

    The product is accumulated in fp32 and added without being rounded to the dtype of its operands.
    """

    def __init__(self, weight: torch.Tensor):
        self._weight = weight
        self._buffer()

    def add(self, grad_y: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """main_grad += dYᵀ · X over all tokens. Returns what to hand to autograd as the gradient of the weight."""
        add_product(self._buffer(), grad_y.flatten(0, -2).t(), x.flatten(0, -2))
        weight = self._weight
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        return torch.zeros_like(weight) if getattr(weight, "zero_out_wgrad", False) else torch.empty_like(weight)

    def _buffer(self) -> torch.Tensor:
        weight, main_grad = self._weight, getattr(self._weight, "main_grad", None)
        own = () if weight.dtype in (torch.float32, torch.float16) else (weight.dtype,)
        allowed = (torch.float32, *own)
        words = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        if main_grad is None:
            raise ValueError(
                f"main_grad: the weight of shape {list(weight.shape)} has no main_grad, to which "
                f"gradient_accumulation_fusion adds its gradient. Set weight.main_grad to a tensor of {words} "
                "and of the weight's shape, or freeze the weight. (Not with fully_shard: it puts other parameters in "
                "the place of those that have one.)"
            )
        if main_grad.dtype not in allowed:
            raise TypeError(
                f"main_grad: weight.main_grad has dtype {main_grad.dtype}; allowed for a weight of {weight.dtype}: "
                f"{words}."
            )
        if main_grad.shape != weight.shape or main_grad.device != weight.device:
            raise ValueError(
                f"main_grad: weight.main_grad has shape {list(main_grad.shape)} on {main_grad.device}; it must be "
                f"{list(weight.shape)} on {weight.device}, as the weight."
            )
        return main_grad


@torch.no_grad()
def add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a · b, accumulated in the dtype of total or wider."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda and (a.dtype, total.dtype) in _WIDENING:
        if torch.compiler.is_compiling():  # fake tensors have no such addmm; this one makes a tensor of fp32 in between
            total.add_(torch.mm(a, b, out_dtype=torch.float32))
        else:
            torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
