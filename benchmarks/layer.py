"""One transformer layer of Llama-3.1-70B and of 8B, forward and backward, on the GPUs that there are.

    python benchmarks/layer.py
    python benchmarks/layer.py --layers llama3.1-8b --world 2 --rounds 30
    python benchmarks/layer.py --device cpu               CPU processes, sizes divided: to see that it runs

The blocks of examples/model.py, sequence-parallel, with M tokens of one sequence:

    plain             torch.nn.functional.linear and NCCL, one after the other
    flux              the layers of flux_ops.nn; they keep what was gathered for the backward, as `plain` does
    flux regather     the same, but gathering again in the backward, which takes less memory
    flux compiled     `flux` under torch.compile
    async-tp          `plain` under torch.compile, which overlaps by itself (_micro_pipeline_tp, symmetric memory)
    plain compiled    `plain` under torch.compile: what the compiler gives without overlap

All have the same weights. Results and gradients of each are compared with those of `plain` before it is timed,
interleaved with the others. One that fails, or whose turn to compile comes after the time is up (--budget), gets a
dash and a footnote. `forward` is that of training. The JSON goes to benchmarks/results (and to $OUT, if it is set).
"""

import argparse
import dataclasses
import datetime
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist

from examples.model import LAYERS, Block, Config, Parallel, rotation
from flux_ops import launch
from flux_ops.bench import report
from flux_ops.tuner import timing
from flux_ops.tuner.measure import TOLERANCE, attempt, difference
from flux_ops.tuner.tables import aligned

CONFIGS = {
    "llama3.1-70b": Config(hidden=8192, ffn=28672, layers=1, heads=64, kv_heads=8, head_dim=128),
    "llama3.1-8b": Config(hidden=4096, ffn=14336, layers=1, heads=32, kv_heads=8, head_dim=128),
}
TOKENS = 8192
MODES = ("forward", "forward+backward")
COMPILED = {"flux compiled": {}, "async-tp": {"_micro_pipeline_tp": True}, "plain compiled": {}}
CANDIDATES = ("plain", "flux", "flux regather", *COMPILED)
ROUNDINGS = 3  # a layer rounds its intermediate results several times: so many times a product's tolerance
STEP_LIMIT_S, LIMIT_S = 150, 540


def small(config):
    """For CPU processes, up to four of them."""
    return dataclasses.replace(
        config, hidden=config.hidden // 16, ffn=config.ffn // 16, heads=config.heads // 8, kv_heads=4, head_dim=64
    )


class Layer:
    """The operands of one layer, and its candidates."""

    def __init__(self, place, config, tokens):
        self.place, self.config = place, config
        self.dtype = torch.bfloat16 if place.is_cuda else torch.float32
        torch.manual_seed(0)
        self.blocks = {"plain": self._block("plain")}
        self.positions = torch.arange(tokens, device=place.device)
        self.rotation = rotation(config, self.positions)
        generator = torch.Generator(place.device).manual_seed(1 + place.rank)
        shape = (tokens // place.world, 1, config.hidden)
        self.x, self.grad = (
            torch.randn(shape, generator=generator, device=place.device).to(self.dtype) for _ in range(2)
        )
        self.x.requires_grad_()

    def _block(self, layers, **options):
        return Block(self.config, Parallel(LAYERS[layers], device=self.place.device, dtype=self.dtype, **options))

    def block(self, name):
        """A candidate's module. Raises where it can't run."""
        if name in COMPILED:
            return self._compiled(name)
        if name not in self.blocks:
            block = self._block("flux", save_gathered=name == "flux")
            block.load_state_dict(self.blocks["plain"].state_dict(), assign=True)  # the same memory
            self.blocks[name] = block
        return self.blocks[name]

    def _compiled(self, name):
        block = self.blocks["flux" if name.startswith("flux") else "plain"]
        if not self.place.is_cuda:
            if name == "async-tp":
                raise RuntimeError("torch overlaps on GPUs alone")
            return torch.compile(block, fullgraph=True, dynamic=False, backend="aot_eager")
        if name == "async-tp":
            torch.distributed._symmetric_memory.enable_symm_mem_for_group(dist.group.WORLD.group_name)
        return torch.compile(block, fullgraph=True, dynamic=False, options=COMPILED[name])

    def call(self, block, mode):
        def forward(_):
            return block(self.x, self.positions, *self.rotation)

        def forward_and_backward(_):
            self.x.grad = None
            for parameter in block.parameters():
                parameter.grad = None
            y = block(self.x, self.positions, *self.rotation)
            y.backward(self.grad)
            return y

        return forward if mode == "forward" else forward_and_backward

    def results(self, block):
        """{name: y, the gradient of x, those of the weights} as matrices."""
        y = self.call(block, "forward+backward")(0)
        found = {"y": y.detach(), "x": self.x.grad} | {name: p.grad for name, p in block.named_parameters()}
        for parameter in (self.x, *block.parameters()):
            parameter.grad = None
        return {name.removeprefix("_orig_mod."): t.flatten(0, -2) if t.dim() > 1 else t for name, t in found.items()}


def relative(got, want):
    """Of a matrix the largest error of a row or column, of a vector (a norm's gradient) that of the whole."""
    if want.dim() > 1:
        return difference(got, want)
    return ((got.float() - want.float()).norm() / want.float().norm()).item()


def measure(place, name, config, tokens, args):
    """A row for each mode."""
    started = time.monotonic()
    layer, blocks, notes = Layer(place, config, tokens), {}, {}
    clock, tolerance = timing.Clock(place), ROUNDINGS * TOLERANCE[layer.dtype]
    want, compile_s, errors = None, {}, {}
    for candidate in CANDIDATES:
        launch.watch(STEP_LIMIT_S)
        begun = time.monotonic()
        if candidate in COMPILED and max(place.everyone(begun - started)) > args.budget:
            notes[candidate] = f"not compiled: {args.budget:.0f} s were up"
            continue

        def run(candidate=candidate):
            block = layer.block(candidate)
            return block, layer.results(block)

        ran, reason = attempt(place, run)
        if reason is None:
            block, got = ran
            want = want or got
            apart = {key: relative(got[key], want[key]) for key in want}
            worst = max(apart, key=lambda key: apart[key] if apart[key] == apart[key] else float("inf"))
            values = place.everyone((apart[worst], worst))
            errors[candidate], at = max(values)
            if not errors[candidate] <= tolerance:
                reason = f"wrong result: a row or column of {at} is off by {errors[candidate]:.1e} of its norm"
        elif candidate == "plain":
            raise RuntimeError(f"the plain layer fails: {reason}")
        if reason:
            notes[candidate] = reason
            continue
        blocks[candidate] = block
        if candidate in COMPILED:
            compile_s[candidate] = max(place.everyone(time.monotonic() - begun))
    del want
    for mode in MODES:
        launch.watch(STEP_LIMIT_S)
        works = {}
        for candidate, block in blocks.items():
            call = layer.call(block, mode)
            count = timing.calls_per_sample(place, clock, call)
            works[candidate] = (timing.repeated(call, count), count)
        timings = timing.interleave(place, clock, works, args.rounds)
        times = {candidate: {**dataclasses.asdict(t), "spread": t.spread} for candidate, t in timings.items()}
        place.say(f"{name} {mode}: " + ", ".join(f"{c} {t['median'] / 1e3:.3f}" for c, t in times.items()) + " ms")
        yield {
            "name": name,
            "mode": mode,
            "M": tokens,
            "config": dataclasses.asdict(config),
            "times": times,
            "errors": errors,
            "compile_s": compile_s,
            "notes": notes,
        }


def table(document):
    """Median ms and speed-up over plain."""
    notes, body = [], []
    for row in document["rows"]:
        cells, base = [], row["times"]["plain"]["median"]
        for candidate in CANDIDATES:
            if candidate in row["times"]:
                median = row["times"][candidate]["median"]
                cells.append(f"{median / 1e3:.3f}" + (f" ({base / median:.2f}x)" if candidate != "plain" else ""))
            else:
                note = row["notes"][candidate]
                if note not in notes:
                    notes.append(note)
                cells.append(f"{report.DASH} [{notes.index(note) + 1}]")
        body.append([f"{row['name']} {row['mode']}", str(row["M"]), *cells])
    meta = document["environment"]
    title = f"a transformer layer, TP = {meta['tp']}, {meta['card']}: median ms, and speed-up over plain"
    footnotes = [f"  [{i + 1}] {note}" for i, note in enumerate(notes)]
    return "\n".join(["", title, *aligned(["layer", "M", *CANDIDATES], body), *footnotes])


def run(place, args):
    document = {"environment": report.environment(place), "rounds": args.rounds, "rows": []}
    stamp = datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d-%H%M%S")
    name = args.name or f"layer-{place.device.type}-tp{place.world}-{stamp}"
    folders = report.folders(keep=place.is_cuda or args.name)  # CPU times count only if someone names them
    paths = []
    for layer in args.layers.split(","):
        config, tokens = CONFIGS[layer], args.tokens
        if not place.is_cuda:
            config, tokens = small(config), tokens // 64
        for row in measure(place, layer, config, tokens, args):
            document["rows"].append(row)
            if place.rank == 0:
                paths = report.write(document, name, folders)
        if place.is_cuda:
            torch.cuda.empty_cache()
    if paths:
        place.say(f"\nwritten: {' '.join(map(str, paths))}")
    place.say(table(document))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default=",".join(CONFIGS), help="of those in the title, comma-separated")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="M")
    parser.add_argument("--rounds", type=int, default=11, help="samples per candidate")
    parser.add_argument("--budget", type=float, default=40, help="seconds of a layer after which none is compiled")
    launch.add_arguments(parser)
    parser.add_argument("--name", default="", help="name of the results file")
    args = parser.parse_args()
    unknown = [layer for layer in args.layers.split(",") if layer not in CONFIGS]
    if unknown:
        parser.error(f"--layers has '{unknown[0]}'; there are {', '.join(CONFIGS)}")
    launch.settle(args)
    if not launch.under_launcher():
        if args.device == "cpu":
            print(
                "CPU processes, the sizes of weights divided by 16, tokens by 64. These times say nothing about GPUs."
            )
        sys.exit(launch.run_ranks(args.world, LIMIT_S))
    with launch.joined(args.device) as place:
        run(place, args)


if __name__ == "__main__":
    main()
