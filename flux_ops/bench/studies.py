"""Studies of one knob: what FLUX (papers/flux.txt) and FiCCO (papers/ficco.txt) show in their figures, on these ops.

Each study is a contest of the harness whose candidates stand in columns; the first column is what the others are
compared with. `rows` alone (rows.py) varies the product.
"""

import re
import statistics

import flux_ops
from flux_ops.bench import report
from flux_ops.bench.candidates import DECOMPOSED, FUSED
from flux_ops.bench.harness import Contest
from flux_ops.bench.rows import Rows
from flux_ops.bench.rows import table as rows_table
from flux_ops.bench.transfer import Transfers
from flux_ops.tuner.measure import GEMM, SEQUENTIAL

PIECES = (1, 2, 4, 8)
WALKS = ("n1", "n2", "n4", "n8", "m1", "m2", "m4", "m8")
SAME_ORDER = "/same-order"  # csrc/schedule/chunk_order.hpp


class Study(Contest):
    ops = ("ag_gemm", "gemm_rs")

    def __init__(self, place, args, todo):
        self.place, self.dtype = place, args.dtype

    def kernel(self, op, product):
        """The configuration of `fused` that is varied: the tuned one where there is one, else the model's first."""
        place, (m, n, k) = self.place, product
        where = place.device.type, place.device.index if place.is_cuda else -1
        hooks, core = flux_ops.ops._hooks, flux_ops.ops._core
        if core is None:
            raise RuntimeError(f"there is nothing to vary: {flux_ops.why_not_cuda()}")
        choices = core.candidates(op, where[0], place.world, m, n, k, self.dtype, False)
        choices.insert(0, hooks.tuned(op, m, n, k, self.dtype, False, place.world, where)[0])
        found = next((c for c in choices if c.startswith(FUSED)), None)
        found = place.everyone(found)[0]
        if found is None:
            raise RuntimeError(f"{op} can't run fused here, so there is nothing to vary")
        return found


class Swizzle(Study):
    """FLUX, figure 8: the order of the chunks shifted by the rank, or the same on all ranks (and in gemm_rs one chunk
    after the other, where else those of the peers are interleaved); and the walk of the tiles inside a chunk
    (along n or m, in stripes of so many clusters), which decides what a wave finds in the L2."""

    def columns(self, op, product):
        kernel = self.kernel(op, product)
        columns = {"rank order": [kernel], "same order": [kernel + SAME_ORDER]}
        if kernel.count("/") == 2:  # kernel/walk/pieces: the CPU's have no walk
            tiles, _, pieces = kernel.split("/")
            columns |= {f"walk {walk}": [f"{tiles}/{walk}/{pieces}"] for walk in WALKS}
        return columns


class Chunks(Study):
    """FLUX, figure 10: how many pieces a chunk travels in, each with a signal of its own."""

    def columns(self, op, product):
        kernel = self.kernel(op, product)
        return {f"p{count}": [re.sub(r"/p\d+", f"/p{count}", kernel)] for count in PIECES}


class Schedule(Study):
    """FiCCO, figure 12: its schedules, each with the best of its numbers of chunks, and the one that its heuristic
    takes, beside the fused kernel and the plain sequence."""

    def columns(self, op, product):
        columns = {"fused": [self.kernel(op, product)], "sequential": [SEQUENTIAL], "heuristic": [DECOMPOSED]}
        for name in flux_ops.ops._core.decomposed_candidates(op):
            columns.setdefault(name.partition("/")[0], []).append(f"{DECOMPOSED}:{name}")
        return columns


class Transfer(Study):
    """FLUX, figure 9: the shards of the all-gather moved by copy engine alone, pushed or pulled, one peer after another
    or all at once; beside NCCL's all-gather and the fused op, which moves the same data and computes besides."""

    ops = ("ag_gemm",)

    def __init__(self, place, args, todo):
        super().__init__(place, args, todo)
        self.transfers = Transfers(
            place, args.dtype, [shape.product(op, place.world) for _, shape, ops in todo for op in ops]
        )

    def columns(self, op, product):
        return {name: [name] for name in self.transfers.NAMES} | {"fused op": [self.kernel(op, product)], GEMM: [GEMM]}

    def make(self, name, op, operands, group=None):
        if name in self.transfers.NAMES:
            return self.transfers.make(name, operands)
        return super().make(name, op, operands, group)

    def expected(self, name, op, operands, want, mode):
        if name in self.transfers.NAMES:
            # In a graph nothing keeps a peer's write from coming before the old result is wiped.
            return self.transfers.expected(name, operands) if mode == "eager" else None
        return super().expected(name, op, operands, want, mode)


STUDIES = {"swizzle": Swizzle, "transfer": Transfer, "chunks": Chunks, "schedule": Schedule, "rows": Rows}


def table(document, op, mode):
    """The columns of a study, a line for each shape; empty if it has none of this op and mode."""
    if document["study"] == "rows":
        return rows_table(document, op, mode)
    rows = report.select(document, op, mode)
    if not rows:
        return ""
    titles = list(dict.fromkeys(title for row in rows for title in row["columns"]))
    bandwidths = document["study"] == "transfer"
    body, ratios = [], {title: [] for title in titles}
    for row in rows:
        first = _fastest(row, titles[0])
        cells = []
        for title in titles:
            found = _fastest(row, title)
            if found and first and title != titles[0]:
                ratios[title].append(found[1] / first[1])
            cells.append(_bandwidth(document, row, title, found) if bandwidths else _cell(row, title, found, first))
        body.append([row["name"], str(row["M"]), *cells])
    if not bandwidths:
        means = [f"{statistics.geometric_mean(r):.3f}" if r else "" for r in ratios.values()]
        body.append(["geometric mean", "", *means])
    what = (
        "GB/s received by a rank; ms of the fused op and of the product alone"
        if bandwidths
        else f"ms of '{titles[0]}', then the time of each as a multiple of it"
    )
    return "\n".join(report.study_table(document, op, mode, what, ["shape", "M", *titles], body))


def _fastest(row, title):
    """(candidate, µs) of the fastest of a column, or None."""
    timed = [(name, row["times"][name]["median"]) for name in row["columns"].get(title, []) if name in row["times"]]
    return min(timed, key=lambda pair: pair[1], default=None)


def _cell(row, title, found, first):
    if not found:
        return report.DASH
    if first is None or found is first or title == next(iter(row["columns"])):
        return f"{found[1] / 1e3:.3f}"
    which = " " + found[0].rpartition("/")[2] if len(row["columns"][title]) > 1 else ""
    return f"{found[1] / first[1]:.3f}{which}"


def _bandwidth(document, row, title, found):
    if not found:
        return report.DASH
    if title not in Transfers.NAMES:
        return f"{found[1] / 1e3:.3f}"
    received = (document["environment"]["tp"] - 1) * row["shard_bytes"]
    return f"{received / found[1] / 1e3:.1f}"
