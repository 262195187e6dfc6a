"""All interleavings of the protocol on small machines: 2 to 4 ranks, a few tiles and pieces, 3 to 5 calls.

protocol_model.hpp states the rules and why they suffice. Here every sequence must end well, and every rule, when it is
broken on purpose, must show: the explorer then prints a shortest trace (pytest -rP shows it).
"""

import itertools
import re
import subprocess
import time

import pytest

SEQUENCES = [",".join(ops) for ops in itertools.product(("ag", "rs"), repeat=3)]
LONG_SEQUENCES = [",".join(ops) for ops in itertools.product(("ag", "rs"), repeat=4)]
REPLAYS = ["AABBB", "AAAB", "ABB", "BBB"]


class Tally:
    def __init__(self):
        self.verified, self.states, self.found = 0, 0, 0
        self.start = time.monotonic()

    def __str__(self):
        seconds = time.monotonic() - self.start
        return (
            f"protocol model: {self.verified} scenarios verified, {self.states:,} states; "
            f"{self.found} with a planted bug, each found; {seconds:.1f} s"
        )


@pytest.fixture(scope="module")
def tally(request):
    result = Tally()
    yield result
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    capture = request.config.pluginmanager.get_plugin("capturemanager")
    if reporter is not None and capture is not None:
        with capture.global_and_fixture_disabled():
            reporter.write_line(f"\n{result}")


@pytest.fixture(scope="module")
def explore(build_program, tally):
    """Runs one scenario; returns (failure, trace), both empty where every interleaving ends well."""
    program = build_program("protocol_check", ["protocol_check.cpp", "protocol_model.cpp"], ["-O2"])

    def run(world, calls, *options):
        command = [str(program), "--world", str(world), "--calls", calls, *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode in (0, 1), f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        print(" ".join(command[1:]), "\n", done.stdout)
        summary, _, rest = done.stdout.partition("\n")
        states = int(re.search(r"(\d+) states", summary).group(1))
        assert summary.startswith("verified" if done.returncode == 0 else "FAILED")
        if done.returncode == 0:
            tally.verified += 1
            tally.states += states
            return "", []
        tally.found += 1
        lines = rest.splitlines()
        trace = [line.split(maxsplit=1)[1] for line in lines if re.match(r" *\d+  rank", line)]
        return "\n".join(lines[: len(lines) - len(trace)]), trace

    return run


def cycle(ops, count):
    """The first `count` calls of a repeated pattern: cycle("ag,rs", 3) is "ag,rs,ag"."""
    return ",".join(itertools.islice(itertools.cycle(ops.split(",")), count))


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
    assert explore(world, calls, "--modes", "ABB", "--tiles", 2, "--split-waits") == ("", [])


def test_empty_calls_take_no_number(explore):
    assert explore(3, "ag,ag,rs", "--pieces", "1,0,1") == ("", [])


@pytest.mark.parametrize("modes", REPLAYS)
@pytest.mark.parametrize("ops", ("ag", "rs", "ag,rs", "rs,ag"))
@pytest.mark.parametrize("world", (2, 3))
def test_replayed_calls(explore, world, ops, modes):
    calls = cycle(ops, len(modes))
    assert explore(world, calls, "--modes", modes, "--tiles", 2) == ("", [])
    assert explore(world, calls, "--modes", modes, "--split-waits") == ("", [])
    if world == 2 or len(modes) == 3:
        assert explore(world, calls, "--modes", modes, "--pieces", 2, "--tiles", 2) == ("", [])


@pytest.mark.parametrize("change", ("wait_per_peer", "wait_before_gemm"))
@pytest.mark.parametrize("ops", ("ag", "rs", "ag,rs", "rs,ag"))
def test_other_places_for_the_completed_wait(explore, ops, change):
    assert explore(3, cycle(ops, 4), "--modes", "ABBB", "--change", change) == ("", [])


def test_counts_hold_the_push_of_gemm_rs_back(explore):
    """Without the fork gemm_rs is still right: no piece leaves before the tiles of its own call are counted."""
    assert explore(3, "rs,rs,rs", "--change", "push_too_early") == ("", [])


# ---- each planted bug is found: change, calls, modes, kind of failure, actor of the last step


PLANTED = [
    ("one_region", "ag,ag,ag", "AAA", "overwritten", "gemm"),
    ("one_region", "rs,rs,rs", "AAA", "overwritten", "gemm"),
    ("one_region", "ag,rs,ag", "AAA", "overwritten", "gemm"),
    ("signal_first", "ag,ag,ag", "AAA", "stale", "gemm"),
    ("signal_first", "rs,rs,rs", "AAA", "stale", "gemm"),
    ("push_too_early", "ag,ag,ag", "AAA", "overwritten", "gemm"),
    ("no_join", "ag,ag,ag", "AAA", "overwritten", "push"),  # x is overwritten while it is sent
    ("no_join", "rs,rs,rs", "AAA", "overwritten", "push"),  # the send buffer is
    ("count_first", "rs,rs,rs", "AAA", "missing", "push"),
    ("too_few_tiles", "rs,rs,rs", "AAA", "missing", "push"),
    ("no_reset", "rs,rs,rs", "AAA", "stale", "push"),
    ("wrong_replay_region", "ag,ag,ag,ag", "AABB", "overwritten", "gemm"),
    ("wrong_replay_region", "rs,rs,rs,rs", "AABB", "overwritten", "gemm"),
    ("no_completed_wait", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("no_completed_wait", "rs,rs,rs", "BBB", "overwritten", "gemm"),
    ("one_region", "rd,rd,rd", "AAA", "overwritten", "gemm"),
    ("signal_first", "rd,rd,rd", "AAA", "missing", "gemm"),
    ("no_completed_wait", "rd,rd,rd", "BBB", "overwritten", "gemm"),
    ("read_after_completed", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("completed_before_join", "ag,ag,ag", "BBB", "overwritten", "gemm"),
    ("completed_before_join", "rs,rs,rs", "BBB", "overwritten", "gemm"),
    ("none", "ag,ag,ag", "ABA", "overwritten", "gemm"),  # rule 8: an eager call after a replayed one
    ("none", "rs,rs,rs", "ABA", "overwritten", "gemm"),
]


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("change, calls, modes, kind, actor", PLANTED)
def test_planted_bug_is_found(explore, world, change, calls, modes, kind, actor):
    failure, trace = explore(world, calls, "--modes", modes, "--tiles", 2, "--change", change)
    assert failure.startswith(f"{kind} data: ")
    assert re.match(rf"rank \d {actor}: call \d .*(read|copy) piece", trace[-1])


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize("calls", ("ag,ag", "rs,rs", "ag,rs"))
def test_signals_that_do_not_alternate_are_overtaken(explore, world, calls):
    failure, _ = explore(world, calls, "--change", "one_signal_set")
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
        assert failure.startswith(f"{kind} data: "), change
