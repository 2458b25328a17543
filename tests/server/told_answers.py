"""Answers as lists of deltas, for tests of the APIs that turn them into events."""

from __future__ import annotations

from itertools import chain

from hypothesis import strategies as st

from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning
from specoffload.chat.families import GENERIC
from specoffload.chat.parser import AnswerForm, StreamParser
from specoffload.generation.generation import FinishReason, TextPiece
from specoffload.generation.statistics import GenerationStats

STATS = GenerationStats(n_prompt_tokens=10, n_tokens=7, n_cached_tokens=4)


def ended(reason: FinishReason, word: str | None = None) -> TextPiece:
    """The last piece of an answer."""
    return TextPiece("", (), reason, STATS, stopping_word=word)


def no_parser() -> StreamParser:
    """A parser for answers that already come as deltas."""
    return StreamParser(AnswerForm(GENERIC))


def _calls(pieces: list[list[str]]) -> list[Delta]:
    found: list[Delta] = []
    for index, arguments in enumerate(pieces):
        found.append(CallPiece(index, f"call_{index}", f"tool_{index}", ""))
        found += [CallPiece(index, None, None, text) for text in ['{"a": "', *arguments, '"}']]
    return found


_text = st.text(
    st.characters(exclude_characters='"\\', exclude_categories=["Cs", "Cc"]), min_size=1
)
_texts = st.lists(_text, max_size=3)
_parts = st.tuples(st.sampled_from([Reasoning, Content, None]), _texts)


def _answer(parts: list[tuple[type[Reasoning] | type[Content] | None, list[str]]]) -> list[Delta]:
    """Reasoning, text and calls in the order of `parts`; None stands for a call."""
    calls = iter(_calls([texts for kind, texts in parts if kind is None]))
    found: list[list[Delta]] = []
    for kind, texts in parts:
        n_pieces = len(texts) + 3
        found.append(
            [next(calls) for _ in range(n_pieces)] if kind is None else [*map(kind, texts)]
        )
    return [*chain.from_iterable(found)]


answers = st.lists(_parts, max_size=6).map(_answer)
