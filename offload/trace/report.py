"""Computes figures that Perfetto does not show: hidden copying, and the causes of waits.

All functions except `read_events` and `read_report` are pure. `docs/trace.md` lists the events. If
a device computes asynchronously, its events cover only the submission of work, so the times of
computing are too short.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.trace.trace import (
    COMPUTE,
    COPY,
    CPU,
    LANES,
    PRODUCER,
    ROUND,
    TOKEN,
    EventValue,
    TraceEvent,
)

PREDICTED_WRONG = "predicted wrong"
SLOT_NOT_FREE = "slot not free"
LINK_BUSY = "link busy"
IDS_READBACK = "ids readback"
CAUSES = (PREDICTED_WRONG, SLOT_NOT_FREE, LINK_BUSY, IDS_READBACK)

Interval = tuple[float, float]


@dataclass(frozen=True)
class TraceReport:
    """The sums over a trace. Shares are 0 to 1, and 0 if the denominator is 0."""

    span_s: float
    copy_s: float  # seconds with a copy under way
    compute_s: float  # seconds in which the device or the CPU computed
    hidden_s: float  # seconds of copying and computing at once
    stalled_s: float  # seconds in which the computation waited
    stalled_by_cause_s: dict[str, float]  # seconds by cause, for all of CAUSES
    n_stalls: int
    copied_bytes: int
    n_dropped: int = 0  # events that the ring had no room for
    n_rounds: int = 0
    n_tokens: int = 0

    @property
    def overlap(self) -> float:
        """Share of the shorter of `copy_s` and `compute_s` in which both ran at once."""
        return self.hidden_s / shorter if (shorter := min(self.copy_s, self.compute_s)) else 0.0

    @property
    def link_utilisation(self) -> float:
        return self.copy_s / self.span_s if self.span_s else 0.0

    @property
    def link_bytes_per_s(self) -> float:
        """The link's mean speed while a copy was under way."""
        return self.copied_bytes / self.copy_s if self.copy_s else 0.0

    def as_json(self) -> dict[str, Any]:
        """Return plain data with units in the names, for the last line of a program's output."""
        return asdict(self) | {
            "overlap": self.overlap,
            "link_utilisation": self.link_utilisation,
            "link_bytes_per_s": self.link_bytes_per_s,
            "dropped_events": self.n_dropped,
        }


def read_report(path: str | Path) -> TraceReport:
    """Return the report of a trace file. Raises OffloadError if Trace.write did not write it."""
    return report(*read_events(path))


def read_events(path: str | Path) -> tuple[list[TraceEvent], int]:
    """Return (events, number of dropped events) of a trace file. Raises OffloadError."""
    if Path(path).exists() and not Path(path).is_file():
        raise OffloadError(f"cannot read the trace {path}: it is not a regular file")
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as e:
        raise OffloadError(f"cannot read the trace {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise OffloadError(f"{path} is not a trace: not JSON ({e})") from e
    other = document.get("otherData") if isinstance(document, dict) else None
    if not isinstance(other, dict) or other.get("producer") != PRODUCER:
        raise OffloadError(f"{path} is not a trace of ours: --trace FILE writes one")
    try:
        events = [_event(e) for e in document["traceEvents"] if e["ph"] == "X"]
        return events, int(other.get("dropped_events", 0))
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as e:
        raise OffloadError(f"{path} is a damaged trace: {type(e).__name__} {e}") from e


def _event(raw: dict[str, Any]) -> TraceEvent:
    start_s = raw["ts"] / 1e6
    args = dict(raw.get("args", {}))
    lane = LANES[LANES.index(raw["cat"])]
    return TraceEvent(lane, str(raw["name"]), start_s, start_s + raw["dur"] / 1e6, args)


def report(events: Iterable[TraceEvent], n_dropped: int = 0) -> TraceReport:
    """Return the report of these events. `n_dropped`: events that the trace has dropped."""
    ordered = sorted(events, key=lambda event: event.start_s)
    copies = [e for e in ordered if e.lane == COPY]
    waits = [e for e in ordered if e.lane == COMPUTE and "cause" in e.args]
    work = [e for e in ordered if e.lane in (COMPUTE, CPU) and "cause" not in e.args]
    copying, computing = union(_intervals(copies)), union(_intervals(work))
    known = _Copies(copies)
    stalls = [(_cause(wait, known), wait.end_s - wait.start_s) for wait in waits]
    stalls = [(cause, seconds) for cause, seconds in stalls if seconds > 0]
    by_cause = dict.fromkeys(CAUSES, 0.0)
    for cause, seconds in stalls:
        by_cause[cause] += seconds
    return TraceReport(
        span_s=max((e.end_s for e in ordered), default=0.0) - ordered[0].start_s
        if ordered
        else 0.0,
        copy_s=length(copying),
        compute_s=length(computing),
        hidden_s=length(intersection(copying, computing)),
        stalled_s=length(union(_intervals(waits))),
        stalled_by_cause_s=by_cause,
        n_stalls=len(stalls),
        copied_bytes=sum(int(e.args.get("bytes", 0)) for e in copies),
        n_dropped=n_dropped,
        n_rounds=sum(e.lane == ROUND and "n_tokens" in e.args for e in ordered),
        n_tokens=sum(e.lane == TOKEN for e in ordered),
    )


class _Copies:
    """An index of all copies by time and by layer, because a trace may have thousands of copies."""

    def __init__(self, copies: Sequence[TraceEvent]) -> None:
        """`copies` in order of their start."""
        self._copies = copies
        self._starts = [copy.start_s for copy in copies]
        self._latest_ends = list(accumulate((copy.end_s for copy in copies), max))
        self._first_guess: dict[tuple[EventValue, EventValue | None], float] = {}
        for copy in copies:
            if copy.args.get("reason") == "predicted" and "layer" in copy.args:
                key = copy.args["layer"], copy.args.get("graph")
                self._first_guess.setdefault(key, copy.start_s)

    def during(self, start_s: float, end_s: float) -> list[TraceEvent]:
        """Return the copies under way at any time from `start_s` to `end_s`, ordered by start."""
        first = bisect_right(self._latest_ends, start_s)
        last = bisect_left(self._starts, end_s)
        return [copy for copy in self._copies[first:last] if copy.end_s > start_s]

    def guessed_by(self, end_s: float, copy: TraceEvent) -> bool:
        """True if a predicted copy of the same layer and graph had begun by `end_s`."""
        key = copy.args["layer"], copy.args.get("graph")
        return self._first_guess.get(key, math.inf) <= end_s


def _cause(wait: TraceEvent, copies: _Copies) -> str:
    if wait.args["cause"] == "ids":
        return IDS_READBACK
    during = copies.during(wait.start_s, wait.end_s)
    # Copies end in order, so the awaited copy is the last one that ended by the end of the wait.
    ended = [c for c in during if c.end_s <= wait.end_s + 1e-9]
    awaited = max(ended or during, key=lambda c: c.end_s, default=None)
    busy_s = length(intersection(union(_intervals(during)), [(wait.start_s, wait.end_s)]))
    if awaited is None or busy_s < 0.5 * (wait.end_s - wait.start_s):
        return SLOT_NOT_FREE  # the link could have copied, but was not allowed to yet
    needed = awaited.args.get("reason") == "needed" and "layer" in awaited.args
    if needed and copies.guessed_by(wait.end_s, awaited):
        return PREDICTED_WRONG
    return LINK_BUSY


def _intervals(events: Iterable[TraceEvent]) -> list[Interval]:
    return [(e.start_s, e.end_s) for e in events]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the union of the intervals as ordered intervals that do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Return the times in both `a` and `b`. Each argument is a result of `union`."""
    both: list[Interval] = []
    i = j = 0
    while i < len(a) and j < len(b):
        start, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if start < end:
            both.append((start, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return both


def length(intervals: Iterable[Interval]) -> float:
    """Return the seconds that `intervals` cover. They must not overlap, as `union` ensures."""
    return sum(end - start for start, end in intervals)
