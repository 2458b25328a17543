"""Counts how many answers to one question are equal, if a server gets it several times. Pure.

Greedy answers to equal requests should be equal, whatever a server keeps between them: cached
prompts, n-grams of earlier texts, and what a draft policy has learnt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from specoffload.config.options import RunOrder

_END = 80  # characters at a text's end that are shown


@dataclass(frozen=True)
class RepeatedText:
    """One of the texts that answered a question. `differs_at`: characters before the first one that
    differs from the most frequent text; None for that text itself."""

    n: int  # answers with this text
    text: str
    differs_at: int | None

    @property
    def end(self) -> str:
        return self.text[-_END:]


@dataclass(frozen=True)
class Repeated:
    """The answers to one question in one run, by text, the most frequent first."""

    question: str
    run: RunOrder
    texts: tuple[RepeatedText, ...]

    @property
    def n(self) -> int:
        return sum(text.n for text in self.texts)

    @property
    def n_equal(self) -> int:
        """Number of answers with the most frequent text."""
        return self.texts[0].n

    @property
    def words(self) -> str:
        n = len(self.texts)
        return f"{self.n_equal} of {self.n} equal" + (f", {n} texts" if n > 1 else "")


def ask_repeatedly(
    question: str, ask: Callable[[str], str], n: int, run: RunOrder, on_answer: Callable[[], object]
) -> Repeated:
    """Ask `n` times, one after the other or all at once, and count the texts."""

    def answer(question: str) -> str:
        text = ask(question)
        on_answer()
        return text

    with ThreadPoolExecutor(1 if run is RunOrder.IN_SEQUENCE else n) as clients:
        return Repeated(question, run, counted(list(clients.map(answer, [question] * n))))


def counted(answers: Sequence[str]) -> tuple[RepeatedText, ...]:
    """Count equal answers. Of texts that are equally frequent, the one that came first is first."""
    counts = Counter(answers).most_common()
    usual = counts[0][0]
    return tuple(
        RepeatedText(n, text, None if text == usual else _n_same(usual, text)) for text, n in counts
    )


def _n_same(one: str, other: str) -> int:
    """Number of equal characters at the beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
