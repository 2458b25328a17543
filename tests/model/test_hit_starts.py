"""Hits are counted while a session runs, and stored at its end.

The next session plans by them, and fills its slots while it waits for the first request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import resolved
from budgets import ON_GPU, budget

from lab.options import Streaming
from offload.model_file import read_facts
from offload.plan.workload import TokenMix
from specoffload.config.options import Toggle
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions
from specoffload.kept import Kept, KeptFile
from specoffload.opening.choices import StartChoices
from specoffload.opening.kept_plan import kept_for_plan
from specoffload.opening.target import target_options
from specoffload.session.session import Session

TARGET = demo_file("target.gguf")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def config_of(**changes: object) -> Config:
    fields = {
        "threads": 1,
        "ctx_size": 256,
        "device": "sim",
        "vram_bytes": budget(TARGET, Streaming(), "half"),
        "n_gpu_layers": ON_GPU,
        "min_batch": "1000",
        "spec": NO_DRAFTS,
        "hybrid": Toggle.ON,
    }
    return resolved.config_of(**{**fields, **changes})


def kept_in(folder: Path) -> Kept:
    return KeptFile(folder, read_facts(TARGET)).load()[0]


def answered(session: Session, n: int) -> Sequence[int]:
    options = GenerateOptions(n_predict=n, ignore_eos=True)
    return [t for piece in session.generate("def f(", options) for t in piece.tokens]


def run(config: Config, n: int) -> tuple[list[str], int]:
    """The start-up lines of a session on hits, and the number of tokens that it recorded per
    layer."""
    with Session(config) as session:
        notes = [note for note in session.notes if "hits" in note or "already on the GPU" in note]
        answered(session, n)
        return notes, session.target.counters().n_recorded


def test_what_a_session_counts_the_plan_of_the_next_reads(folder: Path) -> None:
    (note,), n_recorded = run(config_of(), 100)
    assert "estimate" in note
    assert n_recorded > 0
    found = kept_in(folder).hits
    assert found is not None
    assert 64 <= found.n_tokens <= 110
    assert kept_for_plan(config_of()).hits == found.curve
    (note,), _ = run(config_of(), 100)
    assert f"counted on {found.counted_on} over {round(found.n_tokens)} tokens" in note
    again = kept_in(folder).hits
    assert again is not None
    assert again.n_tokens > found.n_tokens
    assert len([*folder.glob("*.json")]) == 1


def test_too_few_tokens_and_no_profile_keep_nothing(folder: Path) -> None:
    run(config_of(), 8)
    assert kept_in(folder).hits is None
    for _ in range(2):
        (note,), n_recorded = run(config_of(use_profile=False), 80)
        assert "estimate" in note
        assert n_recorded == 0
    assert kept_in(folder).hits is None
    assert kept_for_plan(config_of(use_profile=False)).hits is None


def test_a_damaged_file_is_said_and_nothing_fails(folder: Path) -> None:
    run(config_of(), 80)
    (file,) = folder.glob("*.json")
    file.write_text("[]", encoding="utf-8")
    with Session(config_of()) as session:
        assert any(f"{file} is damaged and not used" in note for note in session.notes)
    run(config_of(), 80)
    assert kept_in(folder).hits is not None


def test_a_folder_that_cannot_be_written_ends_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "file" / "in"))
    run(config_of(), 80)
    assert "measurements are not kept" in caplog.text


def test_what_auto_measures_is_counted_and_known_to_the_next_plan(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This also holds if `auto` decides to split nothing, so that the next plan knows it."""
    monkeypatch.setenv("SPECOFFLOAD_MEASURE_S", "6")
    config = config_of(hybrid=Toggle.AUTO)
    with Session(config) as session:
        assert session.target.opened.routing.is_on
        assert session.target.opened.routing.n_tokens >= 64
        assert session.target.opened.plan is not None
        sharing = session.target.opened.plan.sharing
    assert kept_in(folder).hits is not None
    (decode,) = kept_for_plan(config).decodes
    assert decode.sharing == sharing
    assert 0 < decode.seconds < 1
    assert kept_for_plan(config_of(hybrid=Toggle.ON)).decodes == (decode,), "it plans alike"
    for changes in ({"hybrid": Toggle.OFF}, {"use_profile": False}):
        assert kept_for_plan(config_of(**{"hybrid": Toggle.AUTO, **changes})).decodes == ()


def test_a_session_that_measures_keeps_no_hits(folder: Path) -> None:
    with Session(config_of(), keeps_hits=False) as session:
        answered(session, 80)
        assert session.target.counters().n_recorded == 0
    assert kept_in(folder).hits is None


@pytest.mark.parametrize("hybrid", [Toggle.ON, Toggle.OFF])
def test_tokens_of_runs_decide_what_the_next_plan_is_made_for(folder: Path, hybrid: Toggle) -> None:
    facts, config = read_facts(TARGET), config_of(hybrid=hybrid)
    with Session(config) as session:
        for _ in range(2):  # the second run reuses all but the prompt's last token
            prompt = session.tokenize("word " * 60, add_special=True, parse_special=False)
            for _ in session.generate(prompt, GenerateOptions(n_predict=20, ignore_eos=True)):
                pass
    mix = kept_in(folder).mix
    assert 0 <= mix.n_prompt - len(prompt) <= 2
    assert mix.n_generated == 40
    assert kept_for_plan(config).mix is None, "too few to plan for"
    KeptFile(folder, facts).update(lambda kept: kept.count(None, TokenMix(1000, 64_000)))
    assert kept_for_plan(config).mix == TokenMix(1 / 64, 1)
    with Session(config) as session:
        assert session.target.opened.plan is not None
        (reason,) = [
            words for words in session.target.opened.plan.reasons if "planned for" in words
        ]
        assert reason == "planned for 64 generated tokens to each prompt token (--plan-for)"
    asked = config_of(hybrid=hybrid, plan_for=TokenMix(3, 1))
    options = target_options(asked, StartChoices.as_asked(asked), kept_for_plan(asked))
    assert options.wanted.mix == TokenMix(3, 1)
    assert kept_for_plan(config_of(hybrid=hybrid, use_profile=False)).mix is None


# -- warm starts ---------------------------------------------------------------------------------


def first_decode(config: Config, *, warm: bool) -> tuple[int, Sequence[int], int]:
    """Returns (hits in the first decodes, the text's tokens, experts filled before the request)."""
    with Session(config) as session:
        while warm and session.use_idle_time():
            pass
        before = session.target.counters()
        tokens = answered(session, 2)
        after = session.target.counters()
        assert not session.use_idle_time(), "somebody has asked"
        hits = (after.hits - before.hits) + (after.n_pairs_hit - before.n_pairs_hit)
        return hits, [*tokens, *answered(session, 20)], before.n_filled


@pytest.mark.parametrize(
    "changes",
    [{"hybrid": Toggle.ON}, {"hybrid": Toggle.OFF, "min_batch": "1", "n_cpu_moe": 99}],
)
def test_a_warm_start_hits_more_and_changes_no_text(
    folder: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(**changes)
    run(config, 100)
    kept = kept_in(folder).hits
    assert kept is not None
    assert all(sum(uses) >= 64 * kept.n_used for uses in kept.uses.values())
    cold_hits, cold_text, nothing = first_decode(config, warm=False)
    assert nothing == 0
    caplog.set_level(logging.INFO, "specoffload.session")
    warm_hits, warm_text, n_filled = first_decode(config, warm=True)
    assert n_filled > 0
    assert f"{n_filled} experts were copied" in caplog.text
    assert warm_hits > cold_hits
    assert warm_text == cold_text


def test_those_that_were_used_most_are_there_and_a_request_ends_the_filling(folder: Path) -> None:
    config = config_of()  # without lent slots, which would hold all experts of so small a model
    config = replace(config, lend=False)
    run(config, 100)
    kept = kept_in(folder).hits
    assert kept is not None
    with Session(config) as session:
        assert session.use_idle_time()
        assert session.use_idle_time()
        assert session.target.counters().n_filled == 2, "one at a time: a request waits for one"
        answered(session, 2)
        assert not session.use_idle_time()
        assert session.target.counters().n_filled == 2
    with Session(config) as session:
        while session.use_idle_time():
            pass
        plan, device = session.target.opened.plan, session.target.device
        assert plan is not None
        assert device is not None
        (pool,) = plan.layout.pools
        (executor,) = device.executors.values()
        held = {
            (plan.layout.groups[group].layer, expert)
            for group, expert in executor.schedule.pools[0].where  # type: ignore[attr-defined]
        }
        used = sorted((n for uses in kept.uses.values() for n in uses if n), reverse=True)[
            : pool.n_slots
        ]
        assert len(held) <= pool.n_slots
        # A slot for which no expert is left keeps what the start's measuring copied.
        none = [0] * pool.n_experts
        uses = sorted((kept.uses.get(layer, none)[e] for layer, e in held), reverse=True)
        assert uses[: len(used)] == used
