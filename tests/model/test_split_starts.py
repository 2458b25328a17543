"""A start measures split layers once and stores the result; the next start measures nothing."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import resolved
from budgets import ON_GPU, budget

from lab.options import Streaming
from offload.engine import Engine
from offload.errors import DeviceFailed, DoesNotFit
from offload.ggml.backend import Stream
from offload.measuring import measure_split
from offload.schedule.division import MeasuredCosts, SideTimes
from offload.schedule.splitter import ByCosts
from offload.stream import split_path as path_module
from offload.stream.cpu_side import HostGraph
from offload.stream.device import StreamingDevice
from offload.stream.forms import NoForm
from offload.stream.split_measuring import SplitSides
from specoffload.config.options import Toggle
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.speculation import costs, split_retiming


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the measurements made so far, "split" or "decodes", in order."""
    found: list[str] = []

    def noted(name: str, measure: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **named: Any) -> Any:
            found.append(name)
            return measure(*args, **named)

        return note

    monkeypatch.setattr(costs, "measure_split", noted("split", costs.measure_split))
    monkeypatch.setattr(costs, "measure", noted("decodes", costs.measure))
    monkeypatch.setattr(costs.SessionCosts, "_doubted", lambda self, ways: [])
    monkeypatch.setattr(costs.SessionCosts, "_doubts_split", False)
    return found


def config_of(hybrid: Toggle | None, **changes: object) -> Config:
    half = budget(demo_file("target.gguf"), Streaming(), "half")
    return resolved.config_of(
        **{
            "threads": 1,
            "ctx_size": 256,
            "device": "sim",
            "vram_bytes": half,
            "n_gpu_layers": ON_GPU,
            "n_cpu_moe": 99,
            "min_batch": "1000",
            "spec": NO_DRAFTS,
            "hybrid": hybrid,
            **changes,
        }
    )


def started(config: Config) -> tuple[str, list[bool], list[int]]:
    """Start a session.

    Returns its line on --hybrid, True for each batch size 1..64 that is split, and the tokens of
    an answer.
    """
    with Session(config) as session:
        (line,) = (note for note in session.notes if note.startswith("--hybrid"))
        assert any(note.startswith("split layers: an expert takes") for note in session.notes)
        ways = session.target.opened.weights.ways.now
        sizes = [ways.splits(n) for n in range(1, 65)]
        assert session.target.sequences.length(0) == 0
        options = GenerateOptions(n_predict=6, ignore_eos=True)
        tokens = [t for p in session.generate("def f(", options) for t in p.tokens]
        if sizes[0]:
            assert session.target.counters().split_layers > 0
    return line, sizes, tokens


def speeds(config: Config) -> str:
    """The start-up line that says where the times come from, or "" if there is none."""
    with Session(config) as session:
        return next((note for note in session.notes if note.startswith("speeds: ")), "")


def test_auto_measures_once_and_a_damaged_file_anew(folder: Path, measured: list[str]) -> None:
    config = config_of(Toggle.AUTO)
    line, sizes, tokens = started(config)
    assert line.startswith("--hybrid auto: ")
    assert measured == ["split", "decodes"]
    (file,) = folder.glob("*.json")
    assert speeds(config).endswith(f", kept in {file}")

    again, same_sizes, same_tokens = started(config)
    assert measured == ["split", "decodes"], "nothing new"
    assert (again, same_sizes, same_tokens) == (line, sizes, tokens)

    file.write_text(file.read_text(encoding="utf-8")[:-9], encoding="utf-8")
    assert f"{file} is damaged and not used" in speeds(config)
    assert measured == ["split", "decodes"] * 2
    started(config)
    assert measured == ["split", "decodes"] * 2, "and it is kept again"


@pytest.mark.parametrize(
    ("seconds", "why"),
    [
        (0.01, "since kept times of split layers contradict each other"),
        (7.0, "since no times of split layers are kept"),  # out of bounds: a computer that slept
    ],
)
def test_a_kept_time_that_another_program_spoilt_is_timed_again(
    folder: Path, seconds: float, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(Toggle.AUTO)
    speeds(config)
    (file,) = folder.glob("*.json")
    kept = json.loads(file.read_text(encoding="utf-8"))
    kept["runs"][0]["split"]["host"]["by_rows_s"]["4"] = seconds
    file.write_text(json.dumps(kept), encoding="utf-8")
    caplog.clear()
    assert why in speeds(config)
    said = [line for line in caplog.messages if "an expert of 4 rows takes the CPU 7 s" in line]
    assert len(said) == (seconds == 7.0)
    again = json.loads(file.read_text(encoding="utf-8"))
    assert again["runs"][0]["split"]["host"]["by_rows_s"]["4"] < seconds


def test_a_disturbed_measurement_is_made_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    good = MeasuredCosts(
        SideTimes({1: 1e-5, 2: 2e-5, 4: 3e-5, 8: 4e-5}), SideTimes({1: 1e-6}), 1e-3
    )
    bad = replace(good, host=SideTimes({1: 1e-5, 2: 2e-5, 4: 7e-3, 8: 4e-5}))
    made: list[dict[str, MeasuredCosts]] = []
    monkeypatch.setattr("offload.measuring._measured_split", lambda _: made.pop())
    weights = SimpleNamespace(hybrid=object())
    target = cast(Engine, SimpleNamespace(opened=SimpleNamespace(weights=weights)))
    made += [{"sim": good}, {"sim": bad}]
    assert measure_split(target) == {"sim": good}
    made += [{"sim": bad}, {"sim": good}]
    assert measure_split(target) == {"sim": good}
    assert made == [{"sim": bad}], "one that agrees is believed"
    made += [{"sim": good}, {"sim": bad}]
    assert measure_split(target, is_busy=lambda: True) == {"sim": bad}, "others still run"
    made += [{"sim": bad}]
    took_11_s = iter((0.0, 11.0)).__next__
    assert measure_split(target, clock=took_11_s) == {"sim": bad}
    assert len(made) == 2, "no second pass was made"


def test_on_needs_costs_alone_and_auto_then_measures_the_rest(
    folder: Path, measured: list[str]
) -> None:
    # Without a memory limit, on and auto have the same plan and the same settings.
    on, auto = (config_of(t, vram_bytes=None) for t in (Toggle.ON, Toggle.AUTO))
    _, sizes, _ = started(on)
    assert all(sizes)
    assert measured == ["split"]
    started(on)
    assert measured == ["split"]
    started(auto)
    assert measured == ["split", "decodes"]
    for config in (on, auto):
        started(config)
    assert measured == ["split", "decodes"]


def test_no_profile_neither_reads_nor_keeps(folder: Path, measured: list[str]) -> None:
    for _ in range(2):
        started(config_of(Toggle.ON, use_profile=False))
    assert measured == ["split", "split"]
    assert not folder.exists()


def test_an_unknown_form_is_not_measured_by_decodes(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise NoForm("its rows are folded")

    monkeypatch.setattr(path_module, "find_form", refuse)
    with Session(config_of(Toggle.AUTO)) as session:
        (line,) = (note for note in session.notes if note.startswith("--hybrid"))
    assert "its rows are folded" in line
    assert measured == ["split"]


# -- without a flag, and where nothing can be split ------------------------------------------------


def notes_of(config: Config) -> list[str]:
    """The start-up lines on split layers.

    Also checks that an answer splits no layer if no line says that layers are split.
    """
    with Session(config) as session:
        notes = [n for n in session.notes if n.startswith(("--hybrid", "split layers"))]
        before = session.target.counters().split_layers
        options = GenerateOptions(n_predict=4, ignore_eos=True)
        assert [*session.generate("def f(", options)][-1].finish_reason == "length"
        if not any("layers are split" in note for note in notes):
            assert session.target.counters().split_layers == before
    return notes


def by_default(**changes: object) -> Config:
    return config_of(None, **{"min_batch": "auto"} | changes)


def test_a_start_without_a_flag_measures_once(folder: Path, measured: list[str]) -> None:
    for n_starts in (1, 2):
        line, words = notes_of(by_default())
        assert line.startswith("--hybrid auto: ")
        assert words.startswith("split layers: an expert takes")
        assert measured == ["split", "decodes"], n_starts


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "cpu", "vram_bytes": None, "n_cpu_moe": None}, []),
        ({"n_cpu_moe": 0, "vram_bytes": None}, []),
        ({"min_batch": "3"}, ["--hybrid: --min-batch decides alone (--hybrid auto measures"]),
        ({"use_profile": False}, ["--hybrid: nothing is measured, so no layer is split"]),
    ],
)
def test_without_a_flag_nothing_is_measured_where_nothing_can_be_split_or_may_be_measured(
    folder: Path, measured: list[str], changes: dict[str, object], said: list[str]
) -> None:
    notes = notes_of(by_default(**changes))
    assert len(notes) == len(said)
    assert all(note.startswith(words) for note, words in zip(notes, said, strict=True))
    assert "split" not in measured


@pytest.mark.parametrize("hybrid", [Toggle.ON, Toggle.AUTO])
def test_experts_without_slots_go_by_the_old_rule(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch, hybrid: Toggle
) -> None:
    monkeypatch.setattr(StreamingDevice, "_pool_of", lambda *_: None)
    notes = notes_of(config_of(hybrid))
    assert notes == [f"--hybrid {hybrid}: no layer is split: the device takes no layer's experts"]
    assert measured == ["split"], "there is nothing to compare"


def test_the_least_memory_leaves_slots_for_a_token_and_less_is_refused(folder: Path) -> None:
    """Experts never stream without slots: a smaller limit is refused, and the error names
    --vram."""
    least = budget(demo_file("target.gguf"), Streaming(), "least")
    (line, _) = notes_of(config_of(Toggle.ON, vram_bytes=least, n_gpu_layers=None))
    assert line.startswith("--hybrid on: layers are split")
    with pytest.raises(DoesNotFit, match="--vram"):
        Session(config_of(Toggle.ON, vram_bytes=least // 2, n_gpu_layers=None))


def test_a_measurement_that_fails_keeps_nobody_from_starting(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = HostGraph.compute
    n_computed = 0

    def fail(self: HostGraph, stream: Stream, layer: int) -> int:
        nonlocal n_computed
        n_computed += 1
        if n_computed > 60:
            raise DeviceFailed("computing experts of layer 3 on the CPU failed with ggml status -1")
        return computed(self, stream, layer)

    monkeypatch.setattr(HostGraph, "compute", fail)
    (line,) = notes_of(by_default())
    assert line.startswith("--hybrid auto: no layer is split: measuring it failed: computing exp")
    n_computed = 0
    with pytest.raises(DeviceFailed, match="computing experts"):
        Session(config_of(Toggle.ON))


def test_serving_times_split_layers_again_and_keeps_what_it_found(
    folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kept times are 30 times too long, so they do not contradict each other.

    The CPU then takes as long as `expert_s` says, and timings have no limit. So no clock decides.
    """
    config = config_of(Toggle.ON, ctx_size=1024)
    with Session(config):
        pass
    (file,) = folder.glob("*.json")
    kept = json.loads(file.read_text(encoding="utf-8"))
    host = kept["runs"][0]["split"]["host"]
    host["by_rows_s"] = {n: 30 * expert_s(int(n)) for n in host["by_rows_s"]}
    host["fixed_s"] = 0.0
    file.write_text(json.dumps(kept), encoding="utf-8")
    plain = SplitSides.host_s

    def exactly(sides: SplitSides, n_experts: int, n_rows: int) -> float:
        assert plain(sides, n_experts, n_rows) > 0
        return n_experts * expert_s(n_rows)

    monkeypatch.setattr(SplitSides, "host_s", exactly)
    monkeypatch.setattr(split_retiming, "_CREDIT", math.inf)
    with Session(config) as session:
        before = costs_in_use(session)
        options = GenerateOptions(n_predict=300, ignore_eos=True)
        assert sum(len(p.tokens) for p in session.generate("def f(", options)) == 300
        assert session.counters()["split_timings"] >= 60
        after = costs_in_use(session)
    again = json.loads(file.read_text(encoding="utf-8"))["runs"][0]["split"]["host"]["by_rows_s"]
    assert measured == ["split"], "only the first start"
    for n in (1, 2, 4):
        assert before[n] == pytest.approx(30 * expert_s(n))
        assert after[n] == pytest.approx(expert_s(n), rel=0.05)
        assert again[str(n)] == pytest.approx(expert_s(n), rel=0.05)


def expert_s(n_rows: int) -> float:
    """Return the seconds in which the CPU computes an expert with `n_rows` rows."""
    return 2e-5 * (1 + n_rows) / 2


def costs_in_use(session: Session) -> Sequence[float]:
    """Seconds of an expert on the CPU by rows, by which layers are divided."""
    splitter = session.target.opened.weights.ways.now.splitter
    assert isinstance(splitter, ByCosts)
    return splitter.costs.host_s
