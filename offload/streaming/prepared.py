"""A cache of prepared graphs.

libllama builds its graph anew whenever the number of tokens changes, as it does at each step of
speculation. It builds in the same memory: a graph of the same form has the same nodes at the same
addresses, and only its uid is new.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from offload.ggml.graph import Graph, GraphState
from offload.mla import Outcome

Run = Callable[[], int]  # computes a graph; a ggml_status
# Cap on the bytes of kept graph states. The state of a graph of 60 layers takes 2 MiB, and what was
# prepared for it as much again. So the cap keeps graphs of 16 batch sizes, which is enough for the
# sizes that speculation alternates between.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """One of ggml's graphs, and how to compute it."""

    uid: int  # the graph's number, given by ggml
    run: Run
    mla: Counter[Outcome]  # value projections that each computation counts
    streams: bool  # True if some of its weights stream; its executor then tells the layer clock


class PreparedGraphs:
    """Prepared graphs: the current one at each address, and earlier ones for reuse."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """`most_bytes` caps the states of kept graphs. The least recently used are evicted."""
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
        """Return the prepared `graph`: the current one, an equal earlier one, or a new one.

        `as_built` returns a graph that needs no preparing, or None. `circumstances` returns all
        that preparing depends on beside the graph. When ggml splits a model's graph anew, it gives
        the part at an address a new uid, and never uses the old uid again.
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
