"""All interleavings of the protocol on small machines: 2 to 4 ranks, a few tiles and pieces, 3 to 7 calls.

protocol_model.hpp states the rules and why they suffice. Here every sequence must end well, and every rule, when it is
broken on purpose, must show: the explorer then prints a shortest trace (pytest -rP shows it).
"""

import itertools
import re

import pytest

SEQUENCES = [",".join(ops) for ops in itertools.product(("ag", "rs"), repeat=3)]
LONG_SEQUENCES = [",".join(ops) for ops in itertools.product(("ag", "rs"), repeat=4)]
OPS = ["ag", "rs", "rd", "ag,rs", "rs,ag", "ag,rd", "rs,rd"]  # patterns for cycle()
LANES = ("--lanes", 2)
IN_LINE = ["al", "al,rs", "rs,al", "al,ag,rs", "rs,rs,al"]  # with shards in line
AR_OPS = ["at", "ao", "at,ao", "at,rs", "ag,ao", "rd,at,ag", "rs,ao,at"]  # with gemm_ar: two-shot, one-shot


def cycle(ops, count):
    """The first `count` calls of a repeated pattern: cycle("ag,rs", 3) is "ag,rs,ag"."""
    return ",".join(itertools.islice(itertools.cycle(ops.split(",")), count))


def all_modes(count):
    """Eager calls (A), then device-counted ones in any sequence of the regions 0 (B) and 1 (C): "AABC" and so on.

    The names of the regions don't matter unless an eager call has used them: without one, the first is B. A sequence
    also stands for its beginnings.
    """
    for eager in range(count):
        for regions in itertools.product("BC", repeat=count - eager):
            if eager > 0 or regions[0] == "B":
                yield "A" * eager + "".join(regions)


# ---- the protocol holds


@pytest.mark.parametrize("calls", SEQUENCES)
def test_two_ranks(explore, calls):
    assert explore(2, calls, "--pieces", 2, "--tiles", 4, "--split-waits") == ("", [])


@pytest.mark.parametrize("calls", SEQUENCES)
def test_three_ranks(explore, calls):
    assert explore(3, calls, "--pieces", 2, "--tiles", 2) == ("", [])
    assert explore(3, calls, "--pieces", 1, "--tiles", 2, "--split-waits") == ("", [])


@pytest.mark.parametrize("calls", ("ag,ag,ag", "rs,rs,rs", "ag,rs,ag", "rs,ag,rs"))
def test_three_ranks_with_waits_and_reads_apart(explore, calls):
    assert explore(3, calls, "--pieces", 2, "--tiles", 2, "--split-waits") == ("", [])


@pytest.mark.parametrize("calls", LONG_SEQUENCES)
def test_four_calls(explore, calls):
    assert explore(3, calls, "--tiles", 2) == ("", [])


@pytest.mark.parametrize("calls", ("ag,ag,ag", "ag,rs,ag"))
def test_four_ranks(explore, calls):
    assert explore(4, calls) == ("", [])


@pytest.mark.parametrize("calls", SEQUENCES)
def test_shapes_change_from_call_to_call(explore, calls):
    assert explore(3, calls, "--pieces", "2,1,2", "--tiles", "3,1,2") == ("", [])
    assert explore(3, calls, "--pieces", "1,2,1", "--tiles", "2,3,1") == ("", [])


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("calls", ("rd,rd,rd", "ag,rd,ag", "rd,ag,rd", "rd,rs,rd"))
def test_direct_gemm_rs(explore, world, calls):
    assert explore(world, calls, "--pieces", 2, "--tiles", 3) == ("", [])
    assert explore(world, calls, "--modes", "ABC", "--tiles", 2, "--split-waits") == ("", [])


@pytest.mark.parametrize("ops", IN_LINE)
def test_shards_in_line(explore, ops):
    assert explore(2, cycle(ops, 4), "--pieces", 2, "--tiles", 2, "--split-waits") == ("", [])
    assert explore(3, cycle(ops, 4)) == ("", [])
    assert explore(3, cycle(ops, 3), "--pieces", 2, "--tiles", 2) == ("", [])
    for modes in all_modes(3):
        assert explore(3, cycle(ops, 3), "--modes", modes) == ("", [])
    for options in (("--change", "wait_on_side_stream"), LANES):
        assert explore(3, cycle(ops, 3), "--modes", "ABB", *options) == ("", [])


@pytest.mark.parametrize("ops", AR_OPS)
def test_gemm_ar(explore, ops):
    assert explore(2, cycle(ops, 4), "--pieces", 2, "--tiles", 2, "--split-waits") == ("", [])
    assert explore(3, cycle(ops, 4), "--tiles", 2, "--split-waits") == ("", [])
    assert explore(4, cycle(ops, 3)) == ("", [])


@pytest.mark.parametrize("ops", AR_OPS)
def test_gemm_ar_in_any_regions(explore, ops):
    for modes in all_modes(5):
        assert explore(2, cycle(ops, 5), "--modes", modes, "--pieces", 2, "--tiles", 2) == ("", [])
    for modes in all_modes(4):
        assert explore(3, cycle(ops, 4), "--modes", modes, "--tiles", 2) == ("", [])


def test_empty_calls_take_no_number(explore):
    assert explore(3, "ag,ag,rs", "--pieces", "1,0,1") == ("", [])
    assert explore(3, "ag,ag,rs", "--pieces", "1,0,1", "--modes", "BCB") == ("", [])


@pytest.mark.parametrize("ops", OPS)
def test_two_ranks_and_any_regions(explore, ops):
    for modes in all_modes(6):
        options = ("--modes", modes, "--pieces", 2, "--tiles", 2, "--split-waits")
        assert explore(2, cycle(ops, 6), *options) == ("", [])


@pytest.mark.parametrize("ops", OPS)
def test_three_ranks_and_any_regions(explore, ops):
    for modes in all_modes(4):
        assert explore(3, cycle(ops, 4), "--modes", modes, "--tiles", 2) == ("", [])
    for modes in all_modes(3):
        assert explore(3, cycle(ops, 3), "--modes", modes, "--split-waits") == ("", [])


@pytest.mark.parametrize("ops", OPS)
def test_three_ranks_and_a_long_sequence_of_regions(explore, ops):
    assert explore(3, cycle(ops, 7), "--modes", "ABCBBCC", "--tiles", 2) == ("", [])
    assert explore(3, cycle(ops, 3), "--modes", "ACC", "--pieces", 2, "--tiles", 2) == ("", [])


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("modes", list(all_modes(3)))
def test_any_three_ops_and_any_regions(explore, world, modes):
    for calls in itertools.product(("ag", "rs", "rd", "at", "ao"), repeat=3):
        assert explore(world, ",".join(calls), "--modes", modes) == ("", [])


@pytest.mark.parametrize("change", ("wait_per_peer", "wait_on_side_stream", "one_last_use"))
@pytest.mark.parametrize("ops", OPS)
def test_other_waits_that_are_sound(explore, ops, change):
    for modes in ("ABBC", "AABC", "BCBB"):
        assert explore(3, cycle(ops, 4), "--modes", modes, "--change", change) == ("", [])


@pytest.mark.parametrize("ops", OPS)
def test_only_a_repeated_region_makes_a_call_wait(explore, ops):
    for modes in all_modes(4):
        assert explore(3, cycle(ops, 4), "--modes", modes, "--change", "check_for_wait") == ("", [])
    for modes in ("BCBC", "ABCB", "AACB"):
        assert explore(3, cycle(ops, 4), "--modes", modes, "--change", "no_begun_wait") == ("", [])


def test_counts_hold_the_push_of_gemm_rs_back(explore):
    """Without the fork gemm_rs is still right: no piece leaves before the tiles of its own call are counted."""
    assert explore(3, "rs,rs,rs", "--change", "push_too_early") == ("", [])


@pytest.mark.parametrize("change", ("none", "wait_on_side_stream"))
@pytest.mark.parametrize("calls", SEQUENCES[1:])  # all with a gemm_rs
def test_two_lanes(explore, calls, change):
    for modes in ("AAA", *all_modes(3)):
        options = ("--modes", modes, "--change", change, *LANES)
        assert explore(2, calls, "--pieces", 2, "--tiles", 4, "--split-waits", *options) == ("", [])
        assert explore(2, calls, "--pieces", 3, "--tiles", 3, *options) == ("", [])


@pytest.mark.parametrize("change", ("none", "wait_on_side_stream", "wait_per_peer"))
@pytest.mark.parametrize("ops", ("rs", "ag,rs", "rs,ag"))
def test_two_lanes_in_other_cases(explore, ops, change):
    """Three pieces with waits and reads apart; one, which leaves the first lane idle; three ranks, a peer per lane."""
    options = ("--change", change, *LANES)
    split = ("--pieces", 3, "--tiles", 3, "--split-waits")
    assert explore(2, cycle(ops, 3), "--modes", "ABB", *split, *options) == ("", [])
    sizes = ("--pieces", "2,1,3,1,2,1,3", "--tiles", 3)
    assert explore(2, cycle(ops, 7), "--modes", "ABCBBCC", *sizes, *options) == ("", [])
    for modes in ("AA", *all_modes(2)):
        assert explore(3, cycle(ops, 2), "--modes", modes, "--tiles", 2, *options) == ("", [])
    assert explore(3, cycle(ops, 3), "--modes", "ABB", "--tiles", 1, *options) == ("", [])


def test_two_lanes_with_two_pieces_for_each_of_two_peers(explore):
    options = ("--modes", "BB", "--pieces", "1,2", "--tiles", "1,2", "--change", "wait_on_side_stream", *LANES)
    assert explore(3, "rs,rs", *options) == ("", [])


def test_counts_hold_both_lanes_back(explore):
    options = ("--pieces", "3,1,2", "--tiles", 3, *LANES)
    assert explore(2, "rs,rs,rs", "--change", "push_too_early", *options) == ("", [])


# ---- each planted bug is found: change, calls, modes, kind of failure, actor of the last step


PLANTED = [
    ("one_region", "ag,ag,ag", "AAA", "overwritten", "gemm"),
    ("one_region", "rs,rs,rs", "AAA", "overwritten", "gemm"),
    ("one_region", "ag,rs,ag", "AAA", "overwritten", "gemm"),
    ("signal_first", "ag,ag,ag", "AAA", "stale", "gemm"),
    ("signal_first", "rs,rs,rs", "AAA", "stale", "gemm"),
    ("push_too_early", "ag,ag,ag", "AAA", "overwritten", "gemm"),
    ("no_join", "ag,ag,ag", "AAA", "overwritten", "push"),  # x is overwritten while it is sent
    ("count_first", "rs,rs,rs", "AAA", "missing", "push"),
    ("too_few_tiles", "rs,rs,rs", "AAA", "missing", "push"),
    ("no_reset", "rs,rs,rs", "AAA", "stale", "push"),
    ("one_region", "rd,rd,rd", "AAA", "overwritten", "gemm"),
    ("signal_first", "rd,rd,rd", "AAA", "missing", "gemm"),
    ("no_begun_wait", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("no_begun_wait", "rs,rs,rs", "BBB", "overwritten", "gemm"),
    ("no_begun_wait", "rd,rd,rd", "BBB", "overwritten", "gemm"),
    ("no_begun_wait", "ag,rs,ag,rs", "BCCB", "overwritten", "gemm"),
    ("no_first_wait", "ag,ag,ag", "ACB", "overwritten", "gemm"),  # the region that the last eager call has used
    ("no_first_wait", "rs,rs,rs", "AAB", "overwritten", "gemm"),
    ("no_first_wait", "rd,rd,rd", "ACB", "overwritten", "gemm"),
    ("wait_for_last", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("wait_for_last", "rs,rs,rs", "BCC", "overwritten", "gemm"),
    ("wait_for_last", "rd,rd,rd", "AAB", "overwritten", "gemm"),
    ("last_use_not_updated", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("last_use_not_updated", "rs,rs,rs", "BCC", "overwritten", "gemm"),
    ("last_use_not_updated", "rd,rd,rd", "ABB", "overwritten", "gemm"),
    ("begun_before_last_tile", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("begun_before_last_tile", "rs,rs,rs", "BCC", "overwritten", "gemm"),
    ("begun_before_last_tile", "rd,rd,rd", "ACB", "overwritten", "gemm"),
    ("read_after_begun", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("read_after_begun", "ag,rs,ag", "ACB", "overwritten", "gemm"),
    ("one_region", "at,at,at", "AAA", "overwritten", "push"),
    ("one_region", "at,ag,at", "AAA", "overwritten", "push"),
    ("signal_first", "at,at,at", "AAA", "stale", "gemm"),
    ("no_join", "at,at,at", "AAA", "overwritten", "push"),  # the results are, before they are all in y
    ("no_begun_wait", "at,at,at", "BBB", "overwritten", "push"),
    ("no_first_wait", "at,at,at", "AAB", "overwritten", "push"),
    ("wait_for_last", "at,at,at", "BBB", "overwritten", "push"),
    ("begun_before_last_tile", "at,at,at", "BBB", "overwritten", "push"),
    ("one_region", "ao,ao,ao", "AAA", "(overwritten|missing)", "gemm"),  # missing: the own partial is of the next call
    ("signal_first", "ao,ao,ao", "AAA", "missing", "gemm"),
    ("no_begun_wait", "ao,ao,ao", "BBB", "(overwritten|missing)", "gemm"),
    ("wait_for_last", "ao,ao,ao", "BCC", "(overwritten|missing)", "gemm"),
    ("last_use_not_updated", "ao,ao,ao", "ABB", "(overwritten|missing)", "gemm"),
    ("begun_before_last_tile", "ao,ao,ao", "ACB", "overwritten", "gemm"),
    ("none", "ao,at,ao", "ABA", "overwritten", "push"),
    ("none", "ag,ag,ag", "ABA", "overwritten", "gemm"),  # rule 8: an eager call after a device-counted one
    ("none", "rs,rs,rs", "ABA", "overwritten", "gemm"),
]


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("change, calls, modes, kind, actor", PLANTED)
def test_planted_bug_is_found(explore, world, change, calls, modes, kind, actor):
    failure, trace = explore(world, calls, "--modes", modes, "--tiles", 2, "--change", change)
    assert re.match(f"{kind} data: ", failure)
    assert re.match(rf"rank \d {actor}: call \d .*(read|copy) piece", trace[-1])


def test_a_gemm_rs_that_does_not_wait_for_its_pushes(explore):
    failure, _ = explore(3, "rs,rs,rs", "--tiles", 2, "--change", "no_join")
    assert failure.startswith("deadlock")  # a count of a later call is set back


@pytest.mark.parametrize("calls, modes", (("rs,rs", "AA"), ("rs,ag", "AA"), ("rs,rs", "BC"), ("ag,rs,ag", "ABC")))
def test_only_two_ranks_can_send_from_a_region_without_slots(explore, calls, modes):
    options = ("--modes", modes, "--change", "send_from_region")
    assert explore(2, calls, *options) == ("", [])
    failure, trace = explore(3, calls, *options)
    assert failure.startswith("overwritten data: call in region")
    assert re.match(r"rank \d push: call \d \(gemm_rs, .* copy piece", trace[-1])


@pytest.mark.parametrize("calls, modes", (("rs,al", "AA"), ("ag,rs,al", "AAA"), ("rs,al", "BC")))
def test_shards_in_line_overwrite_what_another_peer_has_yet_to_receive(explore, calls, modes):
    options = ("--modes", modes, "--change", "no_finished_wait")
    assert explore(2, calls, *options) == ("", [])
    failure, trace = explore(3, calls, *options)
    assert failure.startswith("overwritten data: call in slot")
    assert re.match(r"rank \d push: call \d \(gemm_rs, .* copy piece", trace[-1])


@pytest.mark.parametrize("world", (2, 3))
def test_a_slot_is_overwritten_by_an_early_push(explore, world):
    failure, trace = explore(world, "rs,ag", "--change", "push_too_early")
    assert re.match(r"overwritten data: call in slot \d of region 0", failure)
    assert re.match(r"rank \d push: call 1 \(gemm_rs, .* copy piece", trace[-1])


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("calls", ("ag,ag", "rs,rs", "ag,rs"))
def test_signals_that_do_not_alternate_are_overtaken(explore, world, calls):
    failure, _ = explore(world, calls, "--change", "one_signal_set")
    assert failure.startswith("signal of another call: ")
    failure, _ = explore(world, calls, "--modes", "BC", "--change", "one_replay_signal_set")
    assert failure.startswith("signal of another call: ")


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("calls", ("ag,ag", "rs,rs", "ag,rs"))
def test_a_call_that_begins_before_the_join_spoils_the_signals(explore, world, calls):
    """The side stream copies them from the word that the begin raises."""
    failure, _ = explore(world, calls, "--modes", "BB", "--change", "begin_before_join")
    assert failure.startswith("signal of another call: ")


@pytest.mark.parametrize("world", (2, 3))
def test_empty_calls_must_not_take_a_number(explore, world):
    failure, trace = explore(world, "ag,ag,ag", "--pieces", "1,0,1", "--change", "empty_call_counts")
    assert failure.startswith("overwritten data: ")
    assert any("call 2 (ag_gemm, epoch 2): join" in step for step in trace)


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("call", ("ag", "rs"))
def test_wait_kernel_beside_a_gemm_that_fills_the_gpu_deadlocks(explore, world, call):
    failure, trace = explore(world, call, "--modes", "B", "--change", "wait_kernel_needs_sm")
    assert failure.startswith("deadlock")
    assert sum("start the GEMM" in step for step in trace) == world
    assert "push stands before: call 1" in failure


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("modes", ("BB", "CB", "AB"))
@pytest.mark.parametrize("change", ("wait_before_announcing", "last_use_updated_first"))
def test_waits_for_what_nobody_has_announced_deadlock(explore, world, modes, change):
    for calls in ("ag,ag", "rs,rs", "rd,rd"):
        failure, _ = explore(world, calls, "--modes", modes, "--change", change)
        assert failure.startswith("deadlock")
        assert failure.count("wait until all peers have finished") == world


def test_peers_told_in_turn_wait_in_a_ring(explore):
    assert explore(2, "ag", "--modes", "B", "--change", "peers_in_turn") == ("", [])
    failure, trace = explore(3, "ag", "--modes", "B", "--change", "peers_in_turn")
    assert failure.startswith("deadlock")
    assert sum("tell rank" in step for step in trace) == 3


def test_a_count_that_is_left_behind_is_a_bad_end(explore):
    failure, _ = explore(2, "rs", "--change", "no_reset")
    assert failure.startswith("bad end: tiles_done")


def test_traces_are_shortest(explore):
    """Counted by hand: rank 1 has to see rank 0's piece, and send its own twice, before rank 0 reads the first."""
    _, trace = explore(2, "ag,ag", "--change", "one_region")
    assert len(trace) == 8
    assert explore(2, "ag", "--change", "signal_first")[1] == [
        "rank 0 push: call 1 (ag_gemm, epoch 1): signal piece 0 to rank 1",
        "rank 1 gemm: call 1 (ag_gemm, epoch 1): read piece 0 of rank 0 from region 1, for tile 0",
    ]


def test_splitting_the_waits_changes_no_verdict(explore):
    for change, calls, modes, kind, _ in PLANTED:
        failure, _ = explore(2, calls, "--modes", modes, "--tiles", 2, "--change", change, "--split-waits")
        assert re.match(f"{kind} data: ", failure), change


LANES_PLANTED = [
    ("join_one_lane", "rs,rs", "BB", "signal of another call", "gemm: call 1 .* read"),  # the next call has begun
    ("one_lane_waits", "rs,rs,rs", "BBB", r"overwritten data: call in slot \d of region 0", "gemm: call 1 .* read"),
    ("one_lane_waits", "rs,rs,rs", "AAB", r"overwritten data: call in slot \d of region 0", "gemm: call 2 .* read"),
    ("one_lane_waits", "rs,ag,rs", "BCC", r"overwritten data: call in slot \d of region 1", "gemm: call 2 .* read"),
]


@pytest.mark.parametrize("world, pieces", ((2, 2), (2, 3), (3, 1)))
@pytest.mark.parametrize("change, calls, modes, kind, last", LANES_PLANTED)
def test_planted_bug_of_the_second_lane_is_found(explore, world, pieces, change, calls, modes, kind, last):
    options = ("--modes", modes, "--pieces", pieces, "--tiles", pieces, "--change", change)
    failure, trace = explore(world, calls, *options, *LANES)
    assert re.match(kind, failure)
    assert re.match(rf"rank \d {last} piece", trace[-1])
    assert explore(world, calls, *options) == ("", [])  # with one lane it is none


@pytest.mark.parametrize("world, pieces", ((2, 2), (2, 3), (3, 1)))
@pytest.mark.parametrize("calls", ("rs,rs", "ag,rs,rs"))
def test_a_gemm_rs_that_waits_for_one_lane_of_two(explore, calls, world, pieces):
    options = ("--pieces", pieces, "--tiles", pieces, "--change", "join_one_lane")
    assert explore(world, calls, *options, *LANES)[0].startswith("deadlock")  # as above
    assert explore(world, calls, *options) == ("", [])


def test_a_second_lane_changes_no_verdict(explore):
    for change, calls, modes, kind, _ in PLANTED:
        if "rs" in calls:
            options = ("--modes", modes, "--pieces", 2, "--tiles", 4, "--change", change, *LANES)
            failure, _ = explore(2, calls, *options)
            assert re.match(f"{kind} data: ", failure), change
