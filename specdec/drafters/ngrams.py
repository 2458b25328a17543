"""llama.cpp's n-gram drafters, which draft the tokens that followed the same n-gram before.

- `ngram-simple` takes the latest earlier occurrence.
- `ngram-map-k` remembers how many tokens were accepted after each n-gram.
- `ngram-map-k4v` counts several continuations of an n-gram.
- `ngram-mod` shares one hashed table among all sequences.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Generic, TypeVar

import numpy as np

from specdec.types import Decision, Draft, DraftRequest, Round

T = TypeVar("T")
NgramKey = tuple[int, ...]

_MAX_VALUES = 4  # continuations remembered for a key of ngram-map-k4v
_DOMINANCE = 3  # least ratio of a dominant continuation to all others together
_EMPTY = -1
_MULTIPLIER = 6364136223846793005  # Knuth's 64-bit LCG, as in llama.cpp
_MASK = (1 << 64) - 1
_POOR, _POOR_STREAK = 0.25, 5
_FULLEST = 0.25


# -- what all drafters without a model share -------------------------------------------------------


class HistoryDrafter(ABC):
    """Drafts from the text alone, each sequence by itself and without draft steps."""

    name: str

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._propose(request) for request in requests]

    @abstractmethod
    def _propose(self, asked: DraftRequest) -> Draft: ...

    def learn(self, sequence: int, round_: Round) -> None:
        """Does nothing by default: most drafters learn from the text at their next proposal."""
        return

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        """Does nothing by default: most drafters index a text at its next proposal."""
        return

    @abstractmethod
    def forget(self, sequence: int) -> None: ...

    def _offer(self, asked: DraftRequest, tokens: Sequence[int], probs: Sequence[float]) -> Draft:
        """A draft of the part of `tokens` that the policy keeps."""
        walk = asked.begin(min(asked.limit, len(tokens)), self.name)
        fed, wants = 0, walk.wants
        while wants and fed < len(tokens):
            wants = walk.feed(probs[fed])
            fed += 1
        n = walk.n_best
        dropped = tuple(zip(tokens[n:fed], probs[n:fed], strict=True))
        decision = Decision(n, walk.reason)
        return Draft(tuple(tokens[:n]), tuple(probs[:n]), self.name, decision, dropped)


@lru_cache(maxsize=256)
def nothing(source: str, reason: str) -> Draft:
    """An empty draft. Equal arguments give the same object."""
    return Draft((), (), source, Decision(0, reason))


def match_probability(length: int) -> float:
    """A prior for a token that followed an equal context of `length` tokens before.

    Each length has a probability of its own, so the calibration learns its true rate.
    """
    return 1.0 - 1.0 / (2.0 + 0.25 * length)


@dataclass(slots=True)
class _Remembered(Generic[T]):
    value: T
    tokens: list[int]
    is_stale: bool = False


class PerSequence(Generic[T]):
    """One value per sequence, made anew if the history does not continue the one seen before.

    Otherwise the value is reused at the next turn of a conversation. Indexing takes 1 to 3 us
    a token, so indexing a long conversation again at each turn would take 0.1 s.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._entries: dict[int, _Remembered[T]] = {}

    def of(self, sequence: int, history: Sequence[int]) -> T:
        """The sequence's value. The caller must update it with the new tokens of `history`."""
        entry = self._entries.get(sequence)
        if entry is None or (entry.is_stale and not _continues(entry.tokens, history)):
            entry = self._entries[sequence] = _Remembered(self._make(), [])
        entry.is_stale = False
        entry.tokens += history[len(entry.tokens) :]
        return entry.value

    def get(self, sequence: int) -> T | None:
        """The sequence's value without changes, or None if it has none."""
        entry = self._entries.get(sequence)
        return None if entry is None else entry.value

    def forget(self, sequence: int) -> None:
        """Compare the next history with the last one before the value is reused."""
        if sequence in self._entries:
            self._entries[sequence].is_stale = True

    def clear(self) -> None:
        self._entries.clear()


def _continues(tokens: list[int], history: Sequence[int]) -> bool:
    return len(tokens) <= len(history) and tokens == list(history[: len(tokens)])


# -- ngram-simple ----------------------------------------------------------------------------------


@dataclass(slots=True)
class _NgramPlaces:
    """The latest place at which each n-gram was followed by a token."""

    n_indexed: int = 0
    follows: dict[NgramKey, int] = field(default_factory=dict)


class NgramSimple(HistoryDrafter):
    """Drafts up to `size_m` tokens after a repeated `size_n`-gram."""

    name = "ngram-simple"

    def __init__(self, size_n: int = 12, size_m: int = 48) -> None:
        self._n, self._m = size_n, size_m
        self._places = PerSequence(_NgramPlaces)

    def _propose(self, asked: DraftRequest) -> Draft:
        n, history = self._n, asked.history
        known = self._places.of(asked.sequence, history)
        # The first n-gram is ignored, as in llama.cpp: it often is a special token.
        for i in range(max(known.n_indexed, n + 1), len(history)):
            known.follows[tuple(history[i - n : i])] = i
        known.n_indexed = len(history)
        at = known.follows.get(tuple(history[-n:]))
        if at is None:
            return nothing(self.name, f"the last {n} tokens are new")
        tokens = history[at : at + min(self._m, asked.limit)]
        return self._offer(asked, tokens, [match_probability(n)] * len(tokens))

    def forget(self, sequence: int) -> None:
        self._places.forget(sequence)


# -- ngram-map-k and ngram-map-k4v -----------------------------------------------------------------


@dataclass(slots=True)
class _Fate:
    """The occurrences of a key, and the acceptance of drafts after it."""

    at: int = 0  # index of the token after the key's latest occurrence
    hits: int = 0
    n_accepted: int = 0


@dataclass(slots=True)
class _Keys:
    n_indexed: int = 0
    fates: dict[NgramKey, _Fate] = field(default_factory=dict)
    asked: NgramKey | None = None  # the key of the draft under verification


class NgramMapK(HistoryDrafter):
    """Drafts no more tokens than were last accepted after the same key.

    Full acceptance doubles that number, so that one bad draft does not shorten a key's drafts for
    ever.
    """

    name = "ngram-map-k"

    def __init__(self, size_n: int = 12, size_m: int = 48, min_hits: int = 1) -> None:
        self._n, self._m, self._min_hits = size_n, size_m, min_hits
        self._keys = PerSequence(_Keys)

    def _propose(self, asked: DraftRequest) -> Draft:
        n, history = self._n, asked.history
        known = self._keys.of(asked.sequence, history)
        for i in range(max(known.n_indexed, n + 1), len(history)):
            fate = known.fates.get(key := tuple(history[i - n : i]))
            if fate is None:
                fate = known.fates[key] = _Fate(n_accepted=self._m)
            fate.at = i
            fate.hits += 1
        known.n_indexed = len(history)
        key = tuple(history[-n:])
        fate = known.fates.get(key)
        known.asked = None
        if fate is None or fate.hits < self._min_hits:
            return nothing(self.name, f"the last {n} tokens were not seen often enough")
        known.asked = key
        tokens = history[fate.at : fate.at + min(self._m, fate.n_accepted, asked.limit)]
        return self._offer(asked, tokens, [match_probability(n + fate.hits)] * len(tokens))

    def learn(self, sequence: int, round_: Round) -> None:
        known = self._keys.get(sequence)
        if known is None or known.asked is None or round_.draft.source != self.name:
            return
        fate, n_drafted, n_accepted = known.fates[known.asked], round_.n_drafted, round_.n_accepted
        if n_drafted and n_accepted == n_drafted:
            fate.n_accepted = min(self._m, max(fate.n_accepted, 2 * n_accepted))
        elif n_drafted:
            fate.n_accepted = max(1, n_accepted)

    def forget(self, sequence: int) -> None:
        self._keys.forget(sequence)


@dataclass(slots=True)
class _Continuations:
    n_indexed: int = 0
    counts: dict[NgramKey, dict[NgramKey, int]] = field(default_factory=dict)


class NgramMapK4V(HistoryDrafter):
    """Keeps up to four continuations of each key, and drafts only a dominant one."""

    name = "ngram-map-k4v"

    def __init__(self, size_n: int = 8, size_m: int = 8, min_hits: int = 2) -> None:
        self._n, self._m, self._min_hits = size_n, size_m, min_hits
        self._known = PerSequence(_Continuations)

    def _propose(self, asked: DraftRequest) -> Draft:
        known = self._known.of(asked.sequence, asked.history)
        self._index(known, asked.history)
        counts = known.counts.get(tuple(asked.history[-self._n :]))
        if not counts:
            return nothing(self.name, f"the last {self._n} tokens are new")
        best = max(counts, key=lambda v: counts[v])
        count = counts[best]
        rest = sum(counts.values()) - count
        if count < self._min_hits or count < _DOMINANCE * rest:
            return nothing(self.name, f"{count} hits against {rest} of other continuations")
        tokens = best[: asked.limit]
        p = match_probability(self._n * count // (1 + rest))
        return self._offer(asked, tokens, [p] * len(tokens))

    def _index(self, known: _Continuations, history: Sequence[int]) -> None:
        n, m = self._n, self._m
        # A continuation is known only once m tokens follow its key.
        for i in range(max(known.n_indexed, n + 1), len(history) - m + 1):
            counts = known.counts.setdefault(tuple(history[i - n : i]), {})
            value = tuple(history[i : i + m])
            if value in counts:
                counts[value] += 1
            elif len(counts) < _MAX_VALUES:
                counts[value] = 1
            known.n_indexed = i + 1

    def forget(self, sequence: int) -> None:
        self._known.forget(sequence)


# -- ngram-mod -------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Hashed:
    """`hashed` is the hash of the last n of the `n_tokens` that are in the table."""

    n_tokens: int = 0
    hashed: int = 0


class NgramMod(HistoryDrafter):
    """One flat table from the hash of `n_match` tokens to the next token, shared by all sequences.

    The salt of a request is part of the hash.

    Hash collisions are not checked, since verification rejects wrong tokens. The table is reset
    after a streak of poor drafts, or if it is too full. Drafts have `n_min` to `n_max` tokens, or
    none. llama.cpp's `n_min` of 48 suits dense models. Here 1 is safe, since the policy prices
    drafts.
    """

    name = "ngram-mod"

    def __init__(
        self, n_match: int = 24, n_min: int = 1, n_max: int = 64, n_slots: int = 4 << 20
    ) -> None:
        self._n, self._n_min, self._n_max = n_match, n_min, n_max
        self._oldest = pow(_MULTIPLIER, n_match, _MASK + 1)  # weight of a token leaving the hash
        self._table = np.full(n_slots, _EMPTY, np.int32)
        self._slots = self._table.data  # reads single items four times as fast as the array
        self._n_slots, self._most_used = n_slots, _FULLEST * n_slots
        self._n_used = 0
        self._indexed = PerSequence(_Hashed)
        self._was_reset = False
        self._n_poor = 0
        self._new = nothing(self.name, f"the last {n_match} tokens are new")

    def _propose(self, asked: DraftRequest) -> Draft:
        n, history = self._n, asked.history
        salt = asked.salt
        hashed = self._index(asked.sequence, history, len(history), salt)
        if len(history) < n:
            return nothing(self.name, f"fewer than {n} tokens")
        tokens: list[int] = []
        most = min(self._n_max, asked.limit)
        while len(tokens) < most:
            token = self._slots[(hashed ^ (hashed >> 29) ^ salt) % self._n_slots]
            if token == _EMPTY:
                break
            old = history[len(tokens) - n] if len(tokens) < n else tokens[-n]
            hashed = (hashed * _MULTIPLIER + token + 1 - (old + 1) * self._oldest) & _MASK
            tokens.append(token)
        if not tokens:
            return self._new
        if len(tokens) < min(self._n_min, asked.limit):
            return nothing(self.name, f"{len(tokens)} tokens known, at least {self._n_min} wanted")
        return self._offer(asked, tokens, [match_probability(n)] * len(tokens))

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        self._index(sequence, text, n_read, salt)

    def _index(self, sequence: int, history: Sequence[int], n_tokens: int, salt: int) -> int:
        """Add the first `n_tokens` of `history` to the table, as far as they are new.

        Returns the hash of the last n of the added tokens.
        """
        n, slots = self._n, self._slots
        indexed = self._indexed.of(sequence, history)
        hashed, i = indexed.hashed, indexed.n_tokens
        end = max(i, n_tokens)
        while i < end:
            token = history[i]
            if i < n:
                hashed = (hashed * _MULTIPLIER + token + 1) & _MASK
            else:
                slot = (hashed ^ (hashed >> 29) ^ salt) % self._n_slots
                if slots[slot] == _EMPTY:
                    self._n_used += 1
                slots[slot] = token
                going = (history[i - n] + 1) * self._oldest
                hashed = (hashed * _MULTIPLIER + token + 1 - going) & _MASK
            i += 1
        indexed.n_tokens, indexed.hashed = end, hashed
        if self._n_used > self._most_used:
            self.reset()
        return hashed

    def reset(self) -> None:
        """Forget every n-gram of every sequence. Histories are added again at their next turn."""
        self._table.fill(_EMPTY)
        self._n_used = self._n_poor = 0
        self._was_reset = True

    def learn(self, sequence: int, round_: Round) -> None:
        if round_.draft.source != self.name or not round_.n_drafted:
            return
        poor = round_.n_accepted < _POOR * round_.n_drafted
        self._n_poor = self._n_poor + 1 if poor else 0
        if self._n_poor >= _POOR_STREAK:
            self.reset()

    def forget(self, sequence: int) -> None:
        """Keep the table. New tokens of the next history are added to it."""
        self._indexed.forget(sequence)
        if self._was_reset:
            self._indexed.clear()
            self._was_reset = False
