"""From how many tokens streaming beats the CPU: measured on this machine, decided purely.

llama.cpp's fixed 32 is too low for models of many experts on a fast link and too high on others
(docs/background.md, min-batch). Both sides are timed as whole decodes, so what they share cancels
out, and what an estimate of bytes ÷ bandwidth leaves out (router reads, cache hits, overlap)
counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NEVER = 1 << 30
_PAYS = 0.97  # streaming must be this much faster: a tie is noise, and the CPU needs no copies


@dataclass(frozen=True)
class MinBatch:
    """The number of tokens from which a streamed weight's product runs on the device.

    Below it the CPU computes the product in place, at native speed.
    """

    experts: int = 32
    dense: int = 32


@dataclass(frozen=True)
class BothSides:
    """One batch size: seconds of a decode with the CPU's products, and with streamed ones."""

    n_tokens: int
    cpu_s: float
    streamed_s: float


def choose(sides: Sequence[BothSides]) -> tuple[int, str]:
    """The smallest size from which on streaming pays at every measured size, and why."""
    chosen = None
    for side in sorted(sides, key=lambda s: s.n_tokens, reverse=True):
        if side.streamed_s > _PAYS * side.cpu_s:
            break
        chosen = side
    if chosen is None:
        last = max(sides, key=lambda s: s.n_tokens)
        return NEVER, (
            f"--min-batch auto: never; at {last.n_tokens} tokens streaming takes "
            f"{last.streamed_s * 1e3:.1f} ms and the CPU {last.cpu_s * 1e3:.1f} ms"
        )
    return chosen.n_tokens, (
        f"--min-batch auto: {chosen.n_tokens}; there streaming takes "
        f"{chosen.streamed_s * 1e3:.1f} ms and the CPU {chosen.cpu_s * 1e3:.1f} ms"
    )
