"""Run the GPU tests and end with a short table.

    python tests/gpu/run.py                      all tests, every number of ranks from 2 that the machine has GPUs for
    python tests/gpu/run.py -k "grid or graph"   a selection, as pytest's -k has it
    python tests/gpu/run.py --worlds 2 --limit 300
    python tests/gpu/run.py --ranks-per-gpu 4    on a machine with one GPU: ranks that share it and compute in turn, a
                                                 few milliseconds each. It runs what needs no NCCL: gloo stands in
                                                 for it, and no CUDA graph can capture that
    python tests/gpu/run.py --every-config --worlds 2 --limit 3000
                                                 the tests that hold for any configuration, with each of the tuner's
                                                 candidates in turn; a row for each (--configs A,B: with these)

The full log goes to $OUT/gpu-tests.log if OUT is set, else to gpu-tests.log in the build folder. Everything ends within
the limit: then the table shows what was done so far.
"""

import argparse
import os
import pathlib
import re
import subprocess
import sys
import threading
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAX_REASON_LINES = 14
OF_SHARED_GPUS = (
    *("allreduce", "decomposed", "errors", "few_rows", "graphs", "groups", "numerics", "reuse", "shapes"),
    *("autograd", "compiled_graphs", "layers", "parallel_styles", "autocast", "compile", "dispatch", "inductor_pass"),
    *("layout", "topology", "overlapped_training", "megatron", "vllm_layer", "examples", "green_contexts"),
)
NOT_ON_GLOO = (
    *("many_sizes_of_an_mlp_in_one_pool", "a_training_step_in_one_graph", "capture_of_a_training_step"),
    *("overhead_of_a_training_step", "data_parallel", "recomputed_models_agree"),
)
MAX_RANKS_PER_GPU = 16


class Collector:
    """A pytest plugin: one row per test function and world size, or per forced configuration and world size."""

    def __init__(self, say, configs=()):
        self.say = say
        self.configs = sorted(configs, key=len, reverse=True)  # a name may be the beginning of another
        self.rows = {}
        self.running = None
        self.failures = 0
        self.errors = []

    def pytest_runtest_logstart(self, nodeid):
        self.running = nodeid

    def pytest_collectreport(self, report):
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longrepr}")

    def pytest_runtest_logreport(self, report):
        row = self.rows.setdefault(
            self._name_of(report.nodeid), {"cells": 0, "s": 0.0, "pass": 0, "fail": 0, "skip": 0}
        )
        row["s"] += report.duration
        if report.when == "call" and report.passed:
            row["pass"] += 1
            row["cells"] += dict(report.user_properties).get("cells", 1)
        elif report.failed:
            row["fail"] += 1
            self.failures += 1
            self.say(f"FAIL {report.nodeid}\n{_reason_of(report)}")
        elif report.skipped:
            row["skip"] += 1

    def _name_of(self, nodeid):
        """tests/gpu/test_gpu_shapes.py::TestGpuShape::test_residues[gpu2-gemm_rs] -> shapes: residues (2 ranks)"""
        file, _, rest = nodeid.partition("::")
        test, _, params = rest.rpartition("::")[2].partition("[")
        world = re.search(r"gpu(\d+)", params)
        where = f" ({world[1]} ranks)" if world else ""
        if config := next((config for config in self.configs if config in params), None):
            return f"{config}{where}"
        module = pathlib.Path(file).stem.removeprefix("test_gpu_")
        return f"{module}: {test.removeprefix('test_').replace('_', ' ')}{where}"

    def table(self):
        heads = ["configuration" if self.configs else "test", "cases", "time", "result"]
        body = []
        for name, row in self.rows.items():
            counts = [f"{row[key]} {key}" for key in ("fail", "pass", "skip") if row[key]]
            verdict = "pass" if row["pass"] and not row["fail"] and not row["skip"] else ", ".join(counts)
            body.append([name, str(row["cells"]), f"{row['s']:.1f} s", verdict])
        widths = [max(len(line[c]) for line in [heads, *body]) for c in range(4)]
        lines = [[cell.ljust(w) for cell, w in zip(line, widths, strict=True)] for line in [heads, *body]]
        return "\n".join("  ".join(cells).rstrip() for cells in lines)

    def summary(self):
        total = {key: sum(row[key] for row in self.rows.values()) for key in ("cells", "pass", "fail", "skip")}
        return f"{total['pass']} passed ({total['cells']} cases), {total['fail']} failed, {total['skip']} skipped"


def _reason_of(report):
    lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    kept = [line for line in lines if line and not line.startswith(("File ", "^", "Traceback"))]
    shown = kept or lines
    if len(shown) > MAX_REASON_LINES:  # the first lines tell where, the error comes last
        shown = [*shown[: MAX_REASON_LINES // 2], "...", *shown[-MAX_REASON_LINES // 2 :]]
    return "\n".join(f"    {line[:300]}" for line in shown)


def every_config():
    """The names, asked for in a process of its own: the question touches a GPU, and this process forks ranks."""
    code = "from tests.cases.base import every_config; print(*every_config('cuda'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"no configurations: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.split()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", dest="select", default="", help="pytest's -k expression")
    parser.add_argument("--worlds", default="", help="only these numbers of ranks, comma-separated")
    parser.add_argument("--thorough", action="store_true", help="also what the CPU backend's tests cover")
    shared = int(os.environ.get("FLUX_RANKS_PER_GPU", "1"))
    parser.add_argument("--ranks-per-gpu", type=int, default=shared, help="how many ranks may share a GPU")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    parser.add_argument("--every-config", action="store_true", help="with each of the tuner's candidates in turn")
    parser.add_argument("--configs", default="", help="with these configurations in turn, comma-separated")
    parser.add_argument("--limit", type=float, default=560, help="seconds after which everything is stopped")
    args = parser.parse_args()

    sys.path.insert(0, str(ROOT))
    if not 1 <= args.ranks_per_gpu <= MAX_RANKS_PER_GPU:
        parser.error(f"--ranks-per-gpu is {args.ranks_per_gpu}; it must be 1 to {MAX_RANKS_PER_GPU}")
    os.environ["FLUX_RANKS_PER_GPU"] = str(args.ranks_per_gpu)
    screen = os.fdopen(os.dup(1), "w", buffering=1)
    log_path = pathlib.Path(os.environ.get("OUT") or ROOT / "build") / "gpu-tests.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    configs = every_config() if args.every_config else [name for name in args.configs.split(",") if name]
    collector = Collector(lambda text: print(text, file=screen), configs)
    started = time.monotonic()

    def finish(status, note=""):
        for error in collector.errors:
            print(f"NOT COLLECTED {error}", file=screen)
        print(f"\n{collector.table()}\n\n{note}{collector.summary()}, {time.monotonic() - started:.0f} s", file=screen)
        screen.flush()
        os._exit(status)  # ranks end with this process

    def give_up():
        finish(3, f"STOPPED after {args.limit:.0f} s in {collector.running}. ")

    timer = threading.Timer(args.limit, give_up)
    timer.daemon = True
    timer.start()

    options = ["-p", "no:cacheprovider", "-p", "no:timeout", "-p", "no:xdist", "-rs", "--tb=short", "-v"]
    options += ["-W", "ignore::pytest.PytestConfigWarning"]  # the timeout option without its plugin
    others = [f"not gpu{w}" for w in range(2, 17) if args.worlds and str(w) not in args.worlds.split(",")]
    folder, files = ROOT / "tests" / "gpu", ["."]
    if args.ranks_per_gpu > 1:
        others += [f"not {name}" for name in NOT_ON_GLOO]
        files = [f"test_gpu_{name}.py" for name in OF_SHARED_GPUS]
    selection = " and ".join([f"({args.select})"] * bool(args.select) + others)
    if selection:
        options += ["-k", selection]
    options += ["--thorough"] * args.thorough + ["-x"] * args.first
    options += ["--force-config", ",".join(configs)] * bool(configs)
    with open(log_path, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = pytest.main([*options, *(str(folder / file) for file in files)], plugins=[collector])
    nothing_ran = not any(row["pass"] or row["fail"] for row in collector.rows.values())
    finish(int(status) or (4 if nothing_ran else 0), "NOTHING RAN: see the reasons in the log. " if nothing_ran else "")


if __name__ == "__main__":
    main()
