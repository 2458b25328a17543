"""Which ubatches of a decode have begun, and which come next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH, Batch, Ubatches


@given(st.integers(1, 900), st.integers(1, 300), st.integers(0, 3), st.lists(st.booleans()))
def test_each_ubatch_is_expected_once_and_in_order(
    n_tokens: int, n_ubatch: int, n_unwanted: int, early: list[bool]
) -> None:
    sizes = [n_ubatch] * (n_tokens // n_ubatch) + [n_tokens % n_ubatch] * (n_tokens % n_ubatch > 0)
    ubatches = Ubatches(n_ubatch, n_unwanted)
    assert ubatches.unwanted_tokens == 0
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


@given(st.integers(1, 300), st.integers(1, 100), st.integers(0, 300))
def test_a_batch_knows_its_ubatches(n_tokens: int, n_ubatch: int, first_wanted: int) -> None:
    tokens = [7 + i for i in range(n_tokens)]
    wanted = [i >= first_wanted for i in range(n_tokens)]
    batch = Batch(tokens, range(n_tokens), [2] * n_tokens, wanted, n_ubatch)
    ubatches = [wanted[i : i + n_ubatch] for i in range(0, n_tokens, n_ubatch)]
    whole = ubatches if n_tokens % n_ubatch == 0 else ubatches[:-1]
    unwanted = [n for n, its in enumerate(whole) if not any(its)]
    assert batch.n_unwanted_ubatches == (len(unwanted) if n_tokens > n_ubatch else 0)
    assert batch.n_at_once == max(map(len, ubatches))
    is_small = len(ubatches) == 1 and n_tokens <= SMALL_BATCH
    assert list(batch.small_tokens) == (tokens if is_small else [])


def test_ubatches_of_several_sequences_may_all_be_wanted() -> None:
    """libllama may compute their tokens in another order."""
    wanted = [False] * 8 + [True]
    one, two = [0] * 9, [0] * 4 + [1] * 5
    batches = [Batch([1] * 9, range(9), sequences, wanted, 4) for sequences in (one, two)]
    assert [batch.n_unwanted_ubatches for batch in batches] == [2, 0]
