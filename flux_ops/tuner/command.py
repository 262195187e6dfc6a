"""`python -m flux_ops tune`: tunes a list of shapes on all GPUs, or shows what has been tuned.

python -m flux_ops tune --op ag_gemm --shapes "8192,14336,8192;4096,14336,8192"     M,N,K of one rank's product
python -m flux_ops tune --shapes benchmarks/shapes.json:mlp,gpt3                    layers: M, H and I
torchrun --nproc-per-node 4 -m flux_ops tune --shapes ...                           ranks started by torchrun
python -m flux_ops tune --show | --compare                                          what is in the file
python -m flux_ops tune --merge OUT IN [IN ...]                                     joins files; later ones win
"""

import argparse
import os
import sys
import time

import torch

import flux_ops
from flux_ops import launch
from flux_ops.config import settings
from flux_ops.tuner import search, tables
from flux_ops.tuner.cache import LAYOUTS, OPS, CacheError, read, store
from flux_ops.tuner.shapes import parse_shapes

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
STEP_LIMIT_S = 300  # for one shape: beyond it, a rank hangs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--op", default=",".join(OPS), help="comma-separated")
    parser.add_argument("--shapes", default="", help="M,N,K[;M,N,K...] or FILE[:LIST,...]")
    parser.add_argument("--dtype", default="bf16", choices=DTYPES)
    parser.add_argument("--layout", default="nk", choices=LAYOUTS, help="of the weight: nk as in nn.Linear")
    launch.add_arguments(parser)
    parser.add_argument("--out", default=settings.tune_cache, help="the file; default: %(default)s")
    parser.add_argument("--again", action="store_true", help="tune also what is in the file already")
    parser.add_argument("--rounds", type=int, default=search.ROUNDS, help="samples of each of the best candidates")
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no other shape is begun")
    parser.add_argument("--show", action="store_true", help="print the file as a table")
    parser.add_argument("--compare", action="store_true", help="print the model's choices beside the tuned ones")
    parser.add_argument("--merge", nargs="+", metavar=("OUT", "IN"), help="join the files IN into OUT")


def run(args: argparse.Namespace) -> int:
    if flux_ops.ops._hooks is None:
        return launch.refuse("tune", flux_ops.why_not_cuda())
    build = flux_ops.ops._hooks.caches.build
    try:
        if args.merge:
            return _merge(args.merge[0], args.merge[1:], build)
        if not args.out:
            raise ValueError("there is no file to keep the choices in: give --out, or set FLUX_TUNE_CACHE or HOME")
        present = read(args.out, build)
        if args.show or args.compare:
            table = tables.entries_table if args.show else tables.comparison
            print(args.out, *table(present.values()), sep="\n")
            return 0
        return _tune(args, build)
    except (CacheError, ValueError) as error:
        return launch.refuse("tune", error)


def _merge(out: str, paths: list[str], build) -> int:
    if not paths:
        raise ValueError("there is nothing to join: --merge OUT IN [IN ...]")
    for path in paths:
        if not os.path.exists(path):
            raise CacheError(f"{path}: there is no such file")
    entries = [entry for path in paths for entry in read(path, build).values()]
    print(f"{out}: {store(out, entries, build)} entries")
    return 0


def _tune(args, build) -> int:
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; it must be at least 1")
    args.device = args.device or ("" if flux_ops.has_cuda_kernels() else "cpu")
    launch.settle(args)
    if not launch.under_launcher():
        for op in args.op.split(","):
            parse_shapes(args.shapes, op, args.world)  # an error is said once
        return launch.run_ranks(args.world, args.limit + STEP_LIMIT_S)
    with launch.joined(args.device) as place:
        bar = Bar() if place.rank == 0 else None
        log = bar.print if bar else None
        with search.Tuner(device=place.device, log=log, progress=bar.step if bar else None) as tuner:
            return _tune_all(args, build, tuner, bar)


def _tune_all(args, build, tuner, bar) -> int:
    """Every decision is rank 0's."""
    place, deadline = tuner.place, time.monotonic() + args.limit
    ops = args.op.split(",")
    products = [
        tuner.product(op, *sizes, DTYPES[args.dtype], args.layout)
        for op in ops
        for sizes in parse_shapes(args.shapes, op, place.world)
    ]
    known = read(args.out, build) if bar else {}
    todo = [i for i, product in enumerate(products) if args.again or product.key() not in known]
    todo = place.everyone(todo)[0]
    if bar:
        bar.print(f"{len(products)} products, {len(products) - len(todo)} of them in {args.out} already")
    for count, index in enumerate(todo):
        if place.everyone(time.monotonic() > deadline)[0]:
            if bar:
                bar.print(f"--limit: {len(todo) - count} products are left for another run")
            break
        launch.watch(STEP_LIMIT_S)
        if bar:
            bar.title = f"{count + 1}/{len(todo)} "
        entry = tuner.measure(products[index], args.rounds)
        if bar:
            store(args.out, [entry], build)
            bar.print(_line(entry))
    if bar:
        bar.clear()
    return 0


def _line(entry) -> str:
    p = entry.product
    return (
        f"{p.op} M,N,K = {p.m},{p.n},{p.k}: {entry.choice} {entry.us:.1f} us; sequential {entry.sequential_us:.1f}, "
        f"model ({entry.model}) {entry.model_us:.1f}, gemm alone {entry.gemm_us:.1f}"
    )


class Bar:
    """One line on stderr that is written anew, where that is a terminal."""

    WIDTH = 30

    def __init__(self):
        self.title = ""
        self._shown = sys.stderr.isatty()

    def step(self, done: int, total: int) -> None:
        if self._shown:
            filled = self.WIDTH * done // total
            sys.stderr.write(f"\r{self.title}[{'#' * filled}{'.' * (self.WIDTH - filled)}] {done}/{total} candidates ")
            sys.stderr.flush()

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def print(self, line: str) -> None:
        self.clear()
        print(line, flush=True)
