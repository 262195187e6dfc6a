"""The pass."""

import pathlib

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph, Node

from flux_ops import fallback
from flux_ops.inductor import gather, reduce
from flux_ops.inductor.graph import NotMatchedError, c10d, merge_equal_gathers
from flux_ops.inductor.report import Left, Replaced, Report
from flux_ops.version import __version__


class OverlapPass(CustomGraphPass):
    """Puts ag_gemm, gemm_rs and gemm_ar where a compiled graph has a collective next to a matrix product.

    ::

        all_gather(X) · Wᵀ        ->  ag_gemm(X, W)
        reduce_scatter(X · Wᵀ)    ->  gemm_rs(X, W)
        all_reduce(X · Wᵀ)        ->  gemm_ar(X, W)

    A pass of Inductor, for models whose tensor parallelism comes from DTensor (parallelize_module) or from
    torch.distributed's functional collectives::

        model = torch.compile(model, options={"post_grad_custom_post_pass": flux_ops.inductor.OverlapPass()})

    Products: mm and addmm, of bfloat16, float16, float32 and float64, on 2-D operands or on reshaped ones of more
    dimensions. Collectives: along dimension 0, or along another one but the last, which is then moved to the front and
    back. If several products share a gather, the one with most columns becomes ag_gemm, the others use the operand that
    it has gathered. A bias of a reduced product must be the replicated one that DTensor divides by TP: it is taken to
    be the same on all ranks. Reductions: "sum" and "avg".

    What does not fit is left as it is; `flux_ops.inductor.last_report()` says why, and so does the logger
    "flux_ops.inductor" at level INFO.

    Args:
        strategy: of all operators, as in flux_ops.ag_gemm.

    Raises ValueError for an unknown strategy.
    """

    def __init__(self, strategy: str = "auto"):
        fallback.check_strategy("OverlapPass", strategy)
        self.strategy = strategy

    def __call__(self, graph: Graph) -> None:
        graph.eliminate_dead_code()
        merge_equal_gathers(graph)
        report = Report()
        for node in list(graph.nodes):
            if node.op != "call_function" or node._erased or node.target not in _OVERLAPS:
                continue
            try:
                report.replaced.append(_OVERLAPS[node.target](graph, node, self.strategy))
            except NotMatchedError as reason:
                report.left.append(Left(node.name, f"{reason}."))
        if report.replaced:
            stable_topological_sort(graph)
            graph.lint()
        if report.replaced or report.left:
            report.publish()

    def uuid(self) -> tuple:
        """What a compiled graph depends on: Inductor's cache has it in its key."""
        sources = tuple(str(path) for path in sorted(pathlib.Path(__file__).parent.glob("*.py")))
        return __version__, self.strategy, get_hash_for_files(sources)


def _refuse_coalesced(graph: Graph, collective: Node, strategy: str) -> Replaced:
    raise NotMatchedError("it is one collective for several tensors")


_OVERLAPS = {
    c10d.all_gather_into_tensor.default: gather.overlap,
    c10d.reduce_scatter_tensor.default: reduce.overlap,
    c10d.all_reduce.default: reduce.overlap,
    c10d.all_gather_into_tensor_coalesced.default: _refuse_coalesced,
    c10d.reduce_scatter_tensor_coalesced.default: _refuse_coalesced,
    c10d.all_reduce_coalesced.default: _refuse_coalesced,
}
