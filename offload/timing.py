"""The time of a decode, as everything that measures takes it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Sequence

from offload.sequences import Sequences


def decode_s(
    sequences: Sequences, sequence: int, tokens: Sequence[int], n_logits: int | None = None
) -> float:
    """Seconds of one decode, behind which the sequence has grown."""
    start_s = time.perf_counter()
    sequences.extend(sequence, tokens, n_logits)
    return time.perf_counter() - start_s


def median_decode_s(
    sequences: Sequences,
    sequence: int,
    batches: Iterable[Sequence[int]],
    *,
    n_logits: int | None = None,
    grow: bool = False,
) -> float:
    """Median seconds of the decodes of `batches`; the first warms up and does not count.

    Each is taken back before the next, unless the sequence is to `grow`.
    """
    length = sequences.length(sequence)
    times = []
    for batch in batches:
        times.append(decode_s(sequences, sequence, batch, n_logits))
        if not grow:
            sequences.rewind(sequence, length)
    return statistics.median(times[1:])
