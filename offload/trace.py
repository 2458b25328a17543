"""A trace: a ring of timed events in lanes, written in Chrome's trace format.

`NO_TRACE` is false and records nothing: guard events that are costly to describe with `if trace:`.
The file opens in https://ui.perfetto.dev and chrome://tracing. docs/trace.md lists the events, and
offload/trace_report.py reads them back.

Slices of one track must nest or be disjoint, because Perfetto drops overlapping ones. So each kind
has its own track, and slices that still overlap are clipped and counted.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from offload.errors import NotWritten, OffloadError

COPY, COMPUTE, CPU, ROUND, TOKEN = "copy", "compute", "CPU", "round", "token"
LANES = (COPY, COMPUTE, CPU, ROUND, TOKEN)  # tokens have a track for each slot, behind the others
COUNTER = "counter"  # lane of samples of numbers, which are not slices
PRODUCER = "specoffload"  # trace_report refuses files without it
Value = str | int | float

_OF_THE_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO}  # not the path's fault
# Perfetto takes thread 0, and one that is numbered like its process, for the same main thread.
_PROCESS, _FIRST_THREAD = 1, 10
_BIN_NS = 1_000_000  # nanoseconds over which the link's speed is averaged
_CAPACITY = 1 << 18  # newest events kept; about 60 MB of them


class Event(NamedTuple):
    """A slice of time, or a sample of COUNTER. Times are seconds of time.perf_counter."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Value]


class Trace:
    """Keeps the newest events. Several threads may add events at the same time."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        """`capacity`: events kept; older ones are dropped and counted."""
        self._events: deque[Event] = deque(maxlen=capacity)
        self._n_added = 0
        self.totals: dict[str, Value] = {}  # counts over the same time, written to the file too

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self._events)

    @property
    def n_dropped(self) -> int:
        return self._n_added - len(self._events)

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: Value) -> None:
        """Record an event in one of LANES. `args` are shown with it and read by the report."""
        self._n_added += 1
        self._events.append(Event(lane, name, start_s, end_s, args))

    def sample(self, name: str, at_s: float, **values: int | float) -> None:
        """Record numbers that hold from `at_s` on; each is shown as a line of its own."""
        self.add(COUNTER, name, at_s, at_s, **values)

    def restart(self) -> None:
        """Forget all recorded events; the trace begins now."""
        self._events.clear()
        self._n_added = 0

    def events(self) -> list[Event]:
        """Return a copy of the events, in the order of adding."""
        return list(self._events)

    def write(self, path: str | Path) -> None:
        """Write a trace file, in which times start at 0.

        Raises NotWritten if the disk is full or fails, OffloadError if the path cannot be written.
        """
        slices, n_clipped = laid_out(self.events())
        other = {
            "producer": PRODUCER,
            "dropped_events": self.n_dropped,
            "clipped_events": n_clipped,
            **self.totals,
        }
        document = {
            "displayTimeUnit": "ms",
            "otherData": other,
            "traceEvents": chrome_events(slices, self.events(), self.n_dropped),
        }
        try:
            with open(path, "w", encoding="utf-8") as f:
                json.dump(document, f, separators=(",", ":"), ensure_ascii=False)
        except OSError as e:
            with contextlib.suppress(OSError):
                if Path(path).is_file():
                    Path(path).unlink()  # half a trace is none
            words = f"the trace could not be written to {path}: {e.strerror}"
            kind = NotWritten if e.errno in _OF_THE_DISK else OffloadError
            raise kind(words) from e


class _NoTrace(Trace):
    """Tracing is off."""

    def __bool__(self) -> bool:
        return False

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: Value) -> None:
        pass


NO_TRACE: Trace = _NoTrace(0)


class Slice(NamedTuple):
    """An event on a track. Times are nanoseconds since the first event."""

    track: int
    start_ns: int
    end_ns: int
    event: Event


def laid_out(events: Sequence[Event]) -> tuple[list[Slice], int]:
    """Return the slices of all tracks, ordered by start, and how many were clipped. Pure.

    On each track slices nest or are disjoint. A slice that begins in another and ends after it is
    clipped: it then begins where the other ends.
    """
    zero_s = _zero_s(events)
    tracks: defaultdict[int, list[Slice]] = defaultdict(list)
    for event in events:
        if event.lane != COUNTER:
            start_ns, end_ns = _ns(event.start_s - zero_s), _ns(event.end_s - zero_s)
            track = _track(event)
            tracks[track].append(Slice(track, start_ns, max(start_ns, end_ns), event))
    slices: list[Slice] = []
    n_clipped = 0
    for of_track in tracks.values():
        fitting, n = _clipped(of_track)
        slices += fitting
        n_clipped += n
    return sorted(slices, key=_by_start), n_clipped


def _clipped(slices: Iterable[Slice]) -> tuple[list[Slice], int]:
    waiting = [(*_by_start(s), i, s) for i, s in enumerate(slices)]
    heapq.heapify(waiting)
    fitting: list[Slice] = []
    open_ends: list[int] = []  # ends of the slices around the next one, outermost first
    moved: set[int] = set()
    while waiting:
        *_, i, slice_ = heapq.heappop(waiting)
        while open_ends and open_ends[-1] <= slice_.start_ns:
            open_ends.pop()
        if open_ends and slice_.end_ns > open_ends[-1]:
            moved.add(i)
            later = slice_._replace(start_ns=open_ends[-1])
            heapq.heappush(waiting, (*_by_start(later), i, later))
            continue
        open_ends.append(slice_.end_ns)
        fitting.append(slice_)
    return fitting, len(moved)


def _by_start(slice_: Slice) -> tuple[int, int]:
    return slice_.start_ns, -slice_.end_ns


def _track(event: Event) -> int:
    first = LANES.index(event.lane)
    return first + int(event.args.get("slot", 0)) if event.lane == TOKEN else first


def _zero_s(events: Sequence[Event]) -> float:
    return min((event.start_s for event in events), default=0.0)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def chrome_events(
    slices: Sequence[Slice], events: Sequence[Event], n_dropped: int = 0
) -> list[dict[str, object]]:
    """All events of a file: names of tracks, slices, counters. Times are in microseconds."""
    drawn: list[dict[str, object]] = [
        {
            "ph": "X",
            "pid": _PROCESS,
            "tid": _FIRST_THREAD + s.track,
            "cat": s.event.lane,
            "name": s.event.name,
            "ts": s.start_ns / 1e3,
            "dur": (s.end_ns - s.start_ns) / 1e3,
            "args": dict(s.event.args),
        }
        for s in slices
    ]
    if n_dropped:
        words = f"{n_dropped} older events were dropped"
        told = {"ph": "i", "s": "g", "pid": _PROCESS, "tid": _FIRST_THREAD, "ts": 0}
        drawn.append({**told, "name": words})
    return [*_track_names({s.track for s in slices}), *drawn, *_counters(slices, events)]


def _track_names(used: Iterable[int]) -> list[dict[str, object]]:
    named: list[dict[str, object]] = [
        {
            "ph": "M",
            "pid": _PROCESS,
            "tid": _FIRST_THREAD,
            "name": "process_name",
            "args": {"name": PRODUCER},
        }
    ]
    for track in sorted({*range(len(LANES)), *used}):
        slot = track - LANES.index(TOKEN)
        name = LANES[track] if slot <= 0 else f"{TOKEN}, slot {slot}"
        of = {"ph": "M", "pid": _PROCESS, "tid": _FIRST_THREAD + track}
        named.append({**of, "name": "thread_name", "args": {"name": name}})
        named.append({**of, "name": "thread_sort_index", "args": {"sort_index": track}})
    return named


def _counters(slices: Sequence[Slice], events: Sequence[Event]) -> list[dict[str, object]]:
    """Samples in order of time: the recorded ones, and the link's speed computed from copies."""
    zero_s = _zero_s(events)
    samples = [
        (_ns(event.start_s - zero_s), event.name, dict(event.args))
        for event in events
        if event.lane == COUNTER
    ]
    samples += [(at_ns, "link", {"bytes/s": speed}) for at_ns, speed in link_speeds(slices)]
    return [
        {"ph": "C", "pid": _PROCESS, "name": name, "ts": at_ns / 1e3, "args": values}
        for at_ns, name, values in sorted(samples, key=lambda sample: sample[0])
    ]


def link_speeds(slices: Iterable[Slice]) -> list[tuple[int, int]]:
    """Return (nanosecond, bytes/s from then on) for each change of the mean over _BIN_NS. Pure."""
    carried: defaultdict[int, float] = defaultdict(float)  # bytes by bin
    for copy in (s for s in slices if s.event.lane == COPY):
        size_bytes = int(copy.event.args.get("bytes", 0))
        first, last = copy.start_ns // _BIN_NS, max(copy.start_ns, copy.end_ns - 1) // _BIN_NS
        for at in range(first, last + 1):
            start_ns, end_ns = max(copy.start_ns, at * _BIN_NS), (at + 1) * _BIN_NS
            duration_ns = copy.end_ns - copy.start_ns
            share = (min(copy.end_ns, end_ns) - start_ns) / duration_ns if duration_ns else 1.0
            carried[at] += size_bytes * share
    speeds: list[tuple[int, int]] = []
    for at in sorted(carried.keys() | {at + 1 for at in carried}):
        speed = round(carried.get(at, 0.0) / _BIN_NS * 1e9)
        if not speeds or speed != speeds[-1][1]:
            speeds.append((at * _BIN_NS, speed))
    return speeds
