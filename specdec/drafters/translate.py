"""Drafts with a draft model of another vocabulary, whose tokens are translated through text.

The history is converted to text and tokenised for the draft model. Its drafts are converted back
in the same way. Special tokens of one meaning are exchanged by their ids, and replacement pairs
turn other texts of one family into those of the other (llama.cpp #12635). The probability of a
target token is the product of the probabilities of the draft tokens that begin before its end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from specdec.drafters.vocabulary import Vocabulary
from specdec.types import Decision, Draft, Drafter, DraftRequest, Round

_OPEN, _MOST_OPEN = 64, 256  # least and most last characters that are tokenised anew in each round
_WORD_END = re.compile(r"(?<=\S)(?=\s)")
_NO_MARKS: Mapping[int, int] = MappingProxyType({})


def replace_all(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


class _Side:
    """A sequence's history in the draft's tokens. It covers the first `n_read` target tokens.

    The first `n_settled` tokens stay as they are. The others are those of `text`, which grows.
    """

    __slots__ = ("begins", "n_read", "n_settled", "text", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_read = self.n_settled = 0
        self.text = ""
        self.begins = True  # True if no text precedes `text`

    def settle(self, rest: str, *, begins: bool = False) -> None:
        """Keep all tokens so far. `rest` is the text that they do not cover yet."""
        self.n_settled, self.text, self.begins = len(self.tokens), rest, begins


class TranslatedDrafter:
    """`inner` drafts in the draft's vocabulary. `pairs` are (target text, draft text).

    `marks` maps special tokens of the target to those of the draft, and `marks_back` the other way.
    `only_appends` is for a draft model that cannot rewind. No token is then replaced by another one
    when more text follows.
    """

    def __init__(
        self,
        inner: Drafter,
        target: Vocabulary,
        draft: Vocabulary,
        pairs: Sequence[tuple[str, str]] = (),
        *,
        marks: Mapping[int, int] = _NO_MARKS,
        marks_back: Mapping[int, int] = _NO_MARKS,
        only_appends: bool = False,
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._target, self._draft = target, draft
        self._marks, self._marks_back = marks, marks_back
        self._only_appends = only_appends
        self._to_draft = tuple(pairs)
        self._to_target = tuple((d, t) for t, d in pairs if d)
        self._sides: dict[int, _Side] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        read = [self._read(request) for request in requests]
        theirs = iter(self._inner.propose([r for r in read if isinstance(r, DraftRequest)]))
        return [
            r if isinstance(r, Draft) else self._translated(next(theirs), r.sequence, r.limit)
            for r in read
        ]

    # -- the history, for the draft ---------------------------------------------------------------

    def _read(self, asked: DraftRequest) -> DraftRequest | Draft:
        """The request in the draft's tokens, or an empty draft if there is nothing to translate."""
        side = self._sides.setdefault(asked.sequence, _Side())
        new = asked.history[side.n_read :]
        if not side.n_read:
            side.tokens = list(self._draft.beginning)
            side.n_settled = len(side.tokens)
            first = self._target.beginning
            new = new[len(first) :] if tuple(new[: len(first)]) == first else new
        runs = list(_runs(new, self._marks))
        if self._target.detokenize(runs[-1][0]).endswith("\ufffd"):
            return Draft((), (), self.name, Decision(0, "the text ends inside a character"))
        n_same = side.n_settled
        for tokens, mark in runs:
            self._append(side, tokens)
            if mark is not None:
                side.tokens.append(mark)
                side.settle("", begins=True)
        side.n_read = len(asked.history)
        if not side.tokens:
            return Draft((), (), self.name, Decision(0, "the draft reads no text yet"))
        return asked.reading(side.tokens, n_same)

    def _append(self, side: _Side, tokens: Sequence[int]) -> None:
        """Append text. Its last part is tokenised together with what follows it later.

        So a word that comes in several tokens is read as the draft would read it.
        """
        if not tokens:
            return
        begins = side.begins and not side.text
        side.text += replace_all(self._target.text_of(tokens, begins=begins), self._to_draft)
        if len(side.text) > _MOST_OPEN:
            last = len(side.text) - _OPEN
            end = max((f.start() for f in _WORD_END.finditer(side.text, 0, last)), default=last)
            rest = side.text[end:]
            self._tokenise(side, side.text[:end])
            side.settle(rest)
        self._tokenise(side, side.text)
        if self._only_appends:
            side.settle("")

    def _tokenise(self, side: _Side, text: str) -> None:
        del side.tokens[side.n_settled :]
        side.tokens += self._draft.tokens_of(text, begins=side.begins)

    # -- the draft, for the target ----------------------------------------------------------------

    def _translated(self, theirs: Draft, sequence: int, limit: int) -> Draft:
        side = self._sides[sequence]
        tokens: list[int] = []
        probs: list[float] = []
        begins, at = side.begins and not side.text, 0
        for run, mark in _runs(theirs.tokens, self._marks_back):
            end = at + len(run)
            is_whole = self._add_text(tokens, probs, run, theirs.probs[at:end], begins=begins)
            if not is_whole or mark is None:
                break
            tokens.append(mark)
            probs.append(theirs.probs[end])
            begins, at = True, end + 1
        del tokens[limit:], probs[limit:]
        decision = Decision(
            len(tokens), f"{theirs.decision.reason}; translated", theirs.decision.rest
        )
        return Draft(
            tuple(tokens),
            tuple(probs),
            self.name,
            decision,
            n_steps=theirs.n_steps,
            catch_up_s=theirs.catch_up_s,
        )

    def _add_text(
        self,
        tokens: list[int],
        probs: list[float],
        run: Sequence[int],
        run_probs: Sequence[float],
        *,
        begins: bool,
    ) -> bool:
        """Add the target's tokens of drafted text. Returns False if the text ends in a character.

        Each draft token's probability counts for one target token.
        """
        # The text is rendered from the start, since several tokens may share a character.
        texts = [self._draft.text_of(run[: i + 1], begins=begins) for i in range(len(run))]
        texts = [replace_all(text.rstrip("\ufffd"), self._to_target) for text in texts]
        if not texts:
            return True
        ours = self._target.tokens_of(texts[-1], begins=begins) if texts[-1] else []
        ends, used = [len(text) for text in texts], 0
        for i in range(len(ours)):
            length = len(self._target.text_of(ours[: i + 1], begins=begins))
            p = 1.0
            while used < len(ends) and (used == 0 or ends[used - 1] < length):
                p *= run_probs[used]
                used += 1
            probs.append(p)
        tokens += ours
        return not self._draft.detokenize(run).endswith("\ufffd")

    def learn(self, sequence: int, round_: Round) -> None:
        self._inner.learn(sequence, round_)

    def heard(self, sequence: int, text: Sequence[int], n_read: int, salt: int = 0) -> None:
        """Does nothing: a draft model reads its own tokens of the text at its next proposal."""

    def forget(self, sequence: int) -> None:
        self._sides.pop(sequence, None)
        self._inner.forget(sequence)


def _runs(
    tokens: Sequence[int], marks: Mapping[int, int]
) -> Iterator[tuple[list[int], int | None]]:
    """Yield runs of tokens of text, each with the mark that follows it, or None at the end."""
    run: list[int] = []
    for token in tokens:
        mark = marks.get(token)
        if mark is None:
            run.append(token)
        else:
            yield run, mark
            run = []
    yield run, None
