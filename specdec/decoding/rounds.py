"""The frame of all decoding loops: the start, the room for a draft, and the end of a generation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from specdec.errors import SpecDecError
from specdec.types import End, IsEnd, Round, Target

PlayRound = Callable[[int], Round]


def check_start(target: Target, sequence: int, prompt: Sequence[int], n_cached: int) -> None:
    """Raises SpecDecError unless `sequence` holds exactly the first `n_cached` tokens of a prompt
    that is longer than that."""
    if not prompt:
        raise SpecDecError("the prompt is empty: decoding starts from at least one token")
    if not 0 <= n_cached < len(prompt):
        raise SpecDecError(
            f"{n_cached} of {len(prompt)} prompt tokens are cached; the last must be evaluated "
            "anew, so rewind the target by one"
        )
    held = target.length(sequence)
    if held != n_cached:
        raise SpecDecError(
            f"sequence {sequence} holds {held} tokens where {n_cached} are said to be cached"
        )


def play_rounds(
    target: Target,
    history: list[int],
    n_predict: int,
    is_end: IsEnd,
    n_max: int,
    play: PlayRound,
) -> Iterator[Round]:
    """Rounds until one of them ends the generation; the last says why.

    `play(limit)` decodes one round of at most `limit` drafted tokens, appends what it emits to
    `history`, and leaves the target with all of the history but its last token.
    """
    n_left = n_predict
    end: End = ""
    while not end and n_left > 0 and len(history) <= target.n_ctx:
        # A round of m drafts feeds m + 1 tokens and may emit m + 1.
        round_ = play(max(0, min(n_left - 1, target.n_ctx - len(history), n_max)))
        n_left -= len(round_.emitted)
        end = end_of(target, history, n_left, is_end)
        yield replace(round_, end=end) if end else round_


def end_of(target: Target, history: Sequence[int], n_left: int, is_end: IsEnd) -> End:
    """Why no round follows, "" when one does."""
    if is_end(history[-1]):
        return "end"
    if n_left <= 0:
        return "length"
    return "context" if len(history) > target.n_ctx else ""
