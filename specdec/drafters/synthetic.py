"""Synthetic acceptance: accepts drafts at given rates, whatever their tokens are.

This measures the speed of speculation without a trained draft. The resulting text is nonsense.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.acceptance import Verdict
from specdec.drafters.ngrams import HistoryDrafter
from specdec.errors import BadOption
from specdec.types import Draft, DraftRequest, IsEnd


def check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Return `rates` as a tuple; rates[k-1] is the rate at which the first k tokens are accepted.

    Raises BadOption unless all rates lie in [0, 1] and none is above the one before it.
    """
    before = 1.0
    for i, rate in enumerate(rates):
        if not 0.0 <= rate <= before:
            raise BadOption(
                f"entry {i + 1} of the rates is {rate}: rates lie in [0, 1] and never rise"
            )
        before = rate
    if not rates:
        raise BadOption("there are no rates")
    return tuple(rates)


def rates_of_length(length: float, n_max: int) -> tuple[float, ...]:
    """Geometric rates at which a round of `n_max` drafted tokens emits `length` tokens on average.

    The emitted tokens include the one that the target chooses.
    Raises BadOption unless 1 <= length <= n_max + 1.
    """
    if not 1.0 <= length <= n_max + 1:
        raise BadOption(f"a mean length of {length} must lie in [1, {n_max + 1}]")
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        mean = 1.0 + sum(p**k for k in range(1, n_max + 1))
        low, high = (p, high) if mean < length else (low, p)
    return tuple(high**k for k in range(1, n_max + 1))


class SyntheticAcceptance:
    """Accepts the first k drafted tokens with probability rates[k-1]."""

    def __init__(self, rates: Sequence[float], rng: np.random.Generator) -> None:
        self._rates = check_rates(rates)
        self._rng = rng

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        u = self._rng.random()
        n = 0
        while n < min(len(draft.tokens), len(self._rates)) and u < self._rates[n]:
            n += 1
        own = int(logits[n].argmax())
        if n < len(draft.tokens) and own == draft.tokens[n]:
            own = (own + 1) % logits.shape[1]  # a rejected token must differ from its draft
        emitted = [*draft.tokens[:n], own]
        for i, token in enumerate(emitted):
            history.append(token)
            if is_end(token):
                return Verdict(min(n, i + 1), emitted[: i + 1])
        return Verdict(n, emitted)


class SyntheticDrafter(HistoryDrafter):
    """Proposes tokens of the text's past, with the probabilities that follow from the rates."""

    name = "synthetic"

    def __init__(self, rates: Sequence[float]) -> None:
        rates = check_rates(rates)
        before = (1.0, *rates[:-1])
        self._p = [r / b if b > 0 else 0.0 for r, b in zip(rates, before, strict=True)]

    def _propose(self, asked: DraftRequest) -> Draft:
        history = asked.history
        n = min(asked.limit, len(self._p))
        tokens = [history[-1 - (i % len(history))] for i in range(n)]
        return replace(self._offer(asked, tokens, self._p), dropped=())

    def forget(self, sequence: int) -> None:
        pass
