"""`python -m flux_ops bench`, as a user runs it, on CPU processes; and the bare transfers of its study."""

import argparse
import faulthandler
import json
import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import flux_ops
from flux_ops.bench import command
from flux_ops.bench.transfer import GATHER, Transfers
from flux_ops.launch import Place
from flux_ops.tuner.measure import Operands

ROOT = os.path.dirname(os.path.dirname(flux_ops.__file__))
COLUMNS = {
    "swizzle": {"rank order", "same order"},
    "chunks": {"p1", "p2", "p4", "p8"},
    "schedule": {"fused", "sequential", "heuristic", "uniform-fused-1d", "hetero-fused-1d", "hetero-unfused-1d"},
    "transfer": {*Transfers.NAMES, "fused op", "gemm"},
}


def bench(out, *args):
    """(lines of stdout, the document)."""
    env = {**os.environ, "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "", "OUT": str(out)}
    options = ["--shapes", "gpt3-1k", "--rounds", "2", "--dtype", "float32", *args]
    line = [sys.executable, "-m", "flux_ops", "bench", *options]
    result = subprocess.run(line, env=env, capture_output=True, text=True, timeout=100, cwd=out)
    assert result.returncode == 0, result.stderr
    (path,) = out.glob("*.json")
    return result.stdout.splitlines(), json.loads(path.read_text())


def test_benchmark(tmp_path):
    lines, document = bench(tmp_path, "--explore", "t64x64/p8,decomposed")
    assert document["environment"]["tp"] == 2
    assert [row["op"] for row in document["rows"]] == ["ag_gemm", "gemm_rs"]
    for row in document["rows"]:
        assert set(row["times"]) == {"gemm", "sequential", "fused", "fused:t64x64/p8", "decomposed"}, row["notes"]
        assert row["ran"]["fused:t64x64/p8"] == "fused t64x64/p8"
        assert "CUDA" in row["notes"]["torch"]
        assert all(t["q1"] <= t["median"] <= t["q3"] for t in row["times"].values())
    assert lines[-1].startswith("gemm_rs")  # the shortest table is the last


def studied(ctx, study, out, *more):
    """(the closing lines, the document, its paths) of a study of one small layer."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = ["--study", study, "--device", "cpu", "--modes", "eager", "--shapes", "gpt3-1k", "--rounds", "1"]
    args = parser.parse_args([*given, *more, "--world", str(ctx.world)])
    os.environ["OUT"] = out
    try:
        place = Place(ctx.rank, ctx.world, ctx.device, None)
        document, paths = command.measure(place, args, command.layers(args))
    finally:
        del os.environ["OUT"]
        faulthandler.cancel_dump_traceback_later()  # the bench's own watch
    return command.closing(document, paths).splitlines(), document, [str(path) for path in paths]


@pytest.mark.worlds(2)
@pytest.mark.parametrize("study", COLUMNS)
def test_study(ranks, study, tmp_path):
    lines, document, paths = ranks.run(studied, study, str(tmp_path))[0]
    assert json.loads((tmp_path / os.path.basename(paths[0])).read_text()) == document
    assert document["study"] == study
    for row in document["rows"]:
        named = {name for names in row["columns"].values() for name in names}
        assert named | {"gemm", "sequential"} == set(row["times"]), row["notes"]
    assert set(document["rows"][0]["columns"]) >= COLUMNS[study]
    assert lines[-1].startswith("gpt3-1k" if study == "transfer" else "geometric mean")


@pytest.mark.worlds(2)
def test_study_of_rows(ranks, tmp_path):
    lines, document, paths = ranks.run(studied, "rows", str(tmp_path), "--rows", "1,2,3")[0]
    assert json.loads((tmp_path / os.path.basename(paths[0])).read_text()) == document
    measured = [(row["M"], row["op"]) for row in document["rows"]]
    shared = [(m, op) for m in (2, 4) for op in ("ag_gemm", "gemm_rs")]
    assert sorted(measured) == sorted([*shared, *((m, "gemm_ar") for m in (1, 2, 3))])
    for row in document["rows"]:
        assert set(row["times"]) == {"gemm", "sequential", "auto"}, row["notes"]
        assert row["ran"]["auto"].startswith("fused ")
    assert re.match(r"\d flags at 3 sizes", lines[-1])


def transferred(ctx):
    """Which transfers bring every other rank's shard, and nothing else."""
    place = Place(ctx.rank, ctx.world, ctx.device, None)
    products = [(8 * ctx.world, 16, 24), (2 * ctx.world, 16, 40)]
    transfers, wrong = Transfers(place, "float32", products), []
    for product in products:
        operands = Operands(place, "ag_gemm", *product, torch.float32)
        for name in Transfers.NAMES:
            call = transfers.make(name, operands)
            place.everyone(None)
            if name != GATHER:
                transfers._view(ctx.rank, operands.x[0])[1:].fill_(float("nan"))
            place.everyone(None)
            got = call(0)
            place.everyone(None)
            if not got.equal(transfers.expected(name, operands)):
                wrong.append(f"{name} of {product} on rank {ctx.rank}")
    dist.barrier()
    return wrong


@pytest.mark.worlds(2, 3)
def test_transfers_bring_every_other_shard(ranks):
    assert ranks.run(transferred) == [[]] * ranks.world
