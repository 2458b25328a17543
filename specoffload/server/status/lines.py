"""The lines that a server says to whoever runs it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from specoffload.session.generation import GenerationStats

_OF_THE_PLAN = ("device ", "streamed: ", "experts: ", "draft: ")


def plan_of(notes: Sequence[str]) -> list[str]:
    """Of a session's start-up lines, those on what lies where."""
    return [note for note in notes if note.startswith(_OF_THE_PLAN)]


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
