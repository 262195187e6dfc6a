"""The choice of a CUDA kernel and its model are pure functions: by g++ alone."""

import json
import subprocess

import pytest

from tests.host import programs
from tests.host.conftest import CSRC

SOURCES = ["choose_test.cpp", "predict_test.cpp", "beside_fused_test.cpp", "few_rows_test.cpp"]
TESTS = programs.tests_in(SOURCES)


@pytest.fixture(scope="module")
def choose_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    return build_program("choose_test", SOURCES, flags)


@pytest.mark.parametrize("name", TESTS)
def test_choose(choose_test, name):
    programs.passes(choose_test, name)


def test_every_test_of_the_program_is_run(choose_test):
    assert programs.tests_of(choose_test) == TESTS


# ---- the choices that the package ships


def why_not(program, op, world, m, n, k, config, dtype="bfloat16", layout="nk"):
    args = [op, world, m, n, k, dtype, layout, config]
    command = [str(program), "--why-not", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


@pytest.mark.parametrize("path", sorted(CSRC.parent.glob("flux_ops/tuner/caches/*.json")), ids=lambda path: path.stem)
def test_shipped_choices_can_run(choose_test, path):
    refused, checked = [], 0
    for entry in json.loads(path.read_text())["entries"]:
        strategy, _, config = entry["choice"].partition(":")
        if strategy != "fused" or not config or entry["device"].startswith("CPU"):
            continue
        product = [entry[name] for name in ("op", "tp", "m", "n", "k")]
        reason = why_not(choose_test, *product, config, entry["dtype"], entry["layout"])
        refused += [f"{product} {config}: {reason}"] if reason else []
        checked += 1
    assert checked > 0, f"{path} has no fused choice of a GPU"
    assert not refused, "\n".join(refused)


@pytest.mark.parametrize(
    "product, config, reason",
    (
        (("gemm_ar", 2, 8192, 8192, 14336), "p128x192_2x1/m1/p2/s4", ""),
        (("gemm_ar", 2, 8192, 8192, 14336), "p128x192_2x1/m1/p1/s8", "sections"),
        (("gemm_ar", 2, 8192, 8192, 14336), "p128x192_2x1/m1/p3/s4", "pieces"),
        (("gemm_ar", 2, 8196, 8192, 14336), "p128x192_2x1/m1/p2/s4", "multiple of TP x sections = 8"),
        (("gemm_rs", 2, 8192, 8192, 14336), "p128x192_2x1/m1/p1/s1", "no configuration"),
    ),
)
def test_reasons_are_printed(choose_test, product, config, reason):
    printed = why_not(choose_test, *product, config)
    assert reason in printed
    assert (printed == "") == (reason == "")
