"""`bench --policies`: its regime is what it says, and all policies are judged alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
from resolved import config_of

from lab import regime
from lab.policies import Tally, run
from lab.regime import SIZES, SizeWay, ways
from lab.workloads import judged_prompts, tuning_prompts
from specdec.policies.rules import Fixed, FixedWalk
from specdec.types import Round
from specoffload.config.resolution import Config, demo_file
from specoffload.session.generation import GenerationStats
from specoffload.session.session import Session


def pair(device: str) -> Config:
    target, draft = demo_file("target.gguf"), demo_file("draft.gguf")
    return config_of(device=device, model=target, draft=draft, threads=1, use_profile=False)


def ways_of(config: Config) -> tuple[list[SizeWay], str]:
    """The ways of all sizes in the regime that is made, and the words for it."""
    made, words = regime.transfer_bound(config)
    # Counters are what is tested here: the link need not be slow.
    made = replace(made, device="sim", draft=None)
    with Session(made, keeps_hits=False) as session:
        return ways(session.target), words


def test_every_size_streams_as_the_regime_says() -> None:
    found, words = ways_of(pair("auto"))
    assert "batches of every size stream" in words
    assert [way.n for way in found] == list(SIZES)
    assert [way.words for way in found if not way.streams] == []


def test_with_few_slots_larger_batches_stream_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regime, "_SLOT_SHARES", (0.35,))
    found, _ = ways_of(pair("auto"))
    assert [way.words for way in found if not way.streams] == []
    assert {way.n for way in found if "chunks" in way.words} == {n for n in SIZES if n > 3}


def test_what_the_cpu_computes_is_not_said_to_stream() -> None:
    made, _ = regime.transfer_bound(pair("auto"))
    few = replace(made.streaming, vram_bytes=int(0.8 * (made.streaming.vram_bytes or 0)))
    made = replace(made, device="sim", draft=None)
    with Session(replace(made, streaming=replace(few, chunks="off"))) as session:
        found = {way.n: way for way in ways(session.target, (1, 8))}
        assert session.target.device is not None
        assert session.target.device.declined
    assert found[1].streams
    assert not found[8].streams
    assert found[8].words.startswith("the CPU computes 9 of 45 matrices")


class Noting(Fixed):
    """Blocks of 2 that note every draft they begin."""

    def __init__(self, name: str, began: list[tuple[str, int]]) -> None:
        super().__init__(2)
        self.name, self._began, self.n_learnt = name, began, 0

    def begin(self, limit: int, source: str) -> FixedWalk:
        self._began.append((self.name, self.n_learnt))
        return super().begin(limit, source)

    def learn(self, round_: Round) -> None:
        self.n_learnt += 1


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session(pair("cpu"), keeps_hits=False) as opened:
        yield opened


def test_each_repetition_is_played_by_policies_that_learnt_nothing_of_the_others(
    session: Session,
) -> None:
    began: list[tuple[str, int]] = []
    makes = {name: partial(Noting, name, began) for name in "abc"}
    kinds = {"code": ["import os\n", "def f(x):\n", "class A:\n"]}
    tallies = run(session, makes, kinds, 6, 2)
    turns = [name for i, (name, _) in enumerate(began) if not i or began[i - 1][0] != name]
    assert "".join(turns) == 2 * "abcbcacab", "each comes first equally often"
    assert [n for name, n in began if name == "a"].count(0) == 2, "anew in each repetition"
    assert tallies["a"].n_written == 2 * 3 * 6


def test_a_prompt_takes_the_median_of_its_repetitions() -> None:
    tally = Tally()
    for seconds in (1.0, 9.0, 2.0):
        tally.add("code", "x", GenerationStats(n_tokens=10, decode_s=seconds, n_drafted=4))
    tally.add("prose", "y", GenerationStats(n_tokens=10, decode_s=5.0))
    assert tally.rate("code") == pytest.approx(10 / 2.0)
    assert tally.rate() == pytest.approx(20 / 7.0)
    assert tally.n_drafted == 12


def test_no_judged_prompt_was_tuned_on() -> None:
    tuned, judged = tuning_prompts(), judged_prompts()
    assert tuned.keys() == judged.keys() == {"code", "prose", "switching", "agent", "rewrite"}
    for kind, texts in judged.items():
        assert len(set(texts)) == len(texts) == 4
        assert not set(texts) & {text for each in tuned.values() for text in each}, kind
