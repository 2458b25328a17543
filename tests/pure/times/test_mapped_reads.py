"""Kernels read rows of prompts from pinned memory only where this was measured not to be slower."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.stream import read_speed
from offload.stream.read_speed import measure_reads
from offload.times.mapped_reads import (
    MOST_LONGER,
    PROMPT_BYTES,
    MappedReads,
    ReadTimings,
    reads_pay,
    usual_reads,
)

FIRST_S, RATE = st.floats(0.0, 1e-3), st.floats(1e8, 1e11)
READS = st.builds(MappedReads, FIRST_S, RATE, RATE, FIRST_S, RATE)
FACTOR = st.floats(1.0, 1e3)
# Reads that nearly fill the link, as measured by EMOGI (arXiv 2006.06890), and a copy's latency.
FULL = MappedReads(1.5e-6, 12.3e9, 6.2e9, 6e-6, 12.9e9)


@pytest.mark.parametrize(
    ("changes", "pays"),
    [
        ({}, True),
        ({"bytes_per_s": 6e9}, False),  # half as fast as copies
        ({"beside_bytes_per_s": 2e9}, False),  # copies starve the kernels
        ({"first_s": 50e-6}, False),  # the tables of a launch would take 50 us
        ({"bytes_per_s": 12.9e9 / 1.05}, True),  # within what measurements spread by
        ({"copy_bytes_per_s": 3e9}, True),
    ],
)
def test_slow_reads_leave_rows_to_copies(changes: dict[str, float], pays: bool) -> None:
    assert reads_pay(replace(FULL, **changes)) is pays


@given(READS, st.integers(*PROMPT_BYTES))
def test_the_ends_stand_for_all_sizes_between_them(reads: MappedReads, n_bytes: int) -> None:
    if reads_pay(reads):
        # One beyond the limit is a last bit of a sum.
        assert reads.read_s(n_bytes) <= (1 + 1e-9) * MOST_LONGER * reads.copy_s(n_bytes)
        assert reads.beside_s(n_bytes) <= (1 + 1e-9) * MOST_LONGER * reads.copy_s(2 * n_bytes)


@given(READS, FACTOR)
def test_slower_kernels_or_faster_copies_never_let_kernels_read(
    reads: MappedReads, factor: float
) -> None:
    if reads_pay(reads):
        return
    for slower in (
        replace(reads, first_s=reads.first_s * factor),
        replace(reads, bytes_per_s=reads.bytes_per_s / factor),
        replace(reads, beside_bytes_per_s=reads.beside_bytes_per_s / factor),
        replace(reads, copy_first_s=reads.copy_first_s / factor),
        replace(reads, copy_bytes_per_s=reads.copy_bytes_per_s * factor),
    ):
        assert not reads_pay(slower)


def disturbed(reads: MappedReads, factors: tuple[float, ...]) -> MappedReads:
    """Reads measured beside other programs: each time is longer by a factor of its own."""
    a, b, c, d, e = factors
    return MappedReads(
        reads.first_s * a, reads.bytes_per_s / b, reads.beside_bytes_per_s / c,
        reads.copy_first_s * d, reads.copy_bytes_per_s / e,
    )  # fmt: skip


@given(READS, st.integers(1, 5), st.data())
def test_up_to_half_of_the_measurements_may_be_disturbed(
    reads: MappedReads, n_measured: int, data: st.DataObject
) -> None:
    n_disturbed = data.draw(st.integers(0, n_measured // 2))
    factors = st.tuples(*[FACTOR] * 5)
    measured = [disturbed(reads, data.draw(factors)) for _ in range(n_disturbed)]
    measured += [reads] * (n_measured - n_disturbed)
    usual = usual_reads(data.draw(st.permutations(measured)))
    if 2 * n_disturbed < n_measured:
        assert usual == reads
    # Beside copies a disturbance may shorten a read, too, so half of them may decide there.
    assert replace(usual, beside_bytes_per_s=reads.beside_bytes_per_s) == reads


@given(READS, st.integers(1, 5), FACTOR, st.data())
def test_reads_that_ran_after_the_copies_beside_them_do_not_count(
    reads: MappedReads, n_measured: int, factor: float, data: st.DataObject
) -> None:
    n_alone = data.draw(st.integers(0, n_measured // 2))
    alone = replace(reads, beside_bytes_per_s=reads.beside_bytes_per_s * factor)
    measured = [alone] * n_alone + [reads] * (n_measured - n_alone)
    assert usual_reads(data.draw(st.permutations(measured))) == reads


@given(st.lists(READS, min_size=1, max_size=5))
def test_each_usual_value_was_measured(measured: list[MappedReads]) -> None:
    for nth, value in enumerate(astuple(usual_reads(measured))):
        assert value in {astuple(one)[nth] for one in measured}


SIZES = (16 << 10, 2 << 20)


@given(READS, st.tuples(st.floats(1e-6, 1e-4), st.floats(1e-6, 1e-4)))
def test_timings_give_the_reads_that_they_were_made_of(
    reads: MappedReads, kernel_s: tuple[float, float]
) -> None:
    timings = ReadTimings(
        SIZES, kernel_s,
        (kernel_s[0] + reads.read_s(SIZES[0]), kernel_s[1] + reads.read_s(SIZES[1])),
        (kernel_s[0] + reads.copy_s(SIZES[0]), kernel_s[1] + reads.copy_s(SIZES[1])),
        kernel_s[1] + reads.beside_s(SIZES[1]),
    )  # fmt: skip
    assert astuple(timings.reads()) == pytest.approx(astuple(reads), rel=1e-6, abs=1e-9)


@given(st.lists(st.floats(0.0, 10.0), min_size=7, max_size=7))
def test_any_times_give_times_and_rates(times_s: list[float]) -> None:
    """A disturbed measurement may have a kernel that is faster from pinned memory, and so on."""
    a, b, c, d, e, f, g = times_s
    found = ReadTimings(SIZES, (a, b), (c, d), (e, f), g).reads()
    assert all(math.isfinite(value) and value >= 0.0 for value in astuple(found))
    assert min(found.bytes_per_s, found.beside_bytes_per_s, found.copy_bytes_per_s) > 0.0
    assert reads_pay(found) in {True, False}


class FakeProbe:
    """A device whose ways take 1 us and 1 ns a row, and a read beside copies 300 us or 1 us."""

    def __init__(self, *_: object) -> None:
        # Rounds to warm up, and then two reads that were held up until the copies were done.
        self._beside_s: Iterator[float] = iter([1e-6] * 3 + [1e-6, 300e-6, 1e-6, 310e-6, 900e-6])

    def from_device_s(self, n: int) -> float:
        return 1e-6 + 1e-9 * n

    from_pinned_s = copied_s = from_device_s

    def beside_s(self) -> float:
        return next(self._beside_s)


def test_a_start_takes_the_median_of_reads_beside_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_speed, "_ReadProbe", FakeProbe)
    card: Any = SimpleNamespace(device=None)
    found = measure_reads(card)
    beside_s = 300e-6 - FakeProbe().from_device_s(256)
    assert found.beside_bytes_per_s == pytest.approx((2 << 20) / beside_s)


def test_copies_are_under_way_before_a_read_is_timed_beside_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    did: list[str] = []
    probe: Any = object.__new__(read_speed._ReadProbe)
    probe._experts = probe._source = None
    probe._other = SimpleNamespace(
        copy=lambda *_: did.append("copy"), synchronize=lambda: did.append("wait")
    )
    monkeypatch.setattr(probe, "from_pinned_s", lambda _: did.append("read") or 2.0, raising=False)
    assert probe.beside_s() == 2.0
    assert did == [*["copy"] * 4, "read", "wait"]


def test_the_words_have_all_values() -> None:
    assert FULL.words == (
        "a kernel's first read takes 1.5 us and a copy 6.0 us; kernels read 12.3 GB/s, 6.2 beside "
        "copies, and copies bring 12.9"
    )
