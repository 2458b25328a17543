"""The prompt for filling in the middle."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import NotSupported
from specoffload.session.infill import Fill, FillMarkers, fill_prompt

PRE, SUF, MID, REPO, FILE, BOS = 1001, 1002, 1003, 1004, 1005, 1000
ALL = FillMarkers(PRE, SUF, MID, REPO, FILE)


def _prompt(fill: Fill, markers: FillMarkers = ALL, n_room: int = 10_000) -> list[int]:
    return fill_prompt(
        fill, markers, lambda text: list(text.encode()), beginning=[BOS], n_room=n_room
    )


def test_the_middle_is_asked_for_after_prefix_and_suffix() -> None:
    assert _prompt(Fill("ab", "c", "x")) == [BOS, PRE, *b"abx", SUF, *b"c", MID]


def test_the_suffix_may_come_first() -> None:
    fill = Fill("ab", "c", "x", extra=(("f.py", "t"),))
    tokens = fill_prompt(
        fill, ALL, lambda text: list(text.encode()), beginning=[BOS], n_room=99, suffix_first=True
    )
    assert tokens[-7:] == [SUF, *b"c", PRE, *b"abx", MID]
    assert tokens[:-7] == _prompt(fill)[:-7]


def test_other_files_stand_before_under_their_names() -> None:
    fill = Fill("a", "c", extra=(("f.py", "t"),))
    head = [BOS, REPO, *b"project\n", FILE, *b"f.py\n", *b"t", FILE, *b"filename\n"]
    assert _prompt(fill) == [*head, PRE, *b"a", SUF, *b"c", MID]
    plain = _prompt(fill, FillMarkers(PRE, SUF, MID))
    assert plain == [BOS, *b"\n\n--- snippet ---\n\nt", PRE, *b"a", SUF, *b"c", MID]


_text = st.text(st.characters(codec="ascii"), max_size=60)


@given(_text, _text, st.text(st.characters(codec="ascii"), max_size=5), _text, st.integers(10, 150))
def test_what_does_not_fit_is_left_out_far_from_the_hole(
    before: str, after: str, prompt: str, other: str, n_room: int
) -> None:
    tokens = _prompt(Fill(before, after, prompt, (("f", other),)), n_room=n_room)
    assert len(tokens) <= n_room
    assert tokens[0] == BOS
    start, middle = tokens.index(PRE), tokens.index(SUF)
    kept = bytes(tokens[start + 1 : middle])
    assert kept.endswith(prompt.encode())
    assert (before + prompt).encode().endswith(kept)
    assert after.encode().startswith(bytes(tokens[middle + 1 : -1]))
    assert tokens[-1] == MID
    whole = _prompt(Fill(before, after, prompt))
    if len(whole) <= n_room:
        assert tokens[start:] == whole[1:]  # other files displace no text near the hole


@pytest.mark.parametrize("lacking", [(-1, SUF, MID), (PRE, -1, MID), (PRE, SUF, -1)])
def test_a_model_without_the_tokens_says_so(lacking: tuple[int, int, int]) -> None:
    with pytest.raises(NotSupported, match="no token before the"):
        _prompt(Fill("a", "b"), FillMarkers(*lacking))
