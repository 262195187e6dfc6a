"""The pass."""

import inspect
import pathlib

from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx import Graph

from flux_ops import fallback
from flux_ops.inductor import gather, reduce
from flux_ops.inductor.collective import COLLECTIVES
from flux_ops.inductor.graph import NotMatchedError, drop_whole_slices, merge_equal_gathers
from flux_ops.inductor.report import Left, Report
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
        collectives: what it looks for; by default the functional collectives. See flux_ops/inductor/collective.py.

    Raises ValueError for an unknown strategy.
    """

    def __init__(self, strategy: str = "auto", *, collectives: dict = COLLECTIVES):
        fallback.check_strategy("OverlapPass", strategy)
        self.strategy, self.collectives = strategy, collectives

    def __call__(self, graph: Graph) -> None:
        graph.eliminate_dead_code()
        drop_whole_slices(graph)
        merge_equal_gathers(graph)
        report = Report()
        for node in list(graph.nodes):
            read = self.collectives.get(str(node.target))
            if node.op != "call_function" or node._erased or read is None:
                continue
            try:
                collective = read(node)
                report.replaced.append(_OVERLAPS[collective.kind](graph, collective, self.strategy))
            except NotMatchedError as reason:
                report.left.append(Left(node.name, f"{reason}."))
        if report.replaced:
            stable_topological_sort(graph)
            graph.lint()
        if report.replaced or report.left:
            report.publish()

    def uuid(self) -> tuple:
        """What a compiled graph depends on: Inductor's cache has it in its key."""
        sources = {str(path) for path in pathlib.Path(__file__).parent.glob("*.py")}
        sources |= {inspect.getfile(read) for read in self.collectives.values()}
        names = tuple(sorted(self.collectives))
        return __version__, self.strategy, names, get_hash_for_files(tuple(sorted(sources)))


_OVERLAPS = {"all_gather": gather.overlap, "reduce_scatter": reduce.overlap, "all_reduce": reduce.overlap}
