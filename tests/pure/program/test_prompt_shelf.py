"""Prompts of closed models stay in RAM, whole and within the limit, and reach the next process."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from typing import BinaryIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.sequences.sequences import Checkpoint
from specoffload.server.router.shelves import Shelves
from specoffload.slots.choosing import PromptStore, StoredPrompt
from specoffload.slots.prompt_shelf import PromptShelf
from specoffload.slots.shelved_prompts import ShelvedPrompts

MADE_BY = {"model": "one"}


def whole(file: BinaryIO, n_bytes: int) -> bytes:
    return file.read(n_bytes)


def taken(shelf: PromptShelf) -> list[bytes]:
    found = []
    while (one := shelf.take_oldest(whole)) is not None:
        found.append(one)
    return found


def put(shelf: PromptShelf, data: bytes) -> None:
    shelf.append(lambda file: file.write(data))


def prompt(n: int, size: int = 100) -> StoredPrompt:
    row = np.full((1, 4), n, np.float32)
    checkpoints = (Checkpoint(2, b"c" * n), Checkpoint(3, b"d", row=row))
    return StoredPrompt((n, 2, 3, 4), bytes([n]) * size, checkpoints)


@given(st.lists(st.binary(min_size=1, max_size=200), max_size=8))
def test_what_is_put_last_is_the_oldest_and_taken_first(parts: list[bytes]) -> None:
    shelf = PromptShelf()
    for part in parts:
        put(shelf, part)
    assert shelf.size_bytes == sum(len(part) + 8 for part in parts)
    assert taken(shelf) == parts[::-1]
    assert shelf.size_bytes == 0


def test_a_writer_that_ends_in_the_middle_leaves_what_was_there() -> None:
    shelf = PromptShelf()
    put(shelf, b"first")

    def broken(file: BinaryIO) -> None:
        file.write(b"half")
        raise MemoryError

    with pytest.raises(MemoryError):
        shelf.append(broken)
    put(shelf, b"second")
    assert taken(shelf) == [b"second", b"first"]


def test_prompts_go_to_the_next_session_with_their_checkpoints() -> None:
    shelf = PromptShelf()
    first = ShelvedPrompts(shelf, MADE_BY)
    shares: list[float] = []
    for n in (3, 2, 1):  # the newest first
        first.keep_now(prompt(n), shares.append)
    assert first.n_written == 3
    assert shares[-1] == 1.0
    found = ShelvedPrompts(shelf, MADE_BY).take()
    assert [one.tokens for one in found] == [prompt(n).tokens for n in (1, 2, 3)]
    for one in found:
        wanted = prompt(one.tokens[0])
        assert one.state == wanted.state
        assert [c.state for c in one.checkpoints] == [c.state for c in wanted.checkpoints]
        row = one.checkpoints[1].row
        assert row is not None
        assert np.array_equal(row, np.full((1, 4), one.tokens[0], np.float32))
    assert shelf.size_bytes == 0


def test_prompts_of_other_settings_are_dropped(caplog: pytest.LogCaptureFixture) -> None:
    shelf = PromptShelf()
    for n in (2, 1):
        ShelvedPrompts(shelf, MADE_BY).keep_now(prompt(n), lambda share: None)
    assert ShelvedPrompts(shelf, {"model": "two"}).take() == []
    assert shelf.size_bytes == 0
    assert len(caplog.records) == 1


def test_prompts_that_come_back_are_older_than_those_that_came_since() -> None:
    store = PromptStore(350, can_cut=True)
    store.add((9, 9, 9), lambda: StoredPrompt((9, 9, 9), bytes(100)))
    store.put_back([StoredPrompt((n, 2), bytes(100)) for n in (1, 2, 3)])
    assert [p.tokens for p in store.prompts] == [(2, 2), (3, 2), (9, 9, 9)]
    store.remove(store.prompts[1])
    assert [p.tokens for p in store.prompts] == [(2, 2), (9, 9, 9)]


def _child(shelf: PromptShelf, line: Connection) -> None:
    line.send(taken(shelf))
    put(shelf, b"of the child")
    line.close()


def test_a_spawned_process_shares_the_shelf() -> None:
    shelf = PromptShelf()
    put(shelf, b"of the parent")
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(shelf, theirs))
    process.start()
    theirs.close()
    assert ours.recv() == [b"of the parent"]
    process.join(20)
    assert taken(shelf) == [b"of the child"]


# ---- several models


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(1, 60), max_size=4))),
    st.integers(0, 200),
)
def test_closed_models_together_stay_within_the_limit(
    closings: list[tuple[str, list[int]]], limit_bytes: int
) -> None:
    shelves = Shelves(limit_bytes)
    last: dict[str, int] = {}
    for at, (name, sizes) in enumerate(closings):
        shelf = shelves.of(name)
        if shelf is None:
            assert limit_bytes == 0
            return
        shelf.lend()
        shelf.file.clear()
        for size in sizes:
            put(shelf.file, bytes(size))
        shelf.take_back()
        assert shelves.size_bytes <= limit_bytes
        last[name] = at
        whole_bytes = sum(size + 8 for size in sizes)
        if whole_bytes <= limit_bytes:
            assert shelf.file.size_bytes == whole_bytes, "the last one goes after all others"


def test_an_open_models_shelf_is_left_alone() -> None:
    shelves = Shelves(100)
    one, two = shelves.of("one"), shelves.of("two")
    assert one is not None
    assert two is not None
    one.lend()
    put(one.file, bytes(90))
    put(two.file, bytes(80))
    two.take_back()
    assert (one.file.size_bytes, two.file.size_bytes) == (98, 88)
    one.take_back()
    assert (one.file.size_bytes, two.file.size_bytes) == (98, 0)
    assert shelves.of("one") is one
    shelves.keep_only(["two"])
    assert shelves.of("one") is not one
    assert Shelves(0).of("one") is None
