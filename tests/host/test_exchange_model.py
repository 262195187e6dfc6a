"""The exchange of gemm_ar for few rows (csrc/kernels/gemm_ar.cuh) as a small machine, all of whose interleavings are
visited: a store must meet an empty slot, a reader must find the data of its own call, and nobody may wait for ever.

Each rank makes the calls 1, 2, ... one after the other; the state of a rank is how many steps it has made. A step of a
call is a store into a slot of one rank, or a read, which waits until the slot is full and leaves it empty. Loads and
stores of one call may be seen in any order elsewhere; here each is one step in program order, and every order of the
ranks' steps is tried. What is out of order inside a rank changes nothing: slots of one call are unlike places.
"""

import pytest

CALLS = 4


def steps_of(form, rank, world, owner, call):
    """(kind, rank whose slot it is, source of the slot, call) in program order."""
    peers = [(rank + i) % world for i in range(1, world)]
    if form == "one-shot":
        stores = [("store", peer, rank, call) for peer in [*peers, rank]]
        return stores + [("read", rank, source, call) for source in range(world)]
    store = [("store", owner, rank, call)]
    if rank == owner:
        reads = [("read", rank, source, call) for source in range(world)]
        return store + reads + [("store", peer, rank, call) for peer in peers]
    return [*store, ("read", rank, owner, call)]


def failure(form, world, parities=2, empties=True, owner_of=lambda call: 0):
    """What goes wrong in some interleaving, or None."""
    programs = [
        [s for call in range(1, CALLS + 1) for s in steps_of(form, rank, world, owner_of(call), call)]
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
            place = at, source, call % parities
            if kind == "read" and place not in full:
                continue
            stuck, after = False, dict(full)
            if kind == "store":
                if place in full and empties:
                    return f"rank {rank} stores call {call} over call {full[place]}"
                after[place] = call
            else:
                if full[place] != call:
                    return f"rank {rank} reads call {full[place]} in call {call}"
                if empties:
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
@pytest.mark.parametrize("form", ("one-shot", "two-shot"))
@pytest.mark.parametrize("owner", OWNERS)
def test_two_halves_are_enough(form, world, owner):
    assert failure(form, world, owner_of=OWNERS[owner]) is None


def test_one_half_is_not():
    assert "over call" in failure("one-shot", 2, parities=1)


@pytest.mark.parametrize("form", ("one-shot", "two-shot"))
def test_readers_have_to_empty_the_slots(form):
    assert "reads call" in failure(form, 2, empties=False)
