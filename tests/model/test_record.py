"""docs/background.md's table on the record is made by its script, and its terms add up."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lab import record
from offload.model import ModelFacts


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return record.facts_of(tmp_path_factory.mktemp("headers"))


def test_the_table_is_what_its_script_makes_and_the_text_says_what_it_has() -> None:
    page = record.PAGE.read_text(encoding="utf-8")
    assert page == record.page(), "run scripts/lab/run record"
    found = re.search(r"best length\*\* \| \*\*(\d+)\*\* \| \*\*(\d+)\*\* \|", page)
    assert found is not None
    shares = [int(found[i + 1]) / tps for i, tps in enumerate(record.RECORD.values())]
    assert f"to {shares[0]:.2f} of the record at 4k of context, and to {shares[1]:.2f} at" in page


@pytest.mark.parametrize("n_ctx", record.RECORD)
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_terms_add_up_and_none_is_negative(n_ctx: int, n_tokens: int, facts: ModelFacts) -> None:
    case = record.case_of(facts, n_ctx)
    terms = record.terms(case, n_tokens)
    assert sum(terms.values()) == pytest.approx(case.decode_s(n_tokens))
    assert min(terms.values()) > 0


def test_what_is_needed_just_reaches_a_speed(facts: ModelFacts) -> None:
    case = record.case_of(facts, 4096)
    hits = record.needed(lambda x: replace(case, hits=x), 1.0, 0.0, 75.0)
    assert hits is not None
    assert replace(case, hits=hits).tps() == pytest.approx(75.0, rel=1e-3)
    most_tps = replace(case, hits=1.0).tps()
    assert record.needed(lambda x: replace(case, hits=x), 1.0, 0.0, 1.01 * most_tps) is None


def test_the_facts_have_the_size_of_the_published_file(facts: ModelFacts) -> None:
    tables = [e.size_bytes for e in facts.loaded if e.name == "per_layer_token_embd.weight"]
    total = sum(e.size_bytes for e in facts.loaded) - sum(tables) + record.TABLE_BYTES
    assert len(tables) == 1
    assert total == pytest.approx(record.FILE_BYTES, rel=1e-6)
    expert = record.case_of(facts, 4096).work.expert
    assert 2.0 < 8 * expert.size_bytes / expert.n_weights < 2.6, "a type of 2 bits"


def test_slots_and_all_else_fit_the_card(facts: ModelFacts) -> None:
    few, many = (record.case_of(facts, n_ctx) for n_ctx in (131072, 4096))
    assert 0 < few.sharing.n_slots < many.sharing.n_slots
    slots = many.sharing.n_slots * many.work.expert.size_bytes
    dense = many.work.n_layers * many.work.dense.size_bytes + many.work.head.size_bytes
    assert slots + dense < record.VRAM_BYTES
