"""What a node that communicates does, in the same words for every family of collectives.

torch's functional collectives are here: they work on dimension 0, and wait_tensor has their result. A framework with
collectives of its own brings a table as COLLECTIVES.
"""

import dataclasses

import torch
from torch.fx import Node

from flux_ops.inductor.graph import NotMatchedError, c10d, waited


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # "all_gather", "reduce_scatter" or "all_reduce"
    node: Node
    operand: Node  # this rank's shard, or its partial sum
    result: Node  # what the users have: wait_tensor, or the node itself
    group_name: str  # of the process group, for torch.distributed
    world: int
    dim: int = 0  # that is gathered or scattered
    how: str = "sum"  # it reduces


def _name_of(group) -> str:
    if isinstance(group, str):
        return group
    raise NotMatchedError("its group is not given by name, as torch.compiler.config.compile_on_one_rank has it")


def _all_gather(node: Node) -> Collective:
    shard, world, group = node.args
    return Collective("all_gather", node, shard, waited(node), _name_of(group), world)


def _reduce_scatter(node: Node) -> Collective:
    partial, how, world, group = node.args
    return Collective("reduce_scatter", node, partial, waited(node), _name_of(group), world, how=how)


def _all_reduce(node: Node) -> Collective:
    partial, how, group = node.args
    world = torch.distributed.distributed_c10d._resolve_process_group(_name_of(group)).size()
    return Collective("all_reduce", node, partial, waited(node), group, world, how=how)


def _refuse_coalesced(node: Node) -> Collective:
    raise NotMatchedError("it is one collective for several tensors")


# By the operator's name, what reads a node of it; that raises NotMatchedError for one that can't be overlapped.
COLLECTIVES = {
    str(c10d.all_gather_into_tensor.default): _all_gather,
    str(c10d.reduce_scatter_tensor.default): _reduce_scatter,
    str(c10d.all_reduce.default): _all_reduce,
    str(c10d.all_gather_into_tensor_coalesced.default): _refuse_coalesced,
    str(c10d.reduce_scatter_tensor_coalesced.default): _refuse_coalesced,
    str(c10d.all_reduce_coalesced.default): _refuse_coalesced,
}
