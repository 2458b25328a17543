"""Choosing slots, keeping prompts in host memory, and dividing time between prompts and rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest, DoesNotFit
from offload.sequences.sequences import Checkpoint
from specoffload.slots.choosing import (
    PromptStore,
    SavedDraft,
    SlotChoice,
    SlotState,
    Source,
    StoredPrompt,
    choose,
    common,
)
from specoffload.slots.slot import file_of


def slot(
    number: int,
    n_held: int = 0,
    n_reusable: int = 0,
    *,
    busy: bool = False,
    n_shareable: int | None = None,
    last_used: int = 0,
) -> SlotState:
    shareable = n_reusable if n_shareable is None else n_shareable
    return SlotState(number, busy, n_held, 0 if busy else n_reusable, shareable, last_used)


# -- choosing -------------------------------------------------------------------------------------


def test_the_slot_with_the_longest_beginning_is_taken() -> None:
    slots = [slot(0, 50, 20), slot(1, 80, 70), slot(2)]
    assert choose(slots, 100, 0) == SlotChoice(1, Source.OWN)


def test_a_new_prompt_goes_to_an_empty_slot_then_to_the_one_used_longest_ago() -> None:
    assert choose([slot(0, 50), slot(1), slot(2)], 100, 0) == SlotChoice(1, Source.NONE)
    full = [slot(0, 50, last_used=3), slot(1, 50, last_used=1), slot(2, 50, last_used=2)]
    assert choose(full, 100, 0) == SlotChoice(1, Source.NONE, keep=True)


def test_a_few_tokens_in_common_are_no_reason_to_lose_a_conversation() -> None:
    slots = [slot(0, 80, 3), slot(1)]
    assert choose(slots, 100, 0) == SlotChoice(1, Source.NONE)


@pytest.mark.parametrize(("similar", "number"), [(0.0, 1), (0.1, 0), (0.2, 0), (0.21, 1), (1.0, 1)])
def test_a_slot_is_chosen_from_the_share_of_a_prompt_that_is_asked_for(
    similar: float, number: int
) -> None:
    slots = [slot(0, 20, 20, n_shareable=0), slot(1)]
    assert choose(slots, 100, 0, similar=similar).number == number


def test_a_slot_that_would_lose_much_is_copied_to_an_empty_one() -> None:
    slots = [slot(0, 100, 30), slot(1)]
    assert choose(slots, 60, 0) == SlotChoice(1, Source.SLOT, 0)
    # Without an empty slot, the end of the slot's text is kept in host memory.
    assert choose([slot(0, 100, 30), slot(1, 50)], 60, 0) == SlotChoice(0, Source.OWN, keep=True)
    # The same happens if no part of the slot's memory can be shared.
    cannot = [slot(0, 100, 30, n_shareable=0), slot(1)]
    assert choose(cannot, 60, 0) == SlotChoice(0, Source.OWN, keep=True)


def test_a_prompt_takes_its_beginning_from_a_slot_that_is_at_work() -> None:
    slots = [slot(0, 200, 190, busy=True), slot(1, 40, 20), slot(2)]
    assert choose(slots, 200, 0) == SlotChoice(2, Source.SLOT, 0)
    assert choose(slots[:2], 200, 0) == SlotChoice(1, Source.SLOT, 0, keep=True)


def test_a_longer_beginning_in_host_memory_is_loaded() -> None:
    slots = [slot(0, 100, 30), slot(1)]
    assert choose(slots, 200, 150) == SlotChoice(1, Source.STORE)
    assert choose(slots, 200, 30) == SlotChoice(1, Source.SLOT, 0), (
        "of equal ones that which is here"
    )
    assert choose([slot(0)], 200, 8) == SlotChoice(0, Source.NONE), "so few are evaluated faster"


def test_when_all_are_busy_a_request_waits() -> None:
    assert choose([slot(0, 9, 9, busy=True)], 10, 50) is None


@given(
    slots=st.lists(
        st.tuples(st.booleans(), st.integers(0, 99), st.integers(0, 99), st.integers(0, 9)),
        min_size=1,
        max_size=5,
    ),
    n_stored=st.integers(0, 99),
)
def test_whatever_there_is_the_choice_can_be_carried_out(
    slots: list[tuple[bool, int, int, int]], n_stored: int
) -> None:
    states = [
        slot(i, max(held, n), min(held, n), busy=busy, last_used=used)
        for i, (busy, held, n, used) in enumerate(slots)
    ]
    choice = choose(states, 100, n_stored)
    if choice is None:
        assert all(state.is_busy for state in states)
        return
    chosen = states[choice.number]
    assert not chosen.is_busy
    if choice.source is Source.SLOT:
        assert choice.other != choice.number
        assert states[choice.other].n_shareable >= 16
    if choice.source is Source.STORE:
        assert n_stored >= 16
    if choice.source is Source.OWN:
        assert chosen.n_reusable > 0
    if choice.keep:
        assert chosen.n_held >= 16


@given(st.lists(st.integers(0, 2), max_size=8), st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_the_last_token_of_a_prompt_is_never_common(held: list[int], tokens: list[int]) -> None:
    n = common(held, tokens)
    assert n < len(tokens)
    assert held[:n] == tokens[:n]
    assert n in (len(held), len(tokens) - 1) or held[n] != tokens[n]


# -- host memory ----------------------------------------------------------------------------------


def kept(store: PromptStore, tokens: list[int], size: int = 10, **more: Any) -> None:
    store.add(tokens, lambda: StoredPrompt(tuple(tokens), bytes(size), **more))


def test_the_least_recently_stored_goes_when_the_limit_is_reached() -> None:
    store = PromptStore(25, can_cut=True)
    for first in (1, 2, 3):
        kept(store, [first] * 20)
    assert (len(store), store.size_bytes) == (2, 20)
    assert store.reusable([1] * 30) == 0
    assert store.reusable([2] * 30) == 20
    with pytest.raises(DoesNotFit, match="--cache-ram"):
        kept(store, [4] * 20, size=100)
    assert len(store) == 2, "one that exceeds the limit alone takes no room from others"


def test_without_a_limit_all_stay_and_with_none_nothing_is_even_saved() -> None:
    store = PromptStore(None, can_cut=True)
    for first in range(50):
        kept(store, [first] * 20)
    assert len(store) == 50

    def never() -> StoredPrompt:
        raise AssertionError("nothing is to be saved")

    off = PromptStore(0, can_cut=True)
    off.add([1] * 20, never)
    assert len(off) == 0


def test_a_prompt_that_a_longer_one_serves_is_not_stored_beside_it() -> None:
    store = PromptStore(None, can_cut=True)
    kept(store, [1, 2, 3])
    kept(store, [1, 2, 3, 4])
    assert len(store) == 1
    assert store.covers([1, 2])
    assert not store.covers([1, 2], "another salt")
    assert not store.covers([1, 2, 3, 5])
    kept(store, [1, 2])
    assert len(store) == 1
    assert store.take([1, 2, 3, 4, 5]).tokens == (1, 2, 3, 4)
    assert len(store) == 0


def test_a_recurrent_state_serves_whole_or_from_its_checkpoints() -> None:
    store = PromptStore(None, can_cut=False)
    kept(store, [1, 2, 3])
    kept(store, [1, 2, 3, 4])
    assert len(store) == 2, "the longer one cannot be cut"
    assert store.reusable([1, 2, 3, 9]) == 3
    assert store.reusable([1, 2, 9]) == 0
    checkpoints = (Checkpoint(2, b"two"), Checkpoint(4, b"four"))
    kept(store, [5, 6, 7, 8, 9], checkpoints=checkpoints)
    assert store.reusable([5, 6, 7, 0]) == 2
    assert store.take([5, 6, 7, 0]).checkpoints == checkpoints


def test_a_prompt_serves_only_requests_with_its_salt() -> None:
    store = PromptStore(None, can_cut=True)
    kept(store, [1, 2, 3], salt="mine")
    store.add([1, 2], lambda: StoredPrompt((1, 2), b"theirs", salt="theirs"), "theirs")
    assert len(store) == 2, "the longer one has another salt"
    asked = {salt: store.reusable([1, 2, 3, 9], salt) for salt in ("", "mine", "theirs")}
    assert asked == {"": 0, "mine": 3, "theirs": 2}
    assert store.take([1, 2, 3, 9], "theirs").state == b"theirs"


# -- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc/passwd", "..\\x", "a\0b", "a/"])
def test_a_file_name_that_leads_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(BadRequest, match="filename"):
        file_of(Path("folder"), name)


def test_a_file_lies_in_the_folder_that_was_named() -> None:
    assert file_of(Path("folder"), "chat.bin") == Path("folder/chat.bin")
    with pytest.raises(BadRequest, match="--slot-save-path"):
        file_of(None, "chat.bin")


def test_a_much_longer_beginning_on_the_disk_is_read() -> None:
    slots = [slot(0, 100, 30), slot(1)]
    assert choose(slots, 400, 50, n_on_disk=200) == SlotChoice(1, Source.DISK)
    assert choose(slots, 400, 150, n_on_disk=200) == SlotChoice(1, Source.STORE), "about as long"
    assert choose([slot(0, 60, busy=True)], 400, 0, n_on_disk=300) is None
    full = [slot(0, 100, 30)]
    assert choose(full, 400, 0, n_on_disk=300) == SlotChoice(0, Source.DISK, keep=True)


def test_prompts_without_room_in_memory_are_handed_on() -> None:
    gone: list[tuple[int, ...]] = []
    store = PromptStore(100, can_cut=True, on_evicted=lambda prompt: gone.append(prompt.tokens))
    kept(store, [1, 2], size=60)
    kept(store, [3, 4], size=60)
    assert gone == [(1, 2)]
    kept(store, [5, 6], size=101)
    assert gone == [(1, 2), (5, 6)], "larger than the whole store"
    assert [prompt.tokens for prompt in store.prompts] == [(3, 4)]
    both = StoredPrompt((9,), bytes(60), draft=SavedDraft((9,), bytes(60)))
    assert store.add(both.tokens, lambda: both)
    assert store.prompts[-1] == StoredPrompt((9,), bytes(60)), "the draft reads its text again"
    none = PromptStore(0, can_cut=True, on_evicted=lambda prompt: gone.append(prompt.tokens))
    kept(none, [7], size=1)
    assert (gone[-1], len(none)) == ((7,), 0)
