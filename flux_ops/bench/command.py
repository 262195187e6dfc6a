"""The benchmark: our ops against the product alone, the plain sequence and what PyTorch has for them.

python -m flux_ops bench                          mlp and gpt3 shapes, eager and CUDA graph, all GPUs
python -m flux_ops bench --lists sweep --ops gemm_rs --world 2
python -m flux_ops bench --explore CONFIG,CONFIG  configurations of `fused` (or decomposed, decomposed:CONFIG) beside
                                                  the usual columns
python -m flux_ops bench --study swizzle          one knob varied on the kernel that `auto` would take: chunk order and
                                                  tile order; `transfer`: push and pull; `chunks`: pieces of a shard;
                                                  `schedule`: those of `decomposed` against fused and sequential
python -m flux_ops bench --study rows             `auto` at every small number of rows M, and around each power of two;
                                                  --modes eager: beside what PyTorch has, too (and --explore)
torchrun --nproc-per-node 4 -m flux_ops bench     ranks started by torchrun

Each candidate is checked against the plain sequence on random data before it is timed. One that fails or is not
available gets a dash and a footnote. The tables come last, the shortest at the very end; the full numbers are written
to benchmarks/results/ in a checkout, else to the current folder (and to $OUT, if it is set). Where there is no git,
FLUX_COMMIT may say what is measured.
"""

import argparse
import datetime
import pathlib

import torch

from flux_ops import launch
from flux_ops.bench import report, rows, studies
from flux_ops.bench.candidates import AUTO, FUSED, OPS, RIVALS, explored
from flux_ops.bench.harness import Contest, Run
from flux_ops.tuner.measure import GEMM, SEQUENTIAL
from flux_ops.tuner.shapes import Shape, read_lists

SHAPES = pathlib.Path(__file__).parent / "shapes.json"
CPU_SCALE = 16
DEFAULTS = {"modes": "eager,graph", "rounds": 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--lists", default="mlp,gpt3", help="lists of shapes.json, comma-separated; default: mlp,gpt3")
    parser.add_argument("--shapes", default="", help="only these shapes, by name")
    parser.add_argument("--ops", default="", help=f"of {', '.join(OPS)}; default: those that a list is for")
    parser.add_argument("--modes", default="", help="eager,graph; default: both, of --study rows the graph")
    parser.add_argument("--rounds", type=int, default=0, help="samples per candidate; default: 20, of --study rows 8")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    launch.add_arguments(parser)
    parser.add_argument("--explore", default="", help="configurations to measure, comma-separated")
    parser.add_argument("--without", default="", help="candidates to leave out, comma-separated")
    parser.add_argument("--study", default="", choices=("", *studies.STUDIES), help="vary one knob instead")
    parser.add_argument("--rows", default="", help="of --study rows: these numbers of rows, comma-separated")
    parser.add_argument("--limit", type=float, default=540, help="seconds after which everything is stopped")
    parser.add_argument("--name", default="", help="name of the results file")


def run(args: argparse.Namespace) -> int:
    settle(args)
    try:
        check(args)
        todo = layers(args)
    except ValueError as error:
        return launch.refuse("bench", error)
    if not launch.under_launcher():
        if args.device == "cpu":
            print(f"No second GPU: CPU processes, shapes divided by {CPU_SCALE}. These times say nothing about GPUs.")
        return launch.run_ranks(args.world, args.limit)
    with launch.joined(args.device) as place:
        document, paths = measure(place, args, todo)
        place.say(closing(document, paths))
    return 0


def settle(args: argparse.Namespace) -> None:
    """Fill in what was not given."""
    launch.settle(args)
    if args.device == "cpu":
        args.modes = "eager"
    for name, value in (rows.DEFAULTS if args.study == "rows" else DEFAULTS).items():
        setattr(args, name, getattr(args, name) or value)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for a number of rounds, a file's name or names of candidates that can't be."""
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1")
    if pathlib.PurePath(args.name).name != args.name:
        raise ValueError(f"--name is '{args.name}'; it must be the name of a file, without its folder")
    rivals = dict.fromkeys(name for names in RIVALS.values() for name in names)
    known = [GEMM, SEQUENTIAL, *rivals, FUSED, *explored(args.explore), AUTO]
    for name in filter(None, args.without.split(",")):
        if name not in known:
            raise ValueError(f"--without has '{name}'; there are {', '.join(known)}")


def layers(args) -> list[tuple[str, Shape, tuple[str, ...]]]:
    """(list, shape, ops) of what is to be measured. Raises ValueError for names that there are not."""
    wanted = set(filter(None, args.shapes.split(",")))
    asked = tuple(filter(None, args.ops.split(",")))
    for op in asked:
        if op not in OPS:
            raise ValueError(f"--ops has '{op}'; there are {', '.join(OPS)}")
    if args.rows and args.study != "rows":
        raise ValueError("--rows goes with --study rows")
    scale = CPU_SCALE if args.device == "cpu" else 1
    found = []
    for name, shape in read_lists(SHAPES, args.lists):
        if wanted and shape.name not in wanted:
            continue
        scaled = Shape(shape.name, max(shape.m // scale, 1), shape.h // scale, shape.i // scale)
        if args.study == "rows":
            found += [(name, *one) for one in rows.layers(scaled, asked or OPS, rows.parse(args.rows), args.world)]
            continue
        ops = [op for op in asked or _ops_of(name) if scaled.suits(op, args.world)]
        if args.study:
            ops = [op for op in ops if op in studies.STUDIES[args.study].ops]
        if ops:
            found.append((name, scaled, tuple(ops)))
    if not found:
        raise ValueError(f"no shape of --lists {args.lists} is left; M has to be a multiple of the {args.world} ranks")
    return found


def _ops_of(list_name):
    """What the layers of a list are run with: few tokens with an all-reduce, many sequence-parallel."""
    few = list_name == "decode"
    return [op for op in OPS if (op == "gemm_ar") == few]


class Benchmark(Contest):
    def __init__(self, args):
        self.explored = explored(args.explore)
        self.without = args.without.split(",")

    def names(self, op, product):
        names = [GEMM, SEQUENTIAL, *RIVALS[op], FUSED, *self.explored, AUTO]
        return [name for name in names if name not in self.without]


def measure(place, args, todo):
    """(the document, where rank 0 has written it). Collective."""
    document = {
        "environment": report.environment(place),
        "dtype": args.dtype,
        "modes": args.modes.split(","),
        "rounds": args.rounds,
        "rows": [],
    }
    if args.study:
        document["study"] = args.study
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    what = args.study or "-".join(args.lists.split(","))
    name = args.name or f"{args.device}-tp{place.world}-{what}-{stamp}"
    folders = report.folders(keep=place.is_cuda or args.name)  # CPU times count only if someone names them
    contest = studies.STUDIES[args.study](place, args, todo) if args.study else Benchmark(args)
    bench, paths = Run(place, args, contest), []
    try:
        bench.prepare(todo)
    except Exception as error:  # noqa: BLE001 (then the first calls allocate)
        place.say(f"prepare() failed: {error}")
    for list_name, shape, ops in todo:
        for op in ops:
            document["rows"].extend(bench.measure(list_name, shape, op))
            if place.is_cuda:
                torch.cuda.empty_cache()
            if place.rank == 0:
                report.write(document, name, folders)
    document["environment"]["clocks_after"] = report.clocks() if place.is_cuda else None
    if place.rank == 0:
        paths = report.write(document, name, folders)
    return document, paths


def closing(document, paths):
    """The tables, the shortest last."""
    is_study = "study" in document
    table = studies.table if is_study else report.full_table
    tables = [table(document, op, mode) for op in OPS for mode in document["modes"]]
    written = [f"written: {' '.join(map(str, paths))}"] if paths else []
    if is_study:
        parts = [*written, *tables]
    else:
        parts = [*tables, *written, "\n".join(report.summary(document)), report.short_table(document)]
    return "\n".join(f"\n{part}" for part in parts if part)
