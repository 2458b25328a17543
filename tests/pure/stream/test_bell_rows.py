"""Rows of two memories have one numbering, which a kernel's numbers of 32 bits can hold."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.stream.bell_rows import RowSpan, span_of

pages = st.integers(1, 1 << 35).map(lambda n: n << 12)  # addresses of 47 bits


@given(pages, pages, st.integers(1, 64).map(lambda n: 256 * n), st.integers(1, 512))
def test_numbers_name_the_rows_of_both_memories(
    device_at: int, host_at: int, row_bytes: int, n_rows: int
) -> None:
    span = span_of(device_at, host_at, row_bytes, n_rows)
    low = min(device_at, host_at)
    if span is None:
        assert abs(device_at - host_at) // row_bytes + n_rows >= (1 << 31) - 2, "too far apart"
        return
    assert 0 <= span.shift_bytes < row_bytes
    device_at += span.shift_bytes
    low = min(device_at, host_at)
    assert low + span.device_row * row_bytes == device_at
    assert low + span.host_row * row_bytes == host_at
    assert min(span.device_row, span.host_row) == 0
    assert max(span.device_row, span.host_row) + n_rows < 1 << 31


@pytest.mark.parametrize(
    ("device_at", "host_at", "row_bytes", "expected"),
    [
        (0x7F00_0000_0000, 0x7F10_0000_0000, 8192, RowSpan(0, 0, 1 << 23)),
        (0x7F10_0000_0000, 0x7F00_0000_0000, 8192, RowSpan(0, 1 << 23, 0)),
        (0x7F00_0000_0000, 0x7F00_0000_1000, 28672, RowSpan(4096, 0, 0)),  # as if they were one
        (0x7F00_0000_0000, 0x2_0500_0000, 8192, None),  # 2 ** 34 rows apart
        (0x7F00_0000_0000, 0x7F10_0000_0000, 4 * 100, None),  # rows that cannot be aligned
    ],
)
def test_memories_that_have_no_numbering(
    device_at: int, host_at: int, row_bytes: int, expected: RowSpan | None
) -> None:
    assert span_of(device_at, host_at, row_bytes, 8) == expected
