"""Compares the texts that a server writes one request at a time with those it writes at once. Pure.

The protocol is that of llama.cpp #19493: a first run in sequence is the baseline, and later runs,
in sequence and in parallel, should write the same greedy texts. A difference has a margin: how much
likelier the baseline's token was than the next one. Near-ties differ by rounding alone, as kernels
for several tokens round in another way (docs/speculation.md, losslessness).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import shorten

from specoffload.config.options import RunOrder

_NAME_WIDTH = 32  # characters
_CODE_ALONE = "Please write just the code. Do not write any extra comments."


@dataclass(frozen=True)
class Token:
    """A written token. `margin`: its lead in log-probability over the next one; None: unknown."""

    text: str
    margin: float | None = None


AnswerTokens = tuple[Token, ...]
RoleText = tuple[str, str]  # role and text
Ask = Callable[[Sequence[RoleText]], AnswerTokens]


@dataclass(frozen=True)
class BenchTalk:
    """A conversation. Its client sends each question after the answer to the question before."""

    name: str
    questions: tuple[str, ...]


_REFACTOR = """Refactor this function so that it needs no recursion, and write it again as a whole:

def total(tree):
    if tree is None:
        return 0
    left = total(tree.left)
    right = total(tree.right)
    return left + tree.value + right
"""

TALKS = (
    *(
        BenchTalk(f"quicksort in {name}", (f"Write quicksort in {name}. {_CODE_ALONE}",))
        for name in ("C", "Java", "Python")
    ),
    BenchTalk("chess", ("Tell me the rules of chess.",)),
    BenchTalk("refactoring", (_REFACTOR,)),
    BenchTalk(
        "rewriting in one conversation",
        (
            f"Write an iterative quicksort in Python. {_CODE_ALONE}",
            "Write it again with type hints.",
            "Write it again with a comparison function as an argument.",
            "Write it again so that it sorts in descending order.",
        ),
    ),
)


@dataclass(frozen=True)
class Difference:
    """The first token in which two answers differ. A missing token is ""."""

    answer: int  # number of the answer in its conversation, from 0 on
    at: int  # number of the token in its answer, from 0 on
    baseline: str
    other: str
    margin: float | None  # of the baseline's token

    @property
    def words(self) -> str:
        margin = "" if self.margin is None else f", margin {self.margin:.4f}"
        place = f"token {self.at + 1}" + (f" of answer {self.answer + 1}" if self.answer else "")
        return f"differs at {place}: {self.baseline!r}, {self.other!r}{margin}"


def play(talk: BenchTalk, ask: Ask) -> list[AnswerTokens]:
    """Return the answers of a conversation. Each question follows all answers before it."""
    messages: list[RoleText] = []
    answers = []
    for question in talk.questions:
        messages.append(("user", question))
        answers.append(ask(messages))
        messages.append(("assistant", "".join(token.text for token in answers[-1])))
    return answers


def talks_of(conversations: Sequence[tuple[str, ...]]) -> tuple[BenchTalk, ...]:
    """The user's conversations, named by number and by the beginning of their first question."""
    return tuple(
        BenchTalk(f"{number}: {shorten(questions[0], _NAME_WIDTH, placeholder='...')}", questions)
        for number, questions in enumerate(conversations, 1)
    )


def play_all(talks: Sequence[BenchTalk], ask: Ask, run: RunOrder) -> list[list[AnswerTokens]]:
    """Return the answers of all conversations: one after the other, or all at once."""
    with ThreadPoolExecutor(1 if run is RunOrder.IN_SEQUENCE else len(talks)) as clients:
        return list(clients.map(lambda talk: play(talk, ask), talks))


def first_difference(
    baseline: Sequence[AnswerTokens], other: Sequence[AnswerTokens]
) -> Difference | None:
    """Return the first token in which the answers differ, or None if there is none.

    Answers after it are not compared, because their questions follow different texts.
    """
    for number, (usual, theirs) in enumerate(zip(baseline, other, strict=True)):
        for at, (one, two) in enumerate(zip_longest(usual, theirs)):
            if one is None or two is None or one.text != two.text:
                return Difference(
                    number, at, one.text if one else "", two.text if two else "",
                    one.margin if one else None,
                )  # fmt: skip
    return None
