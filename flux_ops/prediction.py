"""`python -m flux_ops info --predict`: what `auto` is expected to run at a number of ranks. It needs no GPU.

What is tuned is left aside: the choice is the model's, and so is the time of the product; a kernel for few rows has no
model. The link's time is that of the bytes that a rank sends, at what one GPU of an NVLink host sends. A fused op takes
as long as the longer of the two, at best; the plain sequence, or an exchange beside a library GEMM, as long as both.
"""

from flux_ops import extension
from flux_ops.bench.command import SHAPES
from flux_ops.bench.report import LINK_GBS
from flux_ops.tuner.cache import OPS
from flux_ops.tuner.shapes import read_lists
from flux_ops.tuner.tables import aligned

HEADS = ["shape", "M", "op", "auto", "product us", "link us", "bound by"]


def table(world: int, lists: str, dtype: str = "bfloat16") -> list[str]:
    """A line for each shape of the lists and op. Raises ValueError for a list or a number of ranks that can't be."""
    if world < 2:
        raise ValueError(f"world is {world}; it must be at least 2.")
    body = [
        [shape.name, str(shape.m), op, *_cells(op, world, shape.product(op, world), dtype)]
        for _, shape in read_lists(SHAPES, lists)
        for op in OPS
        if shape.suits(op, world)
    ]
    title = f"TP = {world}, {dtype}: the model of the H100 and the H200, a link of {LINK_GBS} GB/s"
    return [title, *aligned(HEADS, body)]


def _cells(op, world, product, dtype):
    choice, product_us, sent_bytes = extension.module.predict(op, world, *product, dtype)
    link_us = sent_bytes / (LINK_GBS * 1e3)
    return [
        choice,
        "-" if product_us is None else f"{product_us:.1f}",
        f"{link_us:.1f}",
        bound(choice, product_us, link_us),
    ]


def bound(choice: str, product_us: float | None, link_us: float) -> str:
    if not choice.startswith("fused"):
        return "both, in turn"
    if product_us is None:
        return "-"
    return "product" if product_us >= link_us else "link"
