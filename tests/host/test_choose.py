"""The choice of a CUDA kernel and its model are pure functions: by g++ alone."""

import json
import subprocess

import pytest

from tests.host import programs
from tests.host.conftest import CSRC

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
    "sections_stay_within_the_bound",
    "sections_leave_full_tiles_and_pieces",
    "what_gemm_ar_can_not_cut_is_refused",
    "pieces_of_gemm_ar_are_varied_for_every_kernel",
    "fused_candidates_run_and_are_read_back",
    "few_rows_have_kernels_of_their_own",
    "few_rows_of_a_rank_have_them_too",
    "more_rows_of_gemm_ar_have_them_too",
    "slots_stay_within_the_bound",
    "a_choice_suits_rows_that_fill_its_tiles",
    "predictions_are_those_of_the_model",
    "predictions_of_what_is_not_fused",
    "predictions_of_few_rows_tell_the_forms_apart",
    "a_gemm_ar_that_is_not_fused_is_decomposed",
    "slots_hold_what_is_reduced",
    "few_rows_are_not_fused",
    "half_empty_tiles_are_not_fused",
    "short_products_are_not_fused",
    "some_rows_are_gathered_first",
    "most_is_decomposed_beside_fused",
    "tiles_at_once_are_fused",
    "tiles_of_gemm_ar_keep_most_sms_busy",
    "narrow_weights_have_small_tiles",
    "very_few_rows_may_share_tiles",
    "more_rows_of_gemm_rs_have_them_too",
]


@pytest.fixture(scope="module")
def choose_test(build_program):
    flags = ["-O1", "-fsanitize=undefined,signed-integer-overflow", "-fno-sanitize-recover=all"]
    sources = ["choose_test.cpp", "predict_test.cpp", "beside_fused_test.cpp", "few_rows_test.cpp"]
    return build_program("choose_test", sources, flags)


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
