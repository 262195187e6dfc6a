"""The README's result table, made from a results file.

    python benchmarks/table.py benchmarks/results/NAME.json           prints it
    python benchmarks/table.py benchmarks/results/NAME.json --write   puts it between the markers of README.md

Without a file: the newest one in benchmarks/results/ that was measured on GPUs.
"""

import argparse
import json
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flux_ops.bench import report
from flux_ops.bench.candidates import AUTO, RIVALS
from flux_ops.tuner.measure import GEMM, SEQUENTIAL

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
README = report.ROOT / "README.md"


def newest():
    found = []
    for path in report.RESULTS.glob("*.json"):
        environment = json.loads(path.read_text())["environment"]
        if environment["nccl"]:
            found.append((environment["date"], path))
    if not found:
        raise SystemExit("benchmarks/results/ has no results measured on GPUs; `make bench` makes them.")
    return max(found)[1]


def markdown(document, source, mode="graph"):
    meta = document["environment"]
    mode = mode if mode in document["modes"] else document["modes"][0]
    lines = [
        f"{meta['tp']} x {meta['card']}, {document['dtype']}, {'under a CUDA graph' if mode == 'graph' else 'eager'}; "
        f"median of {document['rounds']} interleaved samples, in ms, the slowest rank counts. `gemm` is cuBLAS alone, "
        f"`sequential` is NCCL and cuBLAS one after the other, `torch` is `torch.ops.symm_mem.fused_*`, "
        "`auto` is what the ops do by default, with the tuned choices that the package brings. "
        f"*E* = 1 − (T − T_gemm) / (T_sequential − T_gemm) is the share of the communication that is hidden. "
        "The fastest of the three is in bold.",
    ]
    for op, title in report.TITLES.items():
        rows = report.select(document, op, mode)
        if not rows:
            continue
        for row in rows:  # where auto runs what `fused` runs anyhow, only the latter is measured
            row["times"].setdefault(AUTO, row["times"].get(FUSED))
        names = [GEMM, SEQUENTIAL, TORCH, AUTO]
        lines += ["", f"**`{op}`** ({title})", ""]
        lines += [
            "| shape | M | H | I | " + " | ".join(names) + " | speed-up | E |",
            "| --- |" + " ---: |" * (len(names) + 5),
        ]
        for row in rows:
            ours = row["times"].get(AUTO)
            sequential = row["times"].get(SEQUENTIAL)
            rivals = [row["times"][n] for n in (SEQUENTIAL, TORCH, AUTO) if row["times"].get(n)]
            fastest = min(rivals, key=lambda timing: timing["median"], default=None)
            cells = [_cell(row["times"].get(name), row["times"].get(name) is fastest) for name in names]
            ratio = f"{sequential['median'] / ours['median']:.2f}" if ours and sequential else report.DASH
            e = report.number(report.efficiency(row["times"], AUTO))
            lines.append(
                f"| {row['name']} | {row['M']} | {row['H']} | {row['I']} | {' | '.join(cells)} | {ratio} | {e} |"
            )
        mean = report.number(report.mean(report.efficiency(row["times"], AUTO) for row in rows))
        lines.append(f"| mean | | | | {' | '.join([''] * len(names))} | | {mean} |")
    versions = ("torch", "cuda", "nccl", "driver", "commit")
    stack = ", ".join(f"{name} {meta[name]}" for name in versions if meta[name])
    lines += ["", f"{meta['date'][:10]}, {stack}. All numbers, with their spread, are in `{source}`."]
    return "\n".join(lines)


def _cell(timing, bold):
    if not timing:
        return report.DASH
    text = f"{timing['median'] / 1e3:.3f}"
    return f"**{text}**" if bold else text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="?", type=pathlib.Path)
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"))
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    path = (args.results or newest()).resolve()
    source = path.relative_to(report.ROOT) if path.is_relative_to(report.ROOT) else path.name
    table = markdown(json.loads(path.read_text()), source, args.mode)
    if not args.write:
        print(table)
        return
    text = README.read_text()
    if BEGIN not in text or END not in text:
        raise SystemExit(f"README.md lacks the markers {BEGIN} and {END}")
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    README.write_text(f"{head}{BEGIN}\n{table}\n{END}{tail}")
    print(f"README.md: table from {source}")


if __name__ == "__main__":
    main()
