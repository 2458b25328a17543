"""Every pair of values is run in some case or refused, and the tables are well formed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from combinations.cases import (
    TABLES,
    Case,
    all_pairs,
    by_new_pairs,
    by_use,
    covering,
    refused_pairs,
)
from combinations.found import FOUND
from combinations.trying import Outcome, Record, shrunk
from hypothesis import given, settings
from hypothesis import strategies as st

SEEDS = st.text(st.characters(categories=("L", "N")), max_size=10)


@pytest.mark.parametrize("table", TABLES)
@given(seed=SEEDS)
@settings(max_examples=5, deadline=None)
def test_each_pair_is_run_or_refused(table: str, seed: str) -> None:
    run = set().union(*(case.pairs for case in covering(table, seed)))
    assert run | refused_pairs(table) == all_pairs(table)
    assert not run & refused_pairs(table)


@pytest.mark.parametrize("table", TABLES)
def test_refused_pairs_and_their_remedies_exist(table: str) -> None:
    for refused in TABLES[table].refused:
        for axis, name in (refused.first, refused.second, (refused.second[0], refused.remedy)):
            TABLES[table].value(axis, name)
        re.compile(refused.says)
        remedied = frozenset((refused.first, (refused.second[0], refused.remedy)))
        assert remedied not in refused_pairs(table), "the remedy is refused, too"


@pytest.mark.parametrize("table", TABLES)
def test_the_page_counts_axes_and_pairs_as_the_tables_do(table: str) -> None:
    page = (Path(__file__).parents[3] / "docs/development.md").read_text("utf-8")
    counts = len(TABLES[table].axes), len(all_pairs(table)), len(refused_pairs(table))
    assert f"| {table} | {' | '.join(f'{n:,}' for n in counts)} | about " in page


@pytest.mark.parametrize("table", TABLES)
def test_values_have_names_of_their_own_and_a_meaning(table: str) -> None:
    for axis, values in TABLES[table].axes.items():
        assert axis.isidentifier()
        assert len({v.name for v in values}) == len(values) >= 2
        assert all(v.meaning and v.weight > 0 for v in values)


def test_three_axes_at_once_are_covered_too() -> None:
    cases = covering("request", "a", strength=3)
    triples = {(c["api"], c["constraint"], c["reasoning"]) for c in cases}
    axes = TABLES["request"].axes
    n_refused = sum(
        {axis for axis, _ in p} == {"api", "constraint"} for p in refused_pairs("request")
    )
    n_pairs = len(axes["api"]) * len(axes["constraint"]) - n_refused
    assert n_refused > 0
    assert len(triples) == n_pairs * len(axes["reasoning"])


def test_untried_pairs_come_first_if_asked_for() -> None:
    cases = by_use(covering("request", "a"))
    n, known = len(cases) // 3, cases[:3]
    ordered = by_new_pairs(cases[3:], known)
    assert sorted(map(str, ordered)) == sorted(map(str, cases[3:]))

    def n_pairs(first: int) -> int:
        return len(set().union(*(c.pairs for c in [*known, *ordered[:first]])))

    assert n_pairs(n) > len(set().union(*(c.pairs for c in cases[: n + 3])))
    gains = [n_pairs(i + 1) - n_pairs(i) for i in range(n)]
    assert gains == sorted(gains, reverse=True)


def test_a_case_is_written_as_code_and_refuses_unknown_names() -> None:
    case = Case.of("session", memory="mla", event="moved")
    assert str(case) == "Case.of('session', memory='mla', event='moved')"
    with pytest.raises(KeyError, match="no axis"):
        Case.of("session", colour="red")
    with pytest.raises(KeyError, match="no value"):
        Case.of("session", memory="elephant")


def test_a_failing_case_shrinks_to_the_pair_that_fails() -> None:
    guilty = {("memory", "windows"), ("event", "restored")}
    for case in covering("session", "c"):
        if guilty <= set(case.values):
            small = shrunk(case, lambda c: guilty <= set(c.values))
            assert set(small.told) == guilty


def test_outcomes_are_read_as_they_were_written_and_a_cut_line_is_left_out(tmp_path: Path) -> None:
    case = Case.of("command", command="tune")
    outcome = Outcome(case, 1.5, ("it dies",), Case.of("command"))
    path = tmp_path / "record.jsonl"
    Record(path).add(outcome)
    path.write_text(path.read_text("utf-8") + outcome.line[:30], "utf-8")
    record = Record(path)
    assert record.outcomes == [outcome]
    assert record.has(case)
    assert not record.has(Case.of("command"))


def test_the_list_of_faults_has_each_once() -> None:
    assert len(set(FOUND)) == len(FOUND)
