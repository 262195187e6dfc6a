"""Test data that needs no tolerance, the same on every rank, and references computed without communication.

EXACT data: x in {-1, 0, 1}, weights in {-1, 0, 1} with at most 248 non-zeros in each row over the whole contraction,
bias in [-8, 8]. Every partial and every total is then an integer of magnitude 256 or less, which bf16 and fp16 hold
exactly whatever the order of the adds. RANKCODE data fills rank r's shard with r + 1.

Each operand is a function of (seed, role, rank) alone: any rank can make any other rank's operand, so a reference
needs no collective.
"""

import dataclasses
import functools

import torch

MAX_NONZEROS = 248
_ROLES = {"x": 1, "weight": 2, "bias": 3, "grad": 4}


def generator(device, seed, role, rank=0):
    return torch.Generator(device).manual_seed((seed * 16 + _ROLES[role]) * 64 + rank)


def exact_x(shape, dtype, gen):
    return torch.randint(-1, 2, shape, generator=gen, device=gen.device, dtype=torch.int8).to(dtype)


def exact_weight(n, k, dtype, gen):
    """[n, k] with at most MAX_NONZEROS non-zeros a row: one at a random place in each of as many blocks of columns."""
    if k <= MAX_NONZEROS:
        return exact_x((n, k), dtype, gen)
    block = -(-k // MAX_NONZEROS)
    padded = block * MAX_NONZEROS
    place = torch.randint(0, block, (n, MAX_NONZEROS), generator=gen, device=gen.device)
    place += torch.arange(0, padded, block, device=gen.device)
    sign = torch.randint(0, 2, (n, MAX_NONZEROS), generator=gen, device=gen.device, dtype=torch.int8) * 2 - 1
    weight = torch.zeros(n, padded, dtype=dtype, device=gen.device)
    weight.scatter_(1, place, sign.to(dtype))
    return weight[:, :k].contiguous()


def exact_bias(n, dtype, gen):
    return torch.randint(-8, 9, (n,), generator=gen, device=gen.device).to(dtype)


def random_values(shape, dtype, gen, scale=1.0):
    return (torch.randn(shape, generator=gen, device=gen.device) * scale).to(dtype)


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: `rows` = M / world (gemm_ar: M), and n and k as this rank's weight [n, k] has them."""

    op: str
    rows: int
    n: int
    k: int
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0
    bias: bool = False
    layout: str = "nk"  # "nk": contiguous [n, k]; "kn": the .t() view of a contiguous [k, n]
    data: str = "exact"  # "exact", "rankcode" or "random"

    def m(self, world):
        """Rows M of the whole product."""
        return self.rows if self.op == "gemm_ar" else self.rows * world

    def __str__(self):
        dtype = str(self.dtype).removeprefix("torch.")
        bias = ", bias" if self.bias else ""
        m = "M" if self.op == "gemm_ar" else "M/TP"
        return (
            f"{self.op} {m}={self.rows} N={self.n} K={self.k} {dtype} {self.layout}{bias} {self.data} seed {self.seed}"
        )


class Operands:
    """The operands of a case on one rank, and what the op has to return there."""

    def __init__(self, case, rank, world, device):
        self.case, self.rank, self.world, self.device = case, rank, world, torch.device(device)
        self.weight = self._layout(self._weight(rank))
        self.x = self._x(rank)
        self.bias = self._bias(rank) if case.bias else None

    # ag_gemm: every rank has its own weight and bias, x is cut along M.
    # gemm_rs, gemm_ar: x [M, world * k] and weight [n, world * k] are cut along K, the bias is common to all ranks.

    def _x(self, rank):
        case = self.case
        rows = case.rows * self.world if case.op == "gemm_rs" else case.rows
        gen = generator(self.device, case.seed, "x", rank)
        if case.data == "rankcode":
            return torch.full((rows, case.k), rank + 1.0, dtype=case.dtype, device=self.device)
        if case.data == "random":
            return random_values((rows, case.k), case.dtype, gen)
        return exact_x((rows, case.k), case.dtype, gen)

    def _weight(self, rank):
        case = self.case
        if case.data == "rankcode":  # picks out column 0 of x: the product shows whose rows they were
            weight = torch.zeros(case.n, case.k, dtype=case.dtype, device=self.device)
            weight[:, :1] = 1
            return weight
        if case.op == "ag_gemm":
            gen = generator(self.device, case.seed, "weight", rank)
            if case.data == "random":
                return random_values((case.n, case.k), case.dtype, gen, case.k**-0.5)
            return exact_weight(case.n, case.k, case.dtype, gen)
        return self._whole_weight[:, rank * case.k : (rank + 1) * case.k].contiguous()

    @functools.cached_property
    def _whole_weight(self):
        case = self.case
        gen = generator(self.device, case.seed, "weight")
        k = case.k * self.world
        if case.data == "random":
            return random_values((case.n, k), case.dtype, gen, k**-0.5)
        return exact_weight(case.n, k, case.dtype, gen)

    def _bias(self, rank):
        gen = generator(self.device, self.case.seed, "bias", rank if self.case.op == "ag_gemm" else 0)
        return exact_bias(self.case.n, self.case.dtype, gen)

    def _layout(self, weight):
        return weight.t().contiguous().t() if self.case.layout == "kn" else weight

    def gathered(self):
        return torch.cat([self._x(rank) for rank in range(self.world)])

    def partials(self):
        """gemm_rs, gemm_ar: each rank's operands for this rank's rows of the result."""
        first = self.rank * self.case.rows if self.case.op == "gemm_rs" else 0
        rows = slice(first, first + self.case.rows)
        return [(self._x(rank)[rows], self._weight(rank)) for rank in range(self.world)]

    def expected(self, accumulate=torch.float32):
        """The result, accumulated in `accumulate` and not yet rounded to the case's dtype."""
        if self.case.op == "ag_gemm":
            pairs = [(self.gathered(), self.weight)]
        else:
            pairs = self.partials()
        y = sum(x.to(accumulate) @ weight.to(accumulate).t() for x, weight in pairs)
        return y if self.bias is None else y + self.bias.to(accumulate)

    def plain(self):
        """What PyTorch makes of it in the case's dtype: matmul, then sums across ranks in that dtype."""
        if self.case.op == "ag_gemm":
            return torch.nn.functional.linear(self.gathered(), self.weight, self.bias)
        parts = [torch.nn.functional.linear(x, weight) for x, weight in self.partials()]
        y = parts[0]
        for part in parts[1:]:
            y = y + part
        return y if self.bias is None else y + self.bias


def poison(device, *shapes_and_dtypes):
    """Fill memory of these sizes with NaN and free it, so that the outputs of the next call are made of it."""
    tensors = [torch.full(shape, float("nan"), dtype=dtype, device=device) for shape, dtype in shapes_and_dtypes]
    del tensors
