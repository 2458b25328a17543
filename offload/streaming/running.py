"""The computation of one graph, and what its player leaves to others (offload/player/play.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from offload.ggml.graph import Graph
from offload.ggml.tensor import Redirect
from offload.schedule.slots import Piece
from offload.streaming.cuts import CutStep, Stop


@dataclass(slots=True)
class Running:
    """Progress of the computation of one graph."""

    graph: Graph
    n_tokens: int  # tokens of the batch
    done: int = 0  # number of nodes submitted
    open: list[CutStep] = field(default_factory=list)  # cuts entered and not left
    redirected: list[Redirect] = field(default_factory=list)
    is_shifted: bool = False  # True while nodes read slots that the player has chosen
    chunks: list[Any] = field(default_factory=list)  # structures that submitted chunks refer to


class Stops(Protocol):
    """The steps of a running graph that the player cannot do alone.

    Those that return an int return a ggml_status.
    """

    def submit(self, running: Running, end: int) -> int:
        """Submit the nodes before position `end`, then leave the cuts that no later node reads."""

    def leave(self, running: Running) -> None:
        """Leave the cuts that no node reads any more that is not submitted."""

    def stop(self, running: Running, stop: Stop) -> int:
        """Do what has to be done before the stop's node."""

    def reach(self, layer: int) -> None:
        """Tell a clock that all nodes before a layer are submitted. Raises BrokenOff."""

    def take_slots(
        self, running: Running, step: CutStep, experts: Sequence[int], elsewhere: Collection[Piece],
        send: Callable[[], None],
    ) -> None:  # fmt: skip
        """Enter a split layer's cut, after `experts` are known, and enqueue its copies.

        `elsewhere`: pieces that the cut uses without slots. `send` uploads the slot numbers. It is
        called when the experts have slots and before their copies are enqueued.
        """
