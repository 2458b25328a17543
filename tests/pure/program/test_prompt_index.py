"""Finding stored prompts by hashes of their blocks, and choosing those to delete."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from hypothesis import given
from hypothesis import strategies as st

from specoffload.slots.choosing import common
from specoffload.slots.prompt_index import (
    BLOCK,
    IndexedPrompt,
    PromptIndex,
    StoredFile,
    chain,
    reusable,
    to_evict,
)

# Texts are made of few different blocks, so that many begin alike.
_TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=4).flatmap(
    lambda blocks: st.integers(0, BLOCK - 1).map(
        lambda rest: [b for b in blocks for _ in range(BLOCK)] + [7] * rest
    )
)


def entry_of(name: str, text: Sequence[int], marks: Sequence[int]) -> IndexedPrompt:
    usable = sorted({m % (len(text) + 1) for m in marks} - {0} | {len(text)})
    return IndexedPrompt(name, len(text), tuple(usable))


@given(
    texts=st.lists(st.tuples(_TEXTS, st.lists(st.integers(1, 600), max_size=2)), max_size=6),
    gone=st.sets(st.integers(0, 5)),
    new=_TEXTS,
    can_cut=st.booleans(),
)
def test_candidates_have_the_stored_prompt_that_spares_most(
    texts: list[tuple[list[int], list[int]]], gone: set[int], new: list[int], can_cut: bool
) -> None:
    """Beginnings of less than a block are overlooked."""
    index = PromptIndex(can_cut=can_cut)
    entries = {}
    for i, (text, marks) in enumerate(texts):
        entries[str(i)] = entry_of(str(i), text, marks), text
        index.add(entries[str(i)][0], text)
    for i in gone:
        index.remove(str(i))
        entries.pop(str(i), None)
    assert index.names == set(entries)

    def spared(name: str) -> int:
        entry, text = entries[name]
        return reusable(entry, common(text, new), can_cut=can_cut)

    best = max(map(spared, entries), default=0)
    candidates = [entry.name for entry in index.candidates(new, len(texts))]
    assert max(map(spared, candidates), default=0) == best or best < BLOCK
    known = max((spared(name) for name in entries), default=0) // BLOCK * BLOCK
    few = [entry.name for entry in index.candidates(new, 1)]
    assert len(few) <= 2
    if can_cut:
        assert max(map(spared, few), default=0) >= known


@given(_TEXTS, _TEXTS)
def test_equal_hashes_mean_equal_beginnings(a: list[int], b: list[int]) -> None:
    n = sum(1 for x, y in zip(chain(a), chain(b), strict=False) if x == y)
    assert a[: n * BLOCK] == b[: n * BLOCK]
    assert n == 0 or chain(a)[:n] == chain(b)[:n]
    assert common([*a, 1], [*b, 1]) < (n + 1) * BLOCK


def test_shorter_prompts_that_a_new_one_replaces_are_known() -> None:
    index = PromptIndex(can_cut=True)
    long = list(range(3 * BLOCK))
    index.add(entry_of("short", long[: 2 * BLOCK], ()), long[: 2 * BLOCK])
    index.add(entry_of("other", [9] * 300, ()), [9] * 300)
    index.add(entry_of("long", long, ()), long)
    assert set(index.beginnings([*long, 1])) == {"long", "short"}
    assert index.beginnings(long) == ["short"]
    assert set(index.extensions(long[: 2 * BLOCK])) == {"long", "short"}
    assert index.extensions(long) == ["long"]


def test_thousands_of_prompts_that_begin_alike_are_searched_in_milliseconds() -> None:
    index = PromptIndex(can_cut=True)
    system = list(range(2000))
    for i in range(3000):
        text = [*system, *([i] * 2000)]
        index.add(IndexedPrompt(str(i), len(text), (len(text),)), text)
    new = [*system, *([1234] * 2000), 5]
    times = []
    for _ in range(5):
        began = perf_counter()
        assert index.candidates(new, 2)[0].name == "1234"
        times.append(perf_counter() - began)
    assert min(times) < 1.0, "a hundred times what it takes on an idle machine"


_FILES = st.lists(
    st.builds(StoredFile, st.uuids().map(str), st.integers(0, 100), st.floats(0, 10)), max_size=8
)


@given(_FILES, *[st.integers(0, 300)] * 4)
def test_as_few_old_files_as_needed_are_deleted(
    files: list[StoredFile], new: int, limit: int, free: int, spare: int
) -> None:
    gone = to_evict(files, new, limit, free, spare)
    total = sum(file.size_bytes for file in files)
    if gone is None:
        assert new > limit or new + spare > free + total
        return
    by_name = {file.name: file for file in files}
    freed = sum(by_name[name].size_bytes for name in gone)
    assert total - freed + new <= limit
    assert free + freed - new >= spare
    stays = [file.used_s for file in files if file.name not in gone]
    assert max((by_name[name].used_s for name in gone), default=0) <= min(stays, default=10)
    if gone:  # without the last one there would not be enough room
        less = freed - by_name[gone[-1]].size_bytes
        assert total - less + new > limit or free + less - new < spare
