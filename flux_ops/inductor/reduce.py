"""A matrix product, then reduce_scatter or all_reduce -> gemm_rs or gemm_ar.

    mm [M, N] -> reshape? [M, ..., N]                          -> reduce_scatter_tensor -> wait_tensor
    mm [M, N] -> reshape [b, S, N] -> split along 1, cat along 0 -> reduce_scatter_tensor -> wait_tensor [b, s, N]

gemm_rs scatters dimension 0. Where another one is scattered, it is moved to the front of the product's rows, and back
in the result: copies of [M, K] and [M/TP, N], in place of the copy of [M, N] that split and cat make.
"""

import dataclasses

import torch
from torch.fx import Graph, Node

from flux_ops.fallback import DTYPES
from flux_ops.inductor.collective import Collective
from flux_ops.inductor.graph import (
    PRODUCTS,
    RESHAPES,
    NotMatchedError,
    Product,
    Writer,
    aten,
    chunks_put_together,
    dim_of,
    is_reshape,
    is_same,
    name_of,
    replace_collective,
    value,
)
from flux_ops.inductor.report import Replaced


@dataclasses.dataclass(frozen=True)
class Reduction:
    collective: Collective
    product: Product
    bias: Node | None  # that the sum over the ranks holds once
    partial: Node  # the product, reshaped: what is reduced, its dimension `dim` scattered
    dim: int

    @staticmethod
    def of(c: Collective) -> "Reduction":
        if c.how not in ("sum", "avg"):
            raise NotMatchedError(f"it reduces with '{c.how}'; only sums and averages can be overlapped")
        looks_through = c.kind == "reduce_scatter" and c.dim == 0
        partial, dim = _scattered(c.operand, c.world) if looks_through else (c.operand, c.dim)
        product = _product_of(partial)
        if dim == value(partial).ndim - 1:
            raise NotMatchedError("it scatters the last dimension, the columns of the product")
        if value(partial).dtype not in DTYPES:
            raise NotMatchedError(f"it reduces {value(partial).dtype}, for which there is no overlapped product")
        bias = None if product.bias is None else _replicated_bias(product.bias, c.world)
        return Reduction(c, product, bias, partial, dim)


def _scattered(reduced: Node, world: int) -> tuple[Node, int]:
    """(what is scattered, along which dimension), looking through the split and cat that bring it to the front."""
    if reduced.target != aten.cat.default:
        return reduced, 0
    split = chunks_put_together(list(reduced.args[0]), world)
    ndim = value(reduced).ndim
    if split is None or dim_of(reduced, 1, ndim) != 0 or len(reduced.users) != 1:
        raise NotMatchedError("what it reduces is a cat, not a matrix product")
    return split.args[0], dim_of(split, 2, ndim)


def _product_of(partial: Node) -> Product:
    node = partial
    while is_reshape(node) and len(node.users) == 1:
        node = node.args[0]
    if node.target in (*PRODUCTS, *RESHAPES) and len(node.users) != 1:
        raise NotMatchedError("the product that it reduces is used elsewhere too")
    product = Product.of(node)
    if product is None:
        raise NotMatchedError(f"what it reduces is the result of {name_of(node)}, not of a matrix product")
    if not is_same(value(partial).shape[-1], product.n):
        raise NotMatchedError("the columns of the product are regrouped ahead of the reduction")
    return product


def _replicated_bias(bias: Node, world: int) -> Node:
    """The bias that all ranks hold alike: DTensor adds its share of 1/TP to each rank's partial sum."""
    if bias.target == aten.div.Tensor and bias.args[1] == world and value(bias).ndim == 1:
        return bias.args[0]
    raise NotMatchedError("each rank adds a bias of its own to its partial sum")


def overlap(graph: Graph, collective: Collective, strategy: str) -> Replaced:
    r = Reduction.of(collective)
    scatters = collective.kind == "reduce_scatter"
    writer = Writer(graph, collective.node)
    weight = writer.transposed(r.product.columns)
    args = weight, r.bias, collective.group_name, strategy
    lead = list(r.partial.args[1][:-1]) if is_reshape(r.partial) else None  # sizes of the rows' dimensions
    rows = r.product.rows
    if scatters:
        if lead is not None:
            rows = writer.reshaped(rows, [*lead, writer.size(rows, 1)])
        y = writer.call(torch.ops.flux.gemm_rs.default, writer.moved(rows, r.dim, 0), *args)
        y = writer.moved(y, 0, r.dim)
    else:
        y = writer.call(torch.ops.flux.gemm_ar.default, rows, *args)
        if lead is not None:
            y = writer.reshaped(y, [*lead, writer.size(y, 1)])
    if collective.how == "avg":
        y = writer.call(aten.div.Tensor, y, collective.world)

    replace_collective(collective.node, collective.result, y)
    return Replaced(collective.node.name, r.product.node.name, "gemm_rs" if scatters else "gemm_ar", _note(r))


def _note(r: Reduction) -> str:
    notes = []
    if r.dim != 0:
        notes.append(f"dimension {r.dim} is moved to the front and back")
    if r.bias is not None:
        notes.append("the bias, of which each rank added 1/TP, is added once")
    if r.collective.how == "avg":
        notes.append("the sum is divided by TP")
    return ", ".join(notes)
