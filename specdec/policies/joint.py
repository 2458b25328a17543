"""One verification batch for several sequences, or for the nodes of a tree.

The rows already in the batch make further rows cheaper, so the marginal cost of a drafted token
is T(rows + 1) - T(rows) at the size of the whole batch: the most probable tokens over all
sequences are taken as long as they pay, looking past bumps of T.
"""

from __future__ import annotations

from collections.abc import Sequence


def best_count(gains: Sequence[float], times: Sequence[float], n_rows: int, rate: float) -> int:
    """The best number of `gains` (probabilities, falling) to verify beside `n_rows` rows.

    `times[n-1]` is T(n); `rate` the best tokens per second. Never more than T is known for.
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
    """The number of tokens of each sequence's draft to verify together, where `n_beside` rows
    besides one of each sequence are in the batch already.

    `chains[s][k]` is the probability that sequence s's first k + 1 drafted tokens are all
    accepted; it falls with k, so the most probable tokens of a sequence are its first.
    """
    order = sorted(((p, s) for s, chain in enumerate(chains) for p in chain), key=lambda t: -t[0])
    n = best_count([p for p, _ in order], times, len(chains) + n_beside, rate)
    counts = [0] * len(chains)
    for _, s in order[:n]:
        counts[s] += 1
    return tuple(counts)


def level(chains: Sequence[Sequence[float]], times: Sequence[float], rate: float) -> int:
    """The number of tokens of every sequence's draft to verify together, the same for all.

    For recurrent memory, which computes sequences of different lengths in batches of their own:
    there the rows of one do not make those of another cheaper.
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
