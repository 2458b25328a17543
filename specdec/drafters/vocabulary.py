"""A vocabulary as translation sees it: text to tokens and back, and what survives the way."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Tokenize = Callable[[str], list[int]]  # adds no BOS, and parses special tokens
Detokenize = Callable[[Sequence[int]], str]  # writes special tokens out

# Characters that no usual token contains. Put before a text, one of them keeps the tokenizer from
# taking the text for the beginning of a sentence.
_ANCHORS = ("\x01", "\U00010380", "\u2603", "\n")
_PROBES = ("ab", " ab")
_WORD = re.compile(r"\s*\S+")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer.

    `beginning` are the tokens that precede every text, such as BOS. SentencePiece puts a blank
    before every text (`adds_space`). To tokenise a text that continues another one, `anchor` is put
    before it, and the anchor's tokens are cut off again. "" if that is not necessary.
    """

    tokenize: Tokenize
    detokenize: Detokenize
    beginning: tuple[int, ...] = ()
    adds_space: bool = False
    anchor: str = ""

    @classmethod
    def probed(
        cls, tokenize: Tokenize, detokenize: Detokenize, beginning: tuple[int, ...] = ()
    ) -> Vocabulary:
        """The vocabulary of a tokenizer whose treatment of blanks is found out by trial."""
        plain = cls(tokenize, detokenize, beginning)
        if all(detokenize(tokenize(text)) == text for text in _PROBES):
            return plain
        adds_space = detokenize(tokenize("ab")) == " ab"
        for anchor in _ANCHORS:
            vocabulary = cls(tokenize, detokenize, beginning, adds_space, anchor)
            if all(vocabulary.text_of(vocabulary.continuation(text)) == text for text in _PROBES):
                return vocabulary
        return cls(tokenize, detokenize, beginning, adds_space)

    def tokens_of(self, text: str, *, begins: bool) -> list[int]:
        """Tokens of a text that begins, or that continues another one."""
        return self.tokenize(text) if begins else self.continuation(text)

    def continuation(self, text: str) -> list[int]:
        """Tokens of a text that continues another one."""
        if not self.anchor or not text:
            return self.tokenize(text)
        n_anchor = len(self.tokenize(self.anchor))
        return self.tokenize(self.anchor + text)[n_anchor:]

    def text_of(self, tokens: Sequence[int], *, begins: bool = False) -> str:
        """Text of tokens. A text that begins lacks the blank that the tokenizer has added."""
        text = self.detokenize(tokens)
        return text[1:] if begins and self.adds_space and text.startswith(" ") else text


class Survival(NamedTuple):
    """The shares of a sample's tokens that survive translation, and the tokens that it takes."""

    kept: float  # share of the target's tokens that the way to the draft and back gives again
    whole: float  # share of the target's tokens that are one token of the draft, too
    draft_tokens: float  # tokens of the draft for each token of the target


def survival(target: Vocabulary, draft: Vocabulary, text: str) -> Survival:
    """Measure what is left of the target's tokens of `text` after translation and back.

    Words are translated one by one, so that a loss in one of them leaves the others as they are.
    """
    n_kept = n_whole = n_ours = n_theirs = 0
    for word in _WORD.findall(text):
        ours = target.continuation(word)
        theirs = draft.continuation(target.text_of(ours))
        n_ours += len(ours)
        n_theirs += len(theirs)
        back = draft.text_of(theirs)
        n_kept += _n_equal_ends(ours, target.continuation(back))
        if back == word:
            n_whole += len(_spans(target, ours) & _spans(draft, theirs))
    n = max(1, n_ours)
    return Survival(n_kept / n, n_whole / n, n_theirs / n)


def _n_equal_ends(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of first tokens that two sequences share."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def _spans(vocabulary: Vocabulary, tokens: Sequence[int]) -> set[tuple[int, int]]:
    """(start, end) of each token in bytes of the text. Tokens inside a character have none."""
    ends = [
        len(vocabulary.detokenize(tokens[:i]).rstrip("\ufffd").encode())
        for i in range(len(tokens) + 1)
    ]
    return {(start, end) for start, end in zip(ends, ends[1:], strict=False) if start < end}
