"""Prepared graphs, kept for when the same graph comes again.

libllama builds its graph anew whenever the number of tokens changes, as it does at each step of
speculation. It builds in the same memory: a graph of the same form has the same nodes at the same
addresses, and only its uid is new.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from offload.ggml.graph import Graph, GraphState
from offload.mla.decision import MlaCounters

Run = Callable[[], int]  # computes a graph; a ggml_status
# Of the states of graphs. One of 60 layers takes 2 MiB, and what was found out about it as much
# again: this keeps the sizes of batches that speculation alternates between, 16 and more.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """One of ggml's graphs, and how to compute it."""

    uid: int  # the graph's, given by ggml
    run: Run
    mla: MlaCounters  # counts that each computation adds
    streams: bool  # some of its weights stream, so that its executor knows the layers


class PreparedGraphs:
    """Prepared graphs by their addresses, and those that were at these addresses before."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """`most_bytes`: of the states of graphs that are kept; those used last stay."""
        self._most_bytes = most_bytes
        self._current: dict[Graph, PreparedGraph] = {}
        self._kept: dict[tuple[Hashable, Graph, GraphState], PreparedGraph] = {}  # used last: last
        self._size_bytes = 0
        self.n_recognised = 0

    def clear(self) -> None:
        self._current.clear()
        self._kept.clear()
        self._size_bytes = 0

    def of(
        self,
        graph: Graph,
        as_built: Callable[[], PreparedGraph | None],
        circumstances: Callable[[], Hashable],
        prepare: Callable[[], PreparedGraph],
    ) -> PreparedGraph:
        """The prepared graph: the one that ggml kept, one that it built alike before, or a new one.

        `as_built` gives a graph that needs no preparing, or None. `circumstances`: all that
        preparing depends on beside the graph. ggml gives the part at an address a new uid when it
        splits a model's graph anew, and never uses the old one again.
        """
        uid = graph.uid
        current = self._current.get(graph)
        if current is not None and current.uid == uid:
            return current
        unchanged = as_built()
        if unchanged is not None:
            self._current[graph] = unchanged
            return unchanged
        state = graph.state()  # before preparing, which may change what it depends on
        key = circumstances(), graph, state
        found = self._kept.pop(key, None)
        if found is None:
            found = prepare()
            self._size_bytes += state.size_bytes
        else:
            self.n_recognised += 1
            found = replace(found, uid=uid)
        self._kept[key] = self._current[graph] = found
        while self._size_bytes > self._most_bytes:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._size_bytes -= oldest[2].size_bytes
        return found
