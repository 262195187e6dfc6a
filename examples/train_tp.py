"""Trains a small Llama on text, tensor- and data-parallel: with flux_ops.nn and with plain PyTorch, in turns.

    python examples/train_tp.py                         all GPUs if there are at least two, else two CPU processes
    python examples/train_tp.py --tp 4                  of 8 GPUs: TP = 4, two replicas
    python examples/train_tp.py --size 8b-layers        four layers as large as those of Llama-3.1-8B
    python examples/train_tp.py --device cpu --world 4 --tp 2
    torchrun --nproc-per-node 4 examples/train_tp.py

Both models begin with the same weights and get the same tokens, so their losses must stay together: within 0.01 %
on CPUs (float32), 2 % on GPUs (products in bfloat16, weights and their updates in float32). A control runs along, plain
PyTorch once more with another order of sums in the forward: over the whole training flux may also not go further from
plain than twice as far as the control, and up to no step five times, or than 0.01 %. Chance needs that much: any
difference of rounding grows in a training, and of nine side by side, four of them controls, one control went 1.6 times
as far as another in all, and 3.9 times up to a step (benchmarks/results/train-h200-tp2-spread.json). So every tenth
step is also computed by flux and by the control with the very weights of the plain training, where nothing has grown:
there the gradient may be no further from the plain one than three times as far as the control's is, and that of a
parameter alone four times, or than 0.01 % (CPUs: 0.001 %).
The losses, the times of the steps and what ran are written as JSON; --plot draws them, with matplotlib.
"""

import argparse
import dataclasses
import itertools
import json
import math
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import flux_ops
from examples import control, text
from examples.model import CONFIGS, LAYERS, Decoder, Parallel, loss_of
from flux_ops import launch
from flux_ops.bench import report

LIMIT_S = 540
MODELS = {**LAYERS, "control": control}
STYLES = {"flux": "-", "plain": "--", "control": ":"}  # of a plot
# Of the difference of the losses, relative to the loss.
TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}
PARTS = 10
TIMES_CONTROL, TIMES_ON_THE_WAY, LEAST_ALLOWED = 2, 5, 1e-4
# Of the difference of the gradients, relative to their norm. Those of flux round otherwise in the backward, too.
PROBE_EVERY, TIMES_GRADIENT, TIMES_PARAMETER = 10, 3, 4
LEAST_GRADIENT = {"cpu": 1e-5, "cuda": 1e-4}
MOST_NOISE = {"cpu": 1e-4, "cuda": 5e-2}  # of the control as a whole: it would allow anything
UNTIMED = 5  # steps


@dataclasses.dataclass(frozen=True)
class Setting:
    """Of each replica: tokens of a step are length · sequences."""

    length: int
    sequences: int
    steps: int
    learning_rate: float
    warm_up: int  # steps until the rate is reached


SETTINGS = {
    "tiny": Setting(128, 4, 60, 3e-3, 10),
    "small": Setting(2048, 4, 200, 1e-4, 10),
    "8b-layers": Setting(4096, 2, 100, 1e-4, 10),
}


class Training:
    """A model, its optimiser, and what its steps gave."""

    def __init__(self, layers, config, setting, mesh, device):
        self.tp, self.dp, self.setting = mesh["tp"].get_group(), mesh["dp"].get_group(), setting
        torch.manual_seed(0)
        self.model = Decoder(config, Parallel(MODELS[layers], self.tp, sequence_parallel=True, device=device))
        # One FSDP unit: its collectives run before the forward and after the backward, never beside a fused kernel.
        half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fully_shard(self.model, mesh=mesh["dp"], mp_policy=half if device.type == "cuda" else MixedPrecisionPolicy())
        for module in self.model.modules():
            if isinstance(module, torch.nn.RMSNorm):
                module.weight.sequence_parallel = True  # FSDP has put its own parameter there
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=setting.learning_rate, weight_decay=0.1)
        self.losses, self.seconds = [], []

    def backward(self, tokens, targets):
        self.optimizer.zero_grad()
        loss = loss_of(self.model(tokens), targets, self.tp)
        loss.backward()
        flux_ops.nn.allreduce_sequence_parallel_grads(self.model, self.tp)
        return loss.detach()

    def take_weights(self, other):
        with torch.no_grad():
            for mine, theirs in zip(self.model.parameters(), other.model.parameters(), strict=True):
                mine.copy_(theirs)

    def gradient_distances(self, other):
        """The norm of the difference of both gradients, relative to that of the other one: as a whole, then of each
        parameter.
        """
        pairs = zip(self.model.parameters(), other.model.parameters(), strict=True)
        grads = ((mine.grad.to_local(), theirs.grad.to_local()) for mine, theirs in pairs)
        squares = torch.stack(
            [torch.stack([(mine - theirs).square().sum(), theirs.square().sum()]) for mine, theirs in grads]
        )
        dist.all_reduce(squares)
        squares = torch.cat([squares.sum(0, keepdim=True), squares])
        return (squares[:, 0] / squares[:, 1]).sqrt().tolist()

    def step(self, tokens, targets):
        warm = min(1.0, (len(self.losses) + 1) / self.setting.warm_up)
        for group in self.optimizer.param_groups:
            group["lr"] = self.setting.learning_rate * warm
        loss = self.backward(tokens, targets)
        self.optimizer.step()
        dist.all_reduce(loss, group=self.dp)
        return loss.item() / dist.get_world_size(self.dp)

    def timed_step(self, place, tokens, targets):
        dist.barrier()
        place.sync()
        started = time.perf_counter()
        self.losses.append(self.step(tokens, targets))  # .item() waits for the GPU
        self.seconds.append(time.perf_counter() - started)

    def save(self, folder, config):
        """A file for each tensor-parallel rank, which examples/generate_tp.py reads."""
        state = {name: parameter.full_tensor() for name, parameter in self.model.state_dict().items()}
        if dist.get_rank(self.dp) == 0:
            folder.mkdir(parents=True, exist_ok=True)
            file = folder / f"rank{dist.get_rank(self.tp)}of{dist.get_world_size(self.tp)}.pt"
            torch.save({"config": dataclasses.asdict(config), "state": state}, file)


def train(place, args):
    config, setting = CONFIGS[args.size], SETTINGS[args.size]
    given = {name: getattr(args, name) for name in ("length", "sequences", "steps", "learning_rate", "warm_up")}
    setting = dataclasses.replace(setting, **{name: value for name, value in given.items() if value})
    tp = args.tp or place.world
    if place.world % tp:
        raise SystemExit(f"--tp is {tp}; it must divide the number of ranks, {place.world}.")
    mesh = init_device_mesh(place.device.type, (place.world // tp, tp), mesh_dim_names=("dp", "tp"))
    corpus = text.standard_library()
    place.say(f"{config}\n{setting}")
    place.say(f"TP = {tp}, {place.world // tp} replicas, {len(corpus):,} bytes of text, {place.device.type}")
    runs = {layers: Training(layers, config, setting, mesh, place.device) for layers in MODELS}
    probes = {layers: Training(layers, config, setting, mesh, place.device) for layers in ("flux", "control")}
    gradients = {layers: [] for layers in probes}
    flux_ops.dispatch_counts(reset=True)
    for i in range(setting.steps):
        launch.watch(120)
        seed = i * mesh["dp"].size() + mesh["dp"].get_local_rank()
        tokens, targets = (t.to(place.device) for t in text.batch(corpus, setting.length, setting.sequences, seed))
        probed = probes if i % PROBE_EVERY == 0 else {}
        for probe in probed.values():
            probe.take_weights(runs["plain"])
            probe.backward(tokens, targets)
        for run in runs.values():
            run.timed_step(place, tokens, targets)
        for layers, probe in probed.items():
            gradients[layers].append(probe.gradient_distances(runs["plain"]))
        if i % max(setting.steps // 10, 1) == 0 or i == setting.steps - 1:
            place.say(
                f"step {i:4}  " + "  ".join(f"loss {layers} {run.losses[-1]:.4f}" for layers, run in runs.items())
            )
    if args.save:
        runs["flux"].save(args.save, config)
    return summary(place, args, config, setting, tp, runs, gradients)


def largest_so_far(losses, wants):
    """Of each step, the largest difference up to it, relative to the loss."""
    return list(itertools.accumulate((abs(a - b) / b for a, b in zip(losses, wants, strict=True)), max))


def means(losses):
    """Of each tenth of the steps."""
    ends = [len(losses) * i // PARTS for i in range(PARTS + 1)]
    return [statistics.fmean(losses[a:b]) for a, b in itertools.pairwise(ends) if a < b]


def stay_together(apart, noise, tolerance):
    """Whether two curves never differ by more than the tolerance, nor by more than the noise explains; both are as
    largest_so_far gives them.
    """
    on_the_way = all(a <= max(TIMES_ON_THE_WAY * n, LEAST_ALLOWED) for a, n in zip(apart, noise, strict=True))
    return on_the_way and apart[-1] <= min(tolerance, max(TIMES_CONTROL * noise[-1], LEAST_ALLOWED))


def gradients_agree(gradients, device):
    """Whether those of flux are in no probe further from the plain ones than rounding explains. `gradients`: lists of
    gradient_distances.
    """
    least, most = LEAST_GRADIENT[device], MOST_NOISE[device]
    return all(
        control[0] <= most
        and flux[0] <= max(TIMES_GRADIENT * control[0], least)
        and all(
            math.isfinite(noise) and apart <= max(TIMES_PARAMETER * noise, least)
            for apart, noise in zip(flux[1:], control[1:], strict=True)
        )
        for flux, control in zip(gradients["flux"], gradients["control"], strict=True)
    )


def summary(place, args, config, setting, tp, runs, gradients):
    """The document that is written. `fine`: the losses stayed together, and fell, and the gradients agree."""
    losses = {layers: run.losses for layers, run in runs.items()}
    curves = {layers: means(run) for layers, run in losses.items()}
    apart = {layers: largest_so_far(losses[layers], losses["plain"]) for layers in gradients}
    curve_apart = {layers: largest_so_far(curves[layers], curves["plain"])[-1] for layers in gradients}
    slowest = {
        layers: [max(ranks) for ranks in zip(*place.everyone(run.seconds), strict=True)] for layers, run in runs.items()
    }
    times = {layers: 1e3 * statistics.median(seconds[UNTIMED:] or seconds) for layers, seconds in slowest.items()}
    tolerance = TOLERANCE[place.device.type]
    finite = all(math.isfinite(loss) for run in losses.values() for loss in run)
    first, last = curves["flux"][0], curves["flux"][-1]
    agree = gradients_agree(gradients, place.device.type)
    return {
        "environment": {**report.environment(place), "tp": tp, "dp": place.world // tp},
        "config": dataclasses.asdict(config),
        "setting": dataclasses.asdict(setting),
        "losses": losses,
        "gradients_apart": gradients,
        "largest_difference": {layers: values[-1] for layers, values in apart.items()},
        "largest_of_curve": curve_apart,
        "tolerance": tolerance,
        "first_loss": first,
        "last_loss": last,
        "step_ms": times,
        "ran": {" ".join(how): calls for how, calls in flux_ops.dispatch_counts().items()},
        "fine": finite and stay_together(apart["flux"], apart["control"], tolerance) and agree and last < first,
    }


def show(place, document):
    times = document["step_ms"]
    place.say(f"\nflux_ops ran, in the training and in the probes: {document['ran']}")
    place.say(f"loss: {document['first_loss']:.3f} at first, {document['last_loss']:.3f} at last")
    both = "flux {flux:.1e}, control {control:.1e}".format
    gradients = document["gradients_apart"]
    mean = {layers: statistics.fmean(whole for whole, *_ in gradients[layers]) for layers in gradients}
    probes = zip(gradients["flux"], gradients["control"], strict=True)
    ratios = [[f / c if c else math.inf if f else 1.0 for f, c in zip(*probe, strict=True)] for probe in probes]
    largest, largest_of_one = max(whole for whole, *_ in ratios), max(itertools.chain(*ratios))
    place.say(
        f"largest difference of a step's loss from plain: {both(**document['largest_difference'])} of it; "
        f"flux may have {document['tolerance']:.0e}, and {TIMES_CONTROL} times that of the control ({TIMES_ON_THE_WAY} "
        "times up to any step)"
    )
    place.say(f"... of the mean of a tenth of the steps: {both(**document['largest_of_curve'])}")
    place.say(
        f"... of the gradient with the same weights, every {PROBE_EVERY} steps, in the mean: {both(**mean)}; flux at "
        f"most {largest:.2f} times as far as the control, in a parameter {largest_of_one:.2f} times ({TIMES_GRADIENT} "
        f"and {TIMES_PARAMETER} are allowed)"
    )
    place.say(
        f"step, median: plain {times['plain']:.1f} ms, flux {times['flux']:.1f} ms: "
        f"{times['plain'] / times['flux']:.2f} times as fast"
    )
    if not place.is_cuda:
        place.say(
            "(On CPU processes there is no link to hide: this shows that the training is right, not that it wins.)"
        )


def plot(document, path):
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4))
    for layers, losses in document["losses"].items():
        axes.plot(losses, STYLES[layers], label=f"{layers}: {document['step_ms'][layers]:.1f} ms a step")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launch.add_arguments(parser)
    parser.add_argument("--tp", type=int, default=0, help="tensor-parallel ranks; default: all, with one replica")
    parser.add_argument("--size", default="", choices=("", *CONFIGS), help="default: small on GPUs, tiny on CPUs")
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--sequences", type=int, default=0, help="sequences of a replica's step")
    parser.add_argument("--learning-rate", type=float, default=0)
    parser.add_argument("--warm-up", type=int, default=0, help="steps until the learning rate is reached")
    parser.add_argument("--out", type=pathlib.Path, default="build/train_tp.json", help="the losses and times")
    parser.add_argument("--plot", type=pathlib.Path, default=None, help="a picture of them (.svg, .png, .pdf)")
    parser.add_argument("--save", type=pathlib.Path, default=None, help="folder for the weights, for generate_tp.py")
    args = parser.parse_args()
    launch.settle(args)
    args.size = args.size or ("small" if args.device == "cuda" else "tiny")
    if args.plot:
        import matplotlib  # noqa: F401 (if it is missing, say so before the training)
    if not launch.under_launcher():
        sys.exit(launch.run_ranks(args.world, LIMIT_S))
    with launch.joined(args.device) as place:
        document = train(place, args)
        show(place, document)
        if place.rank == 0:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(f"written: {args.out}")
            if args.plot:
                plot(document, args.plot)
        flux_ops.destroy(None)
    sys.exit(0 if document["fine"] else "The losses or gradients are apart, or the loss did not fall.")


if __name__ == "__main__":
    main()
