"""The layers of examples/plain.py again, each product cut in two along K and along N: it is summed in two halves, as is
the gradient of x. The same mathematics, other rounding, forward and backward.

How far a model of these goes from one of the plain layers is how far apart two right trainings are.
"""

import torch
import torch.nn.functional as F

from examples import plain


class ColumnParallelLinear(plain.ColumnParallelLinear):
    def product(self, x):
        y = _in_halves(x, self.weight)
        return y if self.bias is None else y + self.bias


class RowParallelLinear(plain.RowParallelLinear):
    def product(self, x):
        return _in_halves(x, self.weight)


def _in_halves(x, weight):
    x1, x2 = x.tensor_split(2, dim=-1)
    halves = []
    for rows in weight.tensor_split(2):
        w1, w2 = rows.tensor_split(2, dim=1)
        halves.append((F.linear(x1, w1).float() + F.linear(x2, w2).float()).to(x.dtype))
    return torch.cat(halves, dim=-1)
