"""Host time of one eager call: what the CPU spends before the call returns. Enqueue only, no synchronisation.

    python benchmarks/host_time.py              all GPUs, a process each; without GPUs one CPU rank and tiny operands
    python benchmarks/host_time.py --world 2    two GPUs

A sample is the mean of a few calls; the table has the smallest and the median sample of rank 0, in microseconds, for
few rows (one kernel) and for many (a kernel and its pushes). On one rank no communication is needed, so what is left is
the way through Python and the dispatcher, and the product: `linear` is the product alone. --name keeps the numbers in
benchmarks/results/, and in $OUT.
"""

import argparse
import pathlib
import statistics
import sys
import time

import torch
import torch.nn.functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import flux_ops
from flux_ops import launch
from flux_ops.bench import report

SAMPLES = 200
CALLS = 10  # of a sample: few enough for the queues of the GPU


def sample(place, call):
    """Microseconds of a call, sample by sample."""
    times = []
    for _ in range(SAMPLES):
        place.sync()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter() - begin) / CALLS * 1e6)
    return times[SAMPLES // 10 :]


MODES = (
    ("inference_mode", torch.inference_mode, False),
    ("no_grad", torch.no_grad, False),
    ("grad mode, none needed", torch.enable_grad, False),
    ("forward of a training step", torch.enable_grad, True),
)


def rows(place):
    n, k, dtype = (1024, 1024, torch.bfloat16) if place.is_cuda else (16, 16, torch.float32)
    strategy = "fused" if place.world > 1 else "auto"
    weight = torch.randn(n, k, dtype=dtype, device=place.device)
    for m in (64, 4096 * place.world) if place.is_cuda else (8,):
        for op in ("linear", "ag_gemm", "gemm_rs", "gemm_ar"):
            x = torch.randn(m // place.world if op == "ag_gemm" else m, k, dtype=dtype, device=place.device)

            def call(x=x, op=op):
                if op == "linear":
                    return F.linear(x, weight)
                return getattr(flux_ops, op)(x, weight, strategy=strategy)

            for mode, grad_mode, needs_grad in MODES:
                if op == "gemm_ar" and needs_grad:
                    continue
                weight.requires_grad_(needs_grad)
                with grad_mode():
                    times = sample(place, call)
                ran = "" if op == "linear" else flux_ops.last_dispatch().config
                yield {"op": op, "M": m, "mode": mode, "ran": ran, "us": [min(times), statistics.median(times)]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=torch.cuda.device_count() or 1)
    parser.add_argument("--name", default="", help="name of a results file")
    options = parser.parse_args()
    if not launch.under_launcher():
        return launch.run_ranks(options.world, limit_s=120)
    with launch.joined("cuda" if flux_ops.has_cuda_kernels() and torch.cuda.is_available() else "cpu") as place:
        place.say(f"{'op':<8} {'M':>5} {'mode':<27} {'least':>7} {'median':>7}  us  configuration")
        document = {"environment": report.environment(place), "rows": []}
        for row in rows(place):
            document["rows"].append(row)
            least, median = row["us"]
            place.say(f"{row['op']:<8} {row['M']:>5} {row['mode']:<27} {least:7.1f} {median:7.1f}      {row['ran']}")
        if options.name and place.rank == 0:
            report.write(document, options.name, report.folders(keep=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
