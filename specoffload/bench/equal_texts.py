"""Greedy texts that should be equal, and are only as far as the library's kernels round alike.

Quantised kernels round differently for each batch size, so that a near-tie of the two likeliest
tokens may fall the other way. Counted for the verification of drafts, and beside it for plain
decoding whose tokens come in batches of another size, with no speculation at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offload.engine import Engine
from specdec.policies.rules import Fixed
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import SEQUENCE, Session
from specoffload.speculation.speculation import Speculation

SPLIT = 8  # tokens of a batch, beside one at a time
N_DRAFT = 4  # tokens of each verified draft


@dataclass(frozen=True)
class PlainText:
    """A greedy text, decoded token by token; `margins` are the logits of the likeliest token less
    those of the second, at each."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Equality:
    """`n_equal` of `n_texts` greedy texts of `n_tokens` equal the plain ones token for token;
    `greatest_margin` is the largest of the plain texts' margins at a first difference."""

    n_texts: int
    n_tokens: int
    n_equal: int
    greatest_margin: float

    @property
    def share(self) -> float:
        return self.n_equal / self.n_texts


def compared(plain: Sequence[PlainText], others: Sequence[Sequence[int]]) -> Equality:
    """Each plain text beside another way's; a text is as long as its plain one. Pure."""
    margins = []
    for text, other in zip(plain, others, strict=True):
        pairs = zip(text.tokens, other, strict=True)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differs is not None:
            margins.append(text.margins[differs])
    n_tokens = max(len(text.tokens) for text in plain)
    return Equality(len(plain), n_tokens, len(plain) - len(margins), max(margins, default=0.0))


def plain_text(engine: Engine, prompt: Sequence[int], n: int) -> PlainText:
    """`n` tokens after `prompt`, one decode each. The sequence is left empty."""
    sequences = engine.sequences
    sequences.rewind(SEQUENCE, 0)
    if len(prompt) > 1:
        sequences.extend(SEQUENCE, prompt[:-1], 0)
    last, tokens, margins = prompt[-1], [], []
    for _ in range(n):
        row = sequences.extend(SEQUENCE, [last], 1)[0]
        last = int(row.argmax())
        tokens.append(last)
        margins.append(margin_of(row))
    sequences.rewind(SEQUENCE, 0)
    return PlainText(tuple(prompt), tuple(tokens), tuple(margins))


def margin_of(row: NDArray[np.float32]) -> float:
    """The greatest of a row of logits less the second."""
    second, first = np.partition(row, -2)[-2:]
    return float(first - second)


def split_text(engine: Engine, text: PlainText, n_batch: int = SPLIT) -> list[int]:
    """The likeliest tokens where the text comes in batches: until the first difference, the text
    that plain decoding at this batch size writes. The sequence is left empty."""
    sequences = engine.sequences
    sequences.rewind(SEQUENCE, 0)
    if len(text.prompt) > 1:
        sequences.extend(SEQUENCE, text.prompt[:-1], 0)
    fed = [text.prompt[-1], *text.tokens[:-1]]
    found: list[int] = []
    for at in range(0, len(fed), n_batch):
        rows = sequences.extend(SEQUENCE, fed[at : at + n_batch])
        found += [int(token) for token in rows.argmax(axis=1)]
    sequences.rewind(SEQUENCE, 0)
    return found


def speculative_text(session: Session, prompt: Sequence[int], n: int) -> list[int]:
    """`n` tokens with a draft in every round, however little it gains."""
    speculation = session.speculation
    assert isinstance(speculation, Speculation)
    before = speculation.policy
    speculation.policy = Fixed(N_DRAFT)
    session.forget()
    try:
        pieces = session.generate(prompt, GenerateOptions(n_predict=n, ignore_eos=True))
        return [token for piece in pieces for token in piece.tokens][:n]
    finally:
        speculation.policy = before
        session.forget()


def equality_words(what: str, found: Equality) -> str:
    """A sentence for people. Pure."""
    words = f"{what}: {found.n_equal} of {found.n_texts} greedy texts of {found.n_tokens} tokens"
    if found.n_equal == found.n_texts:
        return f"{words} equal plain decoding's"
    return (
        f"{words} equal plain decoding's; where others first differ, the logits of the two "
        f"likeliest tokens are at most {found.greatest_margin:.2g} apart"
    )
