"""The value of drafting another token, and of verifying drafted tokens in a shared batch.

`drafting_on` is a small dynamic programme over (n, P), where P is the probability that all n
drafted tokens are accepted. In each state the policy can stop and verify, or pay for a draft step
and see the next token's probability. The value of a step follows from the observed distribution of
these probabilities. A draft continues past a jump in the costs if later tokens are worth it.

In a shared batch, another drafted token costs T(rows + 1) - T(rows), where `rows` counts all
sequences. `allocate` takes the most probable tokens of all sequences, up to the number with the
greatest value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

N_LEVELS = 25  # levels of P, in equal steps of its logarithm
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

# Position of P * q between the levels: the index of the level before, and the next one's weight.
_AT = np.minimum(
    -np.log(np.maximum(_P[:, None] * CENTRES[None, :], _LOWEST)) / LEVEL, N_LEVELS - 1.000001
)
_BELOW = _AT.astype(np.int64)
_WEIGHT = _AT - _BELOW
_ROW = np.repeat(np.arange(N_LEVELS), N_CENTRES)
_FLAT_LOW = _ROW * N_LEVELS + _BELOW.ravel()


def longest_of_use(price: NDArray[np.float64], step: float) -> int:
    """The draft length with the greatest value if all drafted tokens are accepted.

    `price` and `step` are those of `drafting_on`.
    """
    at_best = np.arange(len(price)) * (1.0 - step) - price
    return int(at_best.argmax())


def drafting_on(
    price: NDArray[np.float64], step: float, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Value [limit, N_LEVELS] of drafting one more token, by n drafted tokens and level of P.

    Values are in tokens, and do not count the expected accepted tokens so far. `price[n]` is the
    extra cost, in tokens, of verifying n drafted tokens instead of none. `step` is the cost of a
    draft step, in tokens. `weights` [N_CENTRES] is the distribution of the next token's probability
    and sums to 1.
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
    """Transition probabilities [N_LEVELS, N_LEVELS] from P to P times the next probability."""
    low = (weights * (1.0 - _WEIGHT)).ravel()
    high = (weights * _WEIGHT).ravel()
    size = N_LEVELS * N_LEVELS
    flat = np.bincount(_FLAT_LOW, low, size)
    flat += np.bincount(_FLAT_LOW + 1, high, size)
    return np.asarray(flat.reshape(N_LEVELS, N_LEVELS), np.float64)


def moved(
    weights: NDArray[np.float64], regimes: Sequence[tuple[float, float]]
) -> NDArray[np.float64]:
    """Returns `weights` [N_CENTRES] after the odds of each probability are multiplied.

    `regimes` are (chance, factor) pairs of the possible factors.
    """
    q = sum((w * CENTRES * o / (1.0 - CENTRES + CENTRES * o) for w, o in regimes), np.zeros(1))
    below = np.clip(np.searchsorted(CENTRES, q, side="right") - 1, 0, N_CENTRES - 2)
    part = np.clip((q - CENTRES[below]) / (CENTRES[below + 1] - CENTRES[below]), 0.0, 1.0)
    out = np.bincount(below, weights * (1.0 - part), N_CENTRES)
    out += np.bincount(below + 1, weights * part, N_CENTRES)
    return np.asarray(out, np.float64)


# -- rows of a shared batch ------------------------------------------------------------------------


def extra_time(times: NDArray[np.float64], n_sequences: int) -> NDArray[np.float64]:
    """Seconds that 0, 1, 2, ... drafted tokens of one sequence add to a batch of `n_sequences`.

    `times[n - 1]` is T(n). It is not known yet how many tokens other sequences draft. If all draft
    equally, they share the extra time. If no other sequence drafts, this one pays for it alone.
    Returns the smaller value. A draft that is then too long can still be cut when the lengths are
    chosen together, but a token that was not drafted cannot be added.
    """
    first = times[n_sequences - 1]
    alone = np.asarray(times[n_sequences - 1 :] - first, np.float64)
    if n_sequences == 1:
        return alone
    rows = n_sequences * np.arange(1, 1 + len(alone))
    at_most = np.minimum(rows, len(times))
    slope = max(0.0, float(times[-1] - times[-1 - len(times) // 4])) / max(1, len(times) // 4)
    shared = (times[at_most - 1] - first + slope * (rows - at_most)) / n_sequences
    return np.asarray(np.minimum(alone, shared), np.float64)


def best_count(gains: Sequence[float], times: Sequence[float], n_rows: int, rate: float) -> int:
    """The best number of drafted tokens to add to a batch of `n_rows` rows.

    `gains` are the tokens' probabilities in falling order. `times[n - 1]` is T(n), and the batch
    has at most len(times) rows. `rate` is the best achievable rate, in tokens per second.
    """
    base = times[n_rows - 1]
    best, best_value, total = 0, 0.0, 0.0
    for n in range(1, min(len(gains), len(times) - n_rows) + 1):
        total += gains[n - 1]
        value = total - rate * (times[n_rows + n - 1] - base)
        if value > best_value:
            best, best_value = n, value
    return best


def allocate(
    chains: Sequence[Sequence[float]],
    times: Sequence[float],
    rate: float,
    *,
    n_beside: int = 0,
) -> tuple[int, ...]:
    """The number of drafted tokens to verify for each sequence of a batch.

    `chains[s][k]` is the probability that the first k + 1 drafted tokens of sequence s are all
    accepted. It falls with k, so the most probable tokens of a sequence are its first. The batch
    already holds one row of each sequence and `n_beside` further rows.
    """
    order = sorted(((p, s) for s, chain in enumerate(chains) for p in chain), key=lambda t: -t[0])
    n = best_count([p for p, _ in order], times, len(chains) + n_beside, rate)
    counts = [0] * len(chains)
    for _, s in order[:n]:
        counts[s] += 1
    return tuple(counts)


def level(chains: Sequence[Sequence[float]], times: Sequence[float], rate: float) -> int:
    """The best number of drafted tokens to verify if it is the same for every sequence of a batch.

    Recurrent models need equal lengths, and so do sequences with cells of their own, because
    sequences of different lengths are computed in separate batches and do not share costs. The
    arguments are those of `allocate`.
    """
    n_rows = len(chains)
    best, best_value, total = 0, 0.0, 0.0
    most = min([len(chain) for chain in chains], default=0)
    for n in range(1, min(most, len(times) // n_rows - 1 if n_rows else 0) + 1):
        total += sum([chain[n - 1] for chain in chains])
        value = total - rate * (times[n_rows * (1 + n) - 1] - times[n_rows - 1])
        if value > best_value:
            best, best_value = n, value
    return best
