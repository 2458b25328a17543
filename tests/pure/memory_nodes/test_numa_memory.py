"""Memory is placed, its placement is verified, and it is freed. Kernel errors are one sentence."""

import ctypes
import errno
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from numa import sys
from numa.errors import NoSuchNode, PlacementRefused
from numa.memory import PlacedMemory
from numa.place import (
    NodeRange,
    Placement,
    Strategy,
    place_whole,
    with_huge_pages,
)

if not Path("/proc/self/task").exists():
    pytest.skip("pages can be placed on Linux only", allow_module_level=True)

MIB = 1 << 20
CPU = min(os.sched_getaffinity(0))
# Two nodes that share a processor, so that the tests run on any machine.
TWO = {0: [CPU], 1: [CPU]}


def refuse(call: str, code: int) -> PlacementRefused:
    error = OSError(code, os.strerror(code))
    refusal = PlacementRefused(f"the kernel refused {call} ({error.strerror})")
    refusal.__cause__ = error
    return refusal


def halves(size_bytes: int) -> Placement:
    half = size_bytes // 2
    ranges = (NodeRange(0, half, (0,)), NodeRange(half, size_bytes, (1,)))
    return Placement(Strategy.ROWS, size_bytes, ranges)


class FakeKernel:
    """Records touched pages. Pages are on the nodes in `nodes`, otherwise on node 0."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.touched: list[tuple[int, int]] = []
        self.nodes: dict[int, int] = {}
        monkeypatch.setattr(sys, "touch", lambda a, n: self.touched.append((a, n)))
        monkeypatch.setattr(sys, "bind_pages", lambda *a, **k: None)
        monkeypatch.setattr(sys, "node_of_pages", self.node_of_pages)

    def node_of_pages(self, addresses: Sequence[int]) -> list[int]:
        return [self.nodes.get(a, 0) for a in addresses]


def test_an_arena_is_aligned_and_holds_what_is_written() -> None:
    with PlacedMemory(5 * MIB + 1) as memory:
        assert memory.address % (2 * MIB) == 0
        assert memory.mapped_bytes == 6 * MIB
        ctypes.memset(memory.address, 7, memory.size_bytes)
        assert ctypes.c_ubyte.from_address(memory.address + 5 * MIB).value == 7
    memory.close()


def test_more_address_space_than_there_is_is_refused_in_one_sentence() -> None:
    with pytest.raises(PlacementRefused, match="the kernel refused mmap for .* bytes"):
        PlacedMemory(1 << 50)


def test_pages_of_a_real_node_are_present_and_local_after_applying() -> None:
    with PlacedMemory(8 * MIB) as memory:
        report = memory.apply(place_whole(Strategy.SINGLE, 8 * MIB, [0]), TWO)
        assert report.how in {"mbind", "first touch"}
        if report.local_share is None:
            pytest.skip(f"no proof possible here: {report.notes}")
        assert report.local_share == 1.0
        assert memory.local_share() == 1.0


def test_collapsed_blocks_are_huge_and_keep_their_content() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not enabled.exists():
        pytest.skip("this kernel has no transparent huge pages")
    half = NodeRange(0, 4 * MIB, (0,)), NodeRange(4 * MIB, 8 * MIB, (0,))
    with PlacedMemory(8 * MIB) as memory:
        memory.apply(with_huge_pages(Placement(Strategy.ROWS, 8 * MIB, half)), TWO)
        ctypes.memset(memory.address, 9, memory.size_bytes)
        assert memory.huge_bytes() == 0
        notes = memory.collapse()
        if notes:
            pytest.skip(f"huge pages cannot be made here: {notes}")
        assert memory.huge_bytes() == 8 * MIB
        assert ctypes.c_ubyte.from_address(memory.address + 8 * MIB - 1).value == 9


def test_each_node_touches_its_own_half(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = FakeKernel(monkeypatch)
    with PlacedMemory(4 * MIB) as memory:
        for page in range(512, 1024):
            kernel.nodes[memory.address + page * 4096] = 1
        report = memory.apply(halves(4 * MIB), TWO)
        assert report == replace(report, how="first touch", local_share=1.0, notes=())
        assert sorted(kernel.touched) == [
            (memory.address, 2 * MIB),
            (memory.address + 2 * MIB, 2 * MIB),
        ]


def test_a_node_out_of_memory_keeps_its_pages_elsewhere_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeKernel(monkeypatch)
    with PlacedMemory(4 * MIB) as memory:
        report = memory.apply(halves(4 * MIB), TWO)
        share = report.local_share
        assert share == pytest.approx(0.5, abs=0.05)
        assert share is not None
        assert report.notes == (
            f"{1 - share:.0%} of the pages do not lie on their node (it is out of memory or gone);"
            " they stay where they are and are read remotely",
        )


def test_mbind_refused_falls_back_to_first_touch_in_stripes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = FakeKernel(monkeypatch)

    def refused(*_: object, **__: object) -> None:
        raise refuse("mbind for nodes [0, 1]", errno.EPERM)

    monkeypatch.setattr(sys, "bind_pages", refused)
    with PlacedMemory(4 * MIB) as memory:
        spread = with_huge_pages(place_whole(Strategy.INTERLEAVE, 4 * MIB, [0, 1]))
        report = memory.apply(spread, TWO)
        assert report.how == "first touch"
        assert report.notes == (
            "the kernel refused mbind for nodes [0, 1] (Operation not permitted);"
            " pages are placed by first touch from bound threads instead",
        )
        assert len(kernel.touched) == 2


def test_move_pages_refused_leaves_the_placement_without_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    FakeKernel(monkeypatch)

    def refused(_: object) -> list[int]:
        raise refuse("move_pages for 9 pages", errno.EPERM)

    monkeypatch.setattr(sys, "node_of_pages", refused)
    with PlacedMemory(4 * MIB) as memory:
        report = memory.apply(halves(4 * MIB), TWO)
        assert report.local_share is None
        assert "its proof is missing" in report.notes[0]


def test_huge_pages_refused_leave_small_ones_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sys.advise

    def no_collapse(address: int, size_bytes: int, advice: int) -> None:
        if advice == sys.MADV_COLLAPSE:
            raise refuse("madvise(MADV_COLLAPSE)", errno.EINVAL)
        real(address, size_bytes, advice)

    monkeypatch.setattr(sys, "advise", no_collapse)
    with PlacedMemory(4 * MIB) as memory:
        memory.placement = with_huge_pages(place_whole(Strategy.SINGLE, 4 * MIB, [0]))
        assert memory.collapse() == (
            "the kernel refused madvise(MADV_COLLAPSE) (Invalid argument);"
            " pages of 4 KiB stay there",
        )


def test_old_kernels_without_populate_keep_content_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise refuse("madvise", errno.EINVAL)

    with PlacedMemory(MIB) as memory:
        ctypes.memset(memory.address, 3, 4096)
        monkeypatch.setattr(sys, "advise", unknown)
        sys.touch(memory.address, MIB)
        assert ctypes.c_ubyte.from_address(memory.address).value == 3
        assert not any(n < 0 for n in sys.node_of_pages([memory.address + 4096]))


def test_a_node_without_threads_of_the_plan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeKernel(monkeypatch)
    with (
        PlacedMemory(4 * MIB) as memory,
        pytest.raises(NoSuchNode, match="node 1 has no processor"),
    ):
        memory.apply(halves(4 * MIB), {0: [CPU], 2: [CPU]})


def test_arenas_leave_no_mappings_behind() -> None:
    def n_mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    with PlacedMemory(MIB):
        pass
    before = n_mappings()
    for _ in range(50):
        with PlacedMemory(3 * MIB) as memory:
            ctypes.memset(memory.address, 1, 4096)
    assert n_mappings() <= before + 1
