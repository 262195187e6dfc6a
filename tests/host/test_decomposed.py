"""The schedules of the decomposed strategy and the choice among them, by g++ alone."""

import pytest

from tests.host import programs

SOURCES = ["decomposed_test.cpp"]
TESTS = programs.tests_in(SOURCES)


@pytest.fixture(scope="module")
def decomposed_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    return build_program("decomposed_test", SOURCES, flags)


@pytest.mark.parametrize("name", TESTS)
def test_decomposed(decomposed_test, name):
    programs.passes(decomposed_test, name)


def test_every_test_of_the_program_is_run(decomposed_test):
    assert programs.tests_of(decomposed_test) == TESTS
