"""The drafter `suffix`: continues the longest suffix that occurred in the text or in a corpus.

A suffix automaton takes each token in amortised constant time and always knows the longest repeated
suffix. The draft is the text that followed the suffix's previous occurrence. Longer matches are
likelier to continue, so a token's probability rises with the length of the match.
"""

from __future__ import annotations

from collections.abc import Sequence

from specdec.drafters.ngrams import HistoryDrafter, PerSequence, match_probability, nothing
from specdec.types import Draft, DraftRequest

_SEPARATOR = -1  # token between the texts of a corpus, which no match crosses
_REMEMBERED = 24  # suffixes of the text whose latest places are updated per token


class SuffixAutomaton:
    """All substrings of a growing text. State 0 is the empty string."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._end = [-1]  # latest known end of an occurrence, by state
        self._last = 0

    def extend(self, token: int) -> None:
        end = len(self.text)
        self.text.append(token)
        new = self._add(self._length[self._last] + 1, -1, {}, end)
        p = self._last
        while p != -1 and token not in self._next[p]:
            self._next[p][token] = new
            p = self._link[p]
        if p == -1:
            self._link[new] = 0
        else:
            self._link[new] = self._target_of(p, token)
        self._last = new

    def _target_of(self, p: int, token: int) -> int:
        """The state of the longest suffix that occurred before; cloned if longer ones share it."""
        q = self._next[p][token]
        if self._length[q] == self._length[p] + 1:
            return q
        clone = self._add(self._length[p] + 1, self._link[q], dict(self._next[q]), self._end[q])
        while p != -1 and self._next[p].get(token) == q:
            self._next[p][token] = clone
            p = self._link[p]
        self._link[q] = clone
        return clone

    def _add(self, length: int, link: int, following: dict[int, int], end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._end.append(end)
        return len(self._link) - 1

    def repeated(self) -> tuple[int, int]:
        """(length, end) of the longest suffix of the text that occurred before; (0, -1) if none.

        Then records the end of the text as the latest place of its longest repeated suffixes.
        """
        state = self._link[self._last]
        match = (self._length[state], self._end[state]) if state > 0 else (0, -1)
        for _ in range(_REMEMBERED):
            if state <= 0:
                break
            self._end[state] = len(self.text) - 1
            state = self._link[state]
        return match

    def step(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Match another text with this one, token by token.

        Takes the state and length from the previous token (0, 0 at first) and the next token.
        Returns the state and length of the longest suffix of the other text that occurs here.
        """
        while state and token not in self._next[state]:
            state = self._link[state]
            length = self._length[state]
        following = self._next[state].get(token)
        return (following, length + 1) if following is not None else (0, 0)

    def end(self, state: int) -> int:
        """Index of the last token of an occurrence of the state's strings."""
        return self._end[state]


class _Match:
    __slots__ = ("automaton", "repeated", "length", "n_fed", "state")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.repeated = (0, -1)  # length and end of the longest suffix that occurred before
        self.n_fed = 0
        self.state = 0  # state of the corpus's automaton
        self.length = 0


class SuffixDrafter(HistoryDrafter):
    """Drafts up to `n_max` tokens if a suffix of at least `min_match` tokens occurred before."""

    name = "suffix"

    def __init__(
        self, n_max: int = 32, min_match: int = 2, corpus: Sequence[Sequence[int]] = ()
    ) -> None:
        self._n_max, self._min_match = n_max, min_match
        self._corpus = SuffixAutomaton()
        self._has_corpus = bool(corpus)
        for text in corpus:
            for token in (*text, _SEPARATOR):
                self._corpus.extend(token)
        self._matches = PerSequence(_Match)

    def _propose(self, asked: DraftRequest) -> Draft:
        match = self._fed(asked.sequence, asked.history, len(asked.history))
        (length, end), text = match.repeated, match.automaton.text
        if match.length > length:
            length, text, end = match.length, self._corpus.text, self._corpus.end(match.state)
        if length < self._min_match:
            return nothing(self.name, f"the longest repeated suffix has {length} tokens")
        tokens = text[end + 1 : end + 1 + min(self._n_max, asked.limit)]
        if _SEPARATOR in tokens:
            tokens = tokens[: tokens.index(_SEPARATOR)]
        probs = [match_probability(length + i) for i in range(len(tokens))]
        return self._offer(asked, tokens, probs)

    def _fed(self, sequence: int, history: Sequence[int], n_tokens: int) -> _Match:
        """The sequence's match after the first `n_tokens` of `history`, or more if it had more."""
        match = self._matches.of(sequence, history)
        for token in history[match.n_fed : n_tokens]:
            match.automaton.extend(token)
            match.repeated = match.automaton.repeated()
            if self._has_corpus:
                match.state, match.length = self._corpus.step(match.state, match.length, token)
        match.n_fed = max(match.n_fed, n_tokens)
        return match

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        self._fed(sequence, text, n_read)

    def forget(self, sequence: int) -> None:
        self._matches.forget(sequence)
