"""What Inductor and importers need of the pass, and what pass and styles refuse; the rest is tested with ranks."""

import pickle
import subprocess
import sys

import pytest
import torch

import flux_ops


def test_uuid_tells_passes_apart():
    first, same, other = (flux_ops.inductor.OverlapPass(s).uuid() for s in ("auto", "auto", "sequential"))
    assert first == same
    assert first != other
    assert pickle.loads(pickle.dumps(first)) == first
    fewer = dict(list(flux_ops.inductor.collective.COLLECTIVES.items())[:-1])
    assert flux_ops.inductor.OverlapPass(collectives=fewer).uuid() != first


@pytest.mark.parametrize("strategy", ("best", None, "sequential:t64x64"))
def test_unknown_strategies_are_refused(strategy):
    for make in (
        flux_ops.inductor.OverlapPass,
        flux_ops.parallel.ColwiseParallel,
        flux_ops.parallel.RowwiseParallel,
    ):
        with pytest.raises(ValueError, match=f"{make.__name__}: strategy is {strategy!r}; allowed are"):
            make(strategy=strategy)


@pytest.mark.parametrize("kind", ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"))
def test_a_group_without_a_name_is_left(kind):
    """Later versions of torch can have it in the graph as an object."""
    graph, functional = torch.fx.Graph(), torch.ops._c10d_functional
    x, group = graph.placeholder("x"), graph.placeholder("group")
    how, world = (() if kind == "all_gather_into_tensor" else ("sum",)), (() if kind == "all_reduce" else (2,))
    work = graph.call_function(getattr(functional, kind).default, (x, *how, *world, group))
    graph.output(graph.call_function(functional.wait_tensor.default, (work,)))
    flux_ops.inductor.OverlapPass()(graph)
    (left,) = flux_ops.inductor.last_report().left
    assert left.reason.startswith("its group is not given by name")


IMPORTS = """
import sys, flux_ops
assert not [n for n in ("torch._inductor.custom_graph_pass", "torch.distributed.tensor", "vllm") if n in sys.modules]
flux_ops.inductor.OverlapPass, flux_ops.parallel.ColwiseParallel
"""


def test_imported_on_demand():
    subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], check=True, timeout=100)
    with pytest.raises(AttributeError, match="no attribute 'inductors'"):
        _ = flux_ops.inductors
