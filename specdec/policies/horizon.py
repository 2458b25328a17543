"""The value of drafting on: a small dynamic programme over (tokens drafted, P).

With n tokens drafted, all of them accepted with probability P, one can stop and verify, or spend
a draft step and see the next token's probability. Its value is known once one knows how such
probabilities are distributed, and that is observed. Jagged costs need nothing special: a bump is
crossed when what lies behind it is worth the way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

N_LEVELS = 25  # of P, in equal steps of its logarithm
_LOWEST = 0.02
LEVEL = math.log(1.0 / _LOWEST) / (N_LEVELS - 1)
_P = np.exp(-LEVEL * np.arange(N_LEVELS))

# Representative probabilities of one token, and the edges between them.
CENTRES = np.array(
    [0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.78, 0.84, 0.88, 0.92]
    + [0.945, 0.96, 0.975, 0.985, 0.993, 0.998]
)
N_CENTRES = len(CENTRES)
_EDGES = (CENTRES[1:] + CENTRES[:-1]) / 2
_GRID = 1000
CENTRE_OF = tuple(int(np.searchsorted(_EDGES, i / _GRID, side="right")) for i in range(_GRID + 1))

# Where P * q lies between the levels: the level below and the weight of the one after it.
_AT = np.minimum(
    -np.log(np.maximum(_P[:, None] * CENTRES[None, :], _LOWEST)) / LEVEL, N_LEVELS - 1.000001
)
_BELOW = _AT.astype(np.int64)
_WEIGHT = _AT - _BELOW
_ROW = np.repeat(np.arange(N_LEVELS), N_CENTRES)
_FLAT_LOW = _ROW * N_LEVELS + _BELOW.ravel()


def longest_of_use(price: NDArray[np.float64], step: float) -> int:
    """The longest draft that could pay if all its tokens were certain: beyond it each further
    token costs more than the one it may bring."""
    at_best = np.arange(len(price)) * (1.0 - step) - price
    return int(at_best.argmax())


def drafting_on(
    price: NDArray[np.float64], step: float, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Value [limit, N_LEVELS] of drafting the next token with n drafted and P at a level.

    In tokens, on top of the expected accepted tokens so far. `price[n]` is what verifying n
    drafted tokens costs over verifying none, in tokens; `step` a draft step's; `weights`
    [N_CENTRES] the distribution of the next token's probability, summing to 1.
    """
    limit = len(price) - 1
    out = np.empty((limit, N_LEVELS))
    move = _moves(weights)
    now = _P * float(weights @ CENTRES) - step
    value = np.full(N_LEVELS, -price[limit])
    stopping = (-price).tolist()
    for n in range(limit - 1, -1, -1):
        row = np.dot(move, value, out=out[n])
        row += now
        np.maximum(row, stopping[n], out=value)
    return out


def _moves(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """[N_LEVELS, N_LEVELS]: from a level of P to the levels of P times the next probability."""
    low = (weights * (1.0 - _WEIGHT)).ravel()
    high = (weights * _WEIGHT).ravel()
    size = N_LEVELS * N_LEVELS
    flat = np.bincount(_FLAT_LOW, low, size)
    flat += np.bincount(_FLAT_LOW + 1, high, size)
    return np.asarray(flat.reshape(N_LEVELS, N_LEVELS), np.float64)


def moved(
    weights: NDArray[np.float64], regimes: Sequence[tuple[float, float]]
) -> NDArray[np.float64]:
    """`weights` [N_CENTRES] when the odds have other factors: (chance, factor) each."""
    q = sum((w * CENTRES * o / (1.0 - CENTRES + CENTRES * o) for w, o in regimes), np.zeros(1))
    below = np.clip(np.searchsorted(CENTRES, q, side="right") - 1, 0, N_CENTRES - 2)
    part = np.clip((q - CENTRES[below]) / (CENTRES[below + 1] - CENTRES[below]), 0.0, 1.0)
    out = np.bincount(below, weights * (1.0 - part), N_CENTRES)
    out += np.bincount(below + 1, weights * part, N_CENTRES)
    return np.asarray(out, np.float64)
