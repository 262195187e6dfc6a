"""A call of gemm_ar for many rows on all ranks, simulated: by g++ alone."""

import pytest

from tests.host import programs

TESTS = [
    "calls_end_and_use_all_once",
    "results_may_go_before_the_next_partials",
    "results_before_their_partials_are_found",
]


@pytest.fixture(scope="module")
def ar_order_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    return build_program("ar_order_test", ["ar_order_test.cpp"], flags)


@pytest.mark.parametrize("name", TESTS)
def test_ar_order(ar_order_test, name):
    programs.passes(ar_order_test, name)


def test_every_test_of_the_program_is_run(ar_order_test):
    assert programs.tests_of(ar_order_test) == TESTS
