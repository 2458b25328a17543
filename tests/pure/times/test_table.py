"""The cost table: interpolation, outliers, and the answers that follow from it."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH
from offload.routing.routing import union_of_neighbours
from offload.times.min_batch import NEVER, MinBatch, by_rule, regimes
from offload.times.table import (
    CostTable,
    DecodeTime,
    Way,
    agreeing,
    contradicting,
    entry_of,
    is_believed,
    ranges,
    relative_error,
    typical,
)


def table_of(**ways: dict[int, float]) -> CostTable:
    named = {Way[name.upper()]: seconds for name, seconds in ways.items()}
    entries = {
        w: {n: DecodeTime(s, n_timed=4) for n, s in found.items()} for w, found in named.items()
    }
    return CostTable(64, 4, entries)


def test_known_sizes_are_as_measured_and_others_lie_on_lines_between_them() -> None:
    table = table_of(in_place={1: 1.0, 8: 4.5, 16: 4.5})
    assert table.seconds(Way.IN_PLACE, 8) == 4.5
    assert table.seconds(Way.IN_PLACE, 4) == pytest.approx(2.5)
    assert table.seconds(Way.IN_PLACE, 64) == 4.5, "it rises no further than the last two sizes"
    with pytest.raises(KeyError):
        table.seconds(Way.SPLIT, 1)


def test_streaming_grows_with_the_share_of_the_experts() -> None:
    def need(n: int) -> float:
        return float(union_of_neighbours(n, 4, 64)) / 64

    table = table_of(streamed={n: need(n) + 1e-4 * n for n in (1, 64)})
    for n in (2, 8, 32, 128, 512):
        assert table.seconds(Way.STREAMED, n) == pytest.approx(need(n) + 1e-4 * n, rel=1e-6)


def test_one_measured_size_scales_the_modelled_ones() -> None:
    modelled = {n: DecodeTime(float(n)) for n in (1, 2, 4, 8)}
    table = CostTable(ways={Way.IN_PLACE: modelled | {2: DecodeTime(6.0, n_timed=1)}})
    assert table.seconds(Way.IN_PLACE, 8) == pytest.approx(24.0)
    assert not CostTable(ways={Way.IN_PLACE: modelled}).is_measured


@given(st.dictionaries(st.integers(1, 64), st.floats(0.1, 10.0), min_size=1, max_size=20))
@example({1: 1.0, 2: 1.0, 3: 1.0, 11: 0.25, 23: 1.0, 24: 1.0, 35: 2.0, 36: 2.0, 48: 2.0})
def test_agreeing_times_are_the_longest_that_do_not_contradict_each_other(
    seconds: dict[int, float],
) -> None:
    low = agreeing(seconds)
    assert all(low[n] <= seconds[n] for n in seconds)
    sizes = sorted(low)
    for a in sizes:
        for b in sizes:
            assert a > b or low[a] <= low[b], "no longer than a larger batch"
            for c in sizes:
                assert a + b < c or low[c] <= low[a] + low[b] + 1e-9, "nor than two that hold it"
    assert agreeing(low) == pytest.approx(low)


def test_a_time_that_contradicts_others_is_found_and_believed_when_it_agrees() -> None:
    seconds = {1: 1.0, 2: 40.0, 3: 2.0, 4: 2.5, 16: 6.0}
    assert contradicting(seconds) == [2]
    assert is_believed(1.9, 40.0, 2.0)
    assert is_believed(20.0, 40.0, 2.0), "shorter by more than noise"
    assert not is_believed(39.0, 40.0, 2.0)


def test_a_doubted_size_is_retried_at_three_starts_and_then_believed() -> None:
    table = table_of(in_place={1: 1.0, 2: 9.0, 4: 2.5})
    assert table.doubted(Way.IN_PLACE) == [2]
    for n_starts in (1, 2, 3):
        table.retried(Way.IN_PLACE, 2, DecodeTime(9.1, n_timed=2, date="2026-01-02"))
        assert table.ways[Way.IN_PLACE][2].n_retried == n_starts
    assert table.doubted(Way.IN_PLACE) == []
    other = table_of(in_place={1: 1.0, 2: 9.0, 4: 2.5})
    other.retried(Way.IN_PLACE, 2, DecodeTime(1.5, n_timed=2))
    assert other.seconds(Way.IN_PLACE, 2) == 1.5
    assert other.ways[Way.IN_PLACE][2].n_retried == 0


def test_min_batch_is_where_streaming_crosses_the_cpu() -> None:
    table = table_of(in_place={1: 1.0, 64: 64.0, 512: 512.0}, streamed={1: 20.0, 64: 30.0})
    found = table.min_batch(512)
    assert 28 <= found.experts <= 33
    assert found.prefill_experts == SMALL_BATCH + 1
    slow = table_of(in_place={1: 1.0, 64: 2.0, 512: 8.0}, streamed={1: 9.0, 512: 9.0})
    assert slow.min_batch(512).experts == slow.min_batch(512).prefill_experts == NEVER
    assert table_of().min_batch(64) == MinBatch(NEVER, 32), "by rule: 512 tokens"
    assert by_rule(64, 4) == MinBatch(512, 32)


def test_batches_are_split_where_that_is_measurably_faster() -> None:
    table = table_of(in_place={1: 1.0, 8: 8.0}, split={1: 0.99, 8: 4.0})
    split = [n for n in range(1, 9) if table.best(n)[0] is Way.SPLIT]
    assert split == [2, 3, 4, 5, 6, 7, 8], "a tie is noise"
    assert table.best(8) == (Way.SPLIT, 4.0)
    assert table.best(8, (Way.IN_PLACE,)) == (Way.IN_PLACE, 8.0)
    assert table.curve(2)[0] == 1.0
    with pytest.raises(KeyError):
        CostTable().best(1)


def test_streaming_dense_weights_saves_the_same_in_every_way() -> None:
    table = table_of(in_place={1: 10.0, 8: 10.0}, dense={1: 12.0, 8: 7.0}, split={1: 5.0, 8: 9.0})
    assert table.best(1)[1] == pytest.approx(5.0)
    assert table.best(8)[1] == pytest.approx(6.0)


def test_thresholds_of_verification_and_prefill_are_said_apart() -> None:
    assert MinBatch(8, 4).words(("experts", "dense")) == (
        "experts in batches of 8 tokens or more; dense weights in batches of 4 tokens or more"
    )
    assert MinBatch(NEVER, 32, 306).words(("experts",)) == (
        "experts in batches of 306 tokens or more, which only prompts have"
    )
    assert MinBatch(8, 32, 306).words(("experts",)) == (
        "experts in batches of 8 to 64 tokens, and in those of 306 or more"
    )
    assert MinBatch(64, 32, NEVER).words(("experts",)) == "experts in batches of 64 tokens"
    assert MinBatch(1, 1).words(("experts",)) == "experts in all batches"
    assert [(r.first, r.last) for r in regimes(512)] == [(1, 64), (65, 512)]
    swapped = MinBatch(8, 8, swapped=frozenset({4, 16}))
    assert swapped.streams(4, experts=True)
    assert not swapped.streams(16, experts=True)
    assert not swapped.streams(4, experts=False)


def test_entries_of_timings() -> None:
    assert typical([1.0, 1.0, 1.1, 9.0]) == pytest.approx(31 / 30), "the disturbed one is left out"
    assert relative_error([1.0]) == math.inf
    assert relative_error([1.0, 1.0, 1.0]) == 0.0
    entry = entry_of([1.0, 1.2, 1.1], "2026-01-02")
    assert (entry.n_timed, entry.date) == (3, "2026-01-02")
    assert entry.spread == pytest.approx(0.05 / 1.1)
    assert ranges([1, 2, 3, 8]) == "1 to 3, 8"
    assert ranges([]) == ""


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="not a valid time"):
        DecodeTime(seconds)
