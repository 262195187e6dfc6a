"""The layers of flux_ops.nn in plain PyTorch: a matrix product and a collective, one after the other.

They have the same parameters, drawn in the same way, and differ in `forward` alone.
"""

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F

from flux_ops import nn, reference


class ColumnParallelLinear(nn.ColumnParallelLinear):
    """Y = X · Wᵀ with the columns of this rank; sequence-parallel, X is gathered first."""

    def product(self, x):
        return F.linear(x, self.weight, self.bias)

    def forward(self, x):
        if self.sequence_parallel:
            x = collectives.all_gather_tensor_autograd(x, 0, self.group_name)
        else:
            _refuse_gradients(x)
        y = self.product(x)
        if self.gather_output:
            parts = reference.all_gather(y.unsqueeze(0), self.group)
            return torch.cat(parts.unbind(), dim=-1)
        return y.split(self.sharding.local_parts, dim=-1) if self.split_output else y


class RowParallelLinear(nn.RowParallelLinear):
    """Y = the sum of X · Wᵀ over the ranks; sequence-parallel, each rank gets the rows of its tokens."""

    def product(self, x):
        return F.linear(x, self.weight)

    def forward(self, x):
        y = self.product(x)
        if self.sequence_parallel:
            y = collectives.reduce_scatter_tensor_autograd(y, "sum", 0, self.group_name)
        else:
            _refuse_gradients(x)
            dist.all_reduce(y, group=self.group)
        return y if self.bias is None else y + self.bias


def _refuse_gradients(x):
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "The plain layers have no derivatives without sequence_parallel: call them under torch.no_grad()."
        )
