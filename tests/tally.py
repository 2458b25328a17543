"""Adds up the results of several pytest runs, for the last lines of `scripts/test`.

Each run appends a line to the file that the variable TALLY names. `python tests/tally.py FILE`
shows the skipped tests by reason, then one line with everything.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_FILE = "SPECOFFLOAD_TESTS_TALLY"
_NOT_INSTALLED = re.compile(r"^(\w+) is not installed\b|could not import '(\w+)'")
NO_GPU = "no GPU"
WIDE = "wide"
# A word of a reason, and the short name of all reasons that have it.
_SHORT = {
    "finds no GPU": NO_GPU,
    "chromium": "no browser",
    "one processor": "one processor",
    "root": "root",
    "memory node": "memory nodes",
    "AMX": "no AMX",
    "page cache": "page cache",
    "not installed": "not installed",
}


@dataclass
class Tally:
    """Counts of one or several runs. `skipped` has the skipped tests by reason."""

    passed: int = 0
    failed: int = 0  # errors of fixtures included
    wide: int = 0  # tests of tests/wide.py that the run left out
    skipped: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.passed + other.passed,
            self.failed + other.failed,
            self.wide + other.wide,
            self.skipped + other.skipped,
        )


def short(reason: str) -> str:
    """Return a reason of a skip in a few words, such as "no GPU" or "no torch"."""
    if found := _NOT_INSTALLED.search(reason):
        return f"no {found[1] or found[2]}"
    known = (name for word, name in _SHORT.items() if word in reason)
    return next(known, reason if len(reason) <= 24 else "other")


def tally_of(stats: Mapping[str, Iterable[Any]], n_wide: int) -> Tally:
    """Return the counts of a terminal reporter's `stats`."""
    skipped: Counter[str] = Counter()
    for report in stats.get("skipped", ()):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        skipped[reason.removeprefix("Skipped: ")] += 1
    count = {name: sum(1 for _ in stats.get(name, ())) for name in ("passed", "failed", "error")}
    return Tally(count["passed"], count["failed"] + count["error"], n_wide, skipped)


def keep(tally: Tally) -> None:
    """Append the counts to the file that the variable names, if it is set."""
    if name := os.environ.get(_FILE):
        with Path(name).open("a") as file:
            file.write(json.dumps(vars(tally)) + "\n")


def total(lines: Iterable[str]) -> Tally:
    """Add up what `keep` wrote."""
    runs = (json.loads(line) for line in lines)
    return sum((Tally(**{**run, "skipped": Counter(run["skipped"])}) for run in runs), Tally())


def reason_lines(skipped: Mapping[str, int]) -> list[str]:
    """Return a line for each reason, most tests first."""
    by_count = sorted(skipped.items(), key=lambda entry: (-entry[1], entry[0]))
    return [f"{n:5,} skipped: {reason}" for reason, n in by_count]


def last_line(tally: Tally, seconds: float) -> str:
    """Return one line on everything, in which wide tests that were left out count as skipped."""
    by_name: Counter[str] = Counter()
    for reason, n in tally.skipped.items():
        by_name[short(reason)] += n
    if tally.wide:
        by_name[WIDE] = tally.wide
    told = ", ".join(f"{name} {n:,}" for name, n in by_name.most_common())
    took = f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
    return (
        f"{tally.passed:,} passed, {tally.failed:,} failed, {by_name.total():,} skipped in {took}"
        f"{f' ({told})' if told else ''}"
    )


def main() -> int:
    """Show the total of the file, and the seconds that the caller counted. Fails if a test did."""
    path, seconds = Path(sys.argv[1]), float(sys.argv[2])
    tally = total(path.read_text().splitlines())
    if tally.wide:
        print(f"{tally.wide:5,} skipped: wide, scripts/test-wide runs them (tests/wide.py)")
    print(*reason_lines(tally.skipped), sep="\n")
    print(last_line(tally, seconds))
    return 1 if tally.failed else 0


if __name__ == "__main__":
    sys.exit(main())
