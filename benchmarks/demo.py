"""The demo: a transformer's MLP block, tensor- and sequence-parallel, with its communication hidden.

    python benchmarks/demo.py               all GPUs if there are at least two, else two CPU processes
    python benchmarks/demo.py --device cpu --world 4

Each rank holds M / TP of the tokens and 1 / TP of each weight:

    n = RMSNorm(x)                          x, n          [M / TP, H]
    g = ag_gemm(n, gate and up)             gathers n     [M, 2 I / TP]
    a = silu(g[gate]) * g[up]                             [M, I / TP]
    y = x + gemm_rs(a, down)                scatters      [M / TP, H]

The result is checked against three un-sharded nn.Linear modules; then `fused` is timed against `sequential`, which
is the plain matrix product and the plain collective one after the other.
"""

import argparse
import dataclasses
import pathlib
import sys
import warnings

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F

import flux_ops
from flux_ops import launch
from flux_ops.tuner import timing
from flux_ops.tuner.measure import difference

EPSILON = 1e-5
LIMIT_S = 240


@dataclasses.dataclass(frozen=True)
class Setting:
    title: str
    m: int
    h: int
    i: int
    dtype: torch.dtype
    tolerance: float  # of a row or column of the result, relative to its norm
    rounds: int


SETTINGS = {
    "cpu": Setting("a small transformer MLP block", 512, 512, 1536, torch.float32, 1e-5, 11),
    "cuda": Setting("the MLP of Llama-3.1-70B", 8192, 8192, 28672, torch.bfloat16, 2e-2, 15),
}


class Block:
    """One rank's shard of the block, and the un-sharded modules that it was cut from."""

    def __init__(self, place, setting):
        self.place, self.setting = place, setting
        world, rank, options = place.world, place.rank, {"device": place.device, "dtype": setting.dtype}
        self.m = setting.m - setting.m % world
        self.i = setting.i - setting.i % (8 * world)
        torch.manual_seed(0)  # the same modules on every rank
        self.gate = torch.nn.Linear(setting.h, self.i, bias=False, **options).requires_grad_(False)
        self.up = torch.nn.Linear(setting.h, self.i, bias=False, **options).requires_grad_(False)
        self.down = torch.nn.Linear(self.i, setting.h, bias=False, **options).requires_grad_(False)
        self.down.weight.mul_(8)  # so that the block's part of the result is as large as the residual
        self.scale = torch.rand(setting.h, **options) + 0.5
        tokens = torch.randn(self.m, setting.h, **options)
        self.x = tokens.chunk(world)[rank].clone()
        self.gate_up_shard = torch.cat([self.gate.weight.chunk(world)[rank], self.up.weight.chunk(world)[rank]])
        self.down_shard = self.down.weight.chunk(world, dim=1)[rank].contiguous()

    def norm(self, x):
        return F.rms_norm(x, (x.shape[-1],), self.scale, EPSILON)

    def parallel(self, strategy):
        gate, up = flux_ops.ag_gemm(self.norm(self.x), self.gate_up_shard, strategy=strategy).chunk(2, dim=-1)
        return self.x + flux_ops.gemm_rs(F.silu(gate) * up, self.down_shard, strategy=strategy)

    def unsharded(self):
        """The same tokens through the whole modules; a token needs no other token, so this rank's are enough."""
        n = self.norm(self.x)
        return self.x + self.down(F.silu(self.gate(n)) * self.up(n))


def check(place, block, strategies):
    """Compare with the un-sharded modules; True if all ranks agree within the tolerance."""
    want, fine = block.unsharded(), True
    for strategy in strategies:
        errors = place.everyone(difference(block.parallel(strategy), want))
        good = max(errors) <= block.setting.tolerance
        fine = fine and good
        verdict = "ok" if good else f"WRONG on rank {errors.index(max(errors))}"
        place.say(
            f"  {strategy:<10} largest relative error of a row or column "
            f"{max(errors):.1e}, allowed {block.setting.tolerance:.0e}: {verdict}"
        )
    return fine


def show_chunks(place, block):
    """CPU backend: in which order the chunks of the two ops came and were computed."""
    gate_up = flux_ops.ag_gemm(block.norm(block.x), block.gate_up_shard, strategy="fused")
    mine = [("ag_gemm", _trace())]
    gate, up = gate_up.chunk(2, dim=-1)
    flux_ops.gemm_rs(F.silu(gate) * up, block.down_shard, strategy="fused")
    mine.append(("gemm_rs", _trace()))
    for rank, traces in enumerate(place.everyone(mine)):
        for op, chunks in traces:
            steps = [_step(op, rank, *chunk) for chunk in chunks]
            place.say(f"  rank {rank}  {op}  " + "  ->  ".join(steps))


def _trace():
    """(chunk, ms until its data had come, ms until it was computed) of the last call, in order of completion."""
    return last_of_chunks(flux_ops._C.last_trace())


def last_of_chunks(parts):
    """Of each chunk the piece that was computed last, without its number."""
    chunks = {}
    for chunk, _, arrived, done in parts:
        chunks.pop(chunk, None)
        chunks[chunk] = (chunk, arrived / 1e3, done / 1e3)
    return list(chunks.values())


def _step(op, rank, chunk, arrived, done):
    if op == "ag_gemm":
        how = "own, here from the start" if chunk == rank else f"arrived {arrived:.1f}"
    else:
        how = f"own, peers' parts here {arrived:.1f}" if chunk == rank else f"for rank {chunk}"
    return f"chunk {chunk} ({how}, done {done:.1f})"


def time_strategies(place, block, strategies, mode):
    """Median milliseconds of the block by strategy, interleaved; the slowest rank counts."""
    clock = timing.Clock(place)
    works, graphs = {}, []
    for strategy in strategies:

        def call(_, strategy=strategy):
            return block.parallel(strategy)

        count = timing.calls_per_sample(place, clock, call)
        if mode == "graph":
            replay, _, graph = timing.captured(call, count)
            graphs.append(graph)
            works[strategy] = (replay, count)
        else:
            works[strategy] = (timing.repeated(call, count), count)
    timings = timing.interleave(place, clock, works, block.setting.rounds)
    return {strategy: t.median / 1e3 for strategy, t in timings.items()}


def show_times(place, block, strategies):
    for mode in ("eager", "graph") if place.is_cuda else ("eager",):
        times = time_strategies(place, block, strategies, mode)
        text = ", ".join(f"{strategy} {ms:.3f} ms" for strategy, ms in times.items())
        if len(times) > 1:
            text += f": fused is {times['sequential'] / times['fused']:.2f} times as fast"
        place.say(f"  {'under a CUDA graph' if mode == 'graph' else 'eager' if place.is_cuda else 'block'}: {text}")


def demo(place):
    setting = SETTINGS[place.device.type]
    block = Block(place, setting)
    where = f"{place.world} x {torch.cuda.get_device_name()}" if place.is_cuda else f"{place.world} CPU processes"
    place.say(f"\n{setting.title}, tensor- and sequence-parallel over {where}")
    place.say(f"  {block.m} tokens, hidden size {setting.h}, inner size {block.i}, {str(setting.dtype)[6:]}")
    place.say(f"  each rank holds {block.m // place.world} tokens and 1/{place.world} of every weight")
    strategies = ["sequential", "fused"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block.parallel("auto")
    ran = flux_ops.last_dispatch()
    if ran.strategy != "fused":
        place.say(f"\n  only the plain sequence can run here: {ran.reason}")
        strategies = ["sequential"]

    place.say("\nchecked against un-sharded nn.Linear modules")
    fine = check(place, block, strategies)
    if not place.is_cuda:
        place.say("\nthe order in which the chunks came and were computed (ms since the call)")
        show_chunks(place, block)
    place.say("\ntime of the block, median, the slowest rank counts")
    show_times(place, block, strategies)
    if not place.is_cuda:
        place.say("  (on CPU processes there is no link to hide: this shows that the schedule runs, not that it wins)")
    place.say("\n" + ("The sharded block equals the un-sharded one." if fine else "MISMATCH: see above."))
    return fine


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launch.add_arguments(parser)
    args = parser.parse_args()
    given = args.device
    launch.settle(args)
    if not launch.under_launcher():
        if args.device == "cpu" and not given:
            found = "only one GPU" if torch.cuda.device_count() else "no GPU"
            print(f"{found} here: the CPU backend runs the same schedule on processes and shared memory")
        sys.exit(launch.run_ranks(args.world, LIMIT_S))
    with launch.joined(args.device) as place:
        launch.watch(LIMIT_S - 10)
        fine = demo(place)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
