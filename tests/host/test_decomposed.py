"""The schedules of the decomposed strategy and the choice among them, by g++ alone."""

import pytest

from tests.host import programs

TESTS = [
    "products_cover_each_row_and_column_once",
    "products_need_the_pieces_that_they_read",
    "every_piece_is_pushed_once_and_waited_for",
    "products_follow_the_order_of_arrival",
    "sums_begin_with_the_first_columns",
    "schedules_match_the_picture",
    "large_chunks_are_whole_tiles",
    "partials_cover_each_row_once_own_last",
    "names_are_read_back",
    "other_names_are_refused",
    "ranks_choose_alike",
    "the_heuristic_is_that_of_the_paper",
    "what_is_large_is_reduced_in_two_shots",
    "huge_extents_are_refused",
    "sums_of_16_bits_are_wide",
]


@pytest.fixture(scope="module")
def decomposed_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    return build_program("decomposed_test", ["decomposed_test.cpp"], flags)


@pytest.mark.parametrize("name", TESTS)
def test_decomposed(decomposed_test, name):
    programs.passes(decomposed_test, name)


def test_every_test_of_the_program_is_run(decomposed_test):
    assert programs.tests_of(decomposed_test) == TESTS
