"""Which prompts a step reads, how much of them, and when a step is stopped for a new request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.slots.prompt_share import PromptReads, PromptShare, free_tokens

PIECE = 512
WHOLE = 2048  # tokens of a batch


def share_of(*, keeps: bool = True, n_batch: int = WHOLE) -> PromptShare:
    return PromptShare(PIECE, n_batch, keeps_ubatches=keeps)


def after_a_piece(piece_s: float, *, keeps: bool = True, n_batch: int = WHOLE) -> PromptShare:
    """A share that knows how long a long prompt's step takes, and has chosen the next one."""
    share = share_of(keeps=keeps, n_batch=n_batch)
    share.choose(0, [4 * n_batch], is_first=False)
    share.took(piece_s, has_rounds=False, has_prompts=True)
    share.choose(0, [3 * n_batch], is_first=False)
    return share


# -- between steps ---------------------------------------------------------------------------------


def test_a_prompt_alone_has_no_limit() -> None:
    assert share_of().choose(0, [9000], is_first=False) == PromptReads(None, (0,))


def test_prompts_and_rounds_have_the_same_time() -> None:
    """A piece of a prompt takes 8 times as long as a round, so 8 rounds follow each piece."""
    share = share_of()
    pieces, rounds_s, pieces_s = [], 0.0, 0.0
    for _ in range(90):
        n = share.choose(4, [9000], is_first=False).n_tokens
        assert n is not None
        step_s = 0.8 if n else 0.1
        pieces.append(n)
        share.took(step_s, has_rounds=True, has_prompts=bool(n))
        rounds_s, pieces_s = rounds_s + 0.1 * (not n), pieces_s + step_s * bool(n)
    assert set(pieces) == {0, PIECE}
    assert rounds_s == pytest.approx(pieces_s, rel=0.15)


def test_tokens_ride_along_where_they_cost_next_to_nothing() -> None:
    flat = (1.0, 1.01, 1.02, 1.03, 1.04, 1.2, 1.3)
    assert free_tokens(1, flat) == 4
    assert free_tokens(5, flat) == 0
    assert free_tokens(8, flat) == 0
    share = share_of()
    assert share.choose(1, [9000], flat, is_first=False).n_tokens == PIECE
    share.took(5.0, has_rounds=True, has_prompts=True)
    assert share.choose(1, [9000], flat, is_first=False).n_tokens == 4


def test_while_nothing_runs_prompts_owe_nothing() -> None:
    share = share_of()
    share.choose(1, [9000], is_first=False)
    share.took(5.0, has_rounds=True, has_prompts=True)
    assert share.choose(1, [9000], is_first=False).n_tokens == 0
    share.took(5.0, has_rounds=False, has_prompts=True)
    assert share.choose(1, [9000], is_first=False).n_tokens == PIECE


def test_a_short_prompt_is_read_before_a_long_one_and_its_first_token_comes_at_once() -> None:
    share = after_a_piece(5.0)
    assert share.choose(0, [6000, 16], is_first=False) == PromptReads(16, (1,))
    share.took(0.1, has_rounds=False, has_prompts=True)
    assert share.choose(1, [6000], is_first=True).n_tokens == 0
    share.took(0.1, has_rounds=True, has_prompts=False)
    assert share.choose(1, [6000], is_first=False) == PromptReads(PIECE, (0,))


def test_prompts_of_similar_length_are_read_in_the_order_of_their_arrival() -> None:
    assert share_of().choose(0, [6000, 5000, 7000], is_first=False) == PromptReads(None, (0, 1, 2))
    assert share_of().choose(0, [20, 20], is_first=False) == PromptReads(None, (0, 1))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4), st.integers(1, 9))
def test_short_prompts_without_end_leave_a_long_one_half_of_the_time(
    short: list[int], pieces: int
) -> None:
    """A step of short prompts takes a second, and another one follows it at once."""
    share = after_a_piece(10.0)
    share.took(10.0, has_rounds=False, has_prompts=True)
    short_s = long_s = 0.0
    while long_s < 10.0 * pieces:
        chosen = share.choose(0, [90_000, *short], is_first=False)
        reads_long = 0 in chosen.prompts
        short_s, long_s = short_s + (not reads_long), long_s + 10.0 * reads_long
        share.took(10.0 if reads_long else 1.0, has_rounds=False, has_prompts=True)
    assert short_s <= long_s + 2.0


# -- during a step ---------------------------------------------------------------------------------


def test_an_ubatch_is_stopped_in_its_first_half_and_its_end_is_awaited_in_the_second() -> None:
    share = after_a_piece(40.0)  # four ubatches of 10 s
    waits = [share.is_worth_stopping(16, at_s) for at_s in (1.0, 4.9, 5.5, 9.9, 10.1, 14.0, 16.0)]
    assert waits == [True, True, False, False, True, True, False]
    assert not share.is_worth_stopping(16, 39.7), "the step ends soon"


def test_where_a_stop_loses_the_whole_step_its_half_decides() -> None:
    share = after_a_piece(40.0, keeps=False)
    assert [share.is_worth_stopping(16, at_s) for at_s in (12.0, 19.0, 21.0)] == [True, True, False]


def test_only_short_requests_stop_only_long_steps() -> None:
    share = after_a_piece(40.0)
    assert share.is_worth_stopping(WHOLE // 8, 1.0)
    assert not share.is_worth_stopping(WHOLE // 8 + 1, 1.0)
    quick = after_a_piece(0.4)
    assert not quick.is_worth_stopping(16, 0.1)
    held = after_a_piece(40.0)
    held.choose(0, [6000, 16], is_first=False)
    assert not held.is_worth_stopping(1, 1.0), "it reads a short prompt"


def test_a_first_piece_whose_time_is_unknown_is_stopped_once() -> None:
    share = share_of()
    share.choose(0, [9000], is_first=False)
    assert [share.is_worth_stopping(16, at_s) for at_s in (0.1, 0.6)] == [False, True]
    share.was_stopped(0.6)
    assert share.choose(0, [9000, 16], is_first=False) == PromptReads(16, (1,))
    share.took(0.1, has_rounds=False, has_prompts=True)
    share.choose(1, [9000], is_first=False)
    assert not share.is_worth_stopping(16, 5.0)


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=30), st.booleans())
def test_a_long_prompt_never_loses_more_time_than_its_piece_takes(
    arrivals_s: list[float], keeps: bool
) -> None:
    """Whenever short requests arrive, a piece of 20 s is complete after twice that time."""
    share = after_a_piece(20.0, keeps=keeps)
    lost_s = 0.0
    for at_s in arrivals_s:
        if share.is_worth_stopping(1, at_s):
            lost_s += share._lost_s(at_s)
            share.was_stopped(at_s)
            share.choose(0, [3 * WHOLE], is_first=False)
    assert lost_s <= 20.0
