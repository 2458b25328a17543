"""Chooses how many layers a decode computes between two waits for routers' ids. Pure."""

from __future__ import annotations

_FORGETS = 1 / 8  # share of the averages that each decode replaces
_LEAST_DECODES = 8  # decodes with one wait a layer, before any other number is tried
# Seconds of a wait that the host does not see: a read back, and a launch. Estimated, not measured.
_UNSEEN_S = 10e-6
_LEAST_GAIN = 0.2  # share of the cost that a change of the number must save


class Waits:
    """Averages over decodes of one batch size, and the number of layers per wait chosen from them.

    If a layer computed ahead lacked an expert, the device computes it and the later layers again.
    A wait costs the device the time from the end of its work to the next submission.
    """

    def __init__(self, *, is_async: bool) -> None:
        """`is_async`: False if the host computes what it submits, so that no wait costs time."""
        self._is_async = is_async
        self._n_decodes = self.layers_per_wait = 0
        self._layers = self._missing = self._waits = self._waits_s = self._computed_s = 0.0

    def saw(
        self, n_layers: int, n_missing: int, n_repeated: int, n_waits: int, waits_s: float,
        decode_s: float,
    ) -> None:  # fmt: skip
        """Add a decode to the averages.

        `n_missing`: layers with a missing expert. `n_repeated`: layers computed again. `waits_s`:
        seconds from the end of a wait to the next submission, for `n_waits` waits without a miss.
        """
        keep = 1 - _FORGETS
        self._n_decodes += 1
        self._layers = keep * self._layers + n_layers
        self._missing = keep * self._missing + n_missing
        if n_waits:
            per_layer_s = (decode_s - waits_s) / (n_layers + n_repeated)
            self._waits = keep * self._waits + n_waits
            self._waits_s = keep * self._waits_s + waits_s
            share = _FORGETS if self._computed_s else 1.0
            self._computed_s += share * (per_layer_s - self._computed_s)

    def choose(self, n_layers: int) -> int:
        """Return the number of layers per wait, which is 1 if no layer is computed ahead."""
        if not self._is_async or self._n_decodes < _LEAST_DECODES or n_layers < 2:
            return 1
        choices = [1]
        while 2 * choices[-1] < n_layers:
            choices.append(2 * choices[-1])
        now = min(max(1, self.layers_per_wait), n_layers)
        costs_s = {n: self.cost_s(n, n_layers) for n in (*choices, n_layers)}
        best = min(costs_s, key=costs_s.__getitem__)
        if costs_s[best] < (1 - _LEAST_GAIN) * self.cost_s(now, n_layers):
            now = best
        self.layers_per_wait = now
        return now

    def cost_s(self, n: int, n_layers: int) -> float:
        """Return the expected seconds per layer for waits and repairs, with `n` layers per wait.

        The device computes n - 1 layers ahead, or all n if the only wait is at the graph's end. The
        position of the first layer with a missing expert has a geometric distribution. Layers
        computed ahead are computed again from this one on, with a wait for each.
        """
        wait_s = self._waits_s / max(self._waits, 1e-9) + _UNSEEN_S
        hit = 1 - self._missing / max(self._layers, 1e-9)
        n_ahead = n if n == n_layers else n - 1
        repeated = n_ahead - hit * (1 - hit**n_ahead) / (1 - hit) if hit < 1 else 0.0
        return (wait_s + repeated * (self._computed_s + wait_s)) / n
