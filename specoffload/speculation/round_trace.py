"""Recording rounds for the simulator: (draft p, accepted) of every token of the text.

A token that was not drafted is recorded as unknown, with p null. Such are the target's own token
after full acceptance, and rounds without a draft. Long drafts make a trace more informative even if
they are rejected, so record with `--spec-policy fixed --draft-max 16`.
"""

from __future__ import annotations

import json
from pathlib import Path

from specdec.types import Round
from specdec.whole_file import write_text
from specoffload.errors import UsageError


class RoundTrace:
    """Rounds of one run, written as JSONL in the form that `scripts/lab/run simulate` reads."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError when the file cannot be written, before any work is done."""
        self._path = path
        self._lines: list[str] = []
        self._write([])

    def add(self, round_: Round) -> None:
        source = round_.draft.source
        for p, accepted in round_.evidence:
            record = {"p": min(1.0, p), "accepted": accepted, "source": source}
            self._lines.append(json.dumps(record))
        for _ in range(len(round_.emitted) - len(round_.evidence)):
            self._lines.append(json.dumps({"p": None, "accepted": None, "source": source}))

    def write(self) -> None:
        self._write(self._lines)

    def _write(self, lines: list[str]) -> None:
        try:
            write_text(self._path, "".join(f"{line}\n" for line in lines))
        except OSError as e:
            raise UsageError(f"{self._path}: {e}") from e
