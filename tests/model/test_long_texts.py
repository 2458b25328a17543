"""Tokenising long texts in parts gives the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.options import engine_options
from offload.engine import Engine, open_engine
from offload.sequences.text import LONG_CHARS, cutter, parts_of
from specoffload.config.resolution import demo_file


def test_what_is_cut_is_the_text() -> None:
    special = cutter(["<a>", "<bb>", "</s>"])
    assert special is not None
    text = "word <a>word<bb>" * 1000
    parts = list(parts_of(text, special))
    assert "".join(parts) == text
    assert len(parts) > 5
    assert all(part.startswith("<bb>") for part in parts[1:]), "a blank is before each <a>"


def test_tokens_that_may_overlap_cut_nothing() -> None:
    assert cutter([]) is None
    assert cutter(["<a", "a>>"]) is None
    assert cutter(["<<"]) is None
    assert cutter(["<a>", "<a>b"]) is not None, "the longer is looked for first"


@pytest.fixture(scope="module")
def target() -> Iterator[Engine]:
    with open_engine(demo_file("target.gguf"), engine_options(device="cpu", n_ctx=256)) as engine:
        yield engine


def special_of(target: Engine) -> str:
    return max(target.model.special_texts(parse_special=True), key=len)


@settings(max_examples=20, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["def f(x):\n", "  ", " ", "é", "日本", "x", "SPECIAL"]), min_size=1
    ),
    parse_special=st.booleans(),
)
def test_tokens_are_those_of_the_whole_text(
    target: Engine, words: list[str], parse_special: bool
) -> None:
    text = "".join(words).replace("SPECIAL", special_of(target))
    text *= 1 + (LONG_CHARS + 2000) // len(text)
    found = target.tokenize(text, add_special=True, parse_special=parse_special)
    assert found == target.model.tokenize(text, add_special=True, parse_special=parse_special)
