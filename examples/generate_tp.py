"""Greedy generation of text with a tensor-parallel Llama: with flux_ops.nn and with plain PyTorch, in turns.

    python examples/generate_tp.py                      all GPUs if there are at least two, else two CPU processes
    python examples/generate_tp.py --size 8b-layers --sequences 8 --new 256
    python examples/train_tp.py --save build/weights && python examples/generate_tp.py --load build/weights

Prefill and decode have static shapes and a cache of keys and values; on GPUs each is captured as one CUDA graph. Both
models have the same weights, and must give the same tokens: on CPUs (float32) all of them; on GPUs (bfloat16) all up to
the first place where the two best logits are closer than 2 % of the largest one, where rounding decides. From there on
the sequences are different texts, and are not compared. Up to there all logits must agree too, within 0.01 % and 5 %
of the largest one.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import torch

import flux_ops
from examples import text
from examples.model import CONFIGS, LAYERS, Cache, Config, Decoder, Parallel
from flux_ops import launch
from flux_ops.bench import report

LIMIT_S = 300
TIE = {"cpu": 0.0, "cuda": 2e-2}  # of the largest logit
TOLERANCE = {"cpu": 1e-4, "cuda": 5e-2}  # of the largest logit
TURNS = 5
PROMPT = '"""Utilities for reading and writing text files.\n\nThe functions of this module'


@dataclasses.dataclass(frozen=True)
class Setting:
    prompt: int  # tokens of it
    new: int
    sequences: int


SETTINGS = {"tiny": Setting(64, 48, 2), "small": Setting(512, 128, 8), "8b-layers": Setting(1024, 128, 8)}


class Generation:
    """A model with its cache and all that a step reads and writes, at fixed addresses."""

    def __init__(self, place, layers, config, setting, weights):
        self.place, self.setting = place, setting
        dtype = torch.bfloat16 if place.is_cuda else torch.float32
        parallel = Parallel(LAYERS[layers], sequence_parallel=False, device=place.device, dtype=dtype)
        torch.manual_seed(0)
        self.model = Decoder(config, parallel).requires_grad_(False)
        if weights:
            self.model.load_state_dict(weights)
        length = setting.prompt + setting.new
        self.caches = [Cache(config, parallel, setting.sequences, length) for _ in self.model.blocks]
        self.tokens = torch.zeros(length, setting.sequences, dtype=torch.long, device=place.device)
        self.logits = torch.zeros(length, setting.sequences, config.vocab, device=place.device)
        self.prompt = prompt(setting).to(place.device)
        self.prompt_positions = torch.arange(setting.prompt, device=place.device)
        self.position = torch.zeros(1, dtype=torch.long, device=place.device)  # of the last token
        if layers == "flux":  # before a graph is captured
            flux_ops.nn.prepare(self.model, setting.prompt * setting.sequences, training=False)
        self.prefill, self.decode = self._prefill, self._decode
        if place.is_cuda:
            self.prefill, self.decode = graph_of(self._prefill), graph_of(self._decode)

    @torch.no_grad()
    def _prefill(self):
        self.tokens[: self.setting.prompt] = self.prompt
        logits = self.model(self.prompt, self.prompt_positions, self.caches)
        self.position.fill_(self.setting.prompt)
        self._append(logits)

    @torch.no_grad()
    def _decode(self):
        logits = self.model(self.tokens.index_select(0, self.position), self.position, self.caches)
        self.position += 1
        self._append(logits)

    def _append(self, logits):
        self.logits.index_copy_(0, self.position, logits.float().unsqueeze(0))
        self.tokens.index_copy_(0, self.position, logits.argmax(-1).unsqueeze(0))

    def run(self):
        """Seconds of the prefill, which gives the first token, and of the decode of all others."""
        times = []
        for step, count in ((self.prefill, 1), (self.decode, self.setting.new - 1)):
            self.place.everyone(None)
            self.place.sync()
            started = time.perf_counter()
            for _ in range(count):
                step()
            self.place.sync()
            times.append(time.perf_counter() - started)
        return times


def graph_of(step):
    """A function that replays `step`, captured as a CUDA graph."""
    step()  # once eagerly: libraries allocate what they need
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    return graph.replay


def prompt(setting):
    """[prompt, sequences]: the beginning of a module, and other places of the standard library."""
    tokens, _ = text.batch(text.standard_library(), setting.prompt, setting.sequences, seed=0)
    first = text.encode(PROMPT)[: setting.prompt]
    tokens[len(tokens) - len(first) :, 0] = first
    return tokens


def compared(flux, plain, device_type):
    """For each sequence: how many new tokens are equal, how far the logits are apart up to there, and the margin of the
    logits where the first token is not equal."""
    begin, found = flux.setting.prompt, []
    for i in range(flux.setting.sequences):
        unequal = (flux.tokens[begin:, i] != plain.tokens[begin:, i]).nonzero()
        equal = int(unequal[0]) if len(unequal) else flux.setting.new
        logits, others = (one.logits[begin : begin + equal + 1, i] for one in (plain, flux))
        largest = logits.abs().max()
        one = {"equal": equal, "apart": ((others - logits).abs().max() / largest).item()}
        one["fine"] = one["apart"] <= TOLERANCE[device_type]
        if len(unequal):
            one["margin"] = ((logits[-1].max() - logits[-1, flux.tokens[begin + equal, i]]) / largest).item()
            one["fine"] = one["fine"] and one["margin"] <= TIE[device_type]
        found.append(one)
    return found


def load(folder, place):
    """(configuration, weights of this rank) as examples/train_tp.py wrote them."""
    file = folder / f"rank{place.rank}of{place.world}.pt"
    if not file.exists():
        raise SystemExit(
            f"--load: there is no {file}; train_tp.py --save writes the weights for as many ranks as --tp."
        )
    saved = torch.load(file, map_location=place.device)
    return Config(**saved["config"]), saved["state"]


def generate(place, args):
    config, weights = load(args.load, place) if args.load else (CONFIGS[args.size], None)
    given = {name: getattr(args, name) for name in ("prompt", "new", "sequences") if getattr(args, name)}
    setting = dataclasses.replace(SETTINGS[args.size], **given)
    place.say(f"{config}\n{setting}\nTP = {place.world}, {place.device.type}")
    flux_ops.dispatch_counts(reset=True)
    runs = {layers: Generation(place, layers, config, setting, weights) for layers in LAYERS}
    seconds = {layers: [] for layers in runs}
    for turn in range(1 + (TURNS if place.is_cuda else 1)):
        for layers, run in runs.items():
            launch.watch(120)
            slowest = [max(ranks) for ranks in zip(*place.everyone(run.run()), strict=True)]
            if turn > 0:
                seconds[layers].append(slowest)
    found = compared(runs["flux"], runs["plain"], place.device.type)
    times = {layers: [statistics.median(s) for s in zip(*turns, strict=True)] for layers, turns in seconds.items()}
    new = runs["flux"].tokens[setting.prompt :, 0]
    return {
        "environment": report.environment(place),
        "config": dataclasses.asdict(config),
        "setting": dataclasses.asdict(setting),
        "sequences": found,
        "prefill_ms": {layers: 1e3 * prefill for layers, (prefill, _) in times.items()},
        "tokens_per_s": {layers: (setting.new - 1) * setting.sequences / s for layers, (_, s) in times.items()},
        "ran": {" ".join(how): calls for how, calls in flux_ops.dispatch_counts().items()},
        "text": text.decode(new) if config.vocab == text.VOCABULARY else None,
        "fine": all(place.everyone(all(one["fine"] for one in found))),
    }


def show(place, document):
    setting, rates, prefill = document["setting"], document["tokens_per_s"], document["prefill_ms"]
    place.say(f"\nthe first sequence goes on: {document['text']!r}")
    for i, one in enumerate(document["sequences"]):
        if "margin" in one:
            place.say(
                f"sequence {i}: {one['equal']} tokens are equal; at the next one the best logits are "
                f"{one['margin']:.1e} of the largest apart: {'a tie' if one['fine'] else 'WRONG'}"
            )
    same = sum("margin" not in one for one in document["sequences"])
    apart = max(one["apart"] for one in document["sequences"])
    place.say(f"{same} of {setting['sequences']} sequences: all {setting['new']} tokens of flux and plain are equal")
    place.say(f"their logits differ by at most {apart:.1e} of the largest one")
    place.say(f"prefill: plain {prefill['plain']:.2f} ms, flux {prefill['flux']:.2f} ms")
    place.say(
        f"decode: plain {rates['plain']:.0f} tokens/s, flux {rates['flux']:.0f} tokens/s: "
        f"{rates['flux'] / rates['plain']:.2f} times as fast"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    launch.add_arguments(parser)
    parser.add_argument("--size", default="", choices=("", *CONFIGS), help="default: small on GPUs, tiny on CPUs")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=0, help="tokens to generate")
    parser.add_argument("--sequences", type=int, default=0)
    parser.add_argument("--load", type=pathlib.Path, default=None, help="folder that train_tp.py --save wrote")
    parser.add_argument("--out", type=pathlib.Path, default="build/generate_tp.json")
    args = parser.parse_args()
    launch.settle(args)
    args.size = args.size or ("small" if args.device == "cuda" else "tiny")
    if not launch.under_launcher():
        sys.exit(launch.run_ranks(args.world, LIMIT_S))
    with launch.joined(args.device) as place:
        document = generate(place, args)
        show(place, document)
        if place.rank == 0:
            args.out.parent.mkdir(parents=True, exist_ok=True)
            args.out.write_text(json.dumps(document, indent=1) + "\n")
            print(f"written: {args.out}")
    sys.exit(0 if document["fine"] else "flux and plain gave different tokens, or logits.")


if __name__ == "__main__":
    main()
