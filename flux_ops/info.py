"""`python -m flux_ops info`: what is installed, what can run here, and which tuned choices are in use.

python -m flux_ops info --predict --world 8 --lists mlp,gpt3   what `auto` is expected to run on 8 GPUs; it needs none
"""

import argparse
import os
import platform

import torch

import flux_ops
from flux_ops import config, extension, launch, prediction, topology
from flux_ops.tuner.lookup import device_name


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    parser.add_argument("--predict", action="store_true", help="print what the model of the GPUs' kernels says instead")
    parser.add_argument("--world", type=int, default=8, help="of the prediction: ranks; default: 8")
    parser.add_argument("--lists", default="mlp,gpt3", help="of the prediction: lists of benchmarks/shapes.json")


def run(args: argparse.Namespace) -> int:
    if args.predict and extension.module is None:
        return launch.refuse("info", extension.why_not_loaded)
    try:
        print(*(prediction.table(args.world, args.lists) if args.predict else lines()), sep="\n")
    except ValueError as error:
        return launch.refuse("info", error)
    return 0


def lines() -> list[str]:
    settings = config.settings
    threads = settings.cpu_threads or "min(4, cores / ranks)"
    checks = "comparison" if settings.check_ranks else "no comparison"
    return [
        f"flux_ops      {flux_ops.__version__} in {os.path.dirname(flux_ops.__file__)}",
        f"torch         {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}",
        f"CUDA kernels  {'yes' if flux_ops.has_cuda_kernels() else f'no: {flux_ops.why_not_cuda()}'}",
        *_devices(),
        f"settings      timeout {settings.timeout_s:g} s, {checks} of the ranks' calls, CPU threads {threads}",
        *_caches(),
    ]


def _devices() -> list[str]:
    if torch.cuda.device_count() == 0:
        return [f"devices       {device_name('cpu')}"]
    probes = [
        topology.probe(gpu, "cuda", gpu, flux_ops.__version__, flux_ops.why_not_cuda())
        for gpu in range(torch.cuda.device_count())
    ]
    reason = topology.decide(probes, "cuda")
    return [
        *(f"GPU {gpu}         {device_name('cuda', gpu)}" for gpu in range(len(probes))),
        f"topology      {reason or 'every GPU reaches every other one'}",
    ]


def _caches() -> list[str]:
    hooks = flux_ops.ops._hooks
    if hooks is None:
        return []
    files = [hooks.caches.user, *hooks.caches.shipped] if hooks.caches.user else hooks.caches.shipped
    if not files:
        return ["tuned         no file is in use"]
    shown = []
    for file in files:
        entries = file.num_entries()
        state = f"ignored: {file.error}" if file.error else f"{file.path}: {entries} entries"
        shown.append(f"tuned         {state}")
    return shown
