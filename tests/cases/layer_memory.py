"""What layers keep for their backward, and checkpoints of what keeps the gathered x."""

import functools
import itertools

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from tests.cases.base import FP32
from tests.cases.layers import IN, KINDS, OUT, TOKENS, Cell
from tests.harness.compare import Findings

OPTIONS = [
    {"save_gathered": gathered, "gradient_accumulation_fusion": fused}
    for gathered, fused in itertools.product((False, True), (False, True))
]


def cell_of(ctx, kind, options):
    given = options if kind == "column" else {name: v for name, v in options.items() if name != "save_gathered"}
    cell = Cell(ctx, kind, True, seed=4, **given).require((1, 1, 1))
    if options["gradient_accumulation_fusion"]:
        cell.layer.weight.main_grad = torch.zeros_like(cell.layer.weight, dtype=FP32)
    return cell


def kept(ctx, kind):
    """This rank's part of x alone, and the weight; all of x if that is asked for."""
    for options in OPTIONS:
        cell, shapes = cell_of(ctx, kind, options), []
        with saved_tensors_hooks(lambda t, shapes=shapes: shapes.append(tuple(t.shape)) or t, lambda t: t):
            y = cell.layer(cell.x)
        rows = TOKENS * ctx.world if kind == "row" or options["save_gathered"] else TOKENS
        x = (rows, IN) if kind == "column" else (rows, IN // ctx.world)
        weight = (OUT // ctx.world, IN) if kind == "column" else (OUT, IN // ctx.world)
        assert sorted(shapes) == sorted([x, weight]), f"{options}: kept {shapes}"
        del y


def selective():
    def policy(context, op, *args, **options):
        return CheckpointPolicy.MUST_SAVE if "flux" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


CHECKPOINTS = {
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "not reentrant": functools.partial(checkpoint, use_reentrant=False),
    "selective": functools.partial(checkpoint, use_reentrant=False, context_fn=selective),
}


def checkpointed(ctx, kind):
    findings = Findings()
    for options, (name, run) in itertools.product(OPTIONS, CHECKPOINTS.items()):
        cell = cell_of(ctx, kind, options)
        y = run(cell.layer, cell.x)
        cell.compare(findings, f"{name}, {options}: y", y.detach(), cell.expected()[0])
        y.backward(cell.grad)
        cell.compare_grads(findings, f"{name}, {options}")
    return findings.finish()


class LayerMemoryCases:
    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_what_is_kept(self, ranks, kind):
        ranks.run(kept, kind)

    @pytest.mark.worlds(2, 4)
    @pytest.mark.parametrize("kind", tuple(KINDS))
    def test_checkpoints(self, ranks, kind, record_property):
        record_property("cells", ranks.run(checkpointed, kind)[0])
