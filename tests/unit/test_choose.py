"""The choice of a strategy is a pure function of what the ranks have agreed on."""

import pytest

from flux_ops import extension

_choose = getattr(extension.module, "choose_strategy", None)
pytestmark = pytest.mark.skipif(_choose is None, reason=f"no compiled part: {extension.why_not_loaded}")


def choose(asked, why_local, why_not, why_fused_is_slower="", *, or_decomposed=False):
    return _choose(asked, why_local, why_not, why_fused_is_slower, or_decomposed)


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


def test_auto_takes_decomposed_instead_where_that_can_run():
    strategy, reason, refused, fell_back = choose("auto", "", "", "few rows", or_decomposed=True)
    assert (strategy, refused, fell_back) == ("decomposed", False, False)
    assert "few rows" in reason
    strategy, reason, refused, fell_back = choose("auto", "", "no tensor core", or_decomposed=True)
    assert (strategy, refused, fell_back) == ("decomposed", False, False)
    assert "no tensor core" in reason
    assert choose("auto", "", "", or_decomposed=True)[0] == "fused"


@pytest.mark.parametrize("asked", ("fused", "fused:c128x256_2x1/n2/p2", "decomposed", "decomposed:chunks/c2"))
def test_what_is_asked_for_by_name_runs_or_is_refused(asked):
    name = asked.partition(":")[0]
    assert choose(asked, "", "") == (name, "asked for", False, False)
    assert choose(asked, "", "", "few rows") == (name, "asked for", False, False)
    assert choose(asked, "", "there is no link") == (name, "there is no link", True, False)


@pytest.mark.parametrize("why_not", ("", "there is no link"))
def test_sequential_runs_when_asked_for(why_not):
    assert choose("sequential", "", why_not) == ("sequential", "asked for", False, False)


@pytest.mark.parametrize("asked", ("auto", "fused", "decomposed", "sequential"))
def test_nothing_to_communicate_comes_first(asked):
    strategy, reason, refused, _ = choose(asked, "the group has one rank", "there is no link")
    assert (strategy, reason, refused) == ("local", "the group has one rank", False)


@pytest.mark.parametrize("op, count", (("ag_gemm", 11), ("gemm_rs", 3), ("gemm_ar", 2)))
def test_candidates_of_decomposed_are_named(op, count):
    names = extension.module.decomposed_candidates(op)
    assert len(set(names)) == len(names) == count
    assert all("/c" in name or name in ("gather", "one-shot", "two-shot") for name in names)
    with pytest.raises(ValueError, match="ag_gemm"):
        extension.module.decomposed_candidates("warp9")
