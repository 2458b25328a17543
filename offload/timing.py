"""Measures the time of decodes. All measurements use these functions.

Every timed decode gets the next tokens of a text. If it repeated tokens that were just decoded,
their experts would still be in fast memory, and the decode would be faster than later ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence

from offload.sequences import Sequences

Clock = Callable[[], float]


def decode_s(
    sequences: Sequences,
    sequence: int,
    tokens: Sequence[int],
    n_logits: int | None = None,
    clock: Clock = time.perf_counter,
) -> float:
    """Append the tokens to a sequence in one decode, and return the decode's seconds."""
    start_s = clock()
    sequences.extend(sequence, tokens, n_logits)
    return clock() - start_s


def median_decode_s(
    sequences: Sequences,
    sequence: int,
    batches: Iterable[Sequence[int]],
    *,
    n_logits: int | None = None,
    grow: bool = False,
) -> float:
    """Return the median seconds of decodes of `batches`. The first one warms up and is not counted.

    Each batch is rewound before the next one, unless `grow` is set.
    """
    length = sequences.length(sequence)
    times = []
    for batch in batches:
        times.append(decode_s(sequences, sequence, batch, n_logits))
        if not grow:
            sequences.rewind(sequence, length)
    return statistics.median(times[1:])


class TextWalk:
    """Decodes a text batch by batch, at about `depth` tokens of context.

    Before the sequence would exceed `depth` + `span` tokens, it is rewound to `depth`. The text is
    started again only after its end.
    """

    def __init__(
        self, target: Sequences, sequence: int, text: Sequence[int], depth: int, span: int
    ) -> None:
        self._target, self._sequence, self._text = target, sequence, text
        self._depth, self._end = depth, min(depth + span, target.n_ctx)
        target.rewind(sequence, 0)
        if depth:
            target.extend(sequence, text[:depth], 0)
        # Snapshots of the last decode cannot rewind this far.
        recurrent = depth and not target.can_rewind
        self._checkpoint = target.checkpoint(sequence) if recurrent else None
        self._at = depth if depth + span <= len(text) else 0

    def time_s(
        self, n: int, clock: Clock = time.perf_counter, n_logits: int | None = None
    ) -> float:
        """Decode the next `n` tokens, and return the decode's seconds."""
        if self._target.length(self._sequence) + n > self._end:
            self._cut_back()
        return decode_s(self._target, self._sequence, self._next(n), n_logits, clock)

    def lead(self, n: int, n_decodes: int, n_logits: int | None = None) -> None:
        """Decode the next tokens without timing, in `n_decodes` batches of `n`."""
        for _ in range(n_decodes):
            self.time_s(n, n_logits=n_logits)

    def _next(self, n: int) -> list[int]:
        taken = list(self._text[self._at : self._at + n])
        while len(taken) < n:
            taken += self._text[: n - len(taken)]
        self._at = (self._at + n) % len(self._text)
        return taken

    def _cut_back(self) -> None:
        if self._checkpoint is None:
            self._target.rewind(self._sequence, self._depth)
        else:
            self._target.restore(self._sequence, self._checkpoint)
