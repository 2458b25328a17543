"""Rounds of speculation for other eyes: a log line each with -vv, and a trace for the simulator."""

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
    """Log the round's draft, its judgement and its times. `number` counts from 1."""
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
    """Rounds of one run as JSONL: (draft p, accepted) of every token, for `lab/run simulate`.

    p and accepted are null for a token that was not drafted: the target's own token after full
    acceptance, and the tokens of rounds without a draft.
    """

    def __init__(self, path: Path) -> None:
        """Raises UsageError when the file cannot be written, before any work is done."""
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
