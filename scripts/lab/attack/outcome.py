"""The result of one part of the attack: how its tries ended, and its breaches (failed checks)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_MOST_SHOWN = 20  # most breaches shown of each part


@dataclass(frozen=True)
class Breach:
    """A failed check, and the command that repeats it."""

    what: str
    command: str


@dataclass
class Outcome:
    """The result of one part. `tally` counts how its tries ended; `figures` are also shown."""

    part: str
    n_tries: int = 0
    tally: Counter[str] = field(default_factory=Counter)
    figures: dict[str, Any] = field(default_factory=dict)
    breaches: list[Breach] = field(default_factory=list)
    took_s: float = 0.0


def show(outcomes: list[Outcome], console: Console) -> None:
    """Print the outcomes as a table, then the breaches with their commands."""
    table = Table("part", "tries", "seconds", "how they ended", "figures", "breaches")
    for outcome in outcomes:
        ended = ", ".join(f"{n} {what}" for what, n in outcome.tally.most_common())
        figures = "\n".join(f"{name} {value}" for name, value in outcome.figures.items())
        n = len(outcome.breaches)
        style = "red" if n else "green"
        counted = f"[{style}]{n}[/]"
        row = (outcome.part, str(outcome.n_tries), f"{outcome.took_s:.1f}")
        table.add_row(*row, escape(ended), escape(figures), counted)
    console.print(table)
    for outcome in outcomes:
        for breach in outcome.breaches[:_MOST_SHOWN]:
            console.print(f"{outcome.part}: {breach.what}", markup=False, highlight=False)
            console.print(f"    {breach.command}", markup=False, highlight=False, soft_wrap=True)
        if len(outcome.breaches) > _MOST_SHOWN:
            console.print(f"{outcome.part}: {len(outcome.breaches) - _MOST_SHOWN} more")
