"""A small exact case of each op on two GPUs, for tools that watch a process: no pytest, no forked ranks.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 \\
    compute-sanitizer --target-processes all --report-api-errors no --error-exitcode 9 python tests/gpu/small.py

Without torch's cache each tensor is an allocation of its own, and an access beside it is seen. Errors of API calls are
left out because torch and NCCL probe what the machine can do with calls that fail.
FLUX_TIMEOUT should be generous: a watched kernel is slow.
"""

import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import torch

from flux_ops import launch
from tests.cases.base import OPS, Case, check
from tests.cases.decomposed import strategies
from tests.harness.ranks import Context

SIZES = ((8, 128, 128), (130, 264, 200), (257, 512, 136))
LIMIT_S = 400


def run(place):
    ctx = Context(place.rank, place.world, place.device)
    problems, cells = [], 0
    for op in OPS:
        for rows, n, k in SIZES:
            for bias in (False, True):
                for layout in ("nk", "kn"):
                    for strategy in ("fused", *(s for s in strategies(op) if s.endswith(("/c2", "/c3", "/c16")))):
                        case = Case(op, rows, n, k, bias=bias, layout=layout, seed=cells)
                        problem = check(ctx, case, strategy=strategy)
                        cells += 1
                        if problem:
                            problems.append(f"{strategy} {case}: {problem}")
    torch.cuda.synchronize()
    problems = [one for of_rank in place.everyone(problems) for one in of_rank]
    place.say("\n".join([*problems, f"{cells} cases on {place.world} GPUs, {len(problems)} wrong"]))
    return not problems


def main():
    os.environ.setdefault("FLUX_TIMEOUT", "120")
    if not launch.under_launcher():
        sys.exit(launch.run_ranks(2, LIMIT_S))
    with launch.joined("cuda") as place:
        fine = run(place)
    sys.exit(0 if fine else 1)


if __name__ == "__main__":
    main()
