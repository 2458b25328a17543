"""Events of a graph are reused once the last event of each stream has been synchronized."""

from __future__ import annotations

from typing import Any

import pytest

from offload.backends import Backend
from offload.stream.copying import GraphEvents


class CountedEvent:
    def __init__(self) -> None:
        self.n_synchronized = 0
        self.is_closed = False

    def synchronize(self) -> None:
        self.n_synchronized += 1

    def close(self) -> None:
        self.is_closed = True


class CountingDevice:
    def __init__(self, *, events_hold_parts: bool) -> None:
        self.backend = Backend("A", events_hold_parts=events_hold_parts)
        self.made: list[CountedEvent] = []

    def event(self) -> CountedEvent:
        self.made.append(CountedEvent())
        return self.made[-1]


class Recorder:
    def __init__(self) -> None:
        self.recorded: list[CountedEvent] = []

    def record(self, event: CountedEvent) -> None:
        self.recorded.append(event)


@pytest.mark.parametrize("hold_parts", [False, True])
def test_the_last_of_each_stream_is_synchronized_and_others_where_they_hold_parts(
    hold_parts: bool,
) -> None:
    made: Any = CountingDevice(events_hold_parts=hold_parts)
    copying: Any = Recorder()
    computing: Any = Recorder()
    events = GraphEvents(made)
    for _ in range(3):
        events.record(copying)
    for _ in range(2):
        events.record(computing)
    events.recycle()
    synchronized = [event.n_synchronized > 0 for event in made.made]
    assert synchronized == ([True] * 5 if hold_parts else [False, False, True, False, True])


def test_events_are_used_again_and_closed_once() -> None:
    made: Any = CountingDevice(events_hold_parts=False)
    stream: Any = Recorder()
    events = GraphEvents(made)
    for _ in range(3):
        for _ in range(4):
            events.record(stream)
        events.recycle()
    assert len(made.made) == 4
    assert len(stream.recorded) == 12
    events.close()
    assert all(event.is_closed for event in made.made)
