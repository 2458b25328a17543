"""Times some layers of a decode, and then stops the decode.

A large batch of a large model takes a minute. The layers are alike, so the time of a few of them
gives the time of all. The clock is read just before the device or the CPU reads a layer's streamed
weights.
"""

from __future__ import annotations

import time


class BrokenOff(Exception):
    """The layer clock stopped the decode on purpose. Nothing failed."""


class LayerClock:
    """Times layers from `first` to before `last`, whose weights stream, and stops the decode there.

    The time covers the layers' streamed products and all computation between them.
    """

    def __init__(self, first: int, last: int) -> None:
        assert first < last
        self.first, self.last = first, last
        self._began_s: float | None = None
        self._began_at = self._ended_at = -1
        self._took_s = 0.0

    def wants(self, layer: int) -> bool:
        """True if `reached` has to be called for this layer."""
        return layer >= (self.first if self._began_s is None else self.last)

    def reached(self, layer: int) -> None:
        """Read the clock. All nodes before the streamed products of `layer` must be computed.

        Raises BrokenOff at layer `last`.
        """
        now_s = time.perf_counter()
        if self._began_s is None:
            self._began_s, self._began_at = now_s, layer
        elif layer >= self.last:
            self._took_s, self._ended_at = now_s - self._began_s, layer
            raise BrokenOff

    def seconds_of(self, layers: list[int]) -> float:
        """Return the seconds that all of `layers` would take. Call after `BrokenOff`.

        `layers`: all layers whose weights stream.
        """
        n = sum(self._began_at <= layer < self._ended_at for layer in layers)
        assert n, "a decode is broken off where streamed weights are read"
        return self._took_s * len(layers) / n
