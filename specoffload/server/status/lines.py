"""The lines that a server says to whoever runs it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specoffload.session.generation import GenerationStats

_OF_THE_PLAN = ("device ", "streamed: ", "experts: ", "draft: ")
_FAILED_TO_KEEP = ("not stored", "not kept:")


def plan_of(notes: Sequence[str]) -> list[str]:
    """Select the start-up lines that say what lies where, or that a measurement could not be kept
    and is made again at each start."""
    return [
        note
        for note in notes
        if note.startswith(_OF_THE_PLAN) or any(words in note for words in _FAILED_TO_KEEP)
    ]


def prompt_line(number: int, n_read: int, n_prompt: int, for_s: float) -> str:
    """One line for a prompt of which a part is evaluated."""
    return f"#{number}: prompt {n_read} of {n_prompt} tokens in {for_s:.0f} s"


def abandoned_line(number: int, n_tokens: int, for_s: float | None) -> str:
    """One line for an answer that nobody waits for any more, which ran for `for_s` seconds (None:
    not at all)."""
    if for_s is None:
        done = "while it waited in the queue"
    elif not n_tokens:
        done = f"before its first token, after {for_s:.1f} s"
    else:
        done = f"after {n_tokens} tokens in {for_s:.1f} s"
    return f"#{number}: cancelled, since the client has gone, {done}"


def request_line(number: int, stats: GenerationStats) -> str:
    """One line for an answer."""
    parts = [
        f"#{number}: {stats.n_tokens} tokens, {stats.tokens_per_s:.1f} t/s",
        f"prompt {stats.n_prompt_tokens} ({stats.n_cached_tokens} cached) in "
        f"{stats.prefill_s:.2f} s",
    ]
    if stats.acceptance_rate is not None:
        parts.append(f"acceptance {stats.acceptance_rate:.0%}")
    if stats.streamed_bytes:
        parts.append(f"streamed {stats.streamed_bytes / 2**20:.0f} MiB")
    return " · ".join(parts)
