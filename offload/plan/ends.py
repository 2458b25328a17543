"""Tells a plan's assumptions, and what another mix of prompts and answers would give. Pure.

On a small GPU, memory for fast prompts is missing for fast answers. A plan is a choice between
both, so the user is told the speeds of the plan for decoding alone if answers would be faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.times.decodes import best_s
from offload.times.hits import Sharing, expected_hits
from offload.times.machine import Machine
from offload.times.prompts import prefill_s
from offload.times.work import ModelWork

LEAST_GAIN = 1.1  # times as fast as the plan's decodes, from which the other end is worth a line


@dataclass(frozen=True)
class Speeds:
    """Expected tokens/s of a prompt, and of decoding token by token."""

    prefill_tps: float
    decode_tps: float

    @property
    def in_words(self) -> tuple[str, str]:
        """Both speeds with two significant digits."""
        each = (float(f"{tps:.1e}") for tps in (self.prefill_tps, self.decode_tps))
        prefill, decode = (f"{tps:,g}" for tps in each)
        return prefill, decode


def speeds_of(
    machine: Machine,
    work: ModelWork,
    sharing: Sharing,
    n_ubatch: int,
    n_prompt: int,
    *,
    hybrid: bool,
    prompt_work: ModelWork | None = None,
) -> Speeds:
    """Return the speeds with this use of device memory. With `hybrid`, decodes may be split.

    `prompt_work` includes a prompt's attention. None: `work`.
    """
    its_work = prompt_work or work
    prompt_s = float(prefill_s(machine, its_work, sharing, n_prompt, n_ubatch, hybrid=hybrid))
    return Speeds(n_prompt / prompt_s, 1 / float(best_s(machine, work, sharing, 1, hybrid=hybrid)))


def other_end(planned: Speeds, for_decode: Speeds) -> str:
    """Return a sentence with both ends, or "" if answers would hardly be faster."""
    if for_decode.decode_tps <= LEAST_GAIN * planned.decode_tps:
        return ""
    (prompts, answers), (others, faster) = planned.in_words, for_decode.in_words
    return (
        f"prompts {prompts} tokens/s and answers {answers}, or {others} and {faster} with "
        "--plan-for decode (estimate)"
    )


def hit_words(work: ModelWork, sharing: Sharing) -> str:
    """Return a sentence on the hits that a plan for split layers assumes, and their source."""
    rate = expected_hits(work, sharing, work.union(1))
    if work.hits is not None:
        return f"Speed assumes {rate:.0%} of experts already on the GPU ({work.hits.source})"
    return (
        f"Speed assumes {round(rate, 2):.0%} of experts already on the GPU "
        "(estimate; a run will measure it)"
    )
