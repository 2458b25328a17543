"""Rotary position embedding: angles of every position, and one order of values for both kinds.

llama.cpp turns pairs (0, 1), (2, 3), ... in llama files and (0, n/2), (1, n/2 + 1), ... in
qwen's (ggml's NORM and NEOX). What attention sees are products q·k, which do not change when
both have their values in another order, so the rows of the second kind are put into the order of
the first when they are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, log, pi

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Scaling:
    """llama.cpp's `rope.scaling.*`. `factor` stretches positions; YaRN (arXiv 2309.00071) only
    those of slow frequencies."""

    kind: str = "linear"
    factor: float = 1.0
    attention_factor: float = 1.0
    n_ctx_original: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True)
class Rope:
    """`halves`: values turn with those half a rotation away (NEOX), not with their neighbours."""

    head_size: int
    base: float
    halves: bool
    scaling: Scaling

    def order(self) -> NDArray[np.int64]:
        """Which value of a head, as the file has it, comes first, second, ... here."""
        order = np.arange(self.head_size)
        if self.halves:
            half = self.head_size // 2
            order = np.stack((order[:half], order[half:]), 1).flatten()
        return order

    def turns(
        self, n_positions: int, divisors: NDArray[np.float32] | None = None
    ) -> NDArray[np.complex64]:
        """[n_positions, head_size / 2]: what each pair, as a complex number, is multiplied by.

        `divisors` [head_size / 2] are the file's rope_freqs.
        """
        frequency, magnitude = self._frequencies(divisors)
        angle = np.arange(n_positions, dtype=np.float64)[:, None] * frequency[None, :]
        turns: NDArray[np.complex64] = (magnitude * np.exp(1j * angle)).astype(np.complex64)
        return turns

    def _frequencies(
        self, divisors: NDArray[np.float32] | None
    ) -> tuple[NDArray[np.float64], float]:
        """Angle per position of each pair, and what the pairs' length is multiplied by."""
        half, s = self.head_size // 2, self.scaling
        plain = self.base ** (-np.arange(half) / half)
        if divisors is not None:
            plain = plain / divisors.astype(np.float64)
        if s.kind != "yarn":
            return plain / s.factor, s.attention_factor
        low, high = self._correction()
        ramp = np.clip((np.arange(half) - low) / max(0.001, high - low), 0.0, 1.0)
        mixed = plain / s.factor * ramp + plain * (1.0 - ramp)
        grown = 1.0 + 0.1 * log(s.factor) if s.factor > 1 else 1.0
        return mixed, grown * s.attention_factor

    def _correction(self) -> tuple[float, float]:
        """Between which pairs YaRN goes from turning as trained to turning slower."""
        s = self.scaling

        def pair(n_turns: float) -> float:
            of_circle = s.n_ctx_original / (n_turns * 2 * pi)
            return self.head_size * log(of_circle) / (2 * log(self.base))

        low, high = floor(pair(s.beta_fast)), ceil(pair(s.beta_slow))
        return max(0.0, low), min(self.head_size - 1.0, high)
