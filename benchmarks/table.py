"""The results of README.md and of benchmarks/RESULTS.md, made from results files.

    python benchmarks/table.py benchmarks/results/NAME.json           prints them
    python benchmarks/table.py NAME4.json NAME2.json --write          puts them between the markers of README.md
    python benchmarks/table.py NAME.json --write benchmarks/RESULTS.md    or of another page

The first file's table is whole, those of the others are compact; files of benchmarks/layer.py and of the studies may be
among them.
Beside a file NAME.json lies its picture, NAME.svg, if benchmarks/plot.py has made it. Without a file: the newest one
in benchmarks/results/ that was measured on GPUs.
"""

import argparse
import json
import os
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from flux_ops.bench import report, studies
from flux_ops.bench.candidates import AUTO, RIVALS
from flux_ops.tuner.measure import GEMM, SEQUENTIAL

BEGIN, END = "<!-- results: begin -->", "<!-- results: end -->"
README = report.ROOT / "README.md"
PAGES = (README, report.ROOT / "benchmarks" / "RESULTS.md")
LAYERS = (
    "bfloat16, sequence-parallel: `plain` is `F.linear` and NCCL, `flux` the layers of `flux_ops.nn`, `async-tp` is "
    "`plain` with torch's `_micro_pipeline_tp`; benchmarks/layer.py"
)
RIVAL_WORDS = {
    "torch": "`torch` is `torch.ops.symm_mem.fused_*`",
    "one-shot": "`one-shot` and `two-shot` are cuBLAS and `torch.ops.symm_mem.*_shot_all_reduce`",
}


def newest():
    found = []
    for path in report.RESULTS.glob("*.json"):
        document = json.loads(path.read_text())
        if document["environment"]["nccl"] and "modes" in document and "study" not in document:
            found.append((document["environment"]["date"], path))
    if not found:
        raise SystemExit("benchmarks/results/ has no results measured on GPUs; `make bench` makes them.")
    return max(found)[1]


def markdown(paths, mode="graph", page=README):
    """The whole block, as text, with links as they are from the page."""
    documents = [(path.resolve(), json.loads(path.read_text())) for path in paths]
    rounds = [document["rounds"] for _, document in documents]
    samples = sorted({min(rounds), max(rounds)})
    shown = [row for _, document in documents if "modes" in document for row in _shown_rows(document, mode)]
    rivals = {name for row in shown for name in _measured(RIVALS[row["op"]], [row])}
    words = "".join(f"{text}, " for name, text in RIVAL_WORDS.items() if name in rivals)
    parts = [
        f"Median of {' to '.join(map(str, samples))} interleaved samples, in ms, the slowest rank counts. `gemm` is "
        f"cuBLAS alone, `sequential` is NCCL and cuBLAS one after the other, {words}`auto` is what the ops do by "
        "default, with the tuned choices that the package brings. `link` is the time of the least that a rank sends, "
        f"at {report.LINK_GBS} GB/s. *E* = 1 − (T − T_gemm) / (T_sequential − T_gemm) is the share of the "
        "communication that is hidden. The fastest of each row is in bold."
    ]
    for index, (path, document) in enumerate(documents):
        meta = document["environment"]
        if "modes" not in document:
            parts += [
                f"**Whole layers, TP = {meta['tp']}**: {meta['tp']} x {meta['card']}, {LAYERS}",
                _layers(document),
            ]
            parts.append(_origin(path, meta))
            continue
        in_mode = _mode_of(document, mode)
        if "study" in document:
            parts += [_study(document, in_mode), _origin(path, meta)]
            continue
        graph = "under a CUDA graph" if in_mode == "graph" else "eager"
        parts.append(f"**TP = {meta['tp']}**: {meta['tp']} x {meta['card']}, {document['dtype']}, {graph}")
        picture = path.with_suffix(".svg")
        if picture.exists():
            link = os.path.relpath(picture, page.resolve().parent)
            parts.append(f"![Speed of each shape beside that of the product alone, TP = {meta['tp']}]({link})")
        parts += [_compact(document, in_mode)] if index else _full(document, in_mode)
        if lines := report.summary(document):
            parts.append("\n".join(f"* {line}" for line in lines))
        parts.append(_origin(path, meta))
    return "\n\n".join(parts)


def _mode_of(document, mode):
    return mode if mode in document["modes"] else document["modes"][0]


def _shown_rows(document, mode):
    return [row for row in document["rows"] if row["mode"] == _mode_of(document, mode)]


def _origin(path, meta):
    stack = ", ".join(f"{name} {meta[name]}" for name in ("torch", "cuda", "nccl", "driver", "commit") if meta[name])
    changed = ", uncommitted" if meta.get("uncommitted") else ""
    return f"{meta['date'][:10]}, {stack}{changed}. All numbers, with their spread: `{_shown(path)}`"


def _shown(path):
    return path.relative_to(report.ROOT) if path.is_relative_to(report.ROOT) else path.name


def _times(row):
    """The row's times by candidate; what the op does by default as `auto`."""
    return {**row["times"], AUTO: row["times"].get(report.default_of(row))}


def _full(document, mode):
    """A heading and a table for each op."""
    for op, title in report.TITLES.items():
        rows = report.select(document, op, mode)
        if not rows:
            continue
        names = [GEMM, SEQUENTIAL, *_measured(RIVALS[op], rows), AUTO]
        heads = ["shape", "M", "H", "I", "link", *names, "speed-up", "E"]
        body = []
        for row in rows:
            times = _times(row)
            ours, sequential = times[AUTO], times.get(SEQUENTIAL)
            ratio = f"{sequential['median'] / ours['median']:.2f}" if ours and sequential else report.DASH
            cells = _cells(times, names)
            e = report.number(report.efficiency(times, AUTO))
            sizes = [row["name"], str(row["M"]), str(row["H"]), str(row["I"])]
            body.append([*sizes, report.number(report.link_ms(document, row), 3), *cells, ratio, e])
        mean = report.number(report.mean(report.efficiency(_times(row), AUTO) for row in rows))
        body.append(["mean", *[""] * (len(heads) - 2), mean])
        yield f"**`{op}`** ({title})"
        yield _table(heads, body, left=1)


def _compact(document, mode):
    """One table: a line for each shape, the ops beside each other."""
    by_op = {op: {row["name"]: row for row in report.select(document, op, mode)} for op in report.TITLES}
    by_op = {op: rows for op, rows in by_op.items() if rows}
    shapes = {row["name"]: row for rows in by_op.values() for row in rows.values()}
    columns = {op: [GEMM, SEQUENTIAL, *_measured(RIVALS[op], rows.values()), AUTO] for op, rows in by_op.items()}
    heads = ["shape", "M", *(f"`{op}`: {name}" for op, names in columns.items() for name in ("link", *names, "E"))]
    body = []
    for name, shape in shapes.items():
        line = [name, str(shape["M"])]
        for op, rows in by_op.items():
            times = _times(rows[name]) if name in rows else {}
            link = report.number(report.link_ms(document, rows[name]), 3) if name in rows else report.DASH
            line += [link, *_cells(times, columns[op]), report.number(report.efficiency(times, AUTO))]
        body.append(line)
    return _table(heads, body, left=1)


def _measured(names, rows):
    return [name for name in names if any(name in row["times"] for row in rows)]


def _study(document, mode):
    """The study's own tables, folded."""
    tables = [studies.table(document, op, mode) for op in report.TITLES]
    text = "\n\n".join(table for table in tables if table)
    meta = document["environment"]
    head = f"Study <code>{document['study']}</code>, TP = {meta['tp']}"
    return f"<details><summary>{head}</summary>\n\n```text\n{text}\n```\n\n</details>"


def _layers(document):
    """A line for each layer and pass."""
    names = list(dict.fromkeys(name for row in document["rows"] for name in row["times"]))
    body = [[f"{row['name']}, {row['mode']}", str(row["M"]), *_cells(row["times"], names)] for row in document["rows"]]
    return _table(["layer", "M", *names], body, left=1)


def _cells(times, names):
    """Milliseconds; the fastest of those that compute and communicate in bold."""
    rivals = [times[name] for name in names if name != GEMM and times.get(name)]
    fastest = min(rivals, key=lambda timing: timing["median"], default=None)
    cells = []
    for name in names:
        text = f"{times[name]['median'] / 1e3:.3f}" if times.get(name) else report.DASH
        cells.append(f"**{text}**" if times.get(name) and times[name] is fastest else text)
    return cells


def _table(heads, body, left):
    rule = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in [heads, rule, *body])


def placed(text, block):
    """The page with the block between its markers."""
    if BEGIN not in text or END not in text:
        raise SystemExit(f"The page lacks the markers {BEGIN} and {END}")
    head, rest = text.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n{block}\n{END}{tail}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="*", type=pathlib.Path)
    parser.add_argument("--mode", default="graph", choices=("graph", "eager"))
    parser.add_argument("--write", nargs="?", type=pathlib.Path, const=README, metavar="PAGE", help="by itself: README")
    args = parser.parse_args()
    paths = args.results or [newest()]
    page = args.write or README
    block = markdown(paths, args.mode, page)
    if not args.write:
        print(block)
        return
    page.write_text(placed(page.read_text(), block))
    print(f"{page.name}: results of", *paths)


if __name__ == "__main__":
    main()
