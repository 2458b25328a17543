"""The requests of `agents-day`: what each client sends, and what is sent at the same time. Pure.

Texts are words in a random order. A server's time depends on the lengths of texts and on what they
share, not on what they say.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

N_TALKS = 4
_PAIRS = (((0, 1), (2, 3)), ((0, 2), (1, 3)))  # conversations that run together, by turns
_EDITED = 1  # the conversation whose oldest message is edited in the middle of the day


@dataclass(frozen=True)
class DaySize:
    """The lengths of a day's texts."""

    n_turns: int = 8
    n_words: tuple[int, int] = (40, 400)  # of a tool's result, least and most
    n_system_words: int = 1200
    n_document_words: int = 1500
    n_predict: int = 32


@dataclass(frozen=True)
class Turn:
    """A conversation gets the result of a tool, and answers. `edited` replaces its first result."""

    talk: int
    text: str
    edited: str = ""


@dataclass(frozen=True)
class Leaves:
    """A client sends a long prompt, and leaves before it is read."""

    text: str


@dataclass(frozen=True)
class AskOnce:
    """A request without a conversation: a document, and a question on it."""

    text: str


Act = Turn | Leaves | AskOnce


@dataclass(frozen=True)
class Day:
    """A system prompt, and the acts of a day. Those of one step run at the same time."""

    system: str
    steps: tuple[tuple[Act, ...], ...]

    @property
    def texts(self) -> set[str]:
        """All texts that clients send, without the system prompt."""
        acts = [act for step in self.steps for act in step]
        edited = {act.edited for act in acts if isinstance(act, Turn) and act.edited}
        return {act.text for act in acts} | edited

    @property
    def n_answers(self) -> int:
        return sum(not isinstance(act, Leaves) for step in self.steps for act in step)


def day_of(size: DaySize, vocabulary: Sequence[str], seed: int) -> Day:
    """Return the day of a seed. Days of other seeds share no beginning of a text."""
    rng = random.Random(seed)

    def words(n: int) -> str:
        return " ".join(rng.choices(vocabulary, k=n)) + "\n"

    system = f"day {seed}: {words(size.n_system_words)}"
    document = f"document {seed}: {words(size.n_document_words)}"
    asked_at = {size.n_turns // 3, size.n_turns // 3 + 1}

    def steps() -> Iterator[tuple[Act, ...]]:
        for turn in range(size.n_turns):
            for pair in _PAIRS[turn % 2]:
                acts: list[Act] = []
                for talk in pair:
                    is_edited = talk == _EDITED and turn == size.n_turns // 2
                    edited = words(size.n_words[0]) if is_edited else ""
                    acts.append(Turn(talk, words(rng.randint(*size.n_words)), edited))
                if turn == 1 and pair[0]:
                    acts.append(Leaves(f"left {seed}: {words(size.n_document_words)}"))
                yield tuple(acts)
            if turn in asked_at:
                yield (AskOnce(document + words(12)),)

    return Day(system, tuple(steps()))
