"""Places that a client marks in a prompt's text become numbers of its tokens, also after images."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.images.place_tokens import place_tokens
from specoffload.generation.generation import GenerateOptions
from specoffload.server.engine.calls import kept_places
from specoffload.server.engine.messages import ChatJob
from specoffload.session.images import PromptImages

MARKER = "<image>"


class Pairs:
    """A session whose tokens are pairs of letters, or a last letter alone."""

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert (add_special, parse_special) == (False, True)
        pairs = [text[at : at + 2] for at in range(0, len(text), 2)]
        return [sum(ord(c) << 8 * i for i, c in enumerate(pair)) for pair in pairs]


def places(texts: list[str], ends: list[int], n_spans: int = 1) -> tuple[int, ...]:
    """The kept places of texts with an image of 5 places between, in `n_spans` groups."""
    session: Any = Pairs()
    tokens: list[int] = []
    for at, text in enumerate(texts):
        if at:
            for tile in range(n_spans):
                tokens += place_tokens(5, 5, f"{at} {tile}".encode())
        tokens += session.tokenize(text, add_special=False, parse_special=True)
    images = PromptImages(MARKER, (b"",) * (len(texts) - 1)) if len(texts) > 1 else None
    job = ChatJob(MARKER.join(texts), GenerateOptions(), images, tuple(ends))
    return kept_places(session, job, tokens)


def test_a_token_that_a_place_cuts_is_after_it() -> None:
    assert places(["abcdefg"], [4, 5]) == (2,)
    assert places(["abcdefg"], [4, 6]) == (2, 3)
    assert places(["abcdefg"], [1]) == ()


def test_the_last_token_is_always_evaluated() -> None:
    assert places(["abcdef"], [6]) == (2,)


def test_places_before_between_and_after_images() -> None:
    texts = ["abcd", "efgh", "ijkl"]
    before, between, after = 2, 4 + 7 + 2, 4 + 7 + 4 + 7 + 2
    assert places(texts, [before, between, after]) == (1, 2 + 5 + 1, 2 + 5 + 2 + 5 + 1)
    # A tile is a group of places, so that only the first and the last text are found.
    assert places(texts, [before, between, after], 2) == (1, 2 + 10 + 2 + 10 + 1)


@pytest.mark.parametrize("n_images", [0, 1, 3])
@given(data=st.data())
def test_the_tokens_before_a_place_are_those_of_the_text_before_it(
    n_images: int, data: st.DataObject
) -> None:
    word = st.text("abcdef", min_size=2, max_size=9)
    texts = data.draw(st.lists(word, min_size=n_images + 1, max_size=n_images + 1))
    whole = MARKER.join(texts)
    at = data.draw(st.integers(0, n_images))
    start = sum(len(text) + len(MARKER) for text in texts[:at])
    end = start + data.draw(st.integers(1, len(texts[at])))
    n_before = sum(-(-len(text) // 2) + 5 for text in texts[:at])
    n_whole = (end - start) // 2 + (end == start + len(texts[at]) and (end - start) % 2)
    if end == len(whole):
        n_whole -= 1
    wanted = n_before + n_whole
    assert places(texts, [end]) == ((wanted,) if wanted else ())
