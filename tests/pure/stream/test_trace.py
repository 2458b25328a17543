"""Traces of constructed events, whose expected numbers are worked out by hand."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import OffloadError
from offload.trace.report import (
    CAUSES,
    IDS_READBACK,
    LINK_BUSY,
    PREDICTED_WRONG,
    SLOT_NOT_FREE,
    intersection,
    read_events,
    read_report,
    report,
    union,
)
from offload.trace.trace import LANES, NO_TRACE, Trace, TraceEvent, link_speeds
from specdec.whole_file import named_file


def copy(start: float, end: float, **args: str | int | float) -> TraceEvent:
    return TraceEvent("copy", f"copy at {start}", start, end, args)


def compute(start: float, end: float, **args: str | int | float) -> TraceEvent:
    return TraceEvent("compute", "nodes", start, end, args)


def wait(start: float, end: float, cause: str = "copy", layer: int = 0) -> TraceEvent:
    return TraceEvent("compute", "wait", start, end, {"cause": cause, "layer": layer})


def test_a_trace_that_is_off_says_so_and_keeps_nothing() -> None:
    NO_TRACE.add("copy", "x", 0.0, 1.0, bytes=3)
    assert not NO_TRACE.is_on
    assert NO_TRACE.events() == []
    assert NO_TRACE.n_dropped == 0
    assert Trace().is_on


def test_the_ring_keeps_the_last_events_and_counts_the_rest() -> None:
    trace = Trace(capacity=3)
    for i in range(5):
        trace.add("copy", str(i), i, i + 1)
    assert [event.name for event in trace.events()] == ["2", "3", "4"]
    assert (len(trace), trace.n_dropped) == (3, 2)


def test_threads_may_add_at_the_same_time() -> None:
    trace = Trace()

    def add() -> None:
        for i in range(500):
            trace.add("copy", "x", i, i + 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trace) == 2000


def test_the_file_is_what_perfetto_reads(tmp_path: Path) -> None:
    trace = Trace()
    trace.add("compute", "nodes 0-9", 100.002, 100.003, layer=4)
    trace.add("copy", "blk.3:7+2", 100.0, 100.001, bytes=4096, reason="ahead")
    trace.write(tmp_path / "t.json", named_file)
    document = json.loads((tmp_path / "t.json").read_text())
    events = document["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tuple(names.values()) == LANES
    # Perfetto treats thread 0 and the thread with the process's number as the same thread.
    assert not {0, *(e["pid"] for e in events)} & names.keys()
    timed = [e for e in events if e["ph"] == "X"]
    assert [(names[e["tid"]], e["name"], e["ts"], e["dur"]) for e in timed] == [
        ("copy", "blk.3:7+2", 0.0, 1000.0),  # microseconds, from the first event on
        ("compute", "nodes 0-9", 2000.0, 1000.0),
    ]
    assert timed[0]["args"] == {"bytes": 4096, "reason": "ahead"}
    assert {e["pid"] for e in events} == {1}


def test_counters_are_samples_in_order_of_time_and_the_links_speed_adds_up(tmp_path: Path) -> None:
    trace = Trace()
    trace.sample("slots", 0.001, held=3)
    trace.add("copy", "b", 0.0020, 0.0025, bytes=500)
    trace.add("copy", "a", 0.0, 0.002, bytes=4000)
    trace.sample("slots", 0.0005, held=2)
    trace.write(tmp_path / "t.json", named_file)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    samples = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert samples == [
        ("link", 0.0, {"bytes/s": 2_000_000}),
        ("slots", 500.0, {"held": 2}),
        ("slots", 1000.0, {"held": 3}),
        ("link", 2000.0, {"bytes/s": 500_000}),  # mean over one millisecond
        ("link", 3000.0, {"bytes/s": 0}),
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 0.003), st.integers(1, 9999))))
def test_the_links_speed_over_its_time_is_what_was_copied(
    copies: list[tuple[int, float, int]],
) -> None:
    events = [copy(0.01 * at, 0.01 * at + took, bytes=n) for at, took, n in copies]
    speeds = link_speeds(events, min((e.start_s for e in events), default=0.0))
    carried = sum(
        speed * (end - start) / 1e9
        for (start, speed), (end, _) in zip(speeds, speeds[1:], strict=False)
    )
    assert carried == pytest.approx(sum(n for _, _, n in copies), abs=1)
    assert bool(speeds) == bool(copies)
    assert speeds[-1:] == [(s, 0) for s, _ in speeds[-1:]], "the last copy ends the curve"


def test_a_trace_that_begins_anew_has_nothing_of_before() -> None:
    trace = Trace(capacity=1)
    trace.add("copy", "a", 0.0, 1.0)
    trace.add("copy", "b", 1.0, 2.0)
    trace.restart()
    assert (trace.events(), trace.n_dropped) == ([], 0)


def test_what_was_dropped_is_said_within_the_picture(tmp_path: Path) -> None:
    trace = Trace(capacity=1)
    for i in range(4):
        trace.add("copy", "a", i, i + 1)
    trace.write(tmp_path / "t.json", named_file)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "i"] == ["3 older events were dropped"]


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    trace = Trace(capacity=2)
    for i in range(3):
        trace.add("CPU", f"e{i}", 5.0 + i, 5.5 + i, layer=i)
    trace.write(tmp_path / "t.json", named_file)
    events, n_dropped = read_events(tmp_path / "t.json")
    assert n_dropped == 1
    assert events == [
        TraceEvent("CPU", "e1", 0.0, 0.5, {"layer": 1}),
        TraceEvent("CPU", "e2", 1.0, 1.5, {"layer": 2}),
    ]
    assert read_report(tmp_path / "t.json").n_dropped == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("no json", "not JSON"),
        ("[1, 2]", "not a trace of ours"),
        ('{"traceEvents": []}', "not a trace of ours"),
        ('{"otherData": {"producer": "x"}, "traceEvents": []}', "not a trace of ours"),
        ('{"otherData": {"producer": "specoffload"}}', "damaged"),
        (
            '{"otherData": {"producer": "specoffload"}, "traceEvents": [{"ph": "X", "tid": 9}]}',
            "damaged",
        ),
    ],
)
def test_a_file_that_is_not_ours_is_refused(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(OffloadError, match=error):
        read_report(path)


def test_a_file_that_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"cannot read the trace .*missing\.json: No such file"):
        read_report(tmp_path / "missing.json")
    with pytest.raises(OffloadError, match="could not be written to .*: No such file"):
        Trace().write(tmp_path / "no folder" / "t.json", named_file)


def test_overlap_bandwidth_and_utilisation_of_a_known_trace() -> None:
    #  copy     0====4    6==8
    #  compute     2=======7      10
    #  CPU                    9==10
    seen = report([
        copy(0, 4, bytes=4000, layer=0),
        copy(6, 8, bytes=2000, layer=1),
        compute(2, 7, layer=0),
        TraceEvent("CPU", "experts", 9, 10, {"layer": 1}),
    ])  # fmt: skip
    assert (seen.span_s, seen.copy_s, seen.compute_s) == (10, 6, 6)
    assert seen.hidden_s == 3  # 2..4 and 6..7
    assert seen.overlap == 0.5
    assert seen.link_utilisation == 0.6
    assert seen.link_bytes_per_s == 1000
    assert seen.copied_bytes == 6000
    assert seen.n_stalls == 0


def test_copies_at_the_same_time_are_not_counted_twice() -> None:
    seen = report([copy(0, 4), copy(1, 3), compute(0, 8)])
    assert (seen.copy_s, seen.hidden_s, seen.overlap) == (4, 4, 1.0)


def test_a_wait_is_not_computation() -> None:
    seen = report([copy(0, 4), wait(1, 4), compute(4, 6)])
    assert (seen.compute_s, seen.hidden_s, seen.stalled_s) == (2, 0, 3)


@pytest.mark.parametrize(
    ("events", "cause"),
    [
        ([copy(0, 5), wait(1, 5)], LINK_BUSY),
        ([copy(0, 2), copy(2, 5), copy(5, 9), wait(1, 5)], LINK_BUSY),
        ([copy(4, 5), wait(1, 5)], SLOT_NOT_FREE),
        ([wait(1, 5)], SLOT_NOT_FREE),
        ([wait(1, 5, "ids")], IDS_READBACK),
        (
            [
                copy(0, 2, reason="predicted", layer=7),
                copy(2, 5, reason="needed", layer=7),
                wait(1, 5, layer=7),
            ],
            PREDICTED_WRONG,
        ),
        (
            [
                copy(0, 2, reason="predicted", layer=6),
                copy(2, 5, reason="needed", layer=7),
                wait(1, 5, layer=7),
            ],
            LINK_BUSY,
        ),
        (
            [
                copy(0, 1, reason="predicted", layer=7, graph=1),
                copy(2, 5, reason="needed", layer=7, graph=2),
                wait(2, 5, layer=7),
            ],
            LINK_BUSY,
        ),
    ],
)
def test_each_stall_has_its_cause(events: list[TraceEvent], cause: str) -> None:
    seen = report(events)
    by_cause = seen.stalled_by_cause_s
    assert seen.n_stalls == 1
    assert tuple(by_cause) == CAUSES
    assert by_cause[cause] == sum(by_cause.values()) > 0


def test_an_empty_trace_has_no_overlap_and_no_division_by_zero() -> None:
    seen = report([])
    assert (seen.overlap, seen.link_utilisation, seen.link_bytes_per_s) == (0, 0, 0)
    assert json.loads(json.dumps(seen.as_json()))["n_stalls"] == 0


def test_intervals_unite_and_intersect() -> None:
    assert union([(3, 4), (0, 1), (1, 2), (5, 5), (3, 3.5)]) == [(0, 2), (3, 4)]
    assert intersection([(0, 2), (3, 6)], [(1, 4), (5, 7)]) == [(1, 2), (3, 4), (5, 6)]


def guessed_by_looking_at_all(wait_: TraceEvent, events: list[TraceEvent]) -> bool:
    """True if a guess was made for the layer of the awaited copy, found by a full search."""
    copies = sorted((e for e in events if e.lane == "copy"), key=lambda e: e.start_s)
    during = [c for c in copies if c.end_s > wait_.start_s and c.start_s < wait_.end_s]
    ended = [c for c in during if c.end_s <= wait_.end_s + 1e-9]
    awaited = max(ended or during, key=lambda c: c.end_s, default=None)
    return (
        awaited is not None
        and awaited.args["reason"] == "needed"
        and any(
            c.args["reason"] == "predicted"
            and c.args["layer"] == awaited.args["layer"]
            and c.start_s <= wait_.end_s
            for c in copies
        )
    )


MOMENTS = st.integers(0, 40)
COPIES = st.builds(
    lambda start, length, layer, reason: copy(start, start + length, layer=layer, reason=reason),
    MOMENTS,
    st.integers(1, 9),
    st.integers(0, 2),
    st.sampled_from(["needed", "ahead", "predicted"]),
)
WAITS = st.builds(lambda start, length: wait(start, start + length), MOMENTS, st.integers(1, 9))


@given(st.lists(COPIES, max_size=12), WAITS)
def test_what_a_wait_waited_for_is_found_without_looking_at_every_copy(
    copies: list[TraceEvent], wait_: TraceEvent
) -> None:
    by_cause = report([*copies, wait_]).stalled_by_cause_s
    if not by_cause[SLOT_NOT_FREE]:
        assert bool(by_cause[PREDICTED_WRONG]) == guessed_by_looking_at_all(wait_, copies)


def test_a_fifo_without_a_reader_is_one_sentence(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    trace, said = Trace(), []
    trace.add("CPU", "layer", 0.0, 1.0)

    def write() -> None:
        with pytest.raises(OffloadError, match="it is a FIFO that no program reads") as found:
            trace.write(fifo, named_file)
        said.append(str(found.value))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    assert len(said) == 1, "it waits for a reader"
    assert fifo.exists()
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        trace.write(fifo, named_file)
        assert json.loads(os.read(reader, 1 << 16))["traceEvents"]
    finally:
        os.close(reader)
