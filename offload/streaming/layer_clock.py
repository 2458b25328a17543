"""The time of some layers of a decode, which is broken off behind them.

A large batch of a large model takes a minute, and its layers are alike: a few of them tell what all
take. Layers are told apart where their streamed weights are about to be read, on the device or by
the CPU.
"""

from __future__ import annotations

import time


class BrokenOff(Exception):
    """The decode was broken off where its clock had it: nothing failed."""


class LayerClock:
    """Times from `first` to `last`, layers whose weights stream; breaks the decode off at `last`.

    The time is that of the layers' streamed products and of what comes between them.
    """

    def __init__(self, first: int, last: int) -> None:
        assert first < last
        self.first, self.last = first, last
        self._began_s: float | None = None
        self._began_at = self._ended_at = -1
        self._took_s = 0.0

    def wants(self, layer: int) -> bool:
        """True if `reached` has to hear of this layer."""
        return layer >= (self.first if self._began_s is None else self.last)

    def reached(self, layer: int) -> None:
        """All that precedes the streamed products of `layer` is computed. Raises BrokenOff."""
        now_s = time.perf_counter()
        if self._began_s is None:
            self._began_s, self._began_at = now_s, layer
        elif layer >= self.last:
            self._took_s, self._ended_at = now_s - self._began_s, layer
            raise BrokenOff

    def seconds_of(self, layers: list[int]) -> float:
        """The time of all these layers, those whose weights stream, once it is broken off."""
        n = sum(self._began_at <= layer < self._ended_at for layer in layers)
        assert n, "a decode is broken off where streamed weights are read"
        return self._took_s * len(layers) / n
