"""The layout of streamed weights in the store, and the file reads that fill it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numa.memory import huge_bytes_at
from offload.errors import DoesNotFit
from offload.model import TensorEntry, WeightPlace
from offload.plan.store_layout import PAGE_BYTES, cut_into_chunks, plan_layout
from offload.store.store import HostRoom, check_room, room_now

GIB = 1 << 30


def place(name: str, offset: int, size: int, file: str = "a.gguf") -> WeightPlace:
    return WeightPlace(Path(file), TensorEntry(name, "f32", (size // 4,), offset, size))


@st.composite
def weights(draw: st.DrawFn) -> list[WeightPlace]:
    """Draws weights of up to three files, 32-byte aligned as in GGUF. Some are left out."""
    found = []
    for file in range(draw(st.integers(1, 3))):
        offset = 32 * draw(st.integers(1, 1000))
        for i in range(draw(st.integers(1, 12))):
            size = 32 * draw(st.integers(1, 20_000))
            if draw(st.booleans()):
                found.append(place(f"{file}.{i}", offset, size, f"{file}.gguf"))
            offset += size + 32 * draw(st.sampled_from([0, 0, 1, 5000]))
    return found


@given(weights(), st.sampled_from([PAGE_BYTES, 3 * PAGE_BYTES, 1 << 20]))
def test_every_weight_is_read_once_to_where_it_lies(
    places: list[WeightPlace], chunk_bytes: int
) -> None:
    layout = plan_layout(reversed(places))
    assert set(layout.spots) == {p.entry.name for p in places}
    chunks = cut_into_chunks(layout.runs, chunk_bytes)
    at = 0
    for chunk in chunks:
        assert chunk.at_bytes == at, "no gap and no overlap in memory"
        at += chunk.size_bytes
        for number in (chunk.start_bytes, chunk.size_bytes, chunk.at_bytes):
            assert number % PAGE_BYTES == 0, "a direct read needs it"
        assert 0 < chunk.least_bytes <= chunk.size_bytes <= chunk_bytes
    assert at == layout.size_bytes
    for p in places:
        spot = layout.spots[p.entry.name]
        end = spot.offset_bytes + spot.size_bytes
        pages = set(range(spot.offset_bytes // PAGE_BYTES, -(-end // PAGE_BYTES)))
        brought = {
            (chunk.start_bytes + i) // PAGE_BYTES
            for chunk in chunks
            if chunk.file == p.file
            and chunk.at_bytes - chunk.start_bytes == spot.at_bytes - spot.offset_bytes
            for i in range(0, chunk.least_bytes, PAGE_BYTES)
        }
        assert pages <= brought


def test_distant_weights_are_not_read_with_what_lies_between() -> None:
    page, far = PAGE_BYTES, 256 * PAGE_BYTES
    layout = plan_layout([place("a", 64, page), place("b", page + 96, page), place("c", far, page)])
    assert [(run.start_bytes, run.stop_bytes) for run in layout.runs] == [
        (0, 3 * page),
        (far, far + page),
    ]
    assert [run.end_bytes for run in layout.runs] == [2 * page + 96, far + page]


def test_too_little_memory_is_told_with_both_numbers_the_limit_and_the_flag() -> None:
    with pytest.raises(
        DoesNotFit, match=r"need 3\.00 GiB.*1\.50 GiB are available \(why\).*--mmap"
    ):
        check_room(3 * GIB, HostRoom(3 * GIB // 2, "why"))
    check_room(GIB, HostRoom(GIB, "why"))


def test_the_control_group_limits_the_room(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text(f"{1 << 20}\n")
    room = room_now(tmp_path)
    assert room.available_bytes == 0, "this process uses more than 1 MiB already"
    assert "control group" in room.limited_by
    assert room_now(tmp_path / "proc").limited_by == "free memory"


def test_huge_pages_are_counted_in_the_mappings_of_the_address_alone(tmp_path: Path) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(
        "1000-2000 rw-p 00000000 00:00 0\nAnonHugePages:    2048 kB\n"
        "400000-800000 rw-p 00000000 00:00 0\nRss: 4 kB\nAnonHugePages:    4096 kB\n"
        "800000-a00000 rw-p 00000000 00:00 0\nAnonHugePages:    2048 kB\n"
        "c00000-e00000 rw-p 00000000 00:00 0\nAnonHugePages:    2048 kB\n"
    )
    assert huge_bytes_at(0x400000, smaps) == 6 << 20
    assert huge_bytes_at(0x400000, tmp_path / "none") == 0
