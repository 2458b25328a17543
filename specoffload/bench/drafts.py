"""Compares texts with and without drafts for `bench`, and says why nothing was drafted.

Quantised kernels round differently for each batch size, so a near-tie of the two likeliest tokens
may be decided differently. `bench` counts such texts with verified drafts. It also counts them
without speculation, when the tokens of the plain text are decoded in larger batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from offload.engine import Engine
from specdec.costs.profile import CostProfile
from specdec.policies.rules import Fixed
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import SEQUENCE, Session
from specoffload.speculation.speculation import Speculation

SPLIT = 8  # tokens per batch of `split_text`
N_DRAFT = 4  # tokens per verified draft


@dataclass(frozen=True)
class PlainText:
    """A greedy text that was decoded one token at a time.

    `margins` has one entry per token: its logit minus the logit of the second likeliest token.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    margins: tuple[float, ...]


@dataclass(frozen=True)
class Equality:
    """The number of greedy texts that equal the plain ones in every token.

    `n_tokens` is the length of the longest text. `greatest_margin` is the largest margin of a plain
    text at its first differing token, or 0 if all texts are equal.
    """

    n_texts: int
    n_tokens: int
    n_equal: int
    greatest_margin: float

    @property
    def share(self) -> float:
        return self.n_equal / self.n_texts

    def words(self, what: str) -> str:
        """A sentence on this result; `what` names the compared texts."""
        texts = f"{self.n_equal} of {self.n_texts} greedy texts of {self.n_tokens} tokens"
        words = f"{what}: {texts} equal those of plain decoding"
        if self.n_equal == self.n_texts:
            return words
        return (
            f"{words}; where others first differ, the logits of the two likeliest tokens are at "
            f"most {self.greatest_margin:.2g} apart"
        )


def compared(plain: Sequence[PlainText], others: Sequence[Sequence[int]]) -> Equality:
    """Compare each plain text with the text of equal length at the same place in `others`."""
    margins = []
    for text, other in zip(plain, others, strict=True):
        pairs = zip(text.tokens, other, strict=True)
        differs = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if differs is not None:
            margins.append(text.margins[differs])
    n_tokens = max(len(text.tokens) for text in plain)
    return Equality(len(plain), n_tokens, len(plain) - len(margins), max(margins, default=0.0))


def plain_text(engine: Engine, prompt: Sequence[int], n: int) -> PlainText:
    """Decode `n` greedy tokens after `prompt`, one at a time. Leaves the sequence empty."""
    sequences = engine.sequences
    _evaluate_all_but_the_last(engine, prompt)
    last, tokens, margins = prompt[-1], [], []
    for _ in range(n):
        row = sequences.extend(SEQUENCE, [last], 1)[0]
        last = int(row.argmax())
        second, first = np.partition(row, -2)[-2:]
        tokens.append(last)
        margins.append(float(first - second))
    sequences.rewind(SEQUENCE, 0)
    return PlainText(tuple(prompt), tuple(tokens), tuple(margins))


def split_text(engine: Engine, text: PlainText) -> list[int]:
    """Decode the tokens of `text` in batches of SPLIT, and return the likeliest next tokens.

    Up to the first difference from `text`, they are the greedy text at this batch size. Leaves the
    sequence empty.
    """
    _evaluate_all_but_the_last(engine, text.prompt)
    inputs = [text.prompt[-1], *text.tokens[:-1]]
    chosen: list[int] = []
    for at in range(0, len(inputs), SPLIT):
        rows = engine.sequences.extend(SEQUENCE, inputs[at : at + SPLIT])
        chosen += [int(token) for token in rows.argmax(axis=1)]
    engine.sequences.rewind(SEQUENCE, 0)
    return chosen


def _evaluate_all_but_the_last(engine: Engine, prompt: Sequence[int]) -> None:
    engine.sequences.rewind(SEQUENCE, 0)
    if len(prompt) > 1:
        engine.sequences.extend(SEQUENCE, prompt[:-1], 0)


def speculative_text(session: Session, prompt: Sequence[int], n: int) -> list[int]:
    """Decode `n` greedy tokens with drafts of N_DRAFT tokens, even if drafts save no time."""
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


def off_reason(stats: GenerationStats, costs: CostProfile) -> str:
    """A sentence on why nothing was drafted; "" if at least half of the rounds drafted."""
    n_off = sum(rounds for length, rounds in stats.draft_lengths if length == 0)
    if not stats.n_rounds or 2 * n_off < stats.n_rounds:
        return ""
    rounds = "any round" if n_off == stats.n_rounds else f"{n_off} of {stats.n_rounds} rounds"
    words = f"nothing was drafted in {rounds}: {_price_words(costs)}"
    # In reasons that were counted together, # replaces the numbers.
    reason = next((text for text, _ in stats.decisions if text and "#" not in text), "")
    return f"{words} (the policy: {reason})" if reason else words


def _price_words(costs: CostProfile) -> str:
    """A clause on the acceptance above which a draft of one token saves time."""
    if costs.n_max < 2:
        return "only one batch size was measured, so nothing can be drafted"
    two, step = costs.step_s[1] / costs.step_s[0], costs.draft_step_s / costs.step_s[0]
    share = max(0.0, two - 1 + step)
    price = (
        f"a decode of two tokens takes {two:.2f} times as long as one of one token, and drafting a "
        f"token {step:.2f} times as long"
    )
    if share >= 1:
        return f"{price}, so a draft of one token never saves time"
    return f"{price}, so a draft of one token saves time if over {share:.0%} are accepted"


def length_words(costs: CostProfile) -> str:
    """A sentence on the shortest draft that saves time if all of it is accepted."""
    plain_s = costs.step_s[0]
    for m in range(1, costs.n_max):
        if costs.step_s[m] + m * costs.draft_step_s < (1 + m) * plain_s:
            more = "1 token or more" if m == 1 else f"{m} tokens or more"
            return f"drafts of {more} save time if they are accepted whole"
    return "no draft saves time here, whatever its length"
