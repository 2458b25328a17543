"""Ranges of layers by llama.cpp's rule for --tensor-split."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DeviceUnavailable
from offload.plan.ranges import LayerRange, by_shares, shares_of


@pytest.mark.parametrize(
    ("n_layers", "shares", "ends"),
    [
        (3, (1, 1), (2, 4)),
        (4, (1, 1), (3, 5)),  # the boundary 2.5 lies before layer 3
        (32, (3, 1), (25, 33)),
        (9, (1, 1, 3), (2, 4, 10)),
        (5, (1,), (6,)),
        (5, (0, 1, 0), (0, 6, 6)),
    ],
)
def test_the_rule_is_that_of_llama_cpp(
    n_layers: int, shares: tuple[float, ...], ends: tuple[int, ...]
) -> None:
    assert tuple(r.end for r in by_shares(n_layers, shares)) == ends


@given(st.integers(1, 200), st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=16))
def test_each_layer_lies_in_one_range_and_the_ranges_keep_their_order(
    n_layers: int, shares: list[float]
) -> None:
    if not sum(shares):
        return
    ranges = by_shares(n_layers, shares)
    assert [i for r in ranges for i in range(r.first, r.end)] == list(range(n_layers + 1))
    assert all(share or not len(r) for share, r in zip(shares, ranges, strict=True))


@given(st.lists(st.integers(1, 60), min_size=1, max_size=16))
def test_shares_of_ranges_give_the_same_ranges(lengths: list[int]) -> None:
    n, ranges = 0, []
    for length in lengths:
        ranges.append(LayerRange(n, n + length))
        n += length
    assert by_shares(n - 1, shares_of(ranges)) == tuple(ranges)


@pytest.mark.parametrize(
    "shares",
    [
        (0.0, 0.0),
        (-1.0, 2.0),
        (float("nan"), 1.0),
        (float("inf"),),
        (1e300, 1e-300),
        (2e38, 2e38),
        (1e-50,),
    ],
)
def test_shares_that_divide_nothing_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(DeviceUnavailable, match="shares are numbers from 0 up"):
        by_shares(4, shares)
