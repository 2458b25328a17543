"""Kept hits are read as they were written; what is not theirs is said and not used."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.model import ModelFacts
from offload.model_file import read_facts
from offload.plan.sharing import TokenMix
from offload.routing import SHARES, CountedHits, RoutingRecorder
from specoffload.config.resolution import demo_file
from specoffload.speculation.kept_hits import HitKeeper, Kept, hits_path, load_kept, store_kept
from specoffload.speculation.profile_store import model_hash

RATES = tuple(np.linspace(0.1, 0.9, len(SHARES)).round(4).tolist())


@pytest.fixture(scope="module")
def facts() -> ModelFacts:
    return read_facts(demo_file("target.gguf"))


def hits_of(facts: ModelFacts) -> CountedHits:
    layers = {0: RATES, 2: RATES}
    return CountedHits(facts.n_experts, facts.n_experts_used, layers, 500.0, date(2026, 3, 1))


def file_of(folder: Path, facts: ModelFacts) -> Path:
    return hits_path(folder, facts, model_hash(facts))


def test_what_was_stored_is_loaded_and_merged_with_more(tmp_path: Path, facts: ModelFacts) -> None:
    kept = Kept(hits_of(facts), TokenMix(3000, 50))
    assert load_kept(tmp_path, facts) == (Kept(), "")
    assert store_kept(tmp_path / "new", facts, kept) is None
    assert load_kept(tmp_path / "new", facts) == (kept, "")
    assert store_kept(tmp_path / "new", facts, kept) is None
    found = load_kept(tmp_path / "new", facts)[0].hits
    assert found is not None
    assert 500 < found.n_tokens < 1000
    assert found.layers[2] == pytest.approx(RATES, abs=1e-3)
    assert len([*(tmp_path / "new").iterdir()]) == 1


def change(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.__setitem__(key, value)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (change("model", "f" * 24), "is of another model"),
        (change("n_experts", 7), "is of another model"),
        (change("format", 2), "is of another version"),
        (change("shares", [0.5]), "is damaged"),
        (change("n_used", 99), "is damaged"),
        (change("n_tokens", -1), "is damaged"),
        (change("n_tokens", float("inf")), "is damaged"),
        (change("counted_on", "soon"), "is damaged"),
        (change("layers", {}), "is damaged"),
        (change("layers", {"0": [2.0] * len(SHARES)}), "is damaged"),
        (change("layers", {"0": [0.5]}), "is damaged"),
        (change("layers", {"x": [0.5] * len(SHARES)}), "is damaged"),
        (change("layers", [0.5]), "is damaged"),
        (change("prompt_tokens", -1), "is damaged"),
        (change("generated_tokens", "many"), "is damaged"),
    ],
)
def test_damage_is_said_and_the_next_store_begins_anew(
    tmp_path: Path, facts: ModelFacts, damage: Callable[[dict[str, Any]], None], said: str
) -> None:
    store_kept(tmp_path, facts, Kept(hits_of(facts), TokenMix(3000, 50)))
    file = file_of(tmp_path, facts)
    data = json.loads(file.read_text(encoding="utf-8"))
    damage(data)
    file.write_text(json.dumps(data), encoding="utf-8")
    found, why = load_kept(tmp_path, facts)
    assert found == Kept()
    assert said in why
    assert str(file) in why
    assert store_kept(tmp_path, facts, Kept(hits_of(facts))) is None
    assert load_kept(tmp_path, facts) == (Kept(hits_of(facts)), "")


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=50)
def test_no_bytes_make_it_fail(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    facts, folder = read_facts(demo_file("target.gguf")), tmp_path_factory.mktemp("hits")
    file_of(folder, facts).write_bytes(raw)
    assert load_kept(folder, facts)[0] == Kept()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path, facts: ModelFacts) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    why = store_kept(tmp_path / "file" / "in", facts, Kept(hits_of(facts)))
    assert why is not None
    assert why.startswith("counted hits are not kept: ")


def test_the_keeper_keeps_each_token_once_and_only_enough_of_them(
    tmp_path: Path, facts: ModelFacts
) -> None:
    recorder = RoutingRecorder()
    keeper = HitKeeper(tmp_path, facts, recorder, lambda: TokenMix(0, 0))
    rng = np.random.default_rng(0)

    def tell(n: int) -> None:
        for _ in range(n):
            for layer in (0, 1):
                ids = rng.permutation(facts.n_experts)[None, : facts.n_experts_used]
                recorder.layer(layer, facts.n_experts_used).add(ids.astype(np.int32))

    tell(60)
    keeper.keep()
    assert load_kept(tmp_path, facts) == (Kept(), "")
    tell(60)
    assert not keeper.is_due, "not enough for a session that goes on"
    keeper.keep()
    keeper.keep()
    found = load_kept(tmp_path, facts)[0].hits
    assert found is not None
    assert found.n_tokens == 120
    tell(4096)
    assert keeper.is_due
    keeper.keep()
    found = load_kept(tmp_path, facts)[0].hits
    assert found is not None
    assert found.n_tokens > 1024
    assert keeper.failed is None


def test_tokens_of_runs_are_kept_once_and_without_hits(tmp_path: Path, facts: ModelFacts) -> None:
    tokens = [0, 0]
    keeper = HitKeeper(tmp_path, facts, RoutingRecorder(), lambda: TokenMix(*tokens))
    tokens[:] = 40, 10
    keeper.keep()
    assert load_kept(tmp_path, facts) == (Kept(), ""), "too few to write a file for"
    tokens[:] = 900, 100
    keeper.keep()
    keeper.keep()
    assert load_kept(tmp_path, facts) == (Kept(None, TokenMix(900, 100)), "")
    assert not keeper.is_due
    tokens[0] += 1 << 16
    assert keeper.is_due, "a long session keeps them as it goes on"
    keeper.keep()
    assert not keeper.is_due
    store_kept(tmp_path, facts, Kept(hits_of(facts)))
    kept, why = load_kept(tmp_path, facts)
    assert why == ""
    assert kept.hits == hits_of(facts)
    assert kept.mix.n_prompt > 1 << 16


def test_a_file_of_before_tokens_were_kept_is_read(tmp_path: Path, facts: ModelFacts) -> None:
    store_kept(tmp_path, facts, Kept(hits_of(facts), TokenMix(3000, 50)))
    file = file_of(tmp_path, facts)
    data = json.loads(file.read_text(encoding="utf-8"))
    del data["prompt_tokens"], data["generated_tokens"]
    file.write_text(json.dumps(data), encoding="utf-8")
    assert load_kept(tmp_path, facts) == (Kept(hits_of(facts)), "")


def test_newer_runs_weigh_more_and_few_tokens_weigh_nothing() -> None:
    assert Kept(None, TokenMix(3000, 1000)).mix_for_plan is None
    prompts, answers = Kept(None, TokenMix(1 << 18, 0)), Kept(None, TokenMix(0, 1 << 18))
    assert prompts.merged(answers).mix == TokenMix(1 << 17, 1 << 18)
    assert prompts.merged(answers).mix_for_plan == TokenMix(0.5, 1)
    # A plan does not change with every run.
    near = [Kept(None, TokenMix(n, 1000)).mix_for_plan for n in (6000, 7000, 8000, 11000)]
    assert near == [TokenMix(8.0, 1)] * 4
    assert answers.mix_for_plan == TokenMix(2.0**-18, 1)
