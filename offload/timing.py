"""The time of a decode, as everything that measures takes it.

Every timed decode gets tokens that follow in a text. On tokens that were just decoded each expert
would still lie where it is fast to reach, and a batch would seem to cost what it never costs again.
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
    """Seconds of one decode, by which the sequence grows."""
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


class TextWalk:
    """Goes on through a text, at about `depth` tokens of context, batch by batch.

    The memory is cut back to `depth` tokens when it holds `span` more. The text begins anew only at
    its end.
    """

    def __init__(
        self, target: Sequences, sequence: int, text: Sequence[int], depth: int, span: int
    ) -> None:
        self._target, self._sequence, self._text = target, sequence, text
        self._depth, self._end = depth, min(depth + span, target.n_ctx)
        target.rewind(sequence, 0)
        if depth:
            target.extend(sequence, text[:depth], 0)
        # More is taken back here than the snapshots of a last decode reach.
        recurrent = depth and not target.can_rewind
        self._checkpoint = target.checkpoint(sequence) if recurrent else None
        self._at = depth if depth + span <= len(text) else 0

    def time_s(
        self, n: int, clock: Clock = time.perf_counter, n_logits: int | None = None
    ) -> float:
        """Seconds of a decode of the next `n` tokens."""
        if self._target.length(self._sequence) + n > self._end:
            self._cut_back()
        return decode_s(self._target, self._sequence, self._next(n), n_logits, clock)

    def lead(self, n: int, n_decodes: int, n_logits: int | None = None) -> None:
        """Untimed decodes of the next tokens, `n` each."""
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
