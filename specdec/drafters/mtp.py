"""The target's own layers for multi-token prediction (MTP) as a drafter.

They take the target's hidden rows, which `OwnLayers` collects as the target decodes. The rows of
accepted tokens are computed in one decode with the first token of the next draft. So their price
is part of the draft step's.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

from specdec.drafters.model import BATCHED_TAIL, DraftSampling, ModelDrafter
from specdec.types import Round, Target

_MOST_WAITING = 64  # rows that wait for the next draft


class OwnLayers(Target, Protocol):
    """The layers, and the rows that they have yet to take in."""

    @property
    def most_drafted(self) -> int | None:
        """Most tokens of a draft; None: no limit."""
        ...

    def tail(self, sequence: int, history: Sequence[int]) -> list[int]:
        """The last tokens of `history` that a draft has to begin with; at least one."""
        ...

    def take_in(self, sequences: Sequence[int], *, least: int = 0) -> None:
        """Compute the rows that wait, of each sequence that has more than `least`."""
        ...

    def forget(self, sequence: int) -> None: ...


class LayersMemory:
    """What the layers hold; `DraftMemory` of a model that follows the target by itself."""

    def __init__(self, layers: OwnLayers) -> None:
        self._layers = layers
        self.n_rows = 0  # tokens decoded for drafts so far

    def tail(self, sequence: int, history: Sequence[int]) -> tuple[list[int], float]:
        """The tokens that the draft begins with, and the seconds spent on earlier ones."""
        tail = self._layers.tail(sequence, history)
        if len(tail) <= BATCHED_TAIL:
            return tail, 0.0
        began = perf_counter()
        self._layers.take_in([sequence])
        return tail[-1:], perf_counter() - began

    def fed(self, sequence: int, tokens: Sequence[int]) -> None:
        self.n_rows += len(tokens)

    def mark(self, sequence: int) -> None:
        """Nothing: the layers know which of their tokens are drafted."""

    def forget(self, sequence: int) -> None:
        self._layers.forget(sequence)


class MtpDrafter(ModelDrafter):
    """Drafts with the target's own layers; the other arguments are those of `ModelDrafter`."""

    def __init__(
        self,
        layers: OwnLayers,
        *,
        sampling: DraftSampling | None = None,
        n_vocab: int | None = None,
    ) -> None:
        super().__init__(
            layers,
            name="mtp",
            sampling=sampling,
            n_vocab=n_vocab,
            memory=LayersMemory(layers),
            most=layers.most_drafted,
        )
        self._layers = layers

    def heard(self, sequence: int) -> None:
        self._layers.take_in([sequence], least=_MOST_WAITING)

    def learn(self, sequence: int, round_: Round) -> None:
        """Takes rows in while nothing is drafted, so that not too many wait."""
        self._layers.take_in([sequence], least=_MOST_WAITING)
