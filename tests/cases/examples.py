"""The examples as a user runs them, and the decoder that they share."""

import json
import os
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

import flux_ops
from examples import plain
from examples.model import TINY, Cache, Decoder, Parallel
from tests.cases.base import BF16, FP64
from tests.harness.compare import Findings

ROOT = os.path.dirname(os.path.dirname(flux_ops.__file__))
SIZES = {
    "cpu": {"train_tp": "--steps 12 --length 64 --sequences 2", "generate_tp": "--new 16"},
    "cuda": {"train_tp": "--steps 12 --length 2048 --sequences 1", "generate_tp": "--new 32"},
}
LIMITS = {"cpu": 5e-6, "cuda": 2e-2}  # of a loss: Adam hides what is wrong by a factor, so few steps show little


def run_script(path, folder, device, *args):
    """The lines of its stdout. `folder` is its current folder, and $OUT."""
    env = {**os.environ, "PYTHONPATH": ROOT, "OUT": str(folder)}
    command = [sys.executable, os.path.join(ROOT, path), "--device", device, *args]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=110, cwd=folder)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    return result.stdout.splitlines()


def apart(losses, wants):
    """The largest difference of two curves, relative to the loss."""
    return max(abs(loss - want) / want for loss, want in zip(losses, wants, strict=True))


class Examples:
    """Runs each example at most once for the same ranks."""

    def __init__(self, device, folder):
        self.device, self.folder, self.documents = device, folder, {}

    def run(self, name, world, *args):
        key = name, world, args
        if key not in self.documents:
            if self.device == "cuda" and torch.cuda.device_count() < world:
                pytest.skip(f"needs {world} GPUs, this machine has {torch.cuda.device_count()}")
            out = self.folder / f"{len(self.documents)}.json"
            options = ["--world", str(world), "--out", str(out), *SIZES[self.device][name].split(), *args]
            run_script(f"examples/{name}.py", self.folder, self.device, *options)
            self.documents[key] = json.loads(out.read_text())
        return self.documents[key]

    def train(self, world, tp):
        weights = str(self.folder / f"weights-{world}-{tp}")
        return self.run("train_tp", world, "--tp", str(tp), "--save", weights), weights


def full_logits(ctx, config, layers, dtype, tokens):
    """Of a sequence-parallel model, the logits of all positions, over the whole vocabulary."""
    torch.manual_seed(0)
    model = Decoder(config, Parallel(layers, device=ctx.device, dtype=dtype)).requires_grad_(False)
    parts = [torch.empty_like(logits := model(tokens)) for _ in range(ctx.world)]
    dist.all_gather(parts, logits.contiguous())
    return torch.cat(parts, dim=-1)


def cached_logits(ctx, config, layers, dtype, tokens, prompt):
    """Of a model with a cache, the logits of the positions from the last of the prompt on."""
    torch.manual_seed(0)
    parallel = Parallel(layers, sequence_parallel=False, device=ctx.device, dtype=dtype)
    model = Decoder(config, parallel).requires_grad_(False)
    caches = [Cache(config, parallel, tokens.shape[1], len(tokens)) for _ in model.blocks]
    positions = torch.arange(len(tokens), device=ctx.device)
    steps = [slice(0, prompt), *(slice(i, i + 1) for i in range(prompt, len(tokens)))]
    with torch.no_grad():
        return torch.stack([model(tokens[step], positions[step], caches) for step in steps])


def decode_as_forward(ctx):
    """Prefill and decode give what one forward of all tokens gives, with both kinds of layers."""
    findings = Findings()
    dtype, limit = (BF16, 5e-2) if ctx.is_cuda else (FP64, 1e-12)
    config = types.SimpleNamespace(**{**vars(TINY), "tied": False})
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(config.vocab, (4 * ctx.world, 3), generator=generator).to(ctx.device)
    want = full_logits(ctx, config, plain, dtype, tokens)
    prompt = len(tokens) - 3
    gots = {
        "flux": full_logits(ctx, config, flux_ops.nn, dtype, tokens),
        "flux, cached": cached_logits(ctx, config, flux_ops.nn, dtype, tokens, prompt),
        "plain, cached": cached_logits(ctx, config, plain, dtype, tokens, prompt),
    }
    for name, got in gots.items():
        error = ((got - want[-len(got) :]).norm() / want.norm()).item()
        findings.add(name, None if error < limit else f"rank {ctx.rank}: off by {error:.1e}")
    return findings.finish()


over_worlds = pytest.mark.parametrize("world, tp", ((2, 2), (4, 2), (4, 4)))


class ExampleCases:
    device = "cpu"

    @pytest.fixture(scope="class")
    @classmethod
    def examples(cls, tmp_path_factory):
        return Examples(cls.device, tmp_path_factory.mktemp("examples"))

    @over_worlds
    def test_training(self, examples, world, tp):
        document, _ = examples.train(world, tp)
        flux, plain_ = document["losses"]["flux"], document["losses"]["plain"]
        assert len(flux) == len(plain_) == document["setting"]["steps"]
        assert apart(flux, plain_) < LIMITS[self.device]
        assert flux[-1] < 0.9 * flux[0]
        assert document["step_ms"].keys() == {"flux", "plain", "control"}
        assert any("fused" in how for how in document["ran"]), document["ran"]

    @over_worlds
    def test_training_is_the_same_without_tensor_parallelism(self, examples, world, tp):
        """As many replicas get the same text, whatever TP is."""
        document, alone = examples.train(world, tp)[0], examples.train(world // tp, 1)[0]
        for layers, losses in document["losses"].items():
            assert apart(losses, alone["losses"][layers]) < LIMITS[self.device], layers

    @pytest.mark.parametrize("world", (2, 4))
    def test_generation_of_trained_weights(self, examples, world):
        trained, weights = examples.train(world, world)
        document = examples.run("generate_tp", world, "--load", weights)
        assert document["config"] == trained["config"]
        assert len(document["sequences"]) == document["setting"]["sequences"]
        assert document["tokens_per_s"].keys() == {"flux", "plain"}
        for one in document["sequences"]:
            assert one["fine"]
            if self.device == "cpu":
                assert one["equal"] == document["setting"]["new"]

    @pytest.mark.worlds(2, 4)
    def test_decode_is_as_the_forward_of_all_tokens(self, ranks, record_property):
        record_property("cells", ranks.run(decode_as_forward)[0])
