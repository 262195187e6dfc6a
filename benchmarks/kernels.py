"""The kernels of the fused strategy alone, without communication, against cuBLAS. One GPU is enough.

    python benchmarks/kernels.py --tp 2,4 --lists mlp,gpt3
    python benchmarks/kernels.py --ops ag_gemm --kernels c128x256_2x1,p128x128_2x1 --orders m1,n2
    python benchmarks/kernels.py --lists decode --ops ag_gemm,gemm_ar       the kernels for few rows

Each kernel computes what a rank of TP would, with all that its peers would send there from the start (those for few
rows: what a rank would that has no peers). A first pass times every kernel and tile order a few times, a second one the
fastest of them: interleaved, as in flux_ops bench. The results are written to benchmarks/results/ and to $OUT.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

from flux_ops import extension, launch
from flux_ops.bench import report
from flux_ops.bench.command import SHAPES
from flux_ops.tuner import timing
from flux_ops.tuner.measure import GEMM, MAX_COPIES, ROTATE_BYTES, difference
from flux_ops.tuner.shapes import read_lists

TOLERANCE = 2e-2
FIRST_ROUNDS = 3
FEW_ROWS = 512  # up to so many the kernels for few rows are measured


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", default="mlp,gpt3")
    parser.add_argument("--shapes", default="", help="only these shapes, by name")
    parser.add_argument("--tp", default="2,4")
    parser.add_argument("--ops", default="ag_gemm,gemm_rs")
    parser.add_argument("--kernels", default="", help="comma-separated; default: all for so many rows")
    parser.add_argument("--orders", default="m1,m4,n2,n4")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--keep", type=int, default=6, help="candidates of the second pass")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which everything is stopped")
    parser.add_argument("--name", default="kernels")
    return parser.parse_args()


class Row:
    """One product: operands in rotation, and the candidates on them."""

    def __init__(self, op, shape, tp, device):
        m, n, k = shape.product(op, tp)
        x_size, w_size = (m, k), (n, k)
        gen = torch.Generator(device).manual_seed(1)
        per_call = 2 * (x_size[0] * x_size[1] + w_size[0] * w_size[1])
        copies = min(max(ROTATE_BYTES // per_call, 1), MAX_COPIES)
        self.op, self.tp, self.m = op, tp, m
        self.x = [torch.randn(x_size, generator=gen, device=device).bfloat16() for _ in range(copies)]
        weight = (torch.randn(w_size, generator=gen, device=device) * w_size[1] ** -0.5).bfloat16()
        self.w = [weight.clone() for _ in range(copies)]

    def gemm(self, i):
        return F.linear(self.x[i % len(self.x)], self.w[i % len(self.w)])

    def candidate(self, config):
        core, where = extension.module, (self.tp, config)
        scratch = core.alone_scratch(self.op, self.x[0], self.w[0], *where)
        return lambda i: core.run_alone(self.op, self.x[i % len(self.x)], self.w[i % len(self.w)], *where, scratch)

    def expected(self, config):
        whole = self.op == "ag_gemm" or config[0].isdigit()
        return self.gemm(0) if whole else self.gemm(0)[-self.m // self.tp :]

    def configs(self, args):
        few = self.m <= FEW_ROWS
        names = [name for name in extension.module.config_names("cuda").split() if name[0].isdigit() == few]
        names = list(filter(None, args.kernels.split(","))) or names
        if few:
            return [f"{name}/one-shot" if self.op == "gemm_ar" else name for name in names]
        return [f"{name}/{order}/p1" for name in names for order in args.orders.split(",")]


def measure(place, clock, op, shape, tp, args):
    row = Row(op, shape, tp, place.device)
    calls = {GEMM: row.gemm}
    for config in row.configs(args):
        try:
            call = row.candidate(config)
            error = difference(call(0), row.expected(config))
        except (RuntimeError, ValueError) as reason:
            print(f"{config}: {str(reason).splitlines()[0]}")
            continue
        if not error <= TOLERANCE:
            print(f"{config}: wrong by {error:.1e}")
            continue
        calls[config] = call
    works = {}
    for name, call in calls.items():
        count = timing.calls_per_sample(place, clock, call)
        works[name] = timing.repeated(call, count), count
    first = timing.interleave(place, clock, works, FIRST_ROUNDS, warmup=1)
    best = sorted((n for n in first if n != GEMM), key=lambda n: first[n].median)[: args.keep]
    second = timing.interleave(place, clock, {n: works[n] for n in (GEMM, *best)}, args.rounds, warmup=1)
    base1, base2 = first[GEMM].median, second[GEMM].median
    print(
        f"{op} {shape.name} tp{tp}: cuBLAS {base2:.1f} us; "
        + ", ".join(
            f"{n.removesuffix('/p1')} {second[n].median / base2:.3f}"
            for n in sorted(best, key=lambda n: second[n].median)
        ),
        flush=True,
    )
    return {
        "op": op, "name": shape.name, "M": shape.m, "H": shape.h, "I": shape.i, "tp": tp,
        "gemm": base2,
        "first": {n: t.median / base1 for n, t in first.items()},
        "ratio": {n: t.median / base2 for n, t in second.items()},
    }  # fmt: skip


def run(place, args):
    wanted = set(filter(None, args.shapes.split(",")))
    shapes = [shape for _, shape in read_lists(SHAPES, args.lists) if not wanted or shape.name in wanted]
    clock = timing.Clock(place)
    document = {"environment": report.environment(place), "rows": []}
    folders = report.folders(keep=True)
    for op in args.ops.split(","):
        for tp in map(int, args.tp.split(",")):
            for shape in (shape for shape in shapes if shape.suits(op, tp)):
                document["rows"].append(measure(place, clock, op, shape, tp, args))
                report.write(document, args.name, folders)
                torch.cuda.empty_cache()
    print()
    for op in args.ops.split(","):
        for tp in map(int, args.tp.split(",")):
            rows = [r["ratio"] for r in document["rows"] if r["op"] == op and r["tp"] == tp]
            best = [min(v for name, v in ratio.items() if name != GEMM) for ratio in rows if len(ratio) > 1]
            if not best:
                continue
            summary = f"mean {report.mean(best):.3f}, worst {max(best):.3f}, at most 1 on {sum(v <= 1 for v in best)}"
            print(f"{op} tp{tp}: the best kernel's time / cuBLAS: {summary} of {len(best)} shapes")


def main():
    args = parse_arguments()
    if not launch.under_launcher():
        sys.exit(launch.run_ranks(1, args.limit))
    with launch.joined("cuda") as place:
        run(place, args)


if __name__ == "__main__":
    main()
