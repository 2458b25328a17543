"""`ngram-simple`: what followed the last n tokens when they occurred last."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.offer import match_probability, nothing, offer
from specdec.types import Draft, Policy, Round


class LatestIndex:
    """The latest place where each n-gram was followed by something, of one growing history."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._follows: dict[tuple[int, ...], int] = {}
        self._n_indexed = 0

    def find(self, history: Sequence[int]) -> int | None:
        """Where the continuation of the last n tokens' latest earlier occurrence starts."""
        n = self._n
        # The first n-gram is ignored, as in llama.cpp: it often is a special token.
        for i in range(max(self._n_indexed, n + 1), len(history)):
            self._follows[tuple(history[i - n : i])] = i
        self._n_indexed = len(history)
        return self._follows.get(tuple(history[-n:]))


class NgramSimple:
    """Drafts up to `size_m` tokens after a repeated `size_n`-gram."""

    name = "ngram-simple"

    def __init__(self, size_n: int = 12, size_m: int = 48) -> None:
        self._n, self._m = size_n, size_m
        self._indexes: dict[int, LatestIndex] = {}

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        index = self._indexes.setdefault(sequence, LatestIndex(self._n))
        at = index.find(history)
        if at is None:
            return nothing(self.name, f"the last {self._n} tokens are new")
        tokens = list(history[at : at + min(self._m, limit)])
        p = match_probability(self._n)
        return offer(self.name, tokens, [p] * len(tokens), policy, limit)

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._indexes.pop(sequence, None)
