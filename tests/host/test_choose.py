"""The choice of a CUDA kernel and its model are pure functions: by g++ alone."""

import pytest

from tests.host import programs

TESTS = [
    "names_are_read_back",
    "other_names_are_refused",
    "ranks_choose_alike",
    "pieces_have_signals",
    "no_candidate_pads_more_than_the_bound",
    "the_bound_costs_a_column_of_tiles_at_most",
    "interleaved_chunks_of_one_stripe_have_pieces_along_n",
    "candidates_are_few_and_begin_with_the_model",
    "tall_tiles_are_not_half_empty",
    "few_rows_are_left_to_the_sequence",
    "sections_stay_within_the_bound",
    "sections_are_two_where_full_pushes_leave_them",
    "fused_candidates_run_and_are_read_back",
    "few_rows_have_kernels_of_their_own",
    "few_rows_of_a_rank_have_them_too",
    "more_rows_of_gemm_ar_have_them_too",
    "slots_stay_within_the_bound",
    "a_choice_suits_rows_that_fill_its_tiles",
    "half_empty_tiles_are_left_to_the_sequence",
    "predictions_are_those_of_the_model",
    "predictions_of_what_is_not_fused",
    "predictions_of_few_rows_tell_the_forms_apart",
]


@pytest.fixture(scope="module")
def choose_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    return build_program("choose_test", ["choose_test.cpp", "predict_test.cpp"], flags)


@pytest.mark.parametrize("name", TESTS)
def test_choose(choose_test, name):
    programs.passes(choose_test, name)


def test_every_test_of_the_program_is_run(choose_test):
    assert programs.tests_of(choose_test) == TESTS
