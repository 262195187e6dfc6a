"""Results as a JSON document and as tables.

    efficiency E = 1 - (T - T_gemm) / (T_sequential - T_gemm)

E = 1: the communication is hidden entirely. E = 0: no better than the plain sequence.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess

import torch

import flux_ops
from flux_ops.bench.candidates import AUTO, FUSED, NOT_OURS, ONE_SHOT, RIVALS, TORCH, TWO_SHOT
from flux_ops.tuner.measure import GEMM, SEQUENTIAL
from flux_ops.tuner.tables import aligned

ROOT = pathlib.Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "benchmarks" / "table.py").exists()  # else the package is installed
RESULTS = ROOT / "benchmarks" / "results"
DASH = "-"
LINK_GBS = 370  # what one GPU of an NVLink host sends
TITLES = {
    "ag_gemm": "all-gather + GEMM",
    "gemm_rs": "GEMM + reduce-scatter",
    "gemm_ar": "GEMM + all-reduce",
}


def folders(keep):
    """Where results are written: $OUT, if it is set, and if they are to be kept the checkout or the current folder."""
    kept = RESULTS if IS_CHECKOUT else pathlib.Path.cwd()
    return [pathlib.Path(folder) for folder in (keep and kept, os.environ.get("OUT")) if folder]


def _git(*arguments):
    """Of the checkout; an installed package may lie in a repository of something else."""
    return _output_of("git", *arguments) if IS_CHECKOUT else None


def _output_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, cwd=ROOT, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _version_of(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def clocks():
    """SM clock, its maximum, power and temperature of GPU 0, as nvidia-smi says: a note, not a measurement."""
    fields = "clocks.sm,clocks.max.sm,power.draw,temperature.gpu"
    text = _output_of("nvidia-smi", "-i", "0", f"--query-gpu={fields}", "--format=csv,noheader")
    return text and dict(zip(fields.split(","), (part.strip() for part in text.split(",")), strict=False))


def environment(place):
    """What the numbers were measured on."""
    on_gpu = place.is_cuda
    watched = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NCCL_ALGO", "NCCL_PROTO", "CUDA_MODULE_LOADING")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "tp": place.world,
        "driver": _output_of("nvidia-smi", "-i", "0", "--query-gpu=driver_version", "--format=csv,noheader"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if on_gpu else None,
        "cublas": _version_of("nvidia-cublas")
        or _version_of("nvidia-cublas-cu13")
        or _version_of("nvidia-cublas-cu12"),
        "flux_ops": flux_ops.__version__,
        "commit": os.environ.get("FLUX_COMMIT") or _git("rev-parse", "--short=12", "HEAD"),
        "uncommitted": bool(_git("status", "--porcelain", "csrc", "flux_ops", "benchmarks/*.py")),
        "python": platform.python_version(),
        "variables": {name: os.environ[name] for name in watched if name in os.environ},
        "clocks_before": clocks() if on_gpu else None,
    }


def efficiency(times, name):
    """E of a candidate, or None where it can't be told: no exposed communication to hide."""
    gemm, sequential, ours = (times.get(n) for n in (GEMM, SEQUENTIAL, name))
    if not (gemm and sequential and ours) or sequential["median"] <= gemm["median"]:
        return None
    return 1 - (ours["median"] - gemm["median"]) / (sequential["median"] - gemm["median"])


def link_ms(document, row):
    """The time of the least that a rank sends on its link: (TP - 1) / TP of x or of y, and for gemm_ar of y twice."""
    world, size = document["environment"]["tp"], getattr(torch, document["dtype"]).itemsize
    sent = (world - 1) / world * row["M"] * row["H"] * size * (2 if row["op"] == "gemm_ar" else 1)
    return sent / LINK_GBS / 1e6


def write(document, name, into):
    """Write <name>.json to each of the folders; returns the paths."""
    paths = []
    for folder in into:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.json"
        scratch = path.with_suffix(".tmp")
        scratch.write_text(json.dumps(document, indent=1) + "\n")
        scratch.replace(path)
        paths.append(path)
    return paths


def select(document, op, mode):
    return [row for row in document["rows"] if row["op"] == op and row["mode"] == mode]


def candidates_of(rows):
    """All candidates of these rows: the standing ones first, explored configurations after them."""
    standing = [*NOT_OURS, FUSED, AUTO]
    seen = {name for row in rows for name in (*row["times"], *row["notes"])}
    return [n for n in standing if n in seen] + sorted(seen.difference(standing))


def ours_of(names):
    return [n for n in names if n not in NOT_OURS]


def mean(values):
    values = [v for v in values if v is not None]
    return statistics.fmean(values) if values else None


def number(value, digits=2):
    return DASH if value is None else f"{value:.{digits}f}"


def full_table(document, op, mode):
    """Every candidate of every shape: median in ms, spread, E; footnotes for what is missing."""
    rows = select(document, op, mode)
    if not rows:
        return ""
    names = candidates_of(rows)
    notes, body = [], []
    for row in rows:
        cells = []
        for name in names:
            timing = row["times"].get(name)
            if timing:
                cells.append(f"{timing['median'] / 1e3:.3f} ±{100 * timing['spread']:.1f}%")
                continue
            note = row["notes"].get(name)
            if note and note not in notes:
                notes.append(note)
            cells.append(f"{DASH} [{notes.index(note) + 1}]" if note else DASH)
        cells += [number(efficiency(row["times"], name)) for name in ours_of(names)]
        sizes = [row["name"], str(row["M"]), str(row["H"]), str(row["I"])]
        body.append([*sizes, number(link_ms(document, row), 3), *cells])
    means = [number(mean(efficiency(row["times"], name) for row in rows)) for name in ours_of(names)]
    body.append(["mean", *[""] * (4 + len(names)), *means])
    heads = ["shape", "M", "H", "I", "link", *names, *(f"E {name}" for name in ours_of(names))]
    meta = document["environment"]
    title = f"{op} ({TITLES[op]}), {mode}, TP = {meta['tp']}, {meta['card']}: ms, median ± half the interquartile range"
    footnotes = [f"  link: the least that a rank sends, at {LINK_GBS} GB/s"]
    footnotes += [f"  [{i + 1}] {note}" for i, note in enumerate(notes)]
    return "\n".join([title, *aligned(heads, body), *footnotes])


def study_table(document, op, mode, what, heads, body):
    """The lines of a study's table: what its numbers are above it, what is missing below."""
    meta = document["environment"]
    title = f"{document['study']}: {op}, {mode}, TP = {meta['tp']}, {meta['card']}; {what}"
    rows = select(document, op, mode)
    missing = {(name, note) for row in rows for name, note in row["notes"].items() if name not in row["times"]}
    return [title, *aligned(heads, body), *sorted(f"  {name}: {note}" for name, note in missing)]


def short_table(document):
    """One line per op and mode: the means, and what is slower than the sequence."""
    heads = ["op", "mode", "shapes", "candidate", "mean E", "worst E", "speed-up", "slower than sequential"]
    body = []
    for op in TITLES:
        for mode in document["modes"]:
            rows = select(document, op, mode)
            for name in [TORCH, ONE_SHOT, TWO_SHOT, *ours_of(candidates_of(rows))]:
                timed = [r for r in rows if name in r["times"] and SEQUENTIAL in r["times"]]
                values = [e for r in timed if (e := efficiency(r["times"], name)) is not None]
                ratios = {r["name"]: r["times"][SEQUENTIAL]["median"] / r["times"][name]["median"] for r in timed}
                if not ratios:
                    continue
                slower = ", ".join(n for n, ratio in ratios.items() if ratio < 1) or "none"
                speed = f"{statistics.geometric_mean(ratios.values()):.2f}x"
                worst = number(min(values, default=None))
                body.append([op, mode, str(len(ratios)), name, number(mean(values)), worst, speed, slower])
    return "\n".join(aligned(heads, body))


def summary(document, lists=("mlp", "gpt3")):
    """A line per op and mode: E of what the ops do by default, over the shapes of the lists."""
    lines = []
    for op in TITLES:
        for mode in document["modes"]:
            rows = [row for row in select(document, op, mode) if row["list"] in lists]
            values = {row["name"]: efficiency(row["times"], default_of(row)) for row in rows}
            values = {name: e for name, e in values.items() if e is not None}
            if values:
                worst = min(values, key=values.get)
                wins = sum(_is_fastest(row) for row in rows if row["name"] in values)
                lines.append(
                    f"{op}, TP = {document['environment']['tp']}, {mode}: mean E {mean(values.values()):.2f}, "
                    f"worst {values[worst]:.2f} ({worst}), the fastest on {wins} of {len(values)} shapes of "
                    f"{' and '.join(lists)}"
                )
    return lines


def _is_fastest(row):
    rivals = [row["times"][name]["median"] for name in (SEQUENTIAL, *RIVALS[row["op"]]) if name in row["times"]]
    return row["times"][default_of(row)]["median"] <= min(rivals)


def default_of(row):
    """What stands for the op's default: where `auto` runs what `fused` runs anyhow, only the latter is measured."""
    return AUTO if AUTO in row["times"] else FUSED
