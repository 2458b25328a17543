"""The trace of a real run has tracks that Perfetto accepts, and its sums equal the counters."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from resolved import config_of
from typer.testing import CliRunner

from offload.times.min_batch import MinBatch
from offload.trace.report import read_report
from offload.trace.trace import LANES
from specoffload.cli import app
from specoffload.config.resolution import demo_file
from specoffload.generation.generation import GenerateOptions
from specoffload.generation.statistics import GenerationStats
from specoffload.session.session import Session

N_PREDICT = 24


Traced = tuple[Path, dict[str, Any], int]  # file, its parsed JSON, streamed bytes


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    """A run that streams and drafts."""
    folder = tmp_path_factory.mktemp("trace")
    path = folder / "trace.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECOFFLOAD_PROFILE_DIR", str(folder))
        config = config_of(
            draft=demo_file("draft.gguf"),
            device="sim:bw=400MB/s",
            threads=1,
            ctx_size=512,
            min_batch=MinBatch(1, 1),
            n_gpu_layers=0,
            vram_bytes=10 << 20,
            trace=path,
        )
    with Session(config) as session:
        before = session.target.counters().streamed_bytes
        assert before > 0, "opening measured, so there is something to leave out"
        stats: GenerationStats | None = None
        options = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True)
        for piece in session.generate("def main(", options):
            stats = piece.stats
        assert stats is not None
        session.target.settle()
        copied = session.target.counters().streamed_bytes - before
    return path, json.loads(path.read_text()), copied


def of_phase(document: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in document["traceEvents"] if event["ph"] == phase]


def test_each_event_is_what_the_format_demands(traced: Traced) -> None:
    _, document, _ = traced
    assert {event["ph"] for event in document["traceEvents"]} == {"M", "X", "C"}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        if event["ph"] != "C":
            assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    for event in of_phase(document, "X"):
        assert event["dur"] >= 0
        assert isinstance(event["args"], dict)
    for event in of_phase(document, "C"):
        assert all(isinstance(value, int | float) for value in event["args"].values())


def test_slices_of_a_track_nest_or_are_disjoint(traced: Traced) -> None:
    _, document, _ = traced
    assert document["otherData"]["dropped_events"] == 0
    around: defaultdict[int, list[int]] = defaultdict(list)
    for event in of_phase(document, "X"):
        start = round(event["ts"] * 1e3)
        end = start + round(event["dur"] * 1e3)
        ends = around[event["tid"]]
        while ends and ends[-1] <= start:
            ends.pop()
        assert not ends or end <= ends[-1], event
        ends.append(end)
    assert {event["cat"] for event in of_phase(document, "X")} == set(LANES)
    assert len(around) == len(LANES), "a track for each"
    assert not {0, *(event["pid"] for event in of_phase(document, "X"))} & around.keys()


def test_counters_go_on_in_time_and_are_what_they_say(traced: Traced) -> None:
    _, document, _ = traced
    samples: defaultdict[str, list[tuple[float, dict[str, float]]]] = defaultdict(list)
    for event in of_phase(document, "C"):
        samples[event["name"]].append((event["ts"], event["args"]))
    assert set(samples) == {"link", "slots", "requests"}
    for found in samples.values():
        times = [at for at, _ in found]
        assert times == sorted(times)
    link = [(at, values["bytes/s"]) for at, values in samples["link"]]
    area = sum(
        speed * (end - at) / 1e6 for (at, speed), (end, _) in zip(link, link[1:], strict=False)
    )
    assert area == pytest.approx(document["otherData"]["streamed_bytes"], rel=0.01)
    assert max(values["in use"] for _, values in samples["slots"]) > 0
    assert all(values["in use"] <= values["held"] for _, values in samples["slots"])


def test_copies_add_up_to_the_counter_of_the_run_without_its_profiling(traced: Traced) -> None:
    path, document, copied = traced
    in_file = sum(e["args"]["bytes"] for e in of_phase(document, "X") if e["cat"] == "copy")
    assert in_file == copied == document["otherData"]["streamed_bytes"]
    assert read_report(path).copied_bytes == copied
    shown = CliRunner().invoke(app, ["trace", str(path)], catch_exceptions=False)
    assert "nothing was copied" not in shown.stdout


@pytest.mark.parametrize(
    ("device", "why"),
    [("cpu", "the model ran on the plain CPU, whose computation is not traced"),
     ("sim", "all that the device computed lay in its memory")],
)  # fmt: skip
def test_a_trace_without_copies_says_why_and_what_to_try(
    device: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setenv("SPECOFFLOAD_WITHOUT", "profile")
    words = ["-n", "4", "-t", "1", "-c", "256", "--trace", str(tmp_path / "t.json")]
    asked = ["run", "import os", "--device", device, *words]
    done = CliRunner().invoke(app, asked, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    shown = CliRunner().invoke(app, ["trace", str(tmp_path / "t.json")], catch_exceptions=False)
    assert f"nothing was copied: {why}" in " ".join(shown.stdout.split())
    assert "--min-batch 1" in shown.stdout


def test_rounds_and_their_tokens_are_marked(traced: Traced) -> None:
    path, document, _ = traced
    found = read_report(path)
    assert found.n_tokens == N_PREDICT
    rounds = [e for e in of_phase(document, "X") if e["cat"] == "round" and e["name"] == "round"]
    assert sum(e["args"]["n_tokens"] for e in rounds) == N_PREDICT
    verified = [e for e in of_phase(document, "X") if e["name"] == "verify"]
    assert len(verified) == len(rounds)
    computed = [e for e in of_phase(document, "X") if e["cat"] == "compute"]
    first, last = rounds[0]["ts"], rounds[-1]["ts"] + rounds[-1]["dur"]
    assert any(first <= e["ts"] <= last for e in computed), "one clock for all tracks"
