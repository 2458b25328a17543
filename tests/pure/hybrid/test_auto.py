"""--hybrid auto: which sizes of batches are split, by made-up times."""

from __future__ import annotations

import pytest

from offload.hybrid.auto import choose_sizes


def chosen(gain_at: dict[int, float], n_most: int = 64, most_s: float = 100.0) -> set[int]:
    """Sizes that are split where the gain at a size is that of the last given size up to it."""
    spent = 0.0

    def decode_s(n: int, is_split: bool) -> float:
        nonlocal spent
        spent += 1.0
        gain = next(g for size, g in sorted(gain_at.items(), reverse=True) if size <= n)
        return 1.0 if is_split else gain

    found = choose_sizes(decode_s, n_most, lambda: spent, most_s)
    return set(range(1, n_most + 1)) - found.unsplit


def test_all_sizes_are_split_where_it_is_faster_everywhere() -> None:
    assert chosen({1: 1.3}) == set(range(1, 65))


def test_nothing_is_split_where_it_is_slower_or_a_tie() -> None:
    assert chosen({1: 0.8}) == set()
    assert chosen({1: 1.01}) == set()


def test_the_border_lies_between_the_sizes_that_differ() -> None:
    split = chosen({1: 1.5, 16: 0.7})
    assert set(range(1, 9)) <= split
    assert not split & set(range(16, 65))


def test_a_gain_at_large_batches_alone_does_not_split_small_ones() -> None:
    split = chosen({1: 0.5, 32: 2.0})
    assert 1 not in split
    assert {32, 64} <= split


@pytest.mark.parametrize("n_most", [1, 2, 7, 64])
def test_no_batch_is_larger_than_the_ubatch(n_most: int) -> None:
    assert chosen({1: 2.0}, n_most) == set(range(1, n_most + 1))


def test_one_size_is_timed_whatever_the_budget() -> None:
    assert chosen({1: 0.5}, most_s=0.0) == set()


def test_the_line_names_ranges_and_gains() -> None:
    def decode_s(n: int, is_split: bool) -> float:
        return 1.0 if is_split else (2.0 if n < 16 else 0.5)

    found = choose_sizes(decode_s, 64, lambda: 0.0, 1.0)
    assert found.words(64).startswith("layers of batches of 1 to 11 tokens are split (2.00 x at 1")
    nothing = choose_sizes(lambda n, is_split: 1.0, 64, lambda: 0.0, 1.0)
    assert nothing.words(64).startswith("no layers are split")
