"""Slots are filled with the last run's experts while the first request is awaited."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
from test_hit_starts import config_of, kept_in, run

from specoffload.config.options import Toggle
from specoffload.config.resolution import Config
from specoffload.session.generation import GenerateOptions
from specoffload.session.session import Session

pytestmark = pytest.mark.usefixtures("measures_briefly")
PROMPT = "def f("


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "profiles"))
    return tmp_path / "profiles"


def answered(session: Session, n: int) -> Sequence[int]:
    options = GenerateOptions(n_predict=n, ignore_eos=True)
    return [t for piece in session.generate(PROMPT, options) for t in piece.tokens]


def first_decode(config: Config, *, warm: bool) -> tuple[int, Sequence[int], int]:
    """(uses of experts that were hits in the first decodes, the text's tokens, experts filled)."""
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
    "changes", [{"hybrid": Toggle.ON}, {"hybrid": Toggle.OFF, "min_batch": "1"}]
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
    config = config_of()
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
        plan, device = session.target.plan, session.target.device
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
        assert len(held) == pool.n_slots
        assert sorted((kept.uses[layer][e] for layer, e in held), reverse=True) == used
