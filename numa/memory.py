"""Anonymous memory whose pages lie where a placement says: carries out what `numa.place` decides.

Order of use: allocate, apply (before the weights are loaded), load, collapse, residency. Pages are
placed by first touch from pinned threads, which needs no privilege and no mapping per slab; where
one policy covers the memory, `mbind` is asked first. Whatever the kernel refuses ends as a sentence
in the report, with what was done instead.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from numa import sys
from numa.bind import pinned
from numa.errors import NoSuchNode, PlacementRefused
from numa.place import HUGE_PAGE_BYTES, PAGE_BYTES, Placement

_TOUCH_BYTES = 64 << 20  # per call, so that threads of a node share its ranges evenly
_MOVE_PAGES = 8192
_SAMPLE_PAGES = 4096
_GOOD_ENOUGH = 0.97


@dataclass(frozen=True)
class Residency:
    """Where a sample of pages lies. `per_node` counts pages, `n_absent` those never touched.

    `local_share` compares with the placement: the share of sampled pages on their wanted node.
    """

    n_sampled: int
    n_absent: int
    per_node: dict[int, int]
    local_share: float


@dataclass(frozen=True)
class ApplyReport:
    """A placing as it came out. `how` is "nothing", "first touch" or "mbind"; `notes` refusals."""

    how: str
    local_share: float | None
    notes: tuple[str, ...] = ()


class PlacedMemory:
    """One block of anonymous memory, aligned to 2 MiB or more, owned by this object.

    `address` is valid until `close()`; nothing is touched before `apply`.
    """

    def __init__(self, size_bytes: int, alignment: int = HUGE_PAGE_BYTES) -> None:
        """Raises PlacementRefused when the kernel gives no address space, ValueError for a size
        or an alignment that is none."""
        if size_bytes < 1 or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"memory of {size_bytes} bytes aligned to {alignment} is none")
        alignment = max(alignment, HUGE_PAGE_BYTES)
        self.size_bytes = size_bytes
        self.mapped_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        whole_bytes = self.mapped_bytes + alignment
        base = sys.map_anonymous(whole_bytes)
        self.address = -(-base // alignment) * alignment
        # The ends that alignment leaves over are given back, so the mapping is exactly ours.
        front = self.address - base
        if front:
            sys.unmap(base, front)
        back = whole_bytes - front - self.mapped_bytes
        if back:
            sys.unmap(self.address + self.mapped_bytes, back)
        self.placement: Placement | None = None
        self._is_touched = False

    def apply(
        self,
        placement: Placement,
        cpus_of_node: Mapping[int, Sequence[int]],
        *,
        is_loaded: bool = False,
    ) -> ApplyReport:
        """Fault every page in on its node.

        `cpus_of_node` names the processors whose threads touch each node's pages (from the thread
        plan). Memory that was placed before, or holds weights already (`is_loaded`), is placed anew
        by copying its content out and in, 64 MiB at a time: nobody may use it meanwhile. Raises
        NoSuchNode when a placed node has no processor, ValueError when the placement is larger than
        the memory, PlacementRefused when memory runs out.
        """
        if placement.size_bytes > self.size_bytes:
            raise ValueError(
                f"a placement of {placement.size_bytes} bytes does not fit memory of"
                f" {self.size_bytes}"
            )
        has_pages = is_loaded or self._is_touched
        self.placement = placement
        nodes = {n for r in placement.ranges for n in r.nodes}
        if len(nodes) == 1 and len(cpus_of_node) <= 1:
            return ApplyReport("nothing", None, placement.notes)
        notes = list(placement.notes)
        how = self._bind_whole(placement, notes)
        if len(placement.ranges) > 1:
            # A huge page faulted in at once would span nodes; `collapse` makes those that do not.
            self._advise_or_note(sys.MADV_NOHUGEPAGE, notes)
        work = _work_lists(placement, cpus_of_node, self.mapped_bytes, by_policy=how == "mbind")
        self._is_touched = True
        if has_pages:
            self._place_anew(work)
        else:
            self._touch(work)
        return ApplyReport(how, self._verify(notes), tuple(notes))

    def _bind_whole(self, placement: Placement, notes: list[str]) -> str:
        """One policy for the whole memory: the placement's own, or "where the first toucher runs".

        The latter overrides a policy inherited from numactl, and either keeps the kernel's
        balancing from moving pages: it leaves ranges with a policy alone.
        """
        nodes = placement.ranges[0].nodes if len(placement.ranges) == 1 else ()
        mode = sys.MPOL_INTERLEAVE if len(nodes) > 1 else sys.MPOL_PREFERRED
        try:
            sys.bind_pages(self.address, self.mapped_bytes, mode, nodes)
        except PlacementRefused as refusal:
            notes.append(f"{refusal}; pages are placed by first touch from pinned threads instead")
            return "first touch"
        return "mbind" if nodes else "first touch"

    def _advise_or_note(self, advice: int, notes: list[str]) -> None:
        try:
            sys.advise(self.address, self.mapped_bytes, advice)
        except PlacementRefused as refusal:
            notes.append(f"{refusal}; page size is left to the kernel")

    def _place_anew(self, work: "WorkLists") -> None:
        """Chunk by chunk: content out, pages dropped, touched from the right node, content in.

        Moving pages instead (move_pages) fails where huge pages span nodes, and in containers.
        """
        with PlacedMemory(min(_TOUCH_BYTES, self.mapped_bytes)) as aside:
            for chunk, pieces in enumerate(_by_chunk(work, self.mapped_bytes)):
                start = self.address + chunk * _TOUCH_BYTES
                n_bytes = min(_TOUCH_BYTES, self.address + self.mapped_bytes - start)
                sys.copy(aside.address, start, n_bytes)
                sys.advise(start, n_bytes, sys.MADV_DONTNEED)
                self._touch(pieces)
                sys.copy(start, aside.address, n_bytes)

    def _touch(self, work: "WorkLists") -> None:
        """One pinned thread per processor touches its pieces."""
        with ThreadPoolExecutor(max_workers=max(len(work), 1)) as pool:
            futures = [pool.submit(self._touch_from, cpu, pieces) for cpu, pieces in work]
            for future in futures:
                future.result()

    def _touch_from(self, cpu: int, pieces: list[tuple[int, int]]) -> None:
        with pinned([cpu]):
            for start, stop in pieces:
                sys.touch(self.address + start, stop - start)

    def _verify(self, notes: list[str]) -> float | None:
        """The share that is where it should be, after moving pages if it is too small."""
        refusal = ""
        try:
            share = self.residency().local_share
            if share < _GOOD_ENOUGH:
                refusal = self._move_wrong_pages()
                share = self.residency().local_share
        except PlacementRefused as error:
            notes.append(f"{error}; the placement stays as made, its proof is missing")
            return None
        if share < _GOOD_ENOUGH:
            why = refusal or "their node is out of memory or gone"
            notes.append(
                f"{1 - share:.0%} of the pages do not lie on their node ({why});"
                " they stay where they are and are read remotely"
            )
        return share

    def _move_wrong_pages(self) -> str:
        """Migrate pages that lie elsewhere; the kernel's refusal, or ''."""
        for r in self._placed().ranges:
            if len(r.nodes) > 1:
                continue
            stop = min(r.stop_bytes, self.mapped_bytes)
            for first in range(r.start_bytes, stop, _MOVE_PAGES * PAGE_BYTES):
                last = min(first + _MOVE_PAGES * PAGE_BYTES, stop)
                pages = [self.address + offset for offset in range(first, last, PAGE_BYTES)]
                try:
                    sys.move_pages(pages, [r.nodes[0]] * len(pages))
                except PlacementRefused as refusal:
                    return str(refusal)
        return ""

    def collapse(self, on_block: Callable[[int, int], bool] = lambda *_: True) -> tuple[str, ...]:
        """Make the placement's huge blocks huge. Call after loading; returns what was refused.

        The weights' content is kept. Blocks of which pages lie on two nodes go to the majority's.
        After each block `on_block` is told the bytes done and the bytes in all; False ends it.
        """
        placement = self._placed()
        if not placement.huge:
            return ()
        notes: list[str] = []
        # MADV_COLLAPSE obeys NOHUGEPAGE, and only its opposite takes that back.
        self._advise_or_note(sys.MADV_HUGEPAGE, notes)
        total, done = sum(stop - start for start, stop in placement.huge), 0
        for start, stop in placement.huge:
            done += stop - start
            try:
                self.make_huge(start, stop - start)
            except PlacementRefused as refusal:
                notes.append(f"{refusal}; pages of 4 KiB stay there")
                break
            if not on_block(done, total):
                break
        return tuple(notes)

    def make_huge(self, start_bytes: int, size_bytes: int) -> None:
        """Make the pages of a range huge, contents kept. Raises PlacementRefused."""
        size_bytes = min(size_bytes, self.mapped_bytes - start_bytes)
        sys.advise(self.address + start_bytes, size_bytes, sys.MADV_COLLAPSE)

    def huge_bytes(self) -> int:
        """Bytes of it in huge pages; 0 if unknown."""
        return huge_bytes_at(self.address)

    def sample(self, n_pages: int = _SAMPLE_PAGES, seed: int = 0) -> tuple[list[int], list[int]]:
        """(offsets, nodes) of random pages, ascending; an absent page's node is negative.

        Raises PlacementRefused without permission.
        """
        total = -(-self.size_bytes // PAGE_BYTES)
        chosen = random.Random(seed).sample(range(total), min(n_pages, total))
        offsets = sorted(page * PAGE_BYTES for page in chosen)
        return offsets, sys.node_of_pages([self.address + offset for offset in offsets])

    def residency(self, n_pages: int = _SAMPLE_PAGES, seed: int = 0) -> Residency:
        """Compare a random sample of pages with the placement. Raises PlacementRefused."""
        placement = self._placed()
        offsets, found = self.sample(n_pages, seed)
        per_node: dict[int, int] = {}
        n_local = 0
        for node, wanted in zip(found, _wanted_nodes(placement, offsets), strict=True):
            if node >= 0:
                per_node[node] = per_node.get(node, 0) + 1
                n_local += node in wanted
        n_present = sum(per_node.values())
        share = n_local / n_present if n_present else 0.0
        return Residency(len(offsets), len(offsets) - n_present, per_node, share)

    def _placed(self) -> Placement:
        if self.placement is None:
            raise ValueError("nothing was placed in this memory yet: call apply first")
        return self.placement

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self.address:
            sys.unmap(self.address, self.mapped_bytes)
            self.address = 0

    def __enter__(self) -> "PlacedMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if not self.address else "unplaced"
        if self.address and self.placement:
            state = str(self.placement.strategy)
        return f"<PlacedMemory {self.size_bytes >> 20} MiB, {state}>"


WorkLists = list[tuple[int, list[tuple[int, int]]]]  # (processor, its (start, stop) pieces)


def _work_lists(
    placement: Placement,
    cpus_of_node: Mapping[int, Sequence[int]],
    mapped_bytes: int,
    *,
    by_policy: bool,
) -> WorkLists:
    """The ranges that each processor's thread touches: pieces of its node, shared out in turn.

    Several nodes go in stripes, unless a policy places the pages whoever touches them. Raises
    NoSuchNode for a node without processors.
    """
    of_node: dict[int, list[tuple[int, int]]] = {}
    for r in placement.ranges:
        in_turn = len(r.nodes) > 1 and not by_policy
        step = placement.page_bytes if in_turn else _TOUCH_BYTES
        stop = min(r.stop_bytes, mapped_bytes)
        for i, start in enumerate(range(r.start_bytes, stop, step)):
            node = r.nodes[i % len(r.nodes)]
            of_node.setdefault(node, []).append((start, min(start + step, stop)))
    everyone = sorted(c for cpus in cpus_of_node.values() for c in cpus)
    work: WorkLists = []
    for node, pieces in of_node.items():
        cpus = everyone if by_policy else cpus_of_node.get(node, ())
        if not cpus:
            raise NoSuchNode(
                f"node {node} has no processor of the thread plan to touch its pages from;"
                " they were not placed"
            )
        work += [(cpu, pieces[i :: len(cpus)]) for i, cpu in enumerate(cpus)]
    return work


def _by_chunk(work: WorkLists, mapped_bytes: int) -> list[WorkLists]:
    """The same work, cut at multiples of 64 MiB: one list per chunk."""
    chunks: list[dict[int, list[tuple[int, int]]]] = [
        {} for _ in range(0, mapped_bytes, _TOUCH_BYTES)
    ]
    for cpu, pieces in work:
        for start, stop in pieces:
            for chunk in range(start // _TOUCH_BYTES, (stop - 1) // _TOUCH_BYTES + 1):
                first, last = chunk * _TOUCH_BYTES, (chunk + 1) * _TOUCH_BYTES
                chunks[chunk].setdefault(cpu, []).append((max(start, first), min(stop, last)))
    return [list(chunk.items()) for chunk in chunks]


def _wanted_nodes(placement: Placement, offsets: Sequence[int]) -> list[tuple[int, ...]]:
    """The nodes each offset may lie on; offsets ascend."""
    wanted: list[tuple[int, ...]] = []
    i = 0
    for offset in offsets:
        while placement.ranges[i].stop_bytes <= offset:
            i += 1
        wanted.append(placement.ranges[i].nodes)
    return wanted


def huge_bytes_at(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes in huge pages of the mappings from `address` on, up to a gap; 0 if unknown."""
    total, expected, inside = 0, address, False
    try:
        with smaps.open(encoding="ascii", errors="replace") as lines:
            for line in lines:
                head = line.split(" ", 1)[0]
                if "-" in head and not head.endswith(":"):
                    start, stop = (int(part, 16) for part in head.split("-"))
                    inside = start == expected or start <= address < stop
                    expected = stop if inside else expected
                elif inside and head == "AnonHugePages:":
                    total += int(line.split()[1]) << 10
    except OSError:
        return 0
    return total
