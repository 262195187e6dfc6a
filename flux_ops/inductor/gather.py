"""all_gather, then one or more matrix products on it -> ag_gemm, and products on the operand that it has gathered.

    shard [m, ..., K] -> all_gather_into_tensor -> wait_tensor [M, ..., K] -> reshape? -> mm, mm, ...
    shard [b, s, K]   -> all_gather_into_tensor -> wait_tensor -> split, cat along 1 [b, S, K] -> reshape -> mm, mm, ...

ag_gemm gathers dimension 0. Where another one is gathered, it is moved to the front of the shard, and back in the
results: a copy of each, in place of the copy of the gathered operand that split and cat make. Pointwise operators that
follow take the second one in.
"""

import dataclasses
import operator

import torch
from torch.fx import Graph, Node

from flux_ops.fallback import DTYPES
from flux_ops.inductor.collective import Collective
from flux_ops.inductor.graph import (
    CASTS,
    NotMatchedError,
    Product,
    Writer,
    aten,
    chunks_put_together,
    descendants,
    dim_of,
    erase_unused,
    is_reshape,
    is_same,
    name_of,
    regroupings,
    replace_collective,
    value,
)
from flux_ops.inductor.report import Replaced


@dataclasses.dataclass(frozen=True)
class Gather:
    collective: Node
    shard: Node
    group_name: str
    result: Node  # the shard, gathered along `dim`
    dim: int

    @staticmethod
    def of(c: Collective) -> "Gather":
        if value(c.operand).dtype not in DTYPES:
            raise NotMatchedError(f"it gathers {value(c.operand).dtype}, for which ag_gemm has no product")
        for user in c.result.users if c.dim == 0 else ():
            if user.target == aten.split.Tensor and (moved := _gathered_elsewhere(c.result, user, c.operand, c.world)):
                return Gather(c.node, c.operand, c.group_name, *moved)
        return Gather(c.node, c.operand, c.group_name, c.result, c.dim)


def _gathered_elsewhere(result: Node, split: Node, shard: Node, world: int) -> tuple[Node, int] | None:
    """(cat, its dimension) if the ranks' shards are put together along another dimension than 0."""
    parts = sorted(split.users, key=lambda part: part.args[1] if name_of(part) == "getitem" else -1)
    cats = {user for part in parts for user in part.users}
    cat = cats.pop() if len(cats) == 1 else None
    if cat is None or cat.target != aten.cat.default or list(cat.args[0]) != parts:
        return None
    if chunks_put_together(parts, world) is not split or dim_of(split, 2, value(shard).ndim) != 0:
        return None
    dim = dim_of(cat, 1, value(shard).ndim)
    whole_shards = is_same(value(parts[0]).shape[0], value(shard).shape[0])
    return (cat, dim) if whole_shards and dim != 0 and len(result.users) == 1 else None


def overlap(graph: Graph, collective: Collective, strategy: str) -> Replaced:
    gather = Gather.of(collective)
    products = _products(gather)
    product = max(products, key=lambda p: _hint(p.n))  # the largest hides most; of equals the first
    writer = Writer(graph, product.node)

    shard = writer.moved(gather.shard, gather.dim, 0)
    weight = writer.transposed(product.columns)
    in_op = product.bias if product.bias is not None and value(product.bias).ndim == 1 else None
    args = shard, weight, in_op, gather.group_name
    fused = writer.call(torch.ops.flux.ag_gemm.default, *args, True, strategy)
    y = writer.call(operator.getitem, fused, 0)
    y = writer.flattened(writer.moved(y, 0, gather.dim))
    if product.bias is not in_op:
        y = writer.call(aten.add.Tensor, y, product.bias)
    gathered = writer.call(operator.getitem, fused, 1)
    gathered_there = writer.moved(gathered, 0, gather.dim)

    product.node.replace_all_uses_with(y)
    erase_unused([product.node])
    replace_collective(gather.collective, gather.result, gathered_there)
    erase_unused([gathered_there])
    if gathered._erased:
        fused.args = (*args, False, strategy)
        fused.meta["val"] = (value(fused)[0], value(gather.shard).new_empty(0))
    note = _note(gather, len(products) - 1, gathered._erased)
    return Replaced(gather.collective.name, product.node.name, "ag_gemm", note)


def _note(gather: Gather, others: int, only_use: bool) -> str:
    notes = []
    if gather.dim != 0:
        notes.append(f"dimension {gather.dim} is moved to the front and back")
    if others:
        notes.append(f"{others} more products use the operand that it gathers")
    elif not only_use:
        notes.append("what else uses the gathered operand has that of ag_gemm")
    return ", ".join(notes)


def _hint(size) -> int:
    return size if isinstance(size, int) else size.node.hint or 0


def _products(gather: Gather) -> list[Product]:
    """The products that ag_gemm could compute, in the order of the graph."""
    if gather.dim == value(gather.shard).ndim - 1:
        raise NotMatchedError("it gathers the last dimension, over which a product contracts")
    if value(gather.shard).ndim < 2:
        raise NotMatchedError("it gathers a vector")
    same = list(regroupings(gather.result))
    after = descendants(gather.collective)
    users = [(node, user) for node in same for user in node.users]
    found = {user: Product.of(user) for node, user in users if (p := Product.of(user)) and p.rows is node}
    products = [p for p in found.values() if not after.intersection(p.others())]
    if not products:
        raise NotMatchedError(_why_no_product(users, bool(found)))
    position = {node: i for i, node in enumerate(gather.collective.graph.nodes)}
    return sorted(products, key=lambda p: position[p.node])


def _why_no_product(users: list[tuple[Node, Node]], depends: bool) -> str:
    if depends:
        return "the other operand of its product depends on what it gathers"
    names = sorted({name_of(user) for _, user in users if not is_reshape(user)})
    for node, user in users:
        if user.target in CASTS and value(user).dtype != value(node).dtype:
            return f"what it gathers is converted from {value(node).dtype} to {value(user).dtype} ahead of a product"
    if any("_scaled_mm" in name for name in names):
        return "its product is a scaled one (fp8), which ag_gemm does not have"
    return f"no matrix product has it as its rows; it is used by {', '.join(names) or 'reshapes of its last dimension'}"
