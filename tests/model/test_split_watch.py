"""`--hybrid auto` on a real model splits layers only while that is faster.

It decides at the start and while requests are answered. Sleeping makes one of the two ways several
times as slow as the other.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import resolved

from offload import measuring
from offload.model_file import read_facts
from offload.plan.placement import make_plan
from offload.schedule.splitter import ByCosts
from offload.stream.split_path import SplitPath
from offload.times import learner
from specoffload.config.options import Toggle
from specoffload.config.resolution import Config, demo_file
from specoffload.config.speculation import NO_DRAFTS
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session
from specoffload.terminal.command import opened

PROMPTS = ("def f(", "class A:")
SLOW_LINK = "sim:bw=200MB/s"  # 1 ms for an expert
MOST_STEPS = 400


@pytest.fixture(autouse=True)
def in_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start trials after 16 decodes of a size instead of 64, and keep profiles in the test's
    folder."""
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setattr(learner, "_BETWEEN", 16)
    monkeypatch.setattr(learner, "_RISKED", 0.2)
    monkeypatch.setattr(measuring, "LEAD_TOKENS", 4)


def config_of(device: str, min_batch: str, hybrid: Toggle, n_parallel: int = 1) -> Config:
    """A configuration with slots for 9 of 48 experts; a token uses 12."""
    whole = make_plan(read_facts(demo_file("target.gguf")))
    config = resolved.config_of(
        device=device,
        threads=1,
        ctx_size=1024,
        vram_bytes=whole.resident_bytes + whole.slot_bytes // 5,
        n_cpu_moe=99,
        min_batch=min_batch,
        spec=NO_DRAFTS,
        hybrid=hybrid,
    )
    # The compute buffer would hold all experts of so small a model.
    return replace(config, parallel=n_parallel, lend=False)


@pytest.fixture
def pause_s(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Decodes with split layers take longer by the sum of this list."""
    seconds, expect = list[float](), SplitPath.expect

    def slow(split: SplitPath, *expected_s: float) -> None:
        time.sleep(sum(seconds))
        expect(split, *expected_s)

    monkeypatch.setattr(SplitPath, "expect", slow)
    return seconds


class Answering:
    """Runs requests at once. `steps` does one decode at a time."""

    def __init__(self, session: Session, n: int) -> None:
        self.session = session
        options = GenerateOptions(n_predict=MOST_STEPS, ignore_eos=True)
        self.requests = [
            session.start(session.tokenize(text, add_special=True, parse_special=True), options)
            for text in PROMPTS[:n]
        ]
        self.tokens: list[list[int]] = [[] for _ in self.requests]

    def steps(self) -> Iterator[int]:
        for i in range(MOST_STEPS - 1):
            self.session.step()
            for request, tokens in zip(self.requests, self.tokens, strict=True):
                while request.pieces:
                    tokens += request.pieces.popleft().tokens
            yield i

    def until_changes(self, n: int) -> None:
        for _ in self.steps():
            if self.session.counters()["split_changes"] == n:
                return
        raise AssertionError(f"after {MOST_STEPS} decodes there were not {n} changes")

    def cancel(self) -> None:
        for request in self.requests:
            self.session.cancel(request)


def test_a_start_that_finds_it_slower_says_both_times_and_splits_nothing(
    pause_s: list[float],
) -> None:
    pause_s.append(0.03)
    with Session(config_of("sim", "1000", Toggle.AUTO)) as session:
        (line,) = (note for note in session.notes if note.startswith("--hybrid"))
        found = re.fullmatch(
            r"--hybrid auto: no layer is split, because that is not faster "
            r"\(1 token: ([\d.]+) ms split, ([\d.]+) ms otherwise\)",
            line,
        )
        assert found, line
        assert float(found[1]) > float(found[2])
        assert sizes_of(session) == []
        before = session.target.counters().split_layers
        assert before > 0, "it was measured"
        answering = Answering(session, 1)
        for i in answering.steps():
            if i == 12:
                break
        assert session.target.counters().split_layers == before
        answering.cancel()


def sizes_of(session: Session) -> list[int]:
    """Return the sizes of batches whose layers are split now."""
    return session.target.opened.weights.ways.now.split_sizes


def test_a_pause_ends_a_trial_under_way(pause_s: list[float]) -> None:
    """Decodes that nothing is learnt from are computed in the usual way, as before the trial."""
    with Session(config_of(SLOW_LINK, "1", Toggle.AUTO)) as session:
        assert 1 in sizes_of(session), "the link is slow"
        pause_s.append(0.03)
        answering = Answering(session, 1)
        for _ in answering.steps():
            if 1 not in sizes_of(session):
                break
        assert session.counters()["split_trials"] == 1, "it is under way"
        assert 1 not in sizes_of(session)
        with session.costs.paused():
            assert 1 in sizes_of(session)
        assert 1 in sizes_of(session)
        assert session.counters()["split_changes"] == 0
        answering.cancel()


@pytest.mark.parametrize("n", [1, 2])
def test_while_answering_it_goes_over_to_what_is_faster_and_back(
    n: int, pause_s: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    """`n` requests run at once, so each batch has `n` tokens."""
    with Session(config_of(SLOW_LINK, "1", Toggle.AUTO, n)) as session:
        assert {1, 2} <= set(sizes_of(session)), "the link is slow"
        assert isinstance(session.target.opened.weights.ways.now.splitter, ByCosts)
        answering = Answering(session, n)
        with caplog.at_level(logging.WARNING):
            pause_s.append(0.03)
            answering.until_changes(1)
            assert n not in sizes_of(session)
            before = session.target.counters()
            for i in answering.steps():
                if i == 4:  # before the next trial
                    break
            after = session.target.counters()
            assert after.split_layers == before.split_layers
            assert after.streamed_bytes > before.streamed_bytes
            pause_s.clear()
            answering.until_changes(2)
            assert n in sizes_of(session)
            before = session.target.counters()
            for i in answering.steps():
                if i == 4:
                    break
            after = session.target.counters()
            assert after.split_layers > before.split_layers
            assert after.n_pairs_host > before.n_pairs_host
        assert session.counters()["split_trials"] >= 2
        answering.cancel()
    size = "1 token" if n == 1 else f"{n} tokens"
    said = [r.message.partition(" from now on")[0] for r in caplog.records]
    assert said == [
        f"batches of {size} are computed as --min-batch says",
        f"batches of {size} are computed by CPU and GPU together",
    ]
    with Session(config_of("sim", "1", Toggle.OFF, n)) as session:
        unsplit = Answering(session, n)
        for _ in unsplit.steps():
            if all(len(a) >= len(b) for a, b in zip(unsplit.tokens, answering.tokens, strict=True)):
                break
    for a, b in zip(unsplit.tokens, answering.tokens, strict=True):
        assert len(b) > 32
        assert a[: len(b)] == b


def test_at_a_terminal_a_change_is_said_behind_the_answer(
    pause_s: list[float], capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with opened(config_of(SLOW_LINK, "1", Toggle.AUTO)) as session:
        pause_s.append(0.03)
        answering = Answering(session, 1)
        answering.until_changes(1)
        answering.cancel()
        assert "from now on" not in capsys.readouterr().err + caplog.text
    said = " ".join(capsys.readouterr().err.split())
    assert "batches of 1 token are computed as --min-batch says from now on" in said
