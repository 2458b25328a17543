"""The expected speeds of a plan as text."""

from __future__ import annotations

from specoffload.opening.planning import Planned


def rounded(value: float, n_digits: int = 2) -> str:
    """An estimate as text with `n_digits` significant digits: 162.6 is 160 with two."""
    value = float(f"{value:.{n_digits - 1}e}")
    return f"{value:,g}" if value < 1e5 else f"{value:,.0f}"


def speed_words(planned: Planned, *, full_context: bool = False) -> str:
    """The expected tokens/s of decoding: a number, or a range such as "40 to 100".

    It is a range if hits are guessed. It then begins with the speed of experts used equally often.
    `full_context`: at the end of the context, where a token attends to all others; otherwise at
    its beginning.
    """
    if full_context:
        most_tps = planned.expected["full_context_decode_tps"]
        least_tps = planned.least_full_context_decode_tps
    else:
        most_tps, least_tps = planned.expected["decode_tps"], planned.least_decode_tps
    return speed_range(least_tps, most_tps)


def mtp_speed(planned: Planned) -> str:
    """The expected tokens/s with drafts by the model's own layers, as a number or a range."""
    return speed_range(
        planned.expected["least_mtp_decode_tps"], planned.expected["most_mtp_decode_tps"]
    )


def prompt_words(planned: Planned) -> str:
    """The expected tokens/s of prompts."""
    return rounded(planned.expected["prefill_tps"])


def speed_range(least_tps: float, most_tps: float) -> str:
    """Two speeds as text, such as "40 to 100", or one if both look alike."""
    most, least = rounded(most_tps), rounded(least_tps)
    return most if least == most else f"{least} to {most}"
