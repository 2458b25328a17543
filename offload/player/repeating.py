"""Finds the results of a graph that must be kept, so that its end can be computed again.

ggml gives the memory of a result to a later node when no other node reads the result any more. A
repair begins at an earlier node and reads such results again, so they get memory of their own.
Inputs that later nodes overwrite are copied to such memory when the graph begins. Rows of a KV
cache need no copy, because the repair writes the same rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from offload.ggml.graph import Graph
from offload.ggml.library.lib import op_number
from offload.ggml.rewriting import VIEWS
from offload.ggml.tensor import Tensor, buffer_at, data_at, op_at, root_at, size_at, sources_at

Result = tuple[int, ...]  # the addresses of a result and of its views


class NotRepeatable(Exception):
    """A part of the graph cannot be computed twice. The text says why."""


class Kept(NamedTuple):
    """Results and inputs of a graph that get memory of their own."""

    results: list[Result]
    inputs: list[Result]  # inputs of the graph, which have to be copied


def find_kept(graph: Graph, cuts: Sequence[int]) -> Kept:
    """Return the results and inputs to keep, so that the graph can go back to each of its `cuts`.

    `cuts`: positions of nodes, ascending. Raises NotRepeatable.
    """
    views = frozenset(map(op_number, VIEWS))
    addresses, first = graph.addresses(), cuts[0]
    made: dict[int, int] = {}  # position of the node that computes a result
    last: dict[int, int] = {}  # position of the last node that reads it
    shown: dict[int, dict[int, None]] = {}  # views by result, other graphs' too
    again: dict[int, int] = {}  # first node from the first cut on that reads a result
    written: list[tuple[int, int]] = []  # (position, result) of writes through a view
    n_uses: Counter[int] = Counter()
    writers: dict[int, int] = {}  # last node that wrote a result, by address
    for at, node in enumerate(addresses):
        computes = op_at(node) not in views
        sources = sources_at(node)
        n_uses.update(sources)
        for source in sources:
            of = root_at(source)
            if of not in made and op_at(of):  # take this graph's node at its address
                of = writers.get(data_at(of), of)
            last[of] = at
            if source != of:
                shown.setdefault(of, {})[source] = None
            if computes and at >= first and of != root_at(node):
                again.setdefault(of, at)
        root = root_at(node)
        if root == node:
            made[node], writers[data_at(node)] = at, node
        elif computes:
            written.append((at, root))
    for at, root in written:
        if again.get(root, at) < at:
            raise NotRepeatable(f"{Tensor(root).name} is read and then written")
        if root in made and _is_read_later(made[root], at, cuts):
            raise NotRepeatable(f"{Tensor(root).name} is written in place")
    alive = {root for root, end in last.items() if _is_read_later(made.get(root, -1), end, cuts)}
    memory = {buffer_at(node) for node in made}
    # ggml never gives an output's memory to another node.
    results = [root for root in alive if root in made and not Tensor(root).is_output]
    for node in (one for root in results for one in (root, *shown.get(root, ()))):
        if graph.use_count(Tensor(node)) > n_uses[node]:
            raise NotRepeatable(f"{Tensor(node).name} is read by another graph")
    later = [node for node, at in made.items() if at >= first and node not in results]
    inputs = [
        root
        for root in alive
        if root not in made
        and buffer_at(root) in memory
        and any(_overlap(node, root) for node in later)
    ]
    return Kept(*([(node, *shown.get(node, ())) for node in of] for of in (results, inputs)))


def _is_read_later(made: int, last: int, cuts: Sequence[int]) -> bool:
    """True if a cut lies between node `made`, which computes a result, and its `last` reader."""
    return any(made < cut <= last for cut in cuts)


def _overlap(some: int, other: int) -> bool:
    if buffer_at(some) != buffer_at(other):
        return False
    first, its_first = data_at(some), data_at(other)
    return first < its_first + size_at(other) and its_first < first + size_at(some)
