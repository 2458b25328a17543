"""Flags of llama.cpp and ik_llama.cpp that are none of ours: the form in which they are declared.

A command line that runs there starts here. So each of their flags is ours too, or is answered: it
asks for what is so already, it becomes words of ours, it changes nothing here, or it is refused
with what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Already:
    """It asks for what is so here: accepted without a word."""


@dataclass(frozen=True)
class NoEffect:
    """It changes nothing here; `why` is said at start."""

    why: str


@dataclass(frozen=True)
class Becomes:
    """It is read as these words of ours, which is said at start."""

    words: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    """Without it the program would do something else than was asked for; `why` ends with what to
    do."""

    why: str


Answer = Already | NoEffect | Becomes | Refused


@dataclass(frozen=True)
class Foreign:
    """`off` are names that negate it, which take no value. `optional` are the values that it may
    be followed by, where it may stand bare too."""

    names: tuple[str, ...]
    off: tuple[str, ...]
    variables: tuple[str, ...]
    n_values: int
    answer: Answer | Callable[[str], Answer]
    off_answer: Answer
    optional: tuple[str, ...] = ()

    def answered(self, value: str) -> Answer:
        """The answer to a value; ValueError says what the value must be."""
        return self.answer(value) if callable(self.answer) else self.answer


ALREADY = Already()


def foreign(
    text: str,
    answer: Answer | Callable[[str], Answer],
    *,
    n_values: int = 0,
    off: Answer = ALREADY,
    optional: tuple[str, ...] = (),
) -> Foreign:
    """One flag from its names, blank-separated: `-x --xx !--no-xx VARIABLE`."""
    words = text.split()
    return Foreign(
        names=tuple(word for word in words if word.startswith("-")),
        off=tuple(word[1:] for word in words if word.startswith("!")),
        variables=tuple(word for word in words if word[0].isalpha()),
        n_values=n_values,
        answer=answer,
        off_answer=off,
        optional=optional,
    )


def switches(answer: Answer, *texts: str) -> tuple[Foreign, ...]:
    """Flags without a value that have one answer; so has what negates them."""
    return tuple(foreign(text, answer, off=answer) for text in texts)


def valued(answer: Answer, *texts: str) -> tuple[Foreign, ...]:
    """Flags with a value that have one answer, whatever the value."""
    return tuple(foreign(text, answer, n_values=1) for text in texts)


def off_at(off: Callable[[float], bool], answer: Answer) -> Callable[[str], Answer]:
    """`answer`, unless the number is one with which the flag asks for nothing."""

    def of(value: str) -> Answer:
        try:
            number = float(value)
        except ValueError:
            raise ValueError("must be a number") from None
        return ALREADY if off(number) else answer

    return of
