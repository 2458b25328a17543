"""A trace: a ring of timed events in three lanes, written in Chrome's trace format.

Off is `NO_TRACE`, which is false and records nothing: guard what costs something to describe with
`if trace:`. The file opens in https://ui.perfetto.dev and chrome://tracing; docs/trace.md says what
events there are, and offload/trace_report.py reads them back.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from offload.errors import OffloadError

COPY, COMPUTE, CPU = "copy", "compute", "CPU"
LANES = (COPY, COMPUTE, CPU)
PRODUCER = "specoffload"  # by which trace_report knows a file of ours
Value = str | int | float

_CAPACITY = 1 << 18  # events kept, the last ones; about 60 MB of them


class Event(NamedTuple):
    """Something that took time. Seconds of time.perf_counter."""

    lane: str
    name: str
    start_s: float
    end_s: float
    args: Mapping[str, Value]


class Trace:
    """The last events. Threads may add at the same time."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        """`capacity`: events kept; older ones are dropped and counted."""
        self._events: deque[Event] = deque(maxlen=capacity)
        self._n_added = 0

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

    def events(self) -> list[Event]:
        """A copy, in the order of adding."""
        return list(self._events)

    def write(self, path: str | Path) -> None:
        """Write a trace file; times start at 0. Raises OffloadError if it cannot be written."""
        document = {
            "displayTimeUnit": "ms",
            "otherData": {"producer": PRODUCER, "dropped_events": self.n_dropped},
            "traceEvents": [*_lane_names(), *_chrome_events(self.events())],
        }
        try:
            with open(path, "w", encoding="utf-8") as f:
                json.dump(document, f, separators=(",", ":"))
        except OSError as e:
            with contextlib.suppress(OSError):
                if Path(path).is_file():
                    Path(path).unlink()  # half a trace is none
            raise OffloadError(f"the trace could not be written to {path}: {e.strerror}") from e


class _NoTrace(Trace):
    """Tracing is off."""

    def __bool__(self) -> bool:
        return False

    def add(self, lane: str, name: str, start_s: float, end_s: float, **args: Value) -> None:
        pass


NO_TRACE: Trace = _NoTrace(0)


def _lane_names() -> list[dict[str, object]]:
    named: list[dict[str, object]] = [
        {"ph": "M", "pid": 1, "tid": 0, "name": "process_name", "args": {"name": PRODUCER}}
    ]
    for tid, lane in enumerate(LANES):
        of = {"ph": "M", "pid": 1, "tid": tid}
        named.append({**of, "name": "thread_name", "args": {"name": lane}})
        named.append({**of, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return named


def _chrome_events(events: list[Event]) -> list[dict[str, object]]:
    """Complete events; the format wants microseconds."""
    if not events:
        return []
    zero_s = min(event.start_s for event in events)
    return [
        {
            "ph": "X",
            "pid": 1,
            "tid": LANES.index(event.lane),
            "cat": event.lane,
            "name": event.name,
            "ts": round((event.start_s - zero_s) * 1e6, 3),
            "dur": round(max(0.0, event.end_s - event.start_s) * 1e6, 3),
            "args": dict(event.args),
        }
        for event in sorted(events, key=lambda event: event.start_s)
    ]
