"""`policies` judges all policies alike."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
from resolved import config_of

from lab.policies import Tally, judged_prompts, run, tuning_prompts
from specdec.policies.rules import Fixed
from specdec.types import Round, Walk
from specoffload.config.resolution import Config, demo_file
from specoffload.session.session import Session
from specoffload.session.statistics import GenerationStats


def pair(device: str) -> Config:
    target, draft = demo_file("target.gguf"), demo_file("draft.gguf")
    return config_of(device=device, model=target, draft=draft, threads=1, use_profile=False)


class Noting(Fixed):
    """Blocks of 2 that note every draft they begin."""

    def __init__(self, name: str, began: list[tuple[str, int]]) -> None:
        super().__init__(2)
        self.name, self._began, self.n_learnt = name, began, 0

    def begin(self, limit: int, source: str) -> Walk:
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
