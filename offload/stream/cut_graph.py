"""A graph with cuts, and what its player leaves to others (offload/stream/play.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from offload.ggml.graph import Graph
from offload.ggml.tensor import Redirect, Relocation
from offload.schedule.slots import Piece
from offload.stream.cuts import CutStep, Stop
from offload.stream.passes import PassStep
from offload.stream.program import Program


@dataclass(eq=False, slots=True)
class CutGraph:
    """A graph with its cuts, and how far it is computed.

    The cuts are found when the graph is first seen.
    """

    graph: Graph
    steps: Sequence[CutStep]
    stops: Sequence[Stop]
    n_cuts: int
    relocation: Relocation  # results that get other memory while the graph runs
    played: Program | None  # None: Python does all stops
    n_tokens: int  # tokens of the batch
    passes: Sequence[PassStep] = ()  # layers that are computed in passes
    # While it runs:
    done: int = 0  # number of nodes submitted
    open: list[CutStep] = field(default_factory=list)  # cuts entered and not left
    redirected: list[Redirect] = field(default_factory=list)
    is_shifted: bool = False  # True while nodes read slots that the player has chosen
    sent: list[Any] = field(default_factory=list)  # host memory of enqueued copies

    def __repr__(self) -> str:
        sizes = f"{self.n_tokens} tokens, {self.n_cuts} cuts"
        return f"CutGraph({sizes}, {self.done} of {self.graph!r} done)"

    def reset(self) -> None:
        """Forget how far the graph was computed."""
        self.done, self.open, self.redirected, self.sent = 0, [], [], []

    def needs_as(self, other: CutGraph) -> bool:
        """True if both graphs announce the same needs to the schedule before they run."""
        if self is other or self.played is not None or other.played is not None:
            return self is other
        mine, others = (
            [(s.cut, s.group, s.n_tokens, s.either, s.need is None) for s in graph.steps]
            + [(s.cut, s.group, s.n_tokens, False, False) for s in graph.passes]
            for graph in (self, other)
        )
        return self.n_cuts == other.n_cuts and mine == others


class Stops(Protocol):
    """The steps of a running graph that the player cannot do alone.

    Those that return an int return a ggml_status.
    """

    def submit(self, running: CutGraph, end: int) -> int:
        """Submit the nodes before position `end`, then leave the cuts that no later node reads."""

    def leave(self, running: CutGraph) -> None:
        """Leave every cut whose readers have all been submitted."""

    def stop(self, running: CutGraph, stops: Sequence[Stop]) -> int:
        """Do what has to be done before the nodes of these stops, which follow each other.

        If they are the graph's last stops, submit all nodes.
        """

    def reach(self, layer: int) -> None:
        """Tell a clock that all nodes before a layer are submitted. Raises BrokenOff."""

    def take_slots(
        self, running: CutGraph, step: CutStep, experts: Sequence[int],
        elsewhere: Collection[Piece], send: Callable[[], None],
    ) -> None:  # fmt: skip
        """Enter a split layer's cut, after `experts` are known, and enqueue its copies.

        `elsewhere`: pieces that the cut uses without slots. `send` uploads the slot numbers. It is
        called when the experts have slots and before their copies are enqueued.
        """
