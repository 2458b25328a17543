"""Nodes that may be computed before what waits for the CPU, though a graph has them behind it.

ggml gives results their memory by node order: what two nodes write at different times may be the
same bytes. So a node may go before others only if it reads nothing that they write, and writes
nothing that they read or write. Where only what it writes stands against it, other memory for its
result will do, as long as all that read it are known.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """Bytes [first, end) of a buffer."""

    buffer: int
    first: int
    end: int


class Access(NamedTuple):
    """A node's use of tensors, which are numbers."""

    tensor: int  # that it makes
    reads: tuple[int, ...]
    computes: bool = True  # False: the tensor is a view, and nothing happens
    can_lie_elsewhere: bool = False  # only nodes of the list read its result, or views of it


class Chosen(NamedTuple):
    """Positions in the list of nodes, in order."""

    first: tuple[int, ...]  # computed before all others, in this order
    elsewhere: tuple[int, ...]  # of those, whose results need memory of their own

    def order(self, n: int) -> list[int]:
        """Positions of all `n` nodes in the order in which they are computed."""
        chosen = set(self.first)
        return [*self.first, *(i for i in range(n) if i not in chosen)]


def nodes_ahead(
    late: Span, nodes: Sequence[Access], roots: Sequence[int], spans: Sequence[Span]
) -> Chosen:
    """The nodes that may be computed before `late` is written, and before the others of the list.

    They keep their order, and so do the others. What all of them compute stays the same. By tensor:
    `roots`, the one whose memory it sees, itself if it is no view; `spans`, where it lies.
    """
    first: list[int] = []
    elsewhere: list[int] = []
    read: list[Span] = []  # by what stays behind
    written = [late]
    results: set[int] = set()  # of nodes that go first
    moved: set[int] = set()  # of them, that lie elsewhere from now on: their bytes do not count
    for position, node in enumerate(nodes):
        if not node.computes:
            if roots[node.tensor] in results:
                first.append(position)
            continue
        reads = [spans[tensor] for tensor in node.reads if roots[tensor] not in moved]
        goes = not _overlap(reads, written)
        if goes and _overlap((spans[node.tensor],), [*read, *written]):
            goes = node.can_lie_elsewhere
            if goes:
                elsewhere.append(position)
                moved.add(node.tensor)
        if goes:
            first.append(position)
            results.add(node.tensor)
        else:
            read += reads
            written.append(spans[node.tensor])
    return Chosen(tuple(first), tuple(elsewhere))


def _overlap(some: Iterable[Span], others: Sequence[Span]) -> bool:
    for buffer, first, end in some:
        for other, its_first, its_end in others:
            if buffer == other and first < its_end and its_first < end:
                return True
    return False
