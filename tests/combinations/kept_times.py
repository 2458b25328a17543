"""Disturbs a kept measurement as a busy machine does, and asks whether later starts believe it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from offload.schedule.division import SideTimes

_DISTURBED = 300.0  # factor on the time of a thread that another program interrupts
# Largest ratio of two times of an expert, divided by the ratio of their rows. A thread that was
# interrupted a little may still be believed.
_MOST_RATIO = 40.0


def disturb(kept: Path) -> None:
    """Let one time of each side of split layers be `_DISTURBED` times as long."""
    for path in kept.rglob("*.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        for times in _sides(found):
            rows = sorted(times["by_rows_s"], key=int)
            times["by_rows_s"][rows[len(rows) // 2]] *= _DISTURBED
        path.write_text(json.dumps(found), encoding="utf-8")


def spoilt_times(kept: Path) -> Iterator[str]:
    """A fault for each side whose times of few rows are believed and those of many absurd."""
    for path in kept.rglob("*.json"):
        for times in _sides(json.loads(path.read_text(encoding="utf-8"))):
            by_rows_s = {int(n): s for n, s in times["by_rows_s"].items()}
            believed = SideTimes(by_rows_s, times["fixed_s"]).array()
            least = min(believed[n] / n for n in by_rows_s)
            for n in by_rows_s:
                if believed[n] > _MOST_RATIO * n * least:
                    yield (
                        f"an expert of {n} rows is believed to take {believed[n] * 1e6:.0f} us, "
                        f"where a row takes {least * 1e6:.2f} us"
                    )
                    break


def _sides(found: Any) -> Iterator[dict[str, Any]]:
    """The times of both sides of split layers, in a file of kept measurements."""
    for run in found.get("runs", ()):
        for costs in (run.get("split"), *run.get("splits", {}).values()):
            if costs:
                yield from (costs["host"], costs["device"])
