"""A picture of a results file: for each shape the speed of the sequence, of PyTorch's op and of ours.

    python benchmarks/plot.py benchmarks/results/NAME.json     writes benchmarks/results/NAME.svg

Needs matplotlib (requirements/plot.txt). Bars are T_gemm / T: 1 is the speed of the product alone. Text and lines are
of a grey that can be read on light and on dark pages; the ground is transparent.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import matplotlib as mpl

mpl.use("svg")
from matplotlib import pyplot

from flux_ops.bench import report
from flux_ops.bench.candidates import RIVALS
from flux_ops.tuner.measure import GEMM, SEQUENTIAL

INK = "#7f868e"
OURS = "flux_ops"
COLOURS = {SEQUENTIAL: "#a5acb4", "torch": "#d99a3d", "one-shot": "#d99a3d", "two-shot": "#a46fc0", OURS: "#2f8fd8"}
STYLE = {
    "svg.fonttype": "none",  # text stays text: small, and it can be searched
    "svg.hashsalt": "flux_ops",  # the same picture for the same numbers
    "font.family": ["sans-serif"],
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def speeds(rows, op):
    """By bar: for each row the speed relative to that of the product alone; None where there is no time."""
    names = {SEQUENTIAL: lambda row: SEQUENTIAL}
    names |= {rival: lambda row, rival=rival: rival for rival in RIVALS[op]}
    names[OURS] = report.default_of
    found = {}
    for bar, name_of in names.items():
        timed = [row["times"].get(name_of(row)) for row in rows]
        found[bar] = [t and row["times"][GEMM]["median"] / t["median"] for row, t in zip(rows, timed, strict=True)]
    return found


def draw(document, mode, path):
    mode = mode if mode in document["modes"] else document["modes"][0]
    panels = {op: rows for op in report.TITLES if (rows := report.select(document, op, mode))}
    meta = document["environment"]
    with mpl.rc_context(STYLE):
        figure, axes = pyplot.subplots(len(panels), 1, figsize=(9.6, 2.9 * len(panels)), squeeze=False)
        for axis, (op, rows) in zip(axes[:, 0], panels.items(), strict=True):
            bars = speeds(rows, op)
            width = 0.8 / len(bars)
            for index, (bar, values) in enumerate(bars.items()):
                places = [i - 0.4 + width * (index + 0.5) for i in range(len(rows))]
                axis.bar(places, [v or 0 for v in values], width, label=bar, color=COLOURS[bar], clip_on=False)
            axis.axhline(1, color=INK, linewidth=0.8, linestyle="--")
            axis.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=30, ha="right")
            axis.tick_params(axis="x", length=0)
            axis.set_xlim(-0.6, len(rows) - 0.4)
            axis.set_ylabel("T(gemm) / T")
            axis.set_title(f"{op} ({report.TITLES[op]}), TP = {meta['tp']}, {meta['card']}", fontsize=10, loc="left")
            axis.spines[["top", "right"]].set_visible(False)
            axis.legend(ncols=len(bars), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
        figure.tight_layout()
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        pyplot.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=pathlib.Path)
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"))
    args = parser.parse_args()
    path = args.results.with_suffix(".svg")
    draw(json.loads(args.results.read_text()), args.mode, path)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
