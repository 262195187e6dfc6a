"""csrc/schedule by g++ alone: orders, pieces, slots and the workspace layout, and what the C++ layers may include."""

import re
import subprocess

import pytest

from tests.host import programs
from tests.host.conftest import CSRC

TESTS = [
    "ag_chunks_are_a_permutation_own_first",
    "rs_chunks_are_a_permutation_own_last",
    "pushes_are_consumed_in_the_order_they_are_sent",
    "peer_slots_are_distinct_and_inverse",
    "tile_grid_covers_the_chunk_and_pads_less_than_a_cluster",
    "tile_order_is_a_permutation_with_an_inverse",
    "cluster_order_is_a_permutation_with_an_inverse",
    "tiles_of_a_cluster_are_neighbours_m_fastest",
    "stripes_are_compact",
    "swizzle_matches_the_picture",
    "large_tile_grids_do_not_overflow",
    "pieces_cover_every_item_once",
    "pieces_of_many_items_do_not_overflow",
    "rs_items_go_piece_by_piece_own_chunk_last",
    "rs_pieces_are_named_in_the_order_of_their_items",
    "rs_items_of_clusters_go_as_their_tiles",
    "rs_items_of_many_tiles_do_not_overflow",
    "blocks_of_tiles_are_whole_rows_or_columns",
    "signal_words_are_distinct",
    "parity_alternates",
    "signals_hold_epoch_and_digest",
    "workspace_parts_are_disjoint_and_aligned",
    "ag_shards_are_disjoint_and_exact",
    "rs_tiles_are_disjoint_and_exact",
    "slots_of_peers_are_disjoint",
    "neighbours_have_neighbouring_slots",
    "ar_chunks_cover_the_rows_in_order",
    "ar_steps_visit_every_chunk_once",
    "ar_own_chunks_come_a_section_later",
    "ar_own_steps_are_those_of_the_order",
    "ar_items_follow_the_order_of_the_chunks",
    "ar_results_cover_y_once",
    "turns_are_counted",
    "ar_order_matches_the_picture",
    "ar_signals_are_distinct",
    "ar_bound_of_the_staged_rows_holds_and_grows",
    "ar_region_parts_are_disjoint",
    "ar_calls_end_and_use_all_once",
    "ar_results_may_go_before_the_next_partials",
    "ar_lanes_may_share_a_queue",
    "ar_lanes_that_do_not_meet_are_found",
    "ar_results_before_their_partials_are_found",
    "exchange_slots_are_disjoint",
    "shares_are_disjoint_and_even",
    "owners_agree",
    "scatter_places_are_disjoint",
    "masks_have_the_vectors_with_rows_in_a_range",
    "scattered_tiles_meet_their_owners",
    "slices_of_the_gather_cover_k",
    "groups_of_an_all_reduce_cover_its_units",
]


@pytest.fixture(scope="module")
def schedule_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    parts = ["schedule", "pieces", "workspace", "ar_schedule", "ar_order", "exchange"]
    sources = [f"{part}_test.cpp" for part in parts]
    return build_program("schedule_test", sources, flags)


@pytest.mark.parametrize("name", TESTS)
def test_schedule(schedule_test, name):
    programs.passes(schedule_test, name)


def test_every_test_of_the_program_is_run(schedule_test):
    done = subprocess.run([str(schedule_test), "--list"], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == TESTS


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
