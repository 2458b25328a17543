"""Records a trace, a ring of timed events in lanes, and writes it in Chrome's trace format.

`NO_TRACE` records nothing, and its `is_on` is False, which guards events that are costly to
describe. The file opens in https://ui.perfetto.dev and chrome://tracing. docs/trace.md lists the
events, and offload/trace/report.py reads them back.

Perfetto drops slices of one track that overlap unless one contains the other. So each kind of event
has its own track.
"""

from __future__ import annotations

import errno
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from offload.errors import NotWritten, OffloadError

COPY, COMPUTE, CPU, ROUND, TOKEN = "copy", "compute", "CPU", "round", "token"
LANES = (COPY, COMPUTE, CPU, ROUND, TOKEN)  # tokens have a track for each server slot, at the end
COUNTER = "counter"  # lane of samples of numbers, which are not slices
PRODUCER = "specoffload"  # trace_report refuses files without it
EventValue = str | int | float

_OF_THE_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO}  # errors of a full or bad disk
# Perfetto treats thread 0, and a thread with its process's number, as the main thread.
_PROCESS, _FIRST_THREAD = 1, 10
_DEVICE_TRACKS = 1000  # first track number of devices, if there are several
_BIN_NS = 1_000_000  # nanoseconds over which the link's speed is averaged
_CAPACITY = 1 << 18  # number of newest events kept, about 60 MB


class TraceEvent(NamedTuple):
    """A slice of time, or a sample in the lane COUNTER. Times are from time.perf_counter."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, EventValue]


class Trace:
    """Keeps the newest events. Several threads may add events at the same time."""

    is_on = True  # False: nothing is recorded

    def __init__(self, capacity: int = _CAPACITY) -> None:
        """`capacity`: number of events kept. Older events are dropped and counted."""
        self._events: deque[TraceEvent] = deque(maxlen=capacity)
        self._n_added = 0
        self.totals: dict[
            str, EventValue
        ] = {}  # counts over the same time, also written to the file
        self.cpu_since_s: float | None = None  # clock time at which a decode's CPU part began

    def __len__(self) -> int:
        return len(self._events)

    @property
    def n_dropped(self) -> int:
        return self._n_added - len(self._events)

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: EventValue) -> None:
        """Record an event in one of LANES. `args` are shown with it, and the report reads them."""
        self._n_added += 1
        self._events.append(TraceEvent(lane, name, start_s, end_s, args))

    def sample(self, name: str, at_s: float, **values: int | float) -> None:
        """Record numbers that are valid from `at_s` on. Each is shown as a line of its own."""
        self.add(COUNTER, name, at_s, at_s, **values)

    def of_device(self, name: str) -> Trace:
        """Return a trace that adds events to this one, in rows of the device `name`."""
        return _DeviceTrace(self, name)

    def restart(self) -> None:
        """Drop all recorded events, so that the trace begins now."""
        self._events.clear()
        self._n_added = 0

    def events(self) -> list[TraceEvent]:
        """Return a copy of the events, in the order of adding."""
        return list(self._events)

    def write(self, path: Path, opened: Callable[[Path], AbstractContextManager[BinaryIO]]) -> None:
        """Write a trace file, in which times start at 0.

        `opened` opens `path` to write, and leaves what was there if the block fails, as
        specdec.whole_file.named_file does. Raises NotWritten if the disk is full or fails,
        OffloadError if the path cannot be written.
        """
        events = self.events()
        document = {
            "displayTimeUnit": "ms",
            "otherData": {
                "producer": PRODUCER,
                "dropped_events": self.n_dropped,
                **self.totals,
            },
            "traceEvents": chrome_events(events, self.n_dropped),
        }
        try:
            with opened(path) as file:
                text = json.dumps(document, separators=(",", ":"), ensure_ascii=False)
                file.write(text.encode())
        except OSError as e:
            words = f"the trace could not be written to {path}: {e.strerror}"
            kind = NotWritten if e.errno in _OF_THE_DISK else OffloadError
            raise kind(words) from e


class _NoTrace(Trace):
    """A trace that records nothing, for when tracing is off."""

    is_on = False

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: EventValue) -> None:
        pass

    def of_device(self, name: str) -> Trace:
        return self


class _DeviceTrace(Trace):
    """Adds the events of one of several devices to a trace."""

    def __init__(self, trace: Trace, device: str) -> None:
        super().__init__(0)
        self._trace, self._device = trace, device

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: EventValue) -> None:
        if lane == COUNTER:
            self._trace.add(lane, f"{name}, {self._device}", start_s, end_s, **args)
        else:
            self._trace.add(lane, name, start_s, end_s, **args, device=self._device)


NO_TRACE: Trace = _NoTrace(0)


def chrome_events(events: Sequence[TraceEvent], n_dropped: int = 0) -> list[dict[str, object]]:
    """Return all events of a trace file: names of tracks, slices by start, counters. Pure.

    The times in the result are microseconds since the first event.
    """
    zero_s = min((event.start_s for event in events), default=0.0)
    slices = sorted(
        (event for event in events if event.lane != COUNTER), key=lambda e: (e.start_s, -e.end_s)
    )
    drawn: list[dict[str, object]] = []
    tracks = dict(enumerate(LANES))
    of_devices: dict[tuple[str, EventValue], int] = {}  # tracks of lanes of several devices
    for event in slices:
        track = LANES.index(event.lane)
        if event.lane == TOKEN and (slot := int(event.args.get("slot", 0))):
            track += slot
            tracks[track] = f"{TOKEN}, slot {slot}"
        elif device := event.args.get("device"):
            track = of_devices.setdefault((event.lane, device), _DEVICE_TRACKS + len(of_devices))
            tracks[track] = f"{event.lane}, {device}"
            tracks.pop(LANES.index(event.lane), None)
        start_ns, end_ns = _ns(event.start_s - zero_s), _ns(event.end_s - zero_s)
        drawn.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": _FIRST_THREAD + track,
                "cat": event.lane,
                "name": event.name,
                "ts": start_ns / 1e3,
                "dur": max(0, end_ns - start_ns) / 1e3,
                "args": dict(event.args),
            }
        )
    if n_dropped:
        words = f"{n_dropped} older events were dropped"
        told = {"ph": "i", "s": "g", "pid": _PROCESS, "tid": _FIRST_THREAD, "ts": 0}
        drawn.append({**told, "name": words})
    of = {"ph": "M", "pid": _PROCESS}
    named: list[dict[str, object]] = [
        {**of, "tid": _FIRST_THREAD, "name": "process_name", "args": {"name": PRODUCER}}
    ]
    for track, name in sorted(tracks.items()):
        thread = {**of, "tid": _FIRST_THREAD + track}
        named.append({**thread, "name": "thread_name", "args": {"name": name}})
        named.append({**thread, "name": "thread_sort_index", "args": {"sort_index": track}})
    samples = [
        (_ns(event.start_s - zero_s), event.name, dict(event.args))
        for event in events
        if event.lane == COUNTER
    ]
    samples += [(at_ns, "link", {"bytes/s": speed}) for at_ns, speed in link_speeds(slices, zero_s)]
    counters: list[dict[str, object]] = [
        {"ph": "C", "pid": _PROCESS, "name": name, "ts": at_ns / 1e3, "args": values}
        for at_ns, name, values in sorted(samples, key=lambda sample: sample[0])
    ]
    return [*named, *drawn, *counters]


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def link_speeds(events: Iterable[TraceEvent], zero_s: float) -> list[tuple[int, int]]:
    """Return the link's mean speed in each bin of _BIN_NS, by the copies among `events`. Pure.

    The result has (nanoseconds since `zero_s`, bytes/s from then on) for each change.
    """
    carried: defaultdict[int, float] = defaultdict(float)  # bytes by bin
    for copy in (event for event in events if event.lane == COPY):
        size_bytes = int(copy.args.get("bytes", 0))
        begin_ns, end_ns = _ns(copy.start_s - zero_s), _ns(copy.end_s - zero_s)
        first, last = begin_ns // _BIN_NS, max(begin_ns, end_ns - 1) // _BIN_NS
        for at in range(first, last + 1):
            in_bin_ns = min(end_ns, (at + 1) * _BIN_NS) - max(begin_ns, at * _BIN_NS)
            carried[at] += size_bytes * (
                in_bin_ns / (end_ns - begin_ns) if end_ns > begin_ns else 1
            )
    speeds: list[tuple[int, int]] = []
    for at in sorted(carried.keys() | {at + 1 for at in carried}):
        speed = round(carried.get(at, 0.0) / _BIN_NS * 1e9)
        if not speeds or speed != speeds[-1][1]:
            speeds.append((at * _BIN_NS, speed))
    return speeds
