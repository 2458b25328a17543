"""Recording rounds for the simulator: (draft p, accepted) of every drafted token that was judged.

A token that nobody drafted (the target's own after a full acceptance, rounds without a draft)
leaves no record, so a trace says most where drafts are long: record with `--policy fixed`.
"""

from __future__ import annotations

import json
from pathlib import Path

from specdec.types import Round
from specoffload.errors import UsageError


class RoundTrace:
    """Rounds of one run, written as JSONL in the form that `specoffload simulate` reads."""

    def __init__(self, path: Path) -> None:
        """Raises UsageError when the file cannot be written, before any work is done."""
        self._path = path
        self._lines: list[str] = []
        self._write([])

    def add(self, round_: Round) -> None:
        for p, accepted in round_.evidence:
            record = {"p": min(1.0, p), "accepted": accepted, "segment": round_.draft.source}
            self._lines.append(json.dumps(record))

    def write(self) -> None:
        self._write(self._lines)

    def _write(self, lines: list[str]) -> None:
        try:
            self._path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        except OSError as e:
            raise UsageError(f"--record-trace {self._path}: {e}") from e
