"""How good a draft model is for a target, from both models' logits along the target's own text.

A draft model that reads tokens has the same distribution for a token whether it drafts the token
first or eighth. Only the text before must be the same. So both models read the target's text once.
Drafts of 8 tokens are then replayed along it: position k counts the drafts whose first k - 1 tokens
were right.

- Agreement is the share of tokens of which both models' likeliest is the same. It is the acceptance
  of greedy texts.
- Overlap is 1 minus the total variation distance, sum(min(p, q)). It is the acceptance that
  rejection sampling reaches at temperature 1 (Leviathan et al. 2023, corollary 3.6).
- KL is the divergence of the draft from the target in nats, sum(p log(p / q)).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from specdec.costs.profile import CostProfile

N_POSITIONS = 8
# Least probability of the draft in KL. A token that it cannot draft would make KL infinite.
LEAST_Q = 1e-9


@dataclass(frozen=True)
class TextCompared:
    """Both models along one text, by token: arrays [n tokens]."""

    agrees: NDArray[np.bool_]
    kl: NDArray[np.float64]
    overlap: NDArray[np.float64]


@dataclass(frozen=True)
class AtPosition:
    """Means over the drafts whose tokens before `position` were right. None without such drafts."""

    position: int
    n_tokens: int
    agreement: float | None
    kl: float | None
    overlap: float | None


@dataclass(frozen=True)
class BlockLength:
    """What drafts of `n_drafted` tokens bring on the compared texts.

    `gain` is the speed in units of decoding without drafts.
    """

    n_drafted: int
    tokens_per_round: float
    gain: float


def compared(target: NDArray[np.float32], draft: NDArray[np.float32]) -> TextCompared:
    """Compare logits [n tokens, n_vocab] after the same prefixes.

    Vocabularies may differ in length, as by padding. A token of one only has no probability in the
    other.
    """
    n = max(target.shape[1], draft.shape[1])
    p, q = _probabilities(target, n), _probabilities(draft, n)
    least = np.maximum(q, LEAST_Q)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(p > 0.0, p * (np.log(p) - np.log(least)), 0.0)
    return TextCompared(
        target.argmax(axis=1) == draft.argmax(axis=1),
        np.maximum(0.0, terms.sum(axis=1)),
        np.minimum(p, q).sum(axis=1),
    )


def _probabilities(logits: NDArray[np.float32], n_vocab: int) -> NDArray[np.float64]:
    """Softmax by row, with zeros up to `n_vocab` tokens."""
    e = np.exp(logits - logits.max(axis=1, keepdims=True), dtype=np.float64)
    out = np.zeros((len(logits), n_vocab))
    out[:, : logits.shape[1]] = e / e.sum(axis=1, keepdims=True)
    return out


def by_position(texts: Sequence[TextCompared], n_positions: int = N_POSITIONS) -> list[AtPosition]:
    """The means at each position of drafts of `n_positions` tokens."""
    rows: list[list[tuple[bool, float, float]]] = [[] for _ in range(n_positions)]
    for text in texts:
        for start, right in _rounds(text.agrees, n_positions):
            for k in range(min(right + 1, n_positions, len(text.agrees) - start)):
                i = start + k
                rows[k].append((bool(text.agrees[i]), float(text.kl[i]), float(text.overlap[i])))
    return [
        AtPosition(k + 1, len(seen), *(fmean(x) for x in zip(*seen, strict=True)))
        if seen
        else AtPosition(k + 1, 0, None, None, None)
        for k, seen in enumerate(rows)
    ]


def _rounds(agrees: NDArray[np.bool_], n_drafted: int) -> Iterator[tuple[int, int]]:
    """(first token, number of right tokens) of each draft of a greedy text.

    A draft that the text's end would cut short does not count, unless it is the only one.
    """
    at, n = 0, len(agrees)
    while at + n_drafted <= n or at == 0:
        run = agrees[at : at + n_drafted]
        right = len(run) if run.all() else int(run.argmin())
        yield at, right
        at += right + 1


def block_lengths(
    texts: Sequence[TextCompared], profile: CostProfile, n_most: int = N_POSITIONS
) -> list[BlockLength]:
    """The speed of each constant draft length on greedy texts, by T(n) and the draft's step."""

    def per_round(m: int) -> float:
        kept = [right + 1 for text in texts for _, right in _rounds(text.agrees, m)]
        return sum(kept) / len(kept) if kept else 1.0

    return _by_length(per_round, profile, n_most)


def _by_length(
    per_round: Callable[[int], float], profile: CostProfile, n_most: int
) -> list[BlockLength]:
    """The speed of each draft length whose decode is in the profile, up to `n_most` tokens."""
    lengths = range(min(n_most, profile.n_max - 1) + 1)
    return [_block_length(m, per_round(m), profile) for m in lengths]


def _block_length(n_drafted: int, per_round: float, profile: CostProfile) -> BlockLength:
    """The speed of a draft length whose rounds give `per_round` tokens on average."""
    took_s = profile.time(1 + n_drafted) + n_drafted * profile.draft_step_s
    return BlockLength(n_drafted, per_round, per_round * profile.time(1) / took_s)


def positions_of(accepted: Sequence[int], n_positions: int = N_POSITIONS) -> list[AtPosition]:
    """The acceptance at each position of drafts with these numbers of accepted tokens.

    It takes the place of agreement where both models' logits cannot be compared. A draft that ended
    before a position counts as wrong there.
    """
    positions = []
    for k in range(n_positions):
        reached = [n for n in accepted if n >= k]
        rate = sum([n > k for n in reached]) / len(reached) if reached else None
        positions.append(AtPosition(k + 1, len(reached), rate, None, None))
    return positions


def block_lengths_of(
    accepted: Sequence[int], profile: CostProfile, n_most: int = N_POSITIONS
) -> list[BlockLength]:
    """The speed of each constant draft length. `accepted` are tokens of drafts of `n_most` tokens.

    Shorter drafts are taken for beginnings of these drafts.
    """

    def per_round(m: int) -> float:
        return 1.0 + (fmean([min(n, m) for n in accepted]) if accepted else 0.0)

    return _by_length(per_round, profile, n_most)


def sampled_tokens_per_round(positions: Sequence[AtPosition], n_drafted: int) -> float:
    """Expected tokens of a round of `n_drafted` tokens by rejection sampling at temperature 1.

    The overlaps at the positions count as independent, so this is an estimate.
    """
    total, product = 1.0, 1.0
    for at in positions[:n_drafted]:
        product *= at.overlap or 0.0
        total += product
    return total
