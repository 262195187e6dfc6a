"""Reading and writing FX graphs of ATen operators and functional collectives."""

import dataclasses
import operator
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten, c10d = torch.ops.aten, torch.ops._c10d_functional

RESHAPES = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
CASTS = (torch.ops.prims.convert_element_type.default, aten._to_copy.default)
PRODUCTS = (aten.mm.default, aten.addmm.default)


class NotMatchedError(Exception):
    """The reason why a collective can't be overlapped, as the end of a sentence."""


def value(node: Node) -> torch.Tensor:
    return node.meta["val"]


def is_same(a, b) -> bool:
    """Whether two sizes are equal, whatever values the symbols in them take."""
    return statically_known_true(a == b)


def is_reshape(node: Node) -> bool:
    return node.target in RESHAPES


def name_of(node: Node) -> str:
    return getattr(node.target, "__name__", str(node.target)) if node.op == "call_function" else node.op


@dataclasses.dataclass(frozen=True)
class Product:
    """rows [M, K] · columns [K, N], and a bias if the node is an addmm."""

    node: Node
    bias: Node | None
    rows: Node
    columns: Node

    @staticmethod
    def of(node: Node) -> "Product | None":
        if node.target == aten.mm.default:
            return Product(node, None, *node.args)
        if node.target == aten.addmm.default and all(node.kwargs.get(name, 1) == 1 for name in ("alpha", "beta")):
            return Product(node, *node.args)
        return None

    @property
    def n(self):
        return value(self.columns).shape[1]

    def others(self) -> list[Node]:
        """What the product needs besides its rows."""
        return [self.columns] if self.bias is None else [self.columns, self.bias]


def descendants(node: Node) -> set[Node]:
    found, todo = {node}, [node]
    while todo:
        for user in todo.pop().users:
            if user not in found:
                found.add(user)
                todo.append(user)
    return found


def regroupings(node: Node) -> Iterator[Node]:
    """The node and its reshapes that keep the last dimension: the same rows under other leading dimensions."""
    yield node
    for user in node.users:
        if is_reshape(user) and is_same(value(user).shape[-1], value(node).shape[-1]):
            yield from regroupings(user)


def waited(collective: Node) -> Node:
    """The wait_tensor node. Whoever else holds the collective's result, holds the same tensor."""
    waits = [user for user in collective.users if user.target == c10d.wait_tensor.default]
    if len(waits) != 1:
        raise NotMatchedError(f"it is waited for {len(waits)} times")
    return waits[0]


def chunks_put_together(parts: list[Node], world: int) -> Node | None:
    """The split whose `world` results `parts` are, in order and for no other use, or None."""
    if len(parts) != world or not all(isinstance(p, Node) and name_of(p) == "getitem" for p in parts):
        return None
    split = parts[0].args[0]
    in_order = all(p.args == (split, i) and len(p.users) == 1 for i, p in enumerate(parts))
    return split if in_order and split.target == aten.split.Tensor and len(split.users) == world else None


def dim_of(node: Node, position: int, ndim: int) -> int:
    """The dimension that a split, a slice or a cat works on."""
    dim = node.args[position] if len(node.args) > position else node.kwargs.get("dim", 0)
    return dim % ndim


_MERGED = (
    c10d.all_gather_into_tensor.default,
    c10d.wait_tensor.default,
    aten.split.Tensor,
    operator.getitem,
    aten.cat.default,
    *RESHAPES,
)


def merge_equal_gathers(graph: Graph) -> None:
    """One node where several gather the same shard and regroup it alike, as DTensor has them in each layer."""
    first: dict[tuple, Node] = {}
    for node in list(graph.nodes):
        if node.target in _MERGED and not node.kwargs:
            same = first.setdefault((node.target, _hashable(node.args)), node)
            if same is not node:
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def drop_whole_slices(graph: Graph) -> None:
    """Gathered operands are used as they are, not by slices that keep all: DTensor has these for symbolic sizes."""
    for node in list(graph.nodes):
        if node.target == aten.slice.Tensor and node.args[0].target in (c10d.wait_tensor.default, aten.cat.default):
            of, dim = node.args[0], dim_of(node, 1, value(node).ndim)
            if is_same(value(node).shape[dim], value(of).shape[dim]):
                node.replace_all_uses_with(of)
                graph.erase_node(node)


def _hashable(value):
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


class Writer:
    """Adds nodes in front of `anchor`, with what they return on fake tensors."""

    def __init__(self, graph: Graph, anchor: Node):
        self.graph, self.anchor = graph, anchor

    def call(self, target, *args) -> Node:
        with self.graph.inserting_before(self.anchor):
            node = self.graph.call_function(target, args)
        with torch.no_grad():
            node.meta["val"] = target(*torch.fx.map_arg(args, value))
        if "stack_trace" in self.anchor.meta:
            node.meta["stack_trace"] = self.anchor.meta["stack_trace"]
        return node

    def transposed(self, columns: Node) -> Node:
        """[K, N] -> [N, K], as a view; where it is a view of that already, that."""
        if columns.target in (aten.permute.default, aten.t.default):
            return columns.args[0]
        return self.call(aten.permute.default, columns, [1, 0])

    def moved(self, node: Node, source: int, to: int) -> Node:
        """A dimension moved to another place, and the result contiguous."""
        if source == to:
            return node
        order = list(range(value(node).ndim))
        order.insert(to, order.pop(source))
        across = range(min(source, to), max(source, to) + 1)
        if all(dim == source or is_same(value(node).shape[dim], 1) for dim in across):
            return self.reshaped(node, [self.size(node, dim) for dim in order])
        moved = self.call(aten.permute.default, node, order)
        with self.graph.inserting_before(self.anchor):
            copy = self.graph.call_function(aten.clone.default, (moved,), {"memory_format": torch.contiguous_format})
        copy.meta["val"] = value(moved).clone(memory_format=torch.contiguous_format)
        return copy

    def reshaped(self, node: Node, sizes: list) -> Node:
        return self.call(aten.reshape.default, node, sizes)

    def flattened(self, node: Node) -> Node:
        """[..., N] -> [rows, N]."""
        if value(node).ndim == 2:
            return node
        return self.reshaped(node, [-1, self.size(node, value(node).ndim - 1)])

    def size(self, node: Node, dim: int):
        size = value(node).shape[dim]
        return size if isinstance(size, int) else self.call(aten.sym_size.int, node, dim)


def erase_unused(nodes: list[Node]) -> None:
    """Erases those of the nodes that nothing uses, users first, and what was there for them alone."""
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node._erased or node.users or node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        node.graph.erase_node(node)
        todo += [i for i in inputs if i.op == "call_function"]


def replace_collective(collective: Node, result: Node, by: Node) -> None:
    """Whoever uses the result of a collective uses `by`; so does an output of the graph that was not waited for."""
    if not result._erased:
        result.replace_all_uses_with(by)
    if not collective._erased:
        collective.replace_all_uses_with(by, delete_user_cb=lambda user: user.target != c10d.wait_tensor.default)
        erase_unused([node for node in (result, collective) if not node._erased])
