"""Each of several devices gets a threshold of its own from the one that was measured for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH
from offload.times.min_batch import NEVER, MinBatch, by_device


def test_a_slower_link_gets_a_larger_threshold() -> None:
    """One device's copies take three times as long, so streaming pays from 3 times the tokens."""
    slow, fast = by_device(MinBatch(16, 32, 200, 300), [60, 20], [100, 100])
    assert (slow.experts, fast.experts) == (24, 8)
    assert (slow.prefill_experts, fast.prefill_experts) == (300, 100)
    assert slow.dense == fast.dense == 32
    assert slow.prefill_dense == fast.prefill_dense == 300


_crossovers = st.lists(st.integers(1, 8192), min_size=2, max_size=4)


@given(st.integers(2, SMALL_BATCH), _crossovers, st.data())
def test_thresholds_are_in_the_order_of_the_crossovers(
    first: int, crossovers: list[int], data: st.DataObject
) -> None:
    sizes = data.draw(
        st.lists(st.integers(1, 1 << 40), min_size=len(crossovers), max_size=len(crossovers))
    )
    found = by_device(MinBatch(first), crossovers, sizes)
    for a, x in zip(found, crossovers, strict=True):
        assert 1 <= a.experts <= SMALL_BATCH + 1
        for b, y in zip(found, crossovers, strict=True):
            assert a.experts <= b.experts or x > y
    assert min(its.experts for its in found) <= first
    assert max(its.experts for its in found) >= min(first, SMALL_BATCH)


@given(_crossovers, st.sets(st.integers(1, SMALL_BATCH), min_size=1, max_size=5))
def test_sizes_that_are_swapped_stay_as_they_were_on_every_device(
    crossovers: list[int], swapped: set[int]
) -> None:
    common = MinBatch(12, swapped=frozenset(swapped))
    found = by_device(common, crossovers, [1] * len(crossovers))
    assert len(found) == len(crossovers) >= 1
    for its in found:
        for n in swapped:
            assert its.streams(n, experts=True) == common.streams(n, experts=True)


@pytest.mark.parametrize(
    "value",
    [MinBatch(1, 1), MinBatch(NEVER, NEVER), MinBatch(NEVER, NEVER, SMALL_BATCH + 1, NEVER)],
)
def test_a_threshold_at_the_end_of_its_range_says_nothing_of_each_device(value: MinBatch) -> None:
    assert by_device(value, [60, 20], [1, 1]) == [value, value]


def test_without_a_crossover_or_streamed_weights_all_devices_get_the_same() -> None:
    assert by_device(MinBatch(16), [None, 20], [1, 1]) == [MinBatch(16)] * 2
    assert by_device(MinBatch(16), [30, 20], [0, 0]) == [MinBatch(16)] * 2
