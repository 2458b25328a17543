"""Which ubatches of a decode have begun, and which come next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.stream.ubatches import Ubatches


@given(st.integers(1, 900), st.integers(1, 300), st.integers(0, 3), st.lists(st.booleans()))
def test_each_ubatch_is_expected_once_and_in_order(
    n_tokens: int, n_ubatch: int, n_unwanted: int, early: list[bool]
) -> None:
    sizes = [n_ubatch] * (n_tokens // n_ubatch) + [n_tokens % n_ubatch] * (n_tokens % n_ubatch > 0)
    ubatches = Ubatches(n_ubatch, n_unwanted)
    assert (ubatches.n_to_come, ubatches.next_tokens, ubatches.is_due) == (0, 0, False)
    ubatches.announce(n_tokens)
    for nth, size in enumerate(sizes):
        assert ubatches.next_tokens == size
        assert ubatches.n_to_come == len(sizes) - nth
        if early[nth : nth + 1] == [True]:
            assert ubatches.is_due
            assert ubatches.take() == size
            assert not ubatches.is_due
        assert ubatches.begin(3)
        assert ubatches.expected_tokens == [*sizes, 0][nth + 1]
        assert ubatches.unwanted_tokens == (n_ubatch if nth < n_unwanted else 0)
    assert ubatches.n_to_come == 0
    assert not ubatches.is_due


def test_nothing_begins_early_if_ubatches_have_several_graphs() -> None:
    ubatches = Ubatches(64)
    ubatches.announce(128)
    assert ubatches.begin(1)
    assert ubatches.expected_tokens == 64
    assert not ubatches.begin(2), "a later layer of the same ubatch"
    assert ubatches.have_several_graphs
    assert ubatches.expected_tokens == 0
    assert ubatches.begin(1), "the next ubatch"
