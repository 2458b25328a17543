"""Chooses the memory node of each page of the streamed weights. Pure.

When ggml decodes one token, each thread reads a contiguous slab of every matrix's rows. The slabs
are the same in every decode after `ggml_numa_init`, if `Topology.ggml_is_numa` is true. Strategy
`rows` puts each page on the node whose threads read most of it. So almost all reads are local,
although there is only one copy of the weights.

A small page that two nodes read costs next to nothing. A 2 MiB page that two nodes read costs much.
So a block becomes a huge page only if one node reads almost all of it. docs/numa.md has the
shares of local reads by model.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from mmap import PAGESIZE

from numa.errors import PlacementRefused
from numa.topology import Topology

PAGE_BYTES = PAGESIZE  # 4 KiB on x86; 16 or 64 KiB on some arm64 systems
HUGE_PAGE_BYTES = 2 << 20
_PAGES_PER_BLOCK = HUGE_PAGE_BYTES // PAGE_BYTES
# Least share of a huge block's pages that one node must read.
_MIN_HUGE_SHARE = 0.98
_UNREAD = 255
_GIB = 1 << 30


class Strategy(StrEnum):
    """A way to place pages: on one node, in turn over all, or near the threads that read them.

    `distribute` is `rows` with threads that alternate between nodes, as in llama.cpp's option.
    """

    SINGLE = "single"
    INTERLEAVE = "interleave"
    ROWS = "rows"
    DISTRIBUTE = "distribute"


@dataclass(frozen=True)
class Candidate:
    """A strategy to try, with its number of threads. `node` is set for `single` only.

    With `huge_pages`, suitable blocks become huge pages.
    """

    strategy: Strategy
    n_threads: int
    node: int | None = None
    huge_pages: bool = True

    def __str__(self) -> str:
        where = "" if self.node is None else f" on node {self.node}"
        pages = "huge pages" if self.huge_pages else "4 KiB pages"
        threads = "1 thread" if self.n_threads == 1 else f"{self.n_threads} threads"
        return f"{self.strategy}{where}, {threads}, {pages}"


@dataclass(frozen=True)
class PlacedWeight:
    """A weight of `n_matrices` matrices (experts or MLA heads), each with `n_rows` rows.

    It begins at `offset_bytes` of the memory. There are no gaps between rows or between matrices.
    MUL_MAT_ID reads `routed` weights, and MUL_MAT reads the others.
    """

    offset_bytes: int
    n_rows: int
    row_bytes: int
    n_matrices: int = 1
    routed: bool = False

    @property
    def size_bytes(self) -> int:
        return self.n_matrices * self.n_rows * self.row_bytes


@dataclass(frozen=True)
class NodeRead:
    """Bytes [start, stop) of the memory, which the threads of `node` read."""

    start_bytes: int
    stop_bytes: int
    node: int


@dataclass(frozen=True)
class NodeRange:
    """Bytes [start, stop) on one node, or page by page in turn over several."""

    start_bytes: int
    stop_bytes: int
    nodes: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Page-aligned ranges that cover the memory without gaps, and the blocks to make huge.

    `huge` lists byte ranges [start, stop) aligned to 2 MiB. `notes` say what differs from the
    wanted placement.
    """

    strategy: Strategy
    size_bytes: int
    ranges: tuple[NodeRange, ...]
    huge: tuple[tuple[int, int], ...] = ()
    page_bytes: int = PAGE_BYTES  # bytes that an interleaved range places on a node in turn
    notes: tuple[str, ...] = ()


def placement_for(
    candidate: Candidate,
    topology: Topology,
    team_nodes: Sequence[int],
    weights: Sequence[PlacedWeight],
    size_bytes: int,
) -> Placement:
    """The placement of `size_bytes` of memory that holds `weights`.

    `team_nodes[i]` is the node whose memory thread i reads. If a node is full, the rest of its
    pages goes elsewhere, with a note. Raises NoSuchNode for an unknown node, PlacementRefused if
    all nodes together have too little memory.
    """
    strategy = candidate.strategy
    if strategy is Strategy.SINGLE:
        node = team_nodes[0] if candidate.node is None else topology.node(candidate.node).id
        placement = place_whole(strategy, size_bytes, [topology.memory_node_near(node)])
    elif strategy is Strategy.INTERLEAVE:
        placement = place_whole(strategy, size_bytes, topology.memory_nodes)
    else:
        placement = place_rows(size_bytes, weights, team_nodes, strategy)
    free = {n.id: n.free_bytes for n in topology.nodes if n.id in topology.memory_nodes}
    placement = fit_memory(placement, free)
    return with_huge_pages(placement) if candidate.huge_pages else placement


def place_whole(strategy: Strategy, size_bytes: int, nodes: Sequence[int]) -> Placement:
    """Place everything on one node, or page by page in turn over several."""
    whole = NodeRange(0, _rounded_up(size_bytes), tuple(nodes))
    return Placement(strategy, size_bytes, (whole,))


def place_rows(
    size_bytes: int,
    weights: Iterable[PlacedWeight],
    team_nodes: Sequence[int],
    strategy: Strategy = Strategy.ROWS,
) -> Placement:
    """Place each page on the node whose threads read most of it when one token is decoded.

    Pages that no matrix product reads go to the node of the page before them.
    """
    nodes = sorted(set(team_nodes))
    owners = bytearray([_UNREAD]) * (_rounded_up(size_bytes) // PAGE_BYTES)
    shared: dict[int, dict[int, int]] = {}  # page at the edge of a read -> bytes read per node
    for read in node_reads(weights, team_nodes):
        first, last = read.start_bytes // PAGE_BYTES, (read.stop_bytes - 1) // PAGE_BYTES
        if last > first + 1:
            owners[first + 1 : last] = bytes([nodes.index(read.node)]) * (last - first - 1)
        for page in {first, last}:
            start, stop = page * PAGE_BYTES, (page + 1) * PAGE_BYTES
            n_bytes = min(read.stop_bytes, stop) - max(read.start_bytes, start)
            tally = shared.setdefault(page, {})
            tally[read.node] = tally.get(read.node, 0) + n_bytes
    for page, tally in shared.items():
        owners[page] = nodes.index(max(tally, key=lambda n: (tally[n], -n)))
    return Placement(strategy, size_bytes, _ranges_of(owners, nodes))


def node_reads(weights: Iterable[PlacedWeight], team_nodes: Sequence[int]) -> list[NodeRead]:
    """Return the bytes that each node reads when one token is decoded, in order of the weights.

    Rows are divided among threads as in llama.cpp (ggml-cpu.c in llama-cpp-python 0.3.36):
    ggml_compute_forward_mul_mat and ggml_compute_forward_mul_mat_id, if ggml_is_numa().
    """
    reads: list[NodeRead] = []
    for weight in weights:
        for start, stop, thread in _thread_reads(weight, len(team_nodes)):
            node = team_nodes[thread]
            last = reads[-1] if reads else None
            if last and last.node == node and last.stop_bytes == start:
                reads[-1] = NodeRead(last.start_bytes, stop, node)
            else:
                reads.append(NodeRead(start, stop, node))
    return reads


def _thread_reads(weight: PlacedWeight, n_threads: int) -> Iterable[tuple[int, int, int]]:
    """Yield (start byte, stop byte, thread) in ascending order, as if all experts were used."""
    at, n_matrices = weight.offset_bytes, weight.n_matrices
    matrix_bytes = weight.n_rows * weight.row_bytes
    if not weight.routed and weight.n_rows <= n_matrices:
        # Unless rows outnumber matrices, ggml divides activations. So a thread reads whole heads.
        slabs, step_bytes, starts = _slabs(n_matrices, n_threads), matrix_bytes, [at]
    else:
        slabs, step_bytes = _slabs(weight.n_rows, n_threads), weight.row_bytes
        starts = list(range(at, at + weight.size_bytes, matrix_bytes))
    for start in starts:
        for thread, (first, last) in enumerate(slabs):
            if last > first:
                yield start + first * step_bytes, start + last * step_bytes, thread


def _slabs(n_rows: int, n_threads: int) -> list[tuple[int, int]]:
    """Rows [first, last) of each thread in ggml: ceil(n_rows / n_threads) while any are left."""
    step = -(-n_rows // n_threads)
    return [(min(step * i, n_rows), min(step * (i + 1), n_rows)) for i in range(n_threads)]


def with_huge_pages(placement: Placement) -> Placement:
    """Mark the 2 MiB blocks that may become huge pages. The memory must be aligned to 2 MiB.

    A block with at least 98 % of its pages on one node moves there as a whole. Other blocks keep
    small pages. If a range is interleaved, all blocks become huge, and go to the nodes in turn.
    """
    n_blocks = placement.ranges[-1].stop_bytes // HUGE_PAGE_BYTES
    if any(len(r.nodes) > 1 for r in placement.ranges):
        huge = ((0, n_blocks * HUGE_PAGE_BYTES),) if n_blocks else ()
        return replace(placement, page_bytes=HUGE_PAGE_BYTES, huge=huge)
    nodes = sorted({r.nodes[0] for r in placement.ranges})
    owners = bytearray()
    for r in placement.ranges:
        owners += bytes([nodes.index(r.nodes[0])]) * ((r.stop_bytes - r.start_bytes) // PAGE_BYTES)
    blocks: list[tuple[int, int]] = []
    for first in range(0, n_blocks * _PAGES_PER_BLOCK, _PAGES_PER_BLOCK):
        end = first + _PAGES_PER_BLOCK
        for k in range(len(nodes)):
            if owners.count(k, first, end) >= _MIN_HUGE_SHARE * _PAGES_PER_BLOCK:
                owners[first:end] = bytes([k]) * _PAGES_PER_BLOCK
                start, stop = first * PAGE_BYTES, end * PAGE_BYTES
                if blocks and blocks[-1][1] == start:
                    start, _ = blocks.pop()
                blocks.append((start, stop))
    return replace(placement, ranges=_ranges_of(owners, nodes), huge=tuple(blocks))


def _ranges_of(owners: bytearray, nodes: Sequence[int]) -> tuple[NodeRange, ...]:
    """Join pages of equal owners (indices of `nodes`). Unread pages join the page before them."""
    ranges: list[NodeRange] = []
    # Next page of each value, searched again only after the loop has passed it.
    upcoming = {k: owners.find(k) for k in (*range(len(nodes)), _UNREAD)}
    page = 0
    while page < len(owners):
        value = owners[page]
        stop = len(owners)
        for k, at in upcoming.items():
            if k != value and at >= 0:
                if at < page:
                    at = upcoming[k] = owners.find(k, page)  # noqa: PLW2901
                stop = at if 0 <= at < stop else stop
        end = stop * PAGE_BYTES
        if value == _UNREAD:
            following = owners[stop] if stop < len(owners) else 0
            node = ranges[-1].nodes[0] if ranges else nodes[following]
        else:
            node = nodes[value]
        if ranges and ranges[-1].nodes == (node,):
            ranges[-1] = replace(ranges[-1], stop_bytes=end)
        else:
            ranges.append(NodeRange(page * PAGE_BYTES, end, (node,)))
        page = stop
    return tuple(ranges)


def _rounded_up(size_bytes: int) -> int:
    return -(-size_bytes // PAGE_BYTES) * PAGE_BYTES


def fit_memory(placement: Placement, free_bytes: Mapping[int, int]) -> Placement:
    """Move ranges that do not fit their node to the node with most room, with a note.

    `free_bytes` is the free memory per node. Raises PlacementRefused if all have too little.
    """
    missing = placement.size_bytes - sum(free_bytes.values())
    if missing > 0:
        raise PlacementRefused(
            f"the memory of {placement.size_bytes / _GIB:.1f} GiB is {missing / _GIB:.1f} GiB more"
            " than all nodes have free; nothing was placed"
        )
    if any(len(r.nodes) > 1 for r in placement.ranges):
        return placement
    room = dict(free_bytes)
    spilled: dict[tuple[int, int], int] = {}
    ranges: list[NodeRange] = []
    for r in placement.ranges:
        node, start = r.nodes[0], r.start_bytes
        while start < r.stop_bytes:
            stop = min(r.stop_bytes, start + max(room.get(node, 0), 0) // PAGE_BYTES * PAGE_BYTES)
            if stop == start and max(room.values()) >= PAGE_BYTES:
                node = max(room, key=lambda n: (room[n], -n))
                continue
            if stop == start:  # no node has a whole page left, but the kernel may still find some
                stop = r.stop_bytes
            ranges.append(NodeRange(start, stop, (node,)))
            room[node] = room.get(node, 0) - (stop - start)
            if node != r.nodes[0]:
                key = r.nodes[0], node
                spilled[key] = spilled.get(key, 0) + stop - start
            start = stop
    notes = tuple(
        f"node {a} is out of memory: {n / _GIB:.2f} GiB of its rows were placed on node {b}"
        for (a, b), n in sorted(spilled.items())
    )
    return replace(placement, ranges=tuple(ranges), notes=(*placement.notes, *notes))
