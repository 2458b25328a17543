"""Reads a trace file back: how much of the copying was hidden, and why the computation stood still.

Pure. `docs/trace.md` lists the events it understands. Times are what was recorded: an event of a
device that computes asynchronously covers no more than its submission.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.trace import COMPUTE, COPY, CPU, LANES, PRODUCER, ROUND, TOKEN, Event, Value

PREDICTED_WRONG = "predicted wrong"
SLOT_NOT_FREE = "slot not free"
LINK_BUSY = "link busy"
IDS_READBACK = "ids readback"
CAUSES = (PREDICTED_WRONG, SLOT_NOT_FREE, LINK_BUSY, IDS_READBACK)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Stall:
    """The computation stood still."""

    start_s: float
    duration_s: float
    cause: str  # one of CAUSES
    waiting_for: str
    layer: int  # -1: unknown


@dataclass
class LayerTimes:
    """One layer's cost over the whole trace."""

    compute_s: float = 0.0
    copy_s: float = 0.0
    stalled_s: float = 0.0
    copied_bytes: int = 0


@dataclass(frozen=True)
class TraceReport:
    """Times of a trace; shares are 0..1, and 0 where there was nothing to share."""

    span_s: float
    copy_s: float  # some copy was under way
    compute_s: float  # the device or the CPU computed
    hidden_s: float  # both at once
    stalled_s: float
    copied_bytes: int
    stalls: tuple[Stall, ...]
    layers: dict[int, LayerTimes] = field(default_factory=dict)
    n_dropped: int = 0  # events that the ring had no room for
    n_clipped: int = 0  # slices that overlapped others of their track, and begin later
    n_rounds: int = 0
    n_tokens: int = 0

    @property
    def overlap(self) -> float:
        """Of the shorter of copying and computing, the share during which the other ran too."""
        return self.hidden_s / shorter if (shorter := min(self.copy_s, self.compute_s)) else 0.0

    @property
    def link_utilisation(self) -> float:
        return self.copy_s / self.span_s if self.span_s else 0.0

    @property
    def link_bytes_per_s(self) -> float:
        """While a copy was under way."""
        return self.copied_bytes / self.copy_s if self.copy_s else 0.0

    def stalled_by_cause(self) -> dict[str, float]:
        """Seconds for every cause, those that did not occur included."""
        by_cause = dict.fromkeys(CAUSES, 0.0)
        for stall in self.stalls:
            by_cause[stall.cause] += stall.duration_s
        return by_cause

    def as_json(self) -> dict[str, Any]:
        """Plain data with units in the names, for the last line of a program's output."""
        return {
            "span_s": self.span_s,
            "copy_s": self.copy_s,
            "compute_s": self.compute_s,
            "hidden_s": self.hidden_s,
            "overlap": self.overlap,
            "link_utilisation": self.link_utilisation,
            "link_bytes_per_s": self.link_bytes_per_s,
            "copied_bytes": self.copied_bytes,
            "stalled_s": self.stalled_s,
            "stalled_by_cause_s": self.stalled_by_cause(),
            "n_stalls": len(self.stalls),
            "n_rounds": self.n_rounds,
            "n_tokens": self.n_tokens,
            "dropped_events": self.n_dropped,
            "clipped_events": self.n_clipped,
        }


def read_report(path: str | Path) -> TraceReport:
    """The report of a trace file. Raises OffloadError for a file that is not one of ours."""
    events, n_dropped, n_clipped = read_events(path)
    return report(events, n_dropped, n_clipped)


def read_events(path: str | Path) -> tuple[list[Event], int, int]:
    """(events, how many were dropped, how many clipped) of a file that Trace.write wrote."""
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
        n_dropped, n_clipped = other.get("dropped_events", 0), other.get("clipped_events", 0)
        return events, int(n_dropped), int(n_clipped)
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as e:
        raise OffloadError(f"{path} is a damaged trace: {type(e).__name__} {e}") from e


def _event(raw: dict[str, Any]) -> Event:
    start_s = raw["ts"] / 1e6
    args = dict(raw.get("args", {}))
    lane = LANES[LANES.index(raw["cat"])]
    return Event(lane, str(raw["name"]), start_s, start_s + raw["dur"] / 1e6, args)


def report(events: Iterable[Event], n_dropped: int = 0, n_clipped: int = 0) -> TraceReport:
    """The events summed up."""
    ordered = sorted(events, key=lambda event: event.start_s)
    copies = [e for e in ordered if e.lane == COPY]
    waits = [e for e in ordered if e.lane == COMPUTE and "cause" in e.args]
    work = [e for e in ordered if e.lane in (COMPUTE, CPU) and "cause" not in e.args]
    copying, computing = union(_intervals(copies)), union(_intervals(work))
    known = _Copies(copies)
    stalls = tuple(stall for wait in waits if (stall := _stall(wait, known)) is not None)
    return TraceReport(
        span_s=max((e.end_s for e in ordered), default=0.0) - ordered[0].start_s
        if ordered
        else 0.0,
        copy_s=length(copying),
        compute_s=length(computing),
        hidden_s=length(intersection(copying, computing)),
        stalled_s=length(union(_intervals(waits))),
        copied_bytes=sum(int(e.args.get("bytes", 0)) for e in copies),
        stalls=stalls,
        layers=_layers(copies, work, waits),
        n_dropped=n_dropped,
        n_clipped=n_clipped,
        n_rounds=sum(e.lane == ROUND and "n_tokens" in e.args for e in ordered),
        n_tokens=sum(e.lane == TOKEN for e in ordered),
    )


def _layers(
    copies: Sequence[Event], work: Sequence[Event], waits: Sequence[Event]
) -> dict[int, LayerTimes]:
    layers: defaultdict[int, LayerTimes] = defaultdict(LayerTimes)
    for event in copies:
        times = layers[_layer(event)]
        times.copy_s += event.end_s - event.start_s
        times.copied_bytes += int(event.args.get("bytes", 0))
    for event in work:
        layers[_layer(event)].compute_s += event.end_s - event.start_s
    for event in waits:
        layers[_layer(event)].stalled_s += event.end_s - event.start_s
    return dict(sorted(layers.items()))


def _layer(event: Event) -> int:
    return int(event.args.get("layer", -1))


class _Copies:
    """All copies, found by time and by layer without looking at each: a trace has thousands."""

    def __init__(self, copies: Sequence[Event]) -> None:
        """`copies` in order of their start."""
        self._copies = copies
        self._starts = [copy.start_s for copy in copies]
        self._latest_ends = list(accumulate((copy.end_s for copy in copies), max))
        self._first_guess: dict[tuple[Value, Value | None], float] = {}
        for copy in copies:
            if copy.args.get("reason") == "predicted" and "layer" in copy.args:
                key = copy.args["layer"], copy.args.get("graph")
                self._first_guess.setdefault(key, copy.start_s)

    def during(self, start_s: float, end_s: float) -> list[Event]:
        """Those under way at some time in between, in order of their start."""
        first = bisect_right(self._latest_ends, start_s)
        last = bisect_left(self._starts, end_s)
        return [copy for copy in self._copies[first:last] if copy.end_s > start_s]

    def guessed_by(self, end_s: float, copy: Event) -> bool:
        """True if some piece of this copy's layer had been guessed, in the same graph."""
        key = copy.args["layer"], copy.args.get("graph")
        return self._first_guess.get(key, math.inf) <= end_s


def _stall(wait: Event, copies: _Copies) -> Stall | None:
    """Why the computation waited; None for a wait that took no time."""
    duration_s = wait.end_s - wait.start_s
    if duration_s <= 0:
        return None
    if wait.args["cause"] == "ids":
        return Stall(wait.start_s, duration_s, IDS_READBACK, "router ids", _layer(wait))
    during = copies.during(wait.start_s, wait.end_s)
    # Copies land in order: what is waited for is the last that ended by the end of the wait.
    ended = [c for c in during if c.end_s <= wait.end_s + 1e-9]
    awaited = max(ended or during, key=lambda c: c.end_s, default=None)
    name = awaited.name if awaited else "a copy"
    return Stall(
        wait.start_s, duration_s, _cause(wait, during, awaited, copies), name, _layer(wait)
    )


def _cause(wait: Event, during: Sequence[Event], awaited: Event | None, copies: _Copies) -> str:
    busy_s = length(intersection(union(_intervals(during)), [(wait.start_s, wait.end_s)]))
    if awaited is None or busy_s < 0.5 * (wait.end_s - wait.start_s):
        return SLOT_NOT_FREE  # the link could have copied, but was not allowed to yet
    needed = awaited.args.get("reason") == "needed" and "layer" in awaited.args
    if needed and copies.guessed_by(wait.end_s, awaited):
        return PREDICTED_WRONG
    return LINK_BUSY


def _intervals(events: Iterable[Event]) -> list[Interval]:
    return [(e.start_s, e.end_s) for e in events]


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """The same times as intervals in order that do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        elif end > start:
            merged.append((start, end))
    return merged


def intersection(a: Sequence[Interval], b: Sequence[Interval]) -> list[Interval]:
    """Times in both; `a` and `b` as `union` returns them."""
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
    """Seconds covered; `intervals` as `union` returns them."""
    return sum(end - start for start, end in intervals)
