"""The value of drafting another token, and of rows in a shared batch.

*Drafting on* is a small dynamic programme over (tokens drafted, P), where P is the probability that
all n drafted tokens are accepted. At each state the policy can stop and verify, or spend a draft
step and see the next token's probability. The value of a step follows from the observed
distribution of these probabilities. A draft passes a bump in the costs if the tokens after it are
worth the cost.

*In a shared batch*, the marginal cost of a drafted token is T(rows + 1) - T(rows) at the size of
the whole batch. The most probable tokens over all sequences are taken as long as they pay.
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
    """The draft length of greatest value if all drafted tokens were accepted."""
    at_best = np.arange(len(price)) * (1.0 - step) - price
    return int(at_best.argmax())


def drafting_on(
    price: NDArray[np.float64], step: float, weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Value [limit, N_LEVELS] of drafting the next token with n drafted and P at a level.

    Values are in tokens, on top of the expected accepted tokens so far. `price[n]` is the extra
    cost of verifying n drafted tokens instead of none, in tokens. `step` is the cost of a draft
    step, in tokens. `weights` [N_CENTRES] is the distribution of the next token's probability and
    sums to 1.
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

    `times[n - 1]` is T(n). The number of the other sequences' rows is not known yet. If all draft
    equally, they share the extra time; if no other drafts, this sequence pays it alone. The smaller
    value is returned: a draft that is too long is cut when the lengths are chosen together, but
    a draft that was never made is lost.
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
    """The best number of drafted tokens to verify in a batch that has `n_rows` rows already.

    `gains` are the tokens' probabilities in falling order. `times[n - 1]` is T(n) and limits the
    size of the batch. `rate` is the best achievable rate, in tokens per second.
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
    """The number of drafted tokens to verify, the same for every sequence of a batch.

    Recurrent memory needs equal lengths: it computes sequences of different lengths in separate
    batches, where the rows of one do not make those of another cheaper.
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
