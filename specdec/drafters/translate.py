"""Drafts with a draft model of another vocabulary, whose tokens are translated through text.

The history is converted to text and tokenised for the draft model. Its drafts are converted back
in the same way. Replacement pairs turn one family's special tokens into the other's. The
probability of a target token is the product of the probabilities of the draft tokens that begin
before its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specdec.types import Decision, Draft, Drafter, DraftRequest, Round

Tokenize = Callable[[str], list[int]]  # adds no BOS, and parses special tokens
Detokenize = Callable[[Sequence[int]], str]  # writes special tokens out


@dataclass(frozen=True)
class Vocabulary:
    tokenize: Tokenize
    detokenize: Detokenize


def replace_all(text: str, pairs: Sequence[tuple[str, str]]) -> str:
    for old, new in pairs:
        text = text.replace(old, new)
    return text


class _Side:
    """A sequence's history in the draft's tokens. It covers the first `n_read` target tokens."""

    __slots__ = ("n_read", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.n_read = 0


class TranslatedDrafter:
    """`inner` drafts in the draft's vocabulary. `pairs` are (target text, draft text)."""

    def __init__(
        self,
        inner: Drafter,
        target: Vocabulary,
        draft: Vocabulary,
        pairs: Sequence[tuple[str, str]] = (),
    ) -> None:
        self.name = inner.name
        self._inner = inner
        self._target, self._draft = target, draft
        self._to_draft = tuple(pairs)
        self._to_target = tuple((d, t) for t, d in pairs)
        self._sides: dict[int, _Side] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        read = [self._read(request) for request in requests]
        theirs = iter(self._inner.propose([r for r in read if isinstance(r, DraftRequest)]))
        return [
            r if isinstance(r, Draft) else self._translated(next(theirs), r.limit) for r in read
        ]

    def _read(self, asked: DraftRequest) -> DraftRequest | Draft:
        """The request in the draft's tokens, or an empty draft if there is nothing to translate."""
        history = asked.history
        side = self._sides.setdefault(asked.sequence, _Side())
        text = self._target.detokenize(history[side.n_read :])
        if text.endswith("\ufffd"):
            return Draft((), (), self.name, Decision(0, "the text ends inside a character"))
        side.tokens += self._draft.tokenize(replace_all(text, self._to_draft))
        side.n_read = len(history)
        if not side.tokens:
            return Draft((), (), self.name, Decision(0, "the draft reads no text yet"))
        return asked.reading(side.tokens)

    def _translated(self, theirs: Draft, limit: int) -> Draft:
        ends, text = [], ""
        for i in range(len(theirs.tokens)):
            # The text is rendered from the start, since several tokens may share a character.
            text = self._draft.detokenize(theirs.tokens[: i + 1])
            ends.append(len(text.rstrip("\ufffd")))
        text = replace_all(text.rstrip("\ufffd"), self._to_target)
        tokens = self._target.tokenize(text)[:limit] if text else []
        probs = self._probabilities(tokens, ends, theirs.probs)
        decision = Decision(
            len(tokens), f"{theirs.decision.reason}; translated", theirs.decision.rest
        )
        return Draft(
            tuple(tokens),
            probs,
            self.name,
            decision,
            n_steps=theirs.n_steps,
            catch_up_s=theirs.catch_up_s,
        )

    def _probabilities(
        self, tokens: Sequence[int], ends: Sequence[int], probs: Sequence[float]
    ) -> tuple[float, ...]:
        """The probability of each target token. Each draft token counts for one target token."""
        out = []
        used = 0
        for i in range(len(tokens)):
            length = len(self._target.detokenize(tokens[: i + 1]))
            p = 1.0
            while used < len(probs) and (used == 0 or ends[used - 1] < length):
                p *= probs[used]
                used += 1
            out.append(p)
        return tuple(out)

    def learn(self, sequence: int, round_: Round) -> None:
        self._inner.learn(sequence, round_)

    def heard(self, sequence: int) -> None:
        self._inner.heard(sequence)

    def forget(self, sequence: int) -> None:
        self._sides.pop(sequence, None)
        self._inner.forget(sequence)
