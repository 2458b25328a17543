"""A sequence that was saved in parts is found again, in RAM and in a file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.sequences.saved_state import end_of, is_in_parts, parted, whole_of

PARTS = st.lists(st.binary(max_size=40), min_size=2, max_size=5)


@given(PARTS, st.binary(max_size=30))
def test_parts_apart_and_in_one_piece_are_the_same(parts: list[bytes], own: bytes) -> None:
    ends = tuple(range(3, 3 + len(parts)))
    end = end_of(parts, ends, own)
    for saved in (parted(end, parts), parted(b"".join((*parts, end)))):
        assert [bytes(part) for part in saved.parts] == parts
        assert saved.ends == ends
        assert saved.own == own
    assert is_in_parts(end)
    assert is_in_parts(b"".join((*parts, end)))


@given(st.binary(max_size=60), st.binary(max_size=30))
def test_a_state_that_was_saved_at_once_has_no_ends(state: bytes, own: bytes) -> None:
    saved = parted(whole_of(state, own))
    assert [bytes(part) for part in saved.parts] == [state]
    assert saved.ends == ()
    assert saved.own == own
    assert not is_in_parts(whole_of(state, own))


@pytest.mark.parametrize("lost", [1, 7, 20])
def test_what_lacks_bytes_is_one_part_that_the_library_refuses(lost: int) -> None:
    parts = [b"a" * 30, b"b" * 20]
    damaged = b"".join((*parts, end_of(parts, (5, 9), b"own")))[lost:]
    saved = parted(damaged)
    if lost > 16:  # more than the follower's data
        assert saved.ends == ()
        assert [bytes(part) for part in saved.parts] == [damaged]
    assert parted(end_of(parts, (5, 9), b""), [parts[0], parts[1][lost:]]).ends == ()


@given(st.integers(0, 2**64 - 1), st.binary(max_size=80))
def test_a_table_that_cannot_be_is_none(n_parts: int, state: bytes) -> None:
    hostile = state + n_parts.to_bytes(8, "little") + b"in parts"
    saved = parted(hostile)
    assert sum(len(part) for part in saved.parts) <= len(hostile)
