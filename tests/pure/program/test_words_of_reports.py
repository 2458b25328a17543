"""Sentences of reports are true for one and for many, and name their cause."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from resolved import config_of, line_of
from rich.progress import Progress

from offload.store.store import HostRoom
from offload.times.hits import Sharing
from offload.times.min_batch import NEVER, MinBatch
from offload.times.table import CostTable, DecodeTime, Way
from offload.units import milliseconds, size_words
from specoffload import report
from specoffload.commands import models
from specoffload.commands.bench import _draft_words, _shown_name
from specoffload.commands.models import describe, in_one_line
from specoffload.commands.profile import show_table
from specoffload.config.resolution import Config, demo_file
from specoffload.errors import UsageError
from specoffload.generation.statistics import GenerationStats
from specoffload.kept import CACHE, ON_DEVICE, STREAMED, KeptRun
from specoffload.models.local import CachedModel, models_below
from specoffload.opening.speeds import rounded


def test_an_answer_without_drafts_says_why() -> None:
    none = report.summary(GenerationStats(n_tokens=1, n_prompt_tokens=1, decode_s=1.0))
    assert none[0].startswith("1 token in")
    assert "prompt 1 token in" in none[0]
    assert none[1] == "no drafts: the answer is too short"
    stats = GenerationStats(n_tokens=9, decode_s=1.0)
    assert "nothing drafts" in report.summary(stats)[1]
    stats = GenerationStats(n_tokens=9, decode_s=1.0, decisions=(("p below #", 8),))
    stats = replace(stats, last_reasons=("p 0.3 below 0.5",))
    assert report.summary(stats)[1] == "no drafts: p 0.3 below 0.5"


def test_decisions_have_no_placeholder_and_one_round_is_singular() -> None:
    stats = GenerationStats(n_tokens=9, decisions=(("p # below #", 1), ("other", 2)))
    stats = replace(stats, last_reasons=("p 0.3 below 0.5", "other"), n_draft_steps=1, n_rounds=3)
    lines = report.spec_lines(stats)
    assert lines[-2:] == ["1 round: p 0.3 below 0.5 (the last)", "2 rounds: other"]
    assert lines[-3].startswith("1 draft step took 0.000 s, 3 verifications")
    lines = report.spec_lines(replace(stats, n_could_accept=1))
    (one,) = [line for line in lines if "more" in line]
    assert one == "1 more token would have been accepted, but was not verified"


def test_sizes_and_speeds_have_as_many_digits_as_mean_something() -> None:
    assert size_words(40 << 20) == "40.0 MiB"
    assert size_words(5 << 10) == "5.0 KiB"
    assert size_words(3 << 30) == "3.0 GiB"
    assert rounded(162_581.3) == "160,000"
    assert rounded(96.5) == "96"
    times = [milliseconds(s) for s in (0.000424, 0.000446, 0.0325, 1.234)]
    assert times == ["0.42 ms", "0.45 ms", "32.5 ms", "1234 ms"]


ALL = Sharing()  # the sharing of a run that says none


def test_a_kept_run_is_compared_by_what_differs() -> None:
    settings = {"flash-attn": "auto", "ubatch": "512", "guesses": "True", CACHE: ON_DEVICE}
    kept = KeptRun(settings)

    def words_with(**changes: str) -> str:
        return kept.difference(settings | {n.replace("_", "-"): v for n, v in changes.items()}, ALL)

    assert words_with() == ""
    assert words_with(ubatch="1024") == "the kept run had --ubatch-size 512, not 1024"
    assert words_with(flash_attn="off", ubatch="64") == (
        "the kept run had flash attention auto, not off; --ubatch-size 512, not 64"
    )
    streamed = KeptRun(settings | {STREAMED: "10027008"})
    words = kept.difference(streamed.settings, ALL)
    assert words == "the kept run had no weights streamed to the GPU"
    assert streamed.difference(settings, ALL) == "the kept run had weights streamed to the GPU"
    assert words_with(layout="repacked") == "the kept run had other layouts or devices"
    in_ram = KeptRun(settings | {CACHE: "in RAM, batches of 3 copy from it"})
    assert in_ram.difference(settings, ALL) == "the kept run had the KV cache in RAM"
    words = kept.difference(in_ram.settings, ALL)
    assert words == "the kept run had the KV cache on the GPU"
    assert "other layouts" in KeptRun({"plan": "of an earlier version"}).difference(settings, ALL)
    assert "threads '1/1', not '2/2'" in KeptRun({"threads": "1/1"}).difference(
        {"threads": "2/2"}, ALL
    )


def test_a_threshold_for_no_batch_is_never() -> None:
    assert MinBatch(NEVER, NEVER, prefill_experts=NEVER).words(["experts"]) == "experts in no batch"


def test_ram_with_a_speed_is_read_by_every_command() -> None:
    line = line_of("--ram", "512GiB,200GB/s")
    assert line.options.ram_bytes == 512 << 30
    assert any("--ram 200GB/s ignored" in words for words in line.options.notes)
    assert not line_of("--ram", "512GiB").options.notes
    with pytest.raises(UsageError, match="no size"):
        line_of("--ram", "200GB/s")


def test_own_layers_that_are_missing_are_named_to_the_user(tiny_dense: Path) -> None:
    from specdec.options import DrafterName, SpecOptions

    spec = SpecOptions(drafters=(DrafterName.MTP,), given={"drafters": "--spec-type"})
    config = config_of(model=tiny_dense, spec=spec)
    assert any("--spec-type mtp: the file has no layers" in words for words in config.notes)
    assert not config_of(model=demo_file("target.gguf"), spec=spec).notes


@pytest.mark.parametrize(
    ("on_gpu", "streamed", "file", "ram", "words", "fits"),
    [
        (True, 0, 8, 4, "fits the GPU: 3.0 GiB", True),
        (False, 0, 8, 16, "8.0 GiB in RAM, on the CPU", True),
        (False, 0, 8, 4, "needs 8.0 GiB of RAM, 4.0 GiB is free: experts that do not fit", False),
        (True, 5, 8, 16, "5.0 GiB in RAM, 3.0 GiB on the GPU", True),
    ],
)
def test_a_listed_model_says_where_it_runs(
    on_gpu: bool, streamed: int, file: int, ram: int, words: str, fits: bool
) -> None:
    gib = 1 << 30
    plan = SimpleNamespace(streamed_bytes=streamed * gib, used_bytes=3 * gib)
    planned: Any = SimpleNamespace(
        plan=plan, facts=SimpleNamespace(size_bytes=file * gib, n_experts=8)
    )
    found = in_one_line(planned, ram * gib, on_gpu=on_gpu)
    assert found[0].startswith(words)
    assert found[1] is fits


def test_a_folder_of_models_is_listed(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.gguf", "deep/a-00001-of-00002.gguf", "deep/a-00002-of-00002.gguf", "x.txt"):
        (tmp_path / name).touch()
    found = list(models_below(tmp_path))
    assert [Path(model.name).name for model in found] == ["b.gguf", "a-00001-of-00002.gguf"]
    with pytest.raises(UsageError, match="is no folder"):
        list(models_below(tmp_path / "b.gguf"))


def test_the_fastest_time_of_each_size_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of prompts, which have no time of the way that is the fastest at small sizes."""
    times = {
        Way.IN_PLACE: {1: 2.0, 64: 9.0, 128: 20.0},
        Way.STREAMED: {1: 5.0, 64: 8.0, 128: 10.0},
        Way.SPLIT: {1: 1.0, 64: 3.0},
    }
    table = CostTable(
        32, 3, {w: {n: DecodeTime(s, n_timed=4) for n, s in at.items()} for w, at in times.items()}
    )
    rows: list[tuple[str, ...]] = []
    monkeypatch.setattr(report, "table", lambda title, names, found: rows.extend(found))
    monkeypatch.setattr(report, "line", lambda words: None)
    show_table(table)
    marked = {row[0]: [i for i, cell in enumerate(row[1:]) if cell.endswith("*")] for row in rows}
    assert marked == {"1": [2], "64": [2], "128": [1]}


def test_a_size_that_was_timed_once_has_no_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {
        1: DecodeTime(0.002, 0.0, 1),
        2: DecodeTime(0.003, 0.05, 4),
        3: DecodeTime(0.00023, 87.94, 3),
    }
    rows: list[tuple[str, ...]] = []
    monkeypatch.setattr(report, "table", lambda title, names, found: rows.extend(found))
    show_table(CostTable(32, 3, {Way.IN_PLACE: entries}))
    assert rows == [("1", "2.00 (1)"), ("2", "3.00 ± 5% (4)"), ("3", "no steady time (3)")]


def test_a_listed_model_is_compared_with_the_memory_of_the_control_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = demo_file("target.gguf")

    def config_for(path: Path) -> Config:
        return config_of(line_of("-m", str(path), "--device", "cpu", "-c", "512").options)

    model = CachedModel("demo", "a folder", file)
    assert describe(model, config_for)["fits"]
    room = HostRoom(1 << 20, "the control group's limit of 0.0 GiB")
    monkeypatch.setattr(models, "room_now", lambda: room)
    row = describe(model, config_for)
    assert not row["fits"]
    assert "1.0 MiB is free" in row["here"]


def test_compared_texts_have_the_names_of_the_rows() -> None:
    assert _shown_name("speculative") == "with drafts"
    assert _shown_name("plain in batches of 8") == "without drafts in batches of 8"


def test_a_bar_names_its_step_and_begins_again_only_with_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Progress] = []

    class Remembered(Progress):
        def __init__(self, *columns: Any, **named: Any) -> None:
            super().__init__(*columns, **named)
            made.append(self)

    monkeypatch.setattr(report, "Progress", Remembered)
    shown: list[tuple[str, int]] = []
    with report.steps("m.gguf") as tell:
        (bar,) = made
        for step, share in (("10.0.0.2:8: loading", 0.7), ("reading weights", 0.2),
                            ("reading weights", 0.9), ("measuring", 0.1)):  # fmt: skip
            tell(step, share)
            (task,) = bar.tasks
            shown.append((task.description, round(task.percentage)))
    assert shown == [
        ("m.gguf: 10.0.0.2:8: loading", 70),
        ("m.gguf: reading weights", 20),
        ("m.gguf: reading weights", 90),
        ("m.gguf: measuring", 10),
    ]


def test_a_share_of_accepted_drafts_is_told_with_its_counts() -> None:
    few = {"acceptance_rate": 1.0, "n_accepted": 1, "n_drafted": 1, "tokens_per_round": 1.004}
    assert _draft_words(few) == "drafts 100% accepted (1 of 1), 1.00 tokens per round"
