"""Pairs that the CPU computes, and experts that are missing, get slots, but no token one twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.ggml.player import native
from offload.stream.slot_ids import may_repeat

NO_SLOT = -1
native()  # compiled before the tests, whose time is limited


def other_slots(slots: list[int], n: int, n_slots: int) -> list[int]:
    """Return up to `n` slots that are not in `slots`, as the player chooses them."""
    room = np.zeros(len(slots) + n, np.int32)
    room[: len(slots)] = slots
    found = native().other_slots(n_slots, room.ctypes.data, len(slots), n)
    return list(room[len(slots) :][:found].tolist())


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], int, list[list[int]]]:
    """Draws slots with experts, the number of all slots, and each token's slots or NO_SLOT."""
    n_slots = draw(st.integers(1, 40))
    n_used = draw(st.integers(1, min(n_slots, 9)))
    slots = draw(st.lists(st.integers(0, n_slots - 1), unique=True, max_size=n_slots))
    tokens = []
    for _ in range(draw(st.integers(1, 12))):
        own = draw(st.lists(st.sampled_from(slots), unique=True, max_size=n_used)) if slots else []
        tokens.append(draw(st.permutations(own + [NO_SLOT] * (n_used - len(own)))))
    return slots, n_slots, tokens


@given(batches())
def test_tokens_keep_their_slots_and_get_others_for_the_rest(
    batch: tuple[list[int], int, list[list[int]]],
) -> None:
    slots, n_slots, tokens = batch
    ids = np.array(tokens, np.int32)
    n_used = ids.shape[1]
    found = ids.copy()
    others = other_slots(slots, n_used, n_slots)
    offered = np.array([*slots, *others], np.int32)
    native().fill_in(
        found.ctypes.data, len(found), n_used, offered.ctypes.data, len(slots), len(others)
    )
    assert (found[ids != NO_SLOT] == ids[ids != NO_SLOT]).all()
    assert (found >= 0).all()
    assert (found < n_slots).all()
    assert all(len(set(token)) == len(token) for token in found.tolist())


@given(batches(), st.integers(0, 50))
def test_other_slots_are_others(batch: tuple[list[int], int, list[list[int]]], n: int) -> None:
    slots, n_slots, _ = batch
    others = other_slots(slots, n, n_slots)
    assert len(set(others)) == len(others) == min(n, n_slots - len(slots))
    assert set(others) <= set(range(n_slots)) - set(slots)


def test_a_token_alone_may_name_a_slot_twice_where_all_weights_are_quantised() -> None:
    assert may_repeat(1, ["q4_K", "q6_K"])
    assert not may_repeat(2, ["q4_K", "q6_K"])
    assert not may_repeat(1, ["q4_K", "f16"])


FREE, LOADING, READY = 0, 1, 2


@st.composite
def residencies(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], list[int]]:
    """Draws each expert's slot or NO_SLOT, each slot's state and last use, and the table before."""
    n_slots, n_experts = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    n_there = draw(st.integers(0, min(n_slots, n_experts)))
    slots = draw(st.permutations(range(n_slots)))[:n_there]
    slot_of = draw(st.permutations([*slots, *[NO_SLOT] * (n_experts - n_there)]))
    state = draw(
        st.lists(st.sampled_from((FREE, LOADING, READY)), min_size=n_slots, max_size=n_slots)
    )
    before = draw(st.lists(st.integers(NO_SLOT, n_slots), min_size=n_experts, max_size=n_experts))
    uses = draw(st.lists(st.integers(0, 3), min_size=n_slots, max_size=n_slots))
    return list(slot_of), state, uses, before


@given(residencies(), st.booleans(), st.booleans())
def test_each_expert_computed_ahead_has_a_slot_of_its_own(
    drawn: tuple[list[int], list[int], list[int], list[int]], may_share: bool, needs_one: bool
) -> None:
    """A router chooses distinct experts, so no token's slots repeat if no two experts share."""
    slot_of, state, uses, before = drawn
    n_experts, n_slots = len(slot_of), len(state)
    table = np.array(before, np.int32)
    there, taken = np.zeros(n_experts, np.uint8), np.zeros(n_slots, np.uint8)
    changed = np.zeros(2, np.int64)
    slots, states = np.array(slot_of, np.int32), np.array(state, np.int32)
    last_use = np.array(uses, np.int64)
    can = native().table_slots(
        slots.ctypes.data, states.ctypes.data, last_use.ctypes.data, n_experts, n_slots, may_share,
        needs_one, table.ctypes.data, there.ctypes.data, taken.ctypes.data, changed.ctypes.data,
    )  # fmt: skip
    n_loading = sum(one == LOADING for one in state)
    is_there = [slot >= 0 and state[slot] != LOADING for slot in slot_of]
    assert not taken.any()
    assert there.tolist() == is_there
    differ = np.flatnonzero(table != before)
    assert all(changed[0] <= e < changed[1] for e in differ)
    room = n_slots - n_loading >= n_experts
    shares = bool(may_share)
    is_enough = any(is_there) or (not needs_one and n_loading < n_slots)
    assert bool(can) == (is_enough and (room or shares or all(is_there)))
    if not can:
        return
    found = table.tolist()
    assert all(0 <= slot < n_slots and state[slot] != LOADING for slot in found)
    assert all(found[e] == slot_of[e] for e in range(n_experts) if is_there[e])
    if not shares:
        assert len(set(found)) == n_experts
        return
    (shared,) = {found[e] for e in range(n_experts) if not is_there[e]} or {None}
    if shared is None or not any(is_there):
        return
    used_last = max(uses[slot] for slot in slot_of if slot >= 0 and state[slot] != LOADING)
    assert uses[shared] == used_last, "the token before used it"
    kept = [
        before[e] for e in range(n_experts)
        if not is_there[e] and before[e] in slot_of and uses[before[e]] == used_last
    ]  # fmt: skip
    kept = [slot for slot in kept if slot >= 0 and state[slot] != LOADING]
    assert not kept or shared == kept[0], "the table changes no more than it has to"
