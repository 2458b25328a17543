"""Records rounds of speculation: a debug log line for each, and a trace for the simulator."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

from specdec.types import Round
from specdec.whole_file import write_text
from specoffload.errors import UsageError

log = logging.getLogger("specoffload.speculation")


def log_round(number: int, round_: Round) -> None:
    """Log the draft of a round, its accepted tokens and its times. `number` counts from 1."""
    draft = round_.draft
    probs = (*draft.probs, *(p for _, p in draft.dropped))
    log.debug(
        "round %d: %d drafted by %s, %d verified, probability of all %.3f, %d accepted, "
        "draft %.2f ms, verify %.2f ms: %s",
        number,
        len(probs),
        draft.source,
        len(draft.tokens),
        math.prod(probs),
        round_.n_accepted,
        1e3 * round_.draft_s,
        1e3 * round_.verify_s,
        draft.decision.reason,
    )


class RoundTrace:
    """Collects the rounds of one run for `lab/run simulate`, and writes them as JSONL.

    Each token has a line with the draft's probability `p`, with `accepted`, and with `source`. `p`
    and `accepted` are null for tokens that were not drafted. These are the target's own token after
    a wholly accepted draft, and the tokens of rounds without a draft.
    """

    def __init__(self, path: Path) -> None:
        """Write an empty file. Raises UsageError if it cannot be written."""
        self._path = path
        self._lines: list[str] = []
        self.write()

    def add(self, round_: Round) -> None:
        source = round_.draft.source
        for p, accepted in round_.evidence:
            record = {"p": min(1.0, p), "accepted": accepted, "source": source}
            self._lines.append(json.dumps(record))
        for _ in range(len(round_.emitted) - len(round_.evidence)):
            self._lines.append(json.dumps({"p": None, "accepted": None, "source": source}))

    def write(self) -> None:
        """Write all rounds so far. Raises UsageError."""
        try:
            write_text(self._path, "".join(f"{line}\n" for line in self._lines))
        except OSError as e:
            raise UsageError(f"{self._path}: {e}") from e
