"""From how many tokens streaming beats the CPU: measured on this machine, decided purely.

llama.cpp's fixed 32 is too low for models of many experts on a fast link and too high on others
(PEERS 3.1). Both sides are timed as whole decodes, so what they share cancels out, and what an
estimate of bytes ÷ bandwidth leaves out (router reads, cache hits, overlap) counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.device import MinBatch
from offload.engine import Engine
from offload.timing import median_decode_s

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
NEVER = 1 << 30
_PAYS = 0.97  # streaming must be this much faster: a tie is noise, and the CPU needs no copies


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


def measure(engine: Engine, tokens: Sequence[int], repetitions: int = 2) -> list[BothSides]:
    """Time both sides at each size that fits, on the beginning of `tokens`, in sequence 0.

    The sequence is left empty, and the thresholds as they were.
    """

    def median_s(n: int) -> float:
        engine.sequences.rewind(0, 0)
        return median_decode_s(engine.sequences, 0, [tokens[:n]] * (repetitions + 1))

    sizes = [n for n in SIZES if n <= min(len(tokens), engine.options.n_outputs)]
    before = engine.min_batch
    try:
        engine.set_min_batch_by_decoding(MinBatch(NEVER, NEVER))
        cpu = {n: median_s(n) for n in sizes}
        engine.set_min_batch_by_decoding(MinBatch(1, 1))
        streamed = {n: median_s(n) for n in sizes}
    finally:
        engine.set_min_batch_by_decoding(before)
    return [BothSides(n, cpu[n], streamed[n]) for n in sizes]
