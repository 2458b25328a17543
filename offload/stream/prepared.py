"""Keeps the graphs that a device has prepared, so that equal graphs are not prepared again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

from offload.ggml.graph import Graph, GraphState
from offload.mla import Outcome

ComputeGraph = Callable[[], int]  # computes a graph and returns a ggml_status
# Cap on the bytes of kept graph states. The state of a graph of 60 layers takes 2 MiB, and the
# prepared graph takes as much again. So graphs of 16 batch sizes are kept, which is enough for the
# sizes that speculation alternates between.
_MOST_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PreparedGraph:
    """A function that computes one of ggml's graphs."""

    uid: int  # the graph's number, given by ggml
    run: ComputeGraph
    mla: Counter[Outcome]  # outcomes of value projections, counted at each computation
    streams: bool  # True if some weights stream; then the executor reports to the layer clock
    layer: int = -1  # the first layer whose weights stream, -1 if none does
    is_detached: bool = False  # True if the graph stays valid while ggml builds the next one


@dataclass(eq=False, slots=True)
class _Reusable:
    """A prepared graph for reuse, with the state of the graph before it was prepared."""

    key: tuple[Hashable, Graph]
    state: GraphState
    prepared: PreparedGraph


class PreparedGraphs:
    """The prepared graphs: the current one at each address, and earlier ones for reuse."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        """`most_bytes` caps the states of kept graphs. The least recently used are evicted."""
        self._most_bytes = most_bytes
        self._current: dict[Graph, PreparedGraph] = {}
        # By circumstances and address, those of several batch sizes and several layouts of results.
        self._kept: dict[tuple[Hashable, Graph], list[_Reusable]] = {}
        self._recent: dict[_Reusable, None] = {}  # all of them; the most recently used is last
        self._size_bytes = 0
        self.n_recognised = 0

    def clear(self) -> None:
        self._current.clear()
        self._kept.clear()
        self._recent.clear()
        self._size_bytes = 0

    def of(
        self,
        graph: Graph,
        as_built: Callable[[], PreparedGraph | None],
        circumstances: Callable[[], Hashable],
        prepare: Callable[[], PreparedGraph],
    ) -> PreparedGraph:
        """Return the prepared `graph`: the current one, an equal earlier one, or a new one.

        `as_built` returns a graph that needs no preparing, or None. `circumstances` returns the
        state that preparing depends on, besides the graph. A graph with the same address and uid is
        unchanged: when ggml splits a model's graph anew, it gives each part a uid that it has never
        used before.
        """
        uid = graph.uid
        current = self._current.get(graph)
        if current is not None and current.uid == uid:
            return current
        unchanged = as_built()
        if unchanged is not None:
            self._current[graph] = unchanged
            return unchanged
        key = circumstances(), graph
        same = self._kept.setdefault(key, [])
        reusable = next((kept for kept in reversed(same) if kept.state.matches(graph)), None)
        if reusable is None:
            state = graph.state()  # read before preparing, which may change the state
            reusable = _Reusable(key, state, prepare())
            same.append(reusable)
            self._size_bytes += state.size_bytes
        else:
            self.n_recognised += 1
            reusable.prepared = replace(reusable.prepared, uid=uid)
            self._recent.pop(reusable)
        self._recent[reusable] = None
        self._current[graph] = reusable.prepared
        while self._size_bytes > self._most_bytes:
            self._forget(next(iter(self._recent)))
        return reusable.prepared

    def _forget(self, oldest: _Reusable) -> None:
        del self._recent[oldest]
        same = self._kept[oldest.key]
        same.remove(oldest)
        if not same:
            del self._kept[oldest.key]
        self._size_bytes -= oldest.state.size_bytes
