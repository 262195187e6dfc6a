"""The choice of a strategy is a pure function of what the ranks have agreed on."""

import pytest

from flux_ops import extension

_choose = getattr(extension.module, "choose_strategy", None)
pytestmark = pytest.mark.skipif(_choose is None, reason=f"no compiled part: {extension.why_not_loaded}")


def choose(asked, why_local, why_not_fused, why_fused_is_slower=""):
    return _choose(asked, why_local, why_not_fused, why_fused_is_slower)


def test_auto_takes_fused_where_it_can_run():
    strategy, _, refused, fell_back = choose("auto", "", "")
    assert (strategy, refused, fell_back) == ("fused", False, False)


def test_auto_falls_back_with_the_reason():
    strategy, reason, refused, fell_back = choose("auto", "", "there is no link")
    assert (strategy, refused, fell_back) == ("sequential", False, True)
    assert "there is no link" in reason


def test_auto_takes_the_faster_without_a_warning():
    strategy, reason, refused, fell_back = choose("auto", "", "", "few rows")
    assert (strategy, refused, fell_back) == ("sequential", False, False)
    assert "few rows" in reason
    assert choose("fused", "", "", "few rows") == ("fused", "asked for", False, False)


def test_fused_that_cannot_run_is_refused():
    _, reason, refused, fell_back = choose("fused", "", "there is no link")
    assert (reason, refused, fell_back) == ("there is no link", True, False)


@pytest.mark.parametrize("why_not", ("", "there is no link"))
def test_sequential_runs_when_asked_for(why_not):
    assert choose("sequential", "", why_not) == ("sequential", "asked for", False, False)


@pytest.mark.parametrize("asked", ("auto", "fused", "sequential"))
def test_nothing_to_communicate_comes_first(asked):
    strategy, reason, refused, _ = choose(asked, "the group has one rank", "there is no link")
    assert (strategy, reason, refused) == ("local", "the group has one rank", False)
