"""Answers as lists of deltas, for the APIs that tell them in their own words."""

from __future__ import annotations

from hypothesis import strategies as st

from specoffload.chat.deltas import CallPiece, Content, Delta, Reasoning
from specoffload.session.generation import GenerationStats

STATS = GenerationStats(n_prompt_tokens=10, n_tokens=7, n_cached_tokens=4)


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
answers = st.builds(
    lambda reasoning, before, calls, after: [
        *map(Reasoning, reasoning),
        *map(Content, before),
        *_calls(calls),
        *map(Content, after),
    ],
    _texts,
    _texts,
    st.lists(_texts, max_size=3),
    _texts,
)
