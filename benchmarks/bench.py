"""The benchmark: both ops against the product alone, the plain sequence and PyTorch's fused ops.

    python benchmarks/bench.py                          mlp and gpt3 shapes, eager and CUDA graph, all GPUs
    python benchmarks/bench.py --lists sweep --ops gemm_rs --world 2
    python benchmarks/bench.py --explore CONFIG,CONFIG  configurations of `fused` (or decomposed, decomposed:CONFIG)
                                                        beside the usual columns
    torchrun --nproc-per-node 4 benchmarks/bench.py     ranks started by torchrun

Each candidate is checked against the plain sequence on random data before it is timed. One that fails or is not
available gets a dash and a footnote. The tables come last, the shortest at the very end; the full numbers are written
to benchmarks/results/ (and to $OUT, if it is set). Where there is no git, FLUX_COMMIT may say what is measured.
"""

import argparse
import dataclasses
import datetime
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

import flux_ops
from benchmarks import report
from benchmarks.candidates import AUTO, DECOMPOSED, FUSED, TORCH, make
from flux_ops import launch
from flux_ops.tuner import timing
from flux_ops.tuner.measure import GEMM, SEQUENTIAL, Operands, as_graph, attempt, why_wrong
from flux_ops.tuner.shapes import Shape, read_lists

STEP_LIMIT_S = 75  # for one shape and op: beyond it, a rank hangs
CPU_SCALE = 16


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lists", default="mlp,gpt3", help="lists of shapes.json, comma-separated")
    parser.add_argument("--shapes", default="", help="only these shapes, by name")
    parser.add_argument("--ops", default="ag_gemm,gemm_rs")
    parser.add_argument("--modes", default="eager,graph")
    parser.add_argument("--rounds", type=int, default=20, help="samples per candidate")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--world", type=int, default=0, help="ranks; default: all GPUs (on the CPU: 2)")
    parser.add_argument("--device", default="", choices=("", "cpu", "cuda"))
    parser.add_argument("--explore", default="", help="configurations to measure, comma-separated")
    parser.add_argument("--without", default="", help="candidates to leave out, comma-separated")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which everything is stopped")
    parser.add_argument("--name", default="", help="name of the results file")
    args = parser.parse_args()
    args.device = args.device or ("cuda" if torch.cuda.device_count() > 1 else "cpu")
    args.world = args.world or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.device == "cpu":
        args.modes = "eager"
    return args


def shapes_of(args):
    wanted = set(filter(None, args.shapes.split(",")))
    scale = CPU_SCALE if args.device == "cpu" else 1
    try:
        listed = read_lists(pathlib.Path(__file__).parent / "shapes.json", args.lists)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    for name, shape in listed:
        if not wanted or shape.name in wanted:
            yield name, Shape(shape.name, shape.m // scale, shape.h // scale, shape.i // scale)


class Run:
    """One shape and op after another; every decision is taken by all ranks alike."""

    def __init__(self, place, args):
        self.place, self.args = place, args
        self.dtype = getattr(torch, args.dtype)
        self.clock = timing.Clock(place)
        self.graph_group = dist.new_group() if "graph" in args.modes else None
        explored = [
            c if c.partition(":")[0] == DECOMPOSED else f"{FUSED}:{c}" for c in filter(None, args.explore.split(","))
        ]
        names = [GEMM, SEQUENTIAL, TORCH, FUSED, *explored, AUTO]
        self.names = [n for n in names if n not in args.without.split(",")]

    def checked(self, op, operands):
        """The candidates that run and agree with the sequence: name -> call; notes on the others; what ran."""
        calls, notes, ran = {}, {}, {}
        want, reason = attempt(self.place, lambda: make(SEQUENTIAL, op, operands)(0))
        if reason:
            raise RuntimeError(f"the sequential reference of {op} fails: {reason}")
        for name in self.names:
            call, reason = attempt(self.place, lambda name=name: make(name, op, operands))
            if reason is None:
                got, reason = attempt(self.place, lambda call=call: call(0))
            if reason is None and name.partition(":")[0] in (FUSED, DECOMPOSED, AUTO):
                dispatch = flux_ops.last_dispatch()
                ran[name] = f"{dispatch.strategy} {dispatch.config}".strip()
            if reason is None and not (name == GEMM and op == "gemm_rs"):  # there the product alone is one partial
                reason = why_wrong(self.place, got, want)
            if reason is None and name == AUTO and ran.get(AUTO) == ran.get(FUSED):
                notes[name] = "auto ran the same as fused"
                continue
            if reason:
                notes[name] = reason
            else:
                calls[name] = call
        return calls, notes, ran, want

    def works(self, mode, op, operands, calls, counts, notes, want):
        """What a sample of each candidate executes, in eager mode or as a graph."""
        works, keep = {}, []
        for name, call in calls.items():
            count = counts[name]
            if mode == "eager":
                works[name] = (timing.repeated(call, count), count)
                continue
            call = make(name, op, operands, self.graph_group)
            compared = None if name == GEMM and op == "gemm_rs" else want
            made, reason = as_graph(self.place, call, count, compared)
            if reason:
                notes[name] = reason
            else:
                replay, graph = made
                keep.append(graph)
                works[name] = (replay, count)
        return works, keep

    def measure(self, list_name, shape, op):
        operands = Operands(self.place, op, *shape.product(op, self.place.world), self.dtype)
        calls, notes, ran, want = self.checked(op, operands)
        counts = {name: timing.calls_per_sample(self.place, self.clock, call) for name, call in calls.items()}
        for mode in self.args.modes.split(","):
            mode_notes = dict(notes)
            works, keep = self.works(mode, op, operands, calls, counts, mode_notes, want)
            timings = timing.interleave(self.place, self.clock, works, self.args.rounds)
            times = {name: {**dataclasses.asdict(t), "spread": t.spread} for name, t in timings.items()}
            row = {"list": list_name, "name": shape.name, "op": op, "mode": mode}
            row |= {"M": shape.m, "H": shape.h, "I": shape.i, "times": times, "ran": ran, "notes": mode_notes}
            row["efficiency"] = {name: report.efficiency(times, name) for name in report.ours_of(times)}
            self.place.say(_progress(row))
            yield row
            del works, keep


def _progress(row):
    times = ", ".join(f"{name} {t['median'] / 1e3:.3f}" for name, t in row["times"].items())
    return f"{row['op']} {row['name']} {row['mode']}: {times} ms"


def prepare(place, args, shapes, groups):
    """Make the workspace as large as any shape needs, so that none grows it under a captured graph."""
    for op in args.ops.split(","):
        largest = map(max, zip(*(shape.product(op, place.world) for _, shape in shapes), strict=True))
        sizes = dict(zip(("max_m", "n", "k"), largest, strict=True))
        for group in groups:
            flux_ops.prepare(op=op, **sizes, dtype=getattr(torch, args.dtype), group=group, device=place.device)


def run(place, args):
    shapes = list(shapes_of(args))
    document = {
        "environment": report.environment(place),
        "dtype": args.dtype,
        "modes": args.modes.split(","),
        "rounds": args.rounds,
        "rows": [],
    }
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = args.name or f"{args.device}-tp{place.world}-{'-'.join(args.lists.split(','))}-{stamp}"
    keep = place.is_cuda or args.name  # CPU times count only if someone names them
    folders = [folder for folder in (keep and report.RESULTS, os.environ.get("OUT")) if folder]
    bench, paths = Run(place, args), []
    launch.watch(STEP_LIMIT_S)
    try:
        prepare(place, args, shapes, [None, bench.graph_group] if bench.graph_group else [None])
    except Exception as error:  # noqa: BLE001 (then the first calls allocate)
        place.say(f"prepare() failed: {error}")
    for list_name, shape in shapes:
        for op in args.ops.split(","):
            launch.watch(STEP_LIMIT_S)
            document["rows"].extend(bench.measure(list_name, shape, op))
            if place.is_cuda:
                torch.cuda.empty_cache()
            if place.rank == 0:
                paths = report.write(document, name, folders)
    document["environment"]["clocks_after"] = report.clocks() if place.is_cuda else None
    if place.rank == 0:
        paths = report.write(document, name, folders)
        for op in args.ops.split(","):
            for mode in document["modes"]:
                print("\n" + report.full_table(document, op, mode))
        if paths:
            print("\nwritten:", *paths)
        print("\n" + report.short_table(document), flush=True)


def main():
    args = parse_arguments()
    if not launch.under_launcher():
        list(shapes_of(args))  # an unknown name is said once
        if args.device == "cpu":
            print(f"No second GPU: CPU processes, shapes divided by {CPU_SCALE}. These times say nothing about GPUs.")
        sys.exit(launch.run_ranks(args.world, args.limit))
    with launch.joined(args.device) as place:
        run(place, args)


if __name__ == "__main__":
    main()
