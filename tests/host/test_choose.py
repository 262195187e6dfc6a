"""The choice of a CUDA kernel is a pure function: its header takes the CUDA headers, but no GPU and no kernel."""

import os
import sysconfig
from pathlib import Path

import pytest

from tests.host import programs
from tools import build_config

TESTS = [
    "names_are_read_back",
    "other_names_are_refused",
    "ranks_choose_alike",
    "pieces_have_signals",
    "no_candidate_pads_more_than_the_bound",
    "the_bound_costs_a_column_of_tiles_at_most",
    "candidates_are_few_and_begin_with_the_model",
    "tall_tiles_are_not_half_empty",
    "few_rows_are_left_to_the_sequence",
    "sections_stay_within_the_bound",
    "fused_candidates_run_and_are_read_back",
    "few_rows_have_kernels_of_their_own",
]


def cuda_headers():
    home, _ = build_config.find_cuda_home(os.environ)
    wheels = Path(sysconfig.get_paths()["purelib"]).glob("nvidia/*/include")
    folders = [Path(home) / "include"] if home else []
    return next((f for f in (*folders, *wheels) if (f / "cuda_runtime.h").exists()), None)


@pytest.fixture(scope="module")
def choose_test(build_program):
    headers = cuda_headers()
    if headers is None:
        pytest.skip("no CUDA headers on this machine")
    return build_program("choose_test", ["choose_test.cpp"], ["-O1", "-isystem", str(headers)])


@pytest.mark.parametrize("name", TESTS)
def test_choose(choose_test, name):
    programs.passes(choose_test, name)


def test_every_test_of_the_program_is_run(choose_test):
    assert programs.tests_of(choose_test) == TESTS
