"""Measuring both sides of --min-batch on an opened engine."""

from __future__ import annotations

from collections.abc import Sequence

from offload.engine import Engine
from offload.plan.min_batch import NEVER, BothSides, MinBatch
from offload.timing import median_decode_s

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


def measure(engine: Engine, tokens: Sequence[int], repetitions: int = 2) -> list[BothSides]:
    """Time both sides at each size that fits, on the beginning of `tokens`, in sequence 0.

    The sequence is left empty, and the thresholds as they were.
    """
    sizes = [n for n in SIZES if n <= min(len(tokens), engine.options.n_outputs)]
    before = engine.min_batch

    def decode_s(n: int) -> float:
        engine.sequences.rewind(0, 0)
        return median_decode_s(engine.sequences, 0, [tokens[:n]] * (repetitions + 1))

    try:
        engine.set_min_batch_by_decoding(MinBatch(NEVER, NEVER))
        cpu = {n: decode_s(n) for n in sizes}
        engine.set_min_batch_by_decoding(MinBatch(1, 1))
        streamed = {n: decode_s(n) for n in sizes}
    finally:
        engine.sequences.rewind(0, 0)
        engine.set_min_batch_by_decoding(before)
    return [BothSides(n, cpu[n], streamed[n]) for n in sizes]
