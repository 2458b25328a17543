"""`ngram-map-k` and `ngram-map-k4v`: n-grams with memory of how they fared.

`ngram-map-k` drafts no more than was last accepted after the same key; full acceptance
doubles that again, so that one bad draft does not shorten a key for ever (the known ratchet).
`ngram-map-k4v` keeps up to four continuations per key and drafts only a dominant one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.drafters.offer import match_probability, nothing, offer
from specdec.drafters.per_sequence import PerSequence
from specdec.types import Draft, Policy, Round

Key = tuple[int, ...]

_MAX_VALUES = 4
_DOMINANCE = 3  # times as frequent as all other continuations together


@dataclass(slots=True)
class _Entry:
    at: int = 0
    hits: int = 0
    n_accepted: int = 0


@dataclass(slots=True)
class _History:
    """The index of one sequence, and the key of the draft under verification."""

    n_indexed: int = 0
    entries: dict[Key, _Entry] = field(default_factory=dict)
    values: dict[Key, dict[Key, int]] = field(default_factory=dict)
    asked: Key | None = None


class NgramMapK:
    name = "ngram-map-k"

    def __init__(self, size_n: int = 12, size_m: int = 48, min_hits: int = 1) -> None:
        self._n, self._m, self._min_hits = size_n, size_m, min_hits
        self._histories = PerSequence(_History)

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        known = self._histories.of(sequence, history)
        self._index(known, history)
        key = tuple(history[-self._n :])
        entry = known.entries.get(key)
        known.asked = None
        if entry is None or entry.hits < self._min_hits:
            return nothing(self.name, f"the last {self._n} tokens were not seen often enough")
        n = min(self._m, entry.n_accepted, limit)
        tokens = list(history[entry.at : entry.at + n])
        known.asked = key
        p = match_probability(self._n + entry.hits)
        return offer(self.name, tokens, [p] * len(tokens), policy, limit)

    def _index(self, known: _History, history: Sequence[int]) -> None:
        n = self._n
        for i in range(max(known.n_indexed, n + 1), len(history)):
            entry = known.entries.get(key := tuple(history[i - n : i]))
            if entry is None:
                entry = known.entries[key] = _Entry(n_accepted=self._m)
            entry.at = i
            entry.hits += 1
        known.n_indexed = len(history)

    def learn(self, sequence: int, round_: Round) -> None:
        known = self._histories.get(sequence)
        if known is None or known.asked is None or round_.draft.source != self.name:
            return
        entry = known.entries[known.asked]
        if round_.n_drafted == 0:
            return
        if round_.n_accepted == round_.n_drafted:
            entry.n_accepted = min(self._m, max(entry.n_accepted, 2 * round_.n_accepted))
        else:
            entry.n_accepted = max(1, round_.n_accepted)

    def forget(self, sequence: int) -> None:
        self._histories.forget(sequence)


class NgramMapK4V:
    name = "ngram-map-k4v"

    def __init__(self, size_n: int = 8, size_m: int = 8, min_hits: int = 2) -> None:
        self._n, self._m, self._min_hits = size_n, size_m, min_hits
        self._histories = PerSequence(_History)

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        known = self._histories.of(sequence, history)
        self._index(known, history)
        values = known.values.get(tuple(history[-self._n :]))
        if not values:
            return nothing(self.name, f"the last {self._n} tokens are new")
        best = max(values, key=lambda v: values[v])
        count = values[best]
        rest = sum(values.values()) - count
        if count < self._min_hits or count < _DOMINANCE * rest:
            return nothing(self.name, f"{count} hits against {rest} of other continuations")
        p = match_probability(self._n * count // (1 + rest))
        return offer(self.name, best[:limit], [p] * min(limit, len(best)), policy, limit)

    def _index(self, known: _History, history: Sequence[int]) -> None:
        n, m = self._n, self._m
        # A value is known only once m tokens follow its key.
        for i in range(max(known.n_indexed, n + 1), len(history) - m + 1):
            values = known.values.setdefault(tuple(history[i - n : i]), {})
            value = tuple(history[i : i + m])
            if value in values:
                values[value] += 1
            elif len(values) < _MAX_VALUES:
                values[value] = 1
            known.n_indexed = i + 1

    def learn(self, sequence: int, round_: Round) -> None:
        pass

    def forget(self, sequence: int) -> None:
        self._histories.forget(sequence)
