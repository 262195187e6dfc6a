"""Tables of text, and what the tuner has found as one."""

import statistics
from collections.abc import Iterable

from flux_ops.tuner.cache import Entry

NEAR_PERCENT = 10


def aligned(heads, body):
    widths = [max(len(row[c]) for row in [heads, *body]) for c in range(len(heads))]

    def line(row):
        cells = [
            cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return [line(heads), "  ".join("-" * w for w in widths), *map(line, body)]


def _product_cells(entry: Entry) -> list[str]:
    p = entry.product
    return [p.op, str(p.m), str(p.n), str(p.k), p.dtype, p.layout, str(p.tp)]


_PRODUCT_HEADS = ["op", "M", "N", "K", "dtype", "weight", "TP"]


def _sorted(entries: Iterable[Entry]) -> list[Entry]:
    return sorted(entries, key=lambda e: (e.product.device, e.product.tp, e.product.op, e.product.m, e.product.n))


def entries_table(entries: Iterable[Entry]) -> list[str]:
    """Every entry: the choice and its time in µs beside those of the plain sequence and of the product alone."""
    heads = [*_PRODUCT_HEADS, "device", "choice", "us", "sequential", "gemm", "date"]
    body = [
        [
            *_product_cells(e),
            e.product.device,
            e.choice,
            f"{e.us:.1f}",
            f"{e.sequential_us:.1f}",
            f"{e.gemm_us:.1f}",
            e.date[:10],
        ]
        for e in _sorted(entries)
    ]
    return aligned(heads, body)


def comparison(entries: Iterable[Entry]) -> list[str]:
    """The model's choice beside the tuned one, and how often it is near it."""
    entries = [e for e in _sorted(entries) if e.model_us > 0]
    if not entries:
        return ["There is no entry to compare."]
    ratios = [e.model_us / e.us for e in entries]
    body = [
        [*_product_cells(e), e.choice, f"{e.us:.1f}", e.model, f"{e.model_us:.1f}", f"{ratio:.3f}"]
        for e, ratio in zip(entries, ratios, strict=True)
    ]
    near = sum(ratio <= 1 + NEAR_PERCENT / 100 for ratio in ratios) / len(ratios)
    return [
        *aligned([*_PRODUCT_HEADS, "tuned", "us", "model", "us", "ratio"], body),
        f"The model is within {NEAR_PERCENT} % of the tuned choice on {near:.0%} of {len(ratios)} shapes; it takes "
        f"{statistics.geometric_mean(ratios):.3f} times as long on average, at worst {max(ratios):.3f}.",
    ]
