"""On which node each page of memory should lie. Pure: byte ranges in, byte ranges out.

`rows` puts every page on the node whose threads read most of it (`numa.rows`), so each read is
local with one copy of the weights. A page read from two nodes is lost to one of them: at 4 KiB that
is next to nothing, at 2 MiB it is much, so huge pages are used only where one node reads (almost)
all of one (`with_huge_pages`). docs/numa.md has the table.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from numa.errors import NoSuchNode, PlacementRefused
from numa.rows import Build, Weight, reads

PAGE_BYTES = 4 << 10
HUGE_PAGE_BYTES = 2 << 20
# A block becomes huge if one node reads at least this share, so the whole stays at it or above.
MIN_HUGE_SHARE = 0.98
_GIB = 1 << 30


class Strategy(StrEnum):
    """A copy per node is none of them: `rows` reads locally with one copy, in half the memory."""

    SINGLE = "single"
    INTERLEAVE = "interleave"
    ROWS = "rows"
    DISTRIBUTE = "distribute"


@dataclass(frozen=True)
class NodeRange:
    """Bytes [start, stop) on one node, or page by page in turn over several."""

    start_bytes: int
    stop_bytes: int
    nodes: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        return self.stop_bytes - self.start_bytes


@dataclass(frozen=True)
class Placement:
    """Ranges that cover memory without gaps, page-aligned, and the blocks to make huge.

    `huge` are [start, stop) ranges aligned to 2 MiB. `notes` say what was not done as asked.
    """

    strategy: Strategy
    size_bytes: int
    page_bytes: int
    ranges: tuple[NodeRange, ...]
    huge: tuple[tuple[int, int], ...] = ()
    notes: tuple[str, ...] = ()

    def bytes_per_node(self) -> dict[int, float]:
        """node -> bytes."""
        totals: dict[int, float] = {}
        for r in self.ranges:
            for node in r.nodes:
                totals[node] = totals.get(node, 0.0) + r.n_bytes / len(r.nodes)
        return totals

    @property
    def huge_share(self) -> float:
        """Share of the bytes that lie in huge pages."""
        return sum(b - a for a, b in self.huge) / self.size_bytes if self.size_bytes else 0.0

    def __repr__(self) -> str:
        per_node = ", ".join(
            f"{n}: {b / _GIB:.2f}" for n, b in sorted(self.bytes_per_node().items())
        )
        return (
            f"<Placement {self.strategy}, GiB per node {{{per_node}}}, {len(self.ranges)} ranges>"
        )


@dataclass(frozen=True)
class PlacedWeight:
    """A weight at its offset in the memory."""

    weight: Weight
    offset_bytes: int


@dataclass(frozen=True)
class NodeRead:
    """Bytes [start, stop) of the memory are read from `node`."""

    start_bytes: int
    stop_bytes: int
    node: int


def node_reads(
    weights: Iterable[PlacedWeight],
    team_nodes: Sequence[int],
    n_tokens: int = 1,
    build: Build | None = None,
) -> list[NodeRead]:
    """Who reads what in the memory: thread i reads from `team_nodes[i]`. Sorted by start.

    At one token the reads are disjoint. Raises ValueError where threads steal work.
    """
    found: list[NodeRead] = []
    for placed in weights:
        for read in reads(placed.weight, len(team_nodes), n_tokens, build):
            start, stop = (
                placed.offset_bytes + read.start_bytes,
                placed.offset_bytes + read.stop_bytes,
            )
            node = team_nodes[read.thread]
            last = found[-1] if found else None
            if last and last.node == node and last.stop_bytes == start:
                found[-1] = NodeRead(last.start_bytes, stop, node)
            else:
                found.append(NodeRead(start, stop, node))
    return sorted(found, key=lambda r: (r.start_bytes, r.stop_bytes, r.node))


def place_single(size_bytes: int, node: int, page_bytes: int = PAGE_BYTES) -> Placement:
    """Everything on one node."""
    whole = (NodeRange(0, _round_up(size_bytes, page_bytes), (node,)),)
    return Placement(Strategy.SINGLE, size_bytes, page_bytes, whole)


def place_interleaved(
    size_bytes: int, nodes: Sequence[int], page_bytes: int = PAGE_BYTES
) -> Placement:
    """Page by page in turn over `nodes`: nobody's reads are local, nobody's are all remote."""
    whole = (NodeRange(0, _round_up(size_bytes, page_bytes), tuple(nodes)),)
    return Placement(Strategy.INTERLEAVE, size_bytes, page_bytes, whole)


def place_rows(
    size_bytes: int,
    weights: Sequence[PlacedWeight],
    team_nodes: Sequence[int],
    page_bytes: int = PAGE_BYTES,
    strategy: Strategy = Strategy.ROWS,
) -> Placement:
    """Each page on the node whose threads read most of it when one token is decoded.

    `team_nodes[i]` is thread i's node (pinning.Team.nodes): ordered node by node it is `rows`,
    alternating it is llama.cpp's `distribute`. Bytes that no product reads follow their neighbour.
    """
    if not team_nodes:
        raise NoSuchNode("a team without threads reads nothing; nothing was placed")
    wanted = node_reads(weights, team_nodes)
    owners = _page_owners(wanted, page_bytes)
    ranges = _fill(owners, _round_up(size_bytes, page_bytes), team_nodes[0], page_bytes)
    return Placement(strategy, size_bytes, page_bytes, ranges)


def _round_up(size_bytes: int, page_bytes: int) -> int:
    return -(-size_bytes // page_bytes) * page_bytes


def _page_owners(wanted: Sequence[NodeRead], page_bytes: int) -> list[tuple[int, int, int]]:
    """(first page, page after the last, node), sorted and disjoint, of every page that is read.

    Pages inside one read belong to its node; pages at the ends of reads to who reads most of them.
    """
    shared: dict[int, dict[int, int]] = {}
    owners: list[tuple[int, int, int]] = []
    for r in wanted:
        first, last = r.start_bytes // page_bytes, (r.stop_bytes - 1) // page_bytes
        for page in {first, last}:
            begin = max(r.start_bytes, page * page_bytes)
            n_bytes = min(r.stop_bytes, (page + 1) * page_bytes) - begin
            tally = shared.setdefault(page, {})
            tally[r.node] = tally.get(r.node, 0) + n_bytes
        if last - first > 1:
            owners.append((first + 1, last, r.node))
    for page, tally in shared.items():
        owners.append((page, page + 1, max(tally, key=lambda n: (tally[n], -n))))
    return sorted(owners)


def _fill(
    owners: list[tuple[int, int, int]], stop_bytes: int, first_node: int, page_bytes: int
) -> tuple[NodeRange, ...]:
    """Ranges without gaps: unread pages go with the node before them, neighbours are merged."""
    merged: list[tuple[int, int]] = []  # (start page, node)
    for start, _, node in owners:
        if not merged:
            merged.append((0, node))
        elif merged[-1][1] != node:
            merged.append((start, node))
    if not merged:
        merged = [(0, first_node)]
    edges = [start * page_bytes for start, _ in merged[1:]] + [stop_bytes]
    begins = [start * page_bytes for start, _ in merged]
    return tuple(
        NodeRange(a, b, (node,))
        for a, b, (_, node) in zip(begins, edges, merged, strict=True)
        if b > a
    )


def with_huge_pages(placement: Placement, min_share: float = MIN_HUGE_SHARE) -> Placement:
    """Mark the 2 MiB blocks that may become huge, the memory being aligned to 2 MiB.

    A block that lies on one node up to `1 - min_share` of its bytes moves there as a whole; other
    blocks keep small pages. Interleaved ranges take all blocks: they go in turn, block by block.
    """
    if any(len(r.nodes) > 1 for r in placement.ranges):
        stop = placement.size_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        blocks = ((0, stop),) if stop else ()
        return replace(placement, page_bytes=HUGE_PAGE_BYTES, huge=blocks)
    end = placement.ranges[-1].stop_bytes if placement.ranges else 0
    wanted = [NodeRead(r.start_bytes, r.stop_bytes, r.nodes[0]) for r in placement.ranges]
    moved = [NodeRead(start, stop, node) for start, stop, node in _blocks(wanted, end, min_share)]
    huge = _joined((r.start_bytes, r.stop_bytes) for r in moved)
    ranges = _overlay(placement.ranges, moved)
    return replace(placement, ranges=ranges, huge=huge)


def _blocks(
    wanted: Sequence[NodeRead], end_bytes: int, min_share: float
) -> list[tuple[int, int, int]]:
    """(start, stop, node) of the runs of whole blocks that one node may have."""
    shared: dict[int, dict[int, int]] = {}
    found: list[tuple[int, int, int]] = []
    size = HUGE_PAGE_BYTES
    for r in wanted:
        first, last = -(-r.start_bytes // size), r.stop_bytes // size
        if last > first:
            found.append((first * size, last * size, r.node))
        edges = {r.start_bytes // size, (r.stop_bytes - 1) // size} - set(range(first, last))
        for block in edges:
            begin = max(r.start_bytes, block * size)
            tally = shared.setdefault(block, {})
            tally[r.node] = tally.get(r.node, 0) + min(r.stop_bytes, (block + 1) * size) - begin
    for block, tally in shared.items():
        node = max(tally, key=lambda n: (tally[n], -n))
        if (block + 1) * size <= end_bytes and tally[node] >= min_share * size:
            found.append((block * size, (block + 1) * size, node))
    return sorted(found)


def _joined(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in ranges:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def _overlay(below: Sequence[NodeRange], above: Sequence[NodeRead]) -> tuple[NodeRange, ...]:
    """`above` where it says something, `below` elsewhere; both sorted and disjoint."""
    pieces: list[NodeRange] = []
    covers = iter(above)
    cover = next(covers, None)
    for r in below:
        position = r.start_bytes
        while position < r.stop_bytes:
            while cover and cover.stop_bytes <= position:
                cover = next(covers, None)
            if cover and cover.start_bytes <= position:
                nodes: tuple[int, ...] = (cover.node,)
                stop = min(cover.stop_bytes, r.stop_bytes)
            else:
                stop = min(r.stop_bytes, cover.start_bytes) if cover else r.stop_bytes
                nodes = r.nodes
            if pieces and pieces[-1].nodes == nodes:
                pieces[-1] = replace(pieces[-1], stop_bytes=stop)
            else:
                pieces.append(NodeRange(position, stop, nodes))
            position = stop
    return tuple(pieces)


def locality(placement: Placement, wanted: Sequence[NodeRead]) -> float:
    """Share of the read bytes that lie on the reader's node; 1.0 where nothing is read."""
    total = local = 0.0
    position = 0
    ranges = placement.ranges
    for read in wanted:
        while position and ranges[position].start_bytes > read.start_bytes:
            position -= 1
        while position < len(ranges) - 1 and ranges[position].stop_bytes <= read.start_bytes:
            position += 1
        at = position
        while at < len(ranges) and ranges[at].start_bytes < read.stop_bytes:
            r = ranges[at]
            n_bytes = min(r.stop_bytes, read.stop_bytes) - max(r.start_bytes, read.start_bytes)
            if read.node in r.nodes:
                local += n_bytes / len(r.nodes)
            at += 1
        total += read.stop_bytes - read.start_bytes
    return local / total if total else 1.0


def sampled_locality(
    offsets: Sequence[int], nodes: Sequence[int], wanted: Sequence[NodeRead]
) -> float | None:
    """Share of the bytes read from sampled pages that lie with their reader.

    `nodes[i]` is where the kernel says the page at `offsets[i]` lies, negative for absent pages,
    which do not count. `wanted` are disjoint reads (one token), sorted. None if nothing is read.
    """
    starts = [r.start_bytes for r in wanted]
    total = local = 0
    for offset, node in zip(offsets, nodes, strict=True):
        if node < 0:
            continue
        at = max(bisect_right(starts, offset) - 1, 0)
        while at < len(wanted) and starts[at] < offset + PAGE_BYTES:
            read = wanted[at]
            end = min(read.stop_bytes, offset + PAGE_BYTES)
            n_bytes = max(end - max(read.start_bytes, offset), 0)
            total += n_bytes
            local += n_bytes if read.node == node else 0
            at += 1
    return local / total if total else None


def fit_memory(placement: Placement, free_bytes: Mapping[int, int]) -> Placement:
    """Move what a node has no room for to the node with most room left, and say so.

    Raises PlacementRefused when all nodes together have too little.
    """
    missing = placement.size_bytes - sum(free_bytes.values())
    if missing > 0:
        raise PlacementRefused(
            f"the memory of {placement.size_bytes / _GIB:.1f} GiB is {missing / _GIB:.1f} GiB more"
            " than all nodes have free; nothing was placed"
        )
    if any(len(r.nodes) > 1 for r in placement.ranges):
        return placement
    room = {node: float(n) for node, n in free_bytes.items()}
    spilled: dict[tuple[int, int], int] = {}
    ranges: list[NodeRange] = []
    for r in placement.ranges:
        node, start = r.nodes[0], r.start_bytes
        while start < r.stop_bytes:
            fits = int(max(room.get(node, 0), 0)) // PAGE_BYTES * PAGE_BYTES
            stop = min(r.stop_bytes, start + fits) if fits else start
            if stop > start:
                ranges.append(NodeRange(start, stop, (node,)))
                room[node] -= stop - start
                if node != r.nodes[0]:
                    key = (r.nodes[0], node)
                    spilled[key] = spilled.get(key, 0) + stop - start
                start = stop
            elif max(room.values()) < PAGE_BYTES:
                # Rounding to pages used the last bytes: the kernel may still find them.
                ranges.append(NodeRange(start, r.stop_bytes, (node,)))
                start = r.stop_bytes
            else:
                node = max(room, key=lambda n: (room[n], -n))
    notes = tuple(
        f"node {a} is out of memory: {n / _GIB:.2f} GiB of its rows were placed on node {b}"
        for (a, b), n in sorted(spilled.items())
    )
    return replace(placement, ranges=tuple(ranges), notes=(*placement.notes, *notes))
