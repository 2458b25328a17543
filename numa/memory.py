"""Anonymous memory whose pages are placed as `numa.place` decides.

Call `apply` before the weights are loaded and `collapse` after. If one policy covers the whole
memory, `mbind` is tried first. Otherwise threads bound to a node touch its pages first, which needs
no privilege and no mapping per slab. For each refusal of the kernel, the report has a sentence that
says what was done instead.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from numa import sys
from numa.errors import NoSuchNode, PlacementRefused
from numa.place import HUGE_PAGE_BYTES, PAGE_BYTES, Placement

_TOUCH_BYTES = 64 << 20  # bytes touched per call, few enough to share a node's ranges evenly
_SAMPLE_PAGES = 4096
_GOOD_ENOUGH = 0.97


@dataclass(frozen=True)
class ApplyReport:
    """How pages were placed ("first touch" or "mbind"), and what the kernel refused.

    `local_share` is the share of sampled pages on their planned node, None if the kernel does not
    say.
    """

    how: str
    local_share: float | None
    notes: tuple[str, ...] = ()


class PlacedMemory:
    """One block of anonymous memory, aligned to 2 MiB, owned by this object.

    `address` is valid until `close()`. No page is touched before `apply`.
    """

    def __init__(self, size_bytes: int) -> None:
        """Raises PlacementRefused if the kernel gives no address space, ValueError for no bytes."""
        if size_bytes < 1:
            raise ValueError(f"memory of {size_bytes} bytes is none")
        self.size_bytes = size_bytes
        self.mapped_bytes = -(-size_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        # The unaligned bytes before and after the block are never touched, so they take no memory.
        self._mapping = sys.map_anonymous(self.mapped_bytes + HUGE_PAGE_BYTES)
        self.address = -(-sys.address_of(self._mapping) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.placement: Placement | None = None

    def apply(self, placement: Placement, cpus_of_node: Mapping[int, Sequence[int]]) -> ApplyReport:
        """Fault in every page on its node. The memory must not have been used before.

        `cpus_of_node` names the processors whose threads touch each node's pages. Raises NoSuchNode
        if a placed node has no processor, PlacementRefused if memory runs out.
        """
        self.placement = placement
        notes = list(placement.notes)
        how = self._bind_whole(placement, notes)
        if len(placement.ranges) > 1:
            # Huge pages that are faulted in now may span nodes, so leave them to `collapse`.
            self._advise_or_note(sys.MADV_NOHUGEPAGE, notes)
        work = _work_lists(placement, cpus_of_node, self.mapped_bytes, by_policy=how == "mbind")
        with ThreadPoolExecutor(max_workers=len(work)) as pool:
            list(pool.map(self._touch_from, *zip(*work, strict=True)))
        return ApplyReport(how, self._verified_share(notes), tuple(notes))

    def _bind_whole(self, placement: Placement, notes: list[str]) -> str:
        """Set one memory policy for the whole memory, and return how pages are placed.

        If the placement has one range, the policy places pages as that range says. Otherwise the
        policy is first touch, which overrides a policy inherited from numactl. With any policy,
        the kernel's NUMA balancing does not move the pages.
        """
        nodes = placement.ranges[0].nodes if len(placement.ranges) == 1 else ()
        mode = sys.MPOL_INTERLEAVE if len(nodes) > 1 else sys.MPOL_PREFERRED
        try:
            sys.bind_pages(self.address, self.mapped_bytes, mode, nodes)
        except PlacementRefused as refusal:
            notes.append(f"{refusal}; pages are placed by first touch from bound threads instead")
            return "first touch"
        return "mbind" if nodes else "first touch"

    def _advise_or_note(self, advice: int, notes: list[str]) -> None:
        try:
            sys.advise(self.address, self.mapped_bytes, advice)
        except PlacementRefused as refusal:
            notes.append(f"{refusal}; page size is left to the kernel")

    def _touch_from(self, cpu: int, pieces: list[tuple[int, int]]) -> None:
        with sys.running_on([cpu]):
            for start, stop in pieces:
                sys.touch(self.address + start, stop - start)

    def _verified_share(self, notes: list[str]) -> float | None:
        try:
            share = self.local_share()
        except PlacementRefused as error:
            notes.append(f"{error}; the placement stays as made, its proof is missing")
            return None
        if share < _GOOD_ENOUGH:
            notes.append(
                f"{1 - share:.0%} of the pages do not lie on their node (it is out of memory or"
                " gone); they stay where they are and are read remotely"
            )
        return share

    def local_share(self, n_pages: int = _SAMPLE_PAGES, seed: int = 0) -> float:
        """Share of a random sample of present pages that lie on their planned node.

        Raises PlacementRefused if the kernel does not say where pages lie.
        """
        assert self.placement is not None, "call apply first"
        total = -(-self.size_bytes // PAGE_BYTES)
        chosen = sorted(random.Random(seed).sample(range(total), min(n_pages, total)))
        nodes = sys.node_of_pages([self.address + page * PAGE_BYTES for page in chosen])
        ranges = iter(self.placement.ranges)
        range_ = next(ranges)
        n_present = n_local = 0
        for page, node in zip(chosen, nodes, strict=True):
            while range_.stop_bytes <= page * PAGE_BYTES:
                range_ = next(ranges)
            n_present += node >= 0
            n_local += node in range_.nodes
        return n_local / n_present if n_present else 0.0

    def collapse(self, on_block: Callable[[int, int], bool] = lambda *_: True) -> tuple[str, ...]:
        """Make the placement's huge blocks huge after loading, and return the kernel's refusals.

        The contents are kept. After each block, `on_block` gets the bytes done and the total bytes,
        and returns False to stop.
        """
        assert self.placement is not None, "call apply first"
        if not self.placement.huge:
            return ()
        notes: list[str] = []
        # MADV_COLLAPSE obeys MADV_NOHUGEPAGE, so MADV_HUGEPAGE must revoke it first.
        self._advise_or_note(sys.MADV_HUGEPAGE, notes)
        total, done = sum(stop - start for start, stop in self.placement.huge), 0
        for start, stop in self.placement.huge:
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
        """Make the pages of a range huge and keep their contents. Raises PlacementRefused."""
        size_bytes = min(size_bytes, self.mapped_bytes - start_bytes)
        sys.advise(self.address + start_bytes, size_bytes, sys.MADV_COLLAPSE)

    def huge_bytes(self) -> int:
        """Bytes of this memory in huge pages; 0 if unknown."""
        return huge_bytes_at(self.address)

    def close(self) -> None:
        """Unmap the memory. A second call does nothing."""
        self._mapping.close()
        self.address = 0

    def __enter__(self) -> "PlacedMemory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _work_lists(
    placement: Placement,
    cpus_of_node: Mapping[int, Sequence[int]],
    mapped_bytes: int,
    *,
    by_policy: bool,
) -> list[tuple[int, list[tuple[int, int]]]]:
    """Returns (processor, ranges that its thread touches) for each thread.

    The processors of a node take its ranges in turn. In interleaved ranges, the nodes take turns
    page by page. If a policy places the pages (`by_policy`), all processors share them. Raises
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
    work: list[tuple[int, list[tuple[int, int]]]] = []
    for node, pieces in of_node.items():
        cpus = everyone if by_policy else cpus_of_node.get(node, ())
        if not cpus:
            raise NoSuchNode(
                f"node {node} has no processor of the thread plan to touch its pages from;"
                " they were not placed"
            )
        work += [(cpu, pieces[i :: len(cpus)]) for i, cpu in enumerate(cpus)]
    return work


def huge_bytes_at(address: int, smaps: Path = Path("/proc/self/smaps")) -> int:
    """Bytes in huge pages of the mapping at `address` and those adjacent after it; 0 if unknown."""
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
