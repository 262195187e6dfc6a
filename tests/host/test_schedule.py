"""csrc/schedule by g++ alone: orders, pieces, slots and the workspace layout, and what the C++ layers may include."""

import re

import pytest

from tests.host import programs
from tests.host.conftest import CSRC

PARTS = ("schedule", "pieces", "workspace", "ar_schedule", "ar_order", "exchange")
SOURCES = [f"{part}_test.cpp" for part in PARTS]
TESTS = programs.tests_in(SOURCES)


@pytest.fixture(scope="module")
def schedule_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    return build_program("schedule_test", SOURCES, flags)


@pytest.mark.parametrize("name", TESTS)
def test_schedule(schedule_test, name):
    programs.passes(schedule_test, name)


def test_every_test_of_the_program_is_run(schedule_test):
    assert programs.tests_of(schedule_test) == TESTS


@pytest.mark.parametrize("header", sorted(p.name for p in (CSRC / "schedule").glob("*.hpp")))
def test_header_compiles_alone(build_program, tmp_path, header):
    (tmp_path / "alone.cpp").write_text(
        f'#include "schedule/{header}"\n#include "schedule/{header}"\nint main() {{}}\n'
    )
    build_program(f"alone_{header}", [tmp_path / "alone.cpp"], [])


# ---- includes


def includes(text):
    """The paths that a source includes."""
    return re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)[>\"]", text, flags=re.MULTILINE)


def is_torch(path):
    return re.match(r"(torch|ATen|c10|caffe2|pybind11|Python\.h)", path) is not None


def is_standard(path):
    """True for headers of the C++ standard library: <cstdint>, <algorithm>; no folder, no suffix."""
    return re.fullmatch(r"[a-z_]+", path) is not None


def sources(layer):
    found = [p for p in sorted((CSRC / layer).rglob("*")) if p.suffix in {".hpp", ".h", ".cuh", ".cu", ".cpp", ".inl"}]
    if not found:
        pytest.skip(f"csrc/{layer} has no sources yet")
    return found


def test_schedule_is_pure():
    for path in sources("schedule"):
        text = path.read_text()
        for include in includes(text):
            allowed = include.startswith("schedule/") or is_standard(include)
            assert allowed, f"{path} includes {include}: only schedule/ and the standard library are allowed"
        assert not re.search(r"\b(blockIdx|threadIdx|gridDim|blockDim)\b", text), f"{path} reads a thread's coordinates"


@pytest.mark.parametrize("layer", ("kernels", "comm"))
def test_kernels_do_not_include_torch(layer):
    for path in sources(layer):
        for include in includes(path.read_text()):
            assert not is_torch(include), f"{path} includes {include}"


@pytest.mark.parametrize(
    "line, torch, standard",
    (
        ("#include <torch/library.h>", True, False),
        ('#include "ATen/ATen.h"', True, False),
        ("  #  include <c10/cuda/CUDAStream.h>", True, False),
        ("#include <pybind11/pybind11.h>", True, False),
        ("#include <cuda_runtime.h>", False, False),
        ("#include <cuda/std/array>", False, False),
        ("#include <cutlass/cutlass.h>", False, False),
        ("#include <cute/tensor.hpp>", False, False),
        ('#include "ops/problem.hpp"', False, False),
        ("#include <cstdint>", False, True),
    ),
)
def test_forbidden_includes_are_recognised(line, torch, standard):
    (include,) = includes(f"// a comment\n{line}\n")
    assert (is_torch(include), is_standard(include)) == (torch, standard)
