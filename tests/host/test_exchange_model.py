"""The calls of the exchange area (csrc/kernels/exchange_call.cuh) as a small machine, whose interleavings are all
visited: a store must meet an empty slot, a reader must find the data of its own call, and nobody may wait for ever.

Each rank makes the calls 1, 2, ... one after the other; the state of a rank is how many steps it has made. A step of a
call is a store into a slot of one rank, or a read, which waits until the slot is full and leaves it empty, or a look,
which waits and leaves it. A gather looks, and reads at its end: what is stored before would meet rows in use. Loads and
stores of one call may be seen in any order elsewhere; here each is one step in program order, and every order of the
ranks' steps is tried. What is out of order inside a rank changes nothing: slots of one call are unlike places.
"""

import pytest

CALLS = 4


GROUPS = 2  # of the units of an all-reduce, one behind the other


def steps_of_all_reduce(rank, world, call):
    """That of csrc/kernels/all_reduce.cu, two-shot, in one block: units in groups of one for each owner, the next
    rank's first; while those of a group are added up, the next one's partials are on their way, and the sums of the one
    before.
    """
    steps = []
    peers = [(rank + i) % world for i in range(1, world)]

    def unit_of(group, owner):  # the inverse of exchange_owner
        return group * world + (owner - group) % world

    for turn in range(GROUPS + 2):
        if turn < GROUPS:
            steps += [("store", peer, ("partial", unit_of(turn, peer), rank), call) for peer in peers]
        if 0 <= turn - 1 < GROUPS:
            own = unit_of(turn - 1, rank)
            steps += [("read", rank, ("partial", own, source), call) for source in sorted(peers)]
            steps += [("store", peer, ("sum", own), call) for peer in peers]
        if 0 <= turn - 2 < GROUPS:
            steps += [("read", rank, ("sum", unit_of(turn - 2, peer)), call) for peer in peers]
    return steps


def steps_of_shares(rank, world, call):
    """The two-shot form of csrc/kernels/few_rows.cuh, of one unit with a share for each rank: what other kernels keep
    in the slot of a source has the place of its partial.
    """
    peers = [(rank + i) % world for i in range(1, world)]
    return [
        *(("store", peer, rank, call) for peer in [*peers, rank]),
        *(("read", rank, source, call) for source in range(world)),
        *(("store", peer, ("sum", rank), call) for peer in peers),
        *(("read", rank, ("sum", peer), call) for peer in peers),
    ]


def steps_of(form, rank, world, owner, call):
    """(kind, rank whose slot it is, source of the slot, call) in program order."""
    peers = [(rank + i) % world for i in range(1, world)]
    if form == "all-reduce":
        return steps_of_all_reduce(rank, world, call)
    if form == "shares":
        return steps_of_shares(rank, world, call)
    if form != "two-shot":
        stores = [("store", peer, rank, call) for peer in [*peers, rank]]
        looks = [("look", rank, source, call) for source in range(world) if form == "gather"]
        return [*stores, *looks, *(("read", rank, source, call) for source in range(world))]
    store = [("store", owner, rank, call)]
    if rank == owner:
        reads = [("read", rank, source, call) for source in range(world)]
        return store + reads + [("store", peer, rank, call) for peer in peers]
    return [*store, ("read", rank, owner, call)]


def failure(forms, world, parities=2, empties=True, owner_of=lambda call: 0):
    """What goes wrong in some interleaving of calls that have the forms in turn, or None."""

    def form_of(call):
        return forms[call % len(forms)]

    programs = [
        [s for call in range(1, CALLS + 1) for s in steps_of(form_of(call), rank, world, owner_of(call), call)]
        for rank in range(world)
    ]
    start = ((0,) * world, frozenset())
    seen, todo = {start}, [start]
    while todo:
        made, slots = todo.pop()
        full = dict(slots)
        stuck = True
        for rank, program in enumerate(programs):
            if made[rank] == len(program):
                continue
            kind, at, source, call = program[made[rank]]
            place = form_of(call) == "gather", at, source, call % parities
            if kind != "store" and place not in full:
                continue
            stuck, after = False, dict(full)
            if kind == "store":
                if place in full and empties:
                    return f"rank {rank} stores call {call} over call {full[place]}"
                after[place] = call
            else:
                if full[place] != call:
                    return f"rank {rank} reads call {full[place]} in call {call}"
                if empties and kind == "read":
                    del after[place]
            state = (*made[:rank], made[rank] + 1, *made[rank + 1 :]), frozenset(after.items())
            if state not in seen:
                seen.add(state)
                todo.append(state)
        if stuck and any(m < len(p) for m, p in zip(made, programs, strict=True)):
            return f"the ranks wait for ever after {made} steps"
    return None


OWNERS = {"same owner": lambda call: 0, "owners in turn": lambda call: call % 2}


@pytest.mark.parametrize("world", (2, 3))
@pytest.mark.parametrize(
    "forms",
    (
        ("one-shot",),
        ("two-shot",),
        ("gather",),
        ("one-shot", "gather", "two-shot"),
        ("gather", "gather", "two-shot"),
        ("all-reduce",),
        ("all-reduce", "two-shot", "gather"),
        ("shares",),
        ("shares", "one-shot", "two-shot"),
    ),
    ids="-".join,
)
@pytest.mark.parametrize("owner", OWNERS)
def test_two_halves_are_enough(forms, world, owner):
    assert failure(forms, world, owner_of=OWNERS[owner]) is None


@pytest.mark.parametrize("form", ("one-shot", "gather"))
def test_one_half_is_not(form):
    assert "over call" in failure((form,), 2, parities=1)


@pytest.mark.parametrize("form", ("one-shot", "two-shot", "all-reduce", "shares"))
def test_readers_have_to_empty_the_slots(form):
    assert "reads call" in failure((form,), 2, empties=False)
