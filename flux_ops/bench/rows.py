"""The study of the number of rows: `auto` on one layer, row by row, beside the best of what PyTorch has.

It flags a size at which `auto` is slower than the best of the others, and a step between neighbouring sizes that costs
much more than one row is worth.
"""

import dataclasses
import statistics

from flux_ops.bench import report
from flux_ops.bench.candidates import AUTO, RIVALS, explored
from flux_ops.bench.harness import Contest
from flux_ops.tuner.measure import GEMM, SEQUENTIAL

ROWS = (*range(1, 65), 65, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025)
DEFAULTS = {"modes": "graph", "rounds": 8, "shapes": "llama3.1-70b"}  # of the benchmark's options
MOST_RATIO, MOST_STEP = 1.02, 1.3


class Rows(Contest):
    def __init__(self, place, args, todo):
        self.rivals = "eager" in args.modes  # the replays of some do not end
        self.explored = explored(args.explore)

    def names(self, op, product):
        return [GEMM, SEQUENTIAL, *(RIVALS[op] if self.rivals else ()), *self.explored, AUTO]


def parse(text):
    """The numbers of rows of --rows, or the usual ones. Raises ValueError for anything else."""
    if not text:
        return ROWS
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"--rows is '{text}'; it must be numbers from 1 on, comma-separated")
    return tuple(map(int, parts))


def layers(shape, ops, rows, world):
    """(shape, ops) for each number of rows, with the ops that take it."""
    by_op = {op: sizes(op, rows, world) for op in ops}
    for m in sorted(set().union(*by_op.values())):
        yield dataclasses.replace(shape, m=m), tuple(op for op in ops if m in by_op[op])


def sizes(op, rows, world):
    """The numbers of rows for an op. Where the ranks share them: the multiples of their number on both sides."""
    if op == "gemm_ar":
        return set(rows)
    return {near for m in rows for near in (m // world * world, -(-m // world) * world) if near}


def table(document, op, mode):
    """A line for each size, with its flags; empty if there is none of this op and mode."""
    rows = report.select(document, op, mode)
    if not rows:
        return ""
    step = 1 if op == "gemm_ar" else document["environment"]["tp"]
    names = report.candidates_of(rows)
    before, body, flagged, speeds = {}, [], [], []
    for row in rows:
        times = {name: time["median"] for name, time in row["times"].items()}
        flags = flags_of(times, before.get((row["name"], row["M"] - step)))
        before[row["name"], row["M"]] = times
        flagged += [f"M = {row['M']}: {flag}" for flag in flags]
        if AUTO in times and SEQUENTIAL in times:
            speeds.append(times[SEQUENTIAL] / times[AUTO])
        cells = [f"{times[name] / 1e3:.3f}" if name in times else report.DASH for name in names]
        body.append([row["name"], str(row["M"]), *cells, row["ran"].get(AUTO, report.DASH), "; ".join(flags)])
    ending = (
        f"{len(flagged)} flags at {len(rows)} sizes (auto above {MOST_RATIO} x the best other, a step of {step} above "
        f"{MOST_STEP} x): {', '.join(flagged) or 'none'}"
    )
    endings = [ending]
    if speeds:
        endings.insert(0, f"auto is {statistics.geometric_mean(speeds):.2f} x as fast as {SEQUENTIAL}, geometric mean")
    heads = ["shape", "M", *names, "auto ran", "flags"]
    return "\n".join([*report.study_table(document, op, mode, "ms", heads, body), *endings])


def flags_of(times, times_before):
    """What is wrong with the time of `auto`, in words. `times_before` are those of the size before, or None."""
    if AUTO not in times:
        return []
    flags = []
    others = {name: time for name, time in times.items() if name not in (GEMM, AUTO)}
    if others:
        best = min(others, key=others.get)
        if times[AUTO] > MOST_RATIO * others[best]:
            flags.append(f"{times[AUTO] / others[best]:.2f} x {best}")
    if times_before and AUTO in times_before and times[AUTO] > MOST_STEP * times_before[AUTO]:
        flags.append(f"step {times[AUTO] / times_before[AUTO]:.2f} x")
    return flags
