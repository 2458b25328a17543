"""Logs a few logits of each row that judges drafts, to compare a run with another one.

Where two runs write different texts, the first row whose logits differ shows which decode it was.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.acceptance import MatchAcceptance, RejectionAcceptance, Verdict
from specdec.types import Draft, IsEnd

TRACE = 5  # level of these lines, below logging.DEBUG; llama.cpp's verbosity that shows them
_N_SHOWN = 3  # logits at each end of a row

log = logging.getLogger("specoffload.speculation")


def log_logits(draft: Draft, logits: NDArray[np.float32], history: list[int]) -> None:
    """Log the ends of each row of logits [1 + n drafted, n_vocab] after the text `history`.

    Row 0 follows the text's last token, and row i the i-th drafted token.
    """
    for i, (token, row) in enumerate(zip((history[-1], *draft.tokens), logits, strict=True)):
        first, last = (
            " ".join(f"{value:.5f}" for value in part) for part in (row[:_N_SHOWN], row[-_N_SHOWN:])
        )
        log.log(TRACE, "  %d tokens, row %d (token %d): %s ... %s",
                len(history), i, token, first, last)  # fmt: skip


class LoggedMatch(MatchAcceptance):
    """Judges as its base class does, and logs the rows before."""

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        log_logits(draft, logits, history)
        return super().__call__(draft, logits, history, is_end)

    def descend(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        log_logits(draft, logits, history)
        return super().descend(draft, logits, history, is_end)


class LoggedRejection(RejectionAcceptance):
    """Judges as its base class does, and logs the rows before."""

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        log_logits(draft, logits, history)
        return super().__call__(draft, logits, history, is_end)
