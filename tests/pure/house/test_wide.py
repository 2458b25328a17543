"""The tests that scripts/test leaves out exist, and its sample is drawn from all cases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import wide

TESTS = Path(__file__).parents[2]


def test_the_list_names_tests_that_exist() -> None:
    for name in (*wide.LONG, *wide.SAMPLED):
        file, _, function = name.partition("::")
        source = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {function}\(", source, re.MULTILINE), name
    assert not wide.LONG & wide.SAMPLED.keys()


def test_a_sample_has_all_other_tests_and_each_case_has_its_turn() -> None:
    function, n = next(iter(wide.SAMPLED.items()))
    cases = [f"tests/{function}[{i}]" for i in range(3 * n)]
    others = ["tests/pure/test_x.py::test_y[1]", "tests/pure/test_x.py::test_z"]
    long = [f"tests/{next(iter(wide.LONG))}"]
    seen: set[str] = set()
    for seed in range(40):
        chosen = wide.sample([*cases, *others, *long], seed)
        assert chosen >= set(others)
        assert not chosen & set(long)
        assert len(chosen & set(cases)) == n
        assert chosen == wide.sample([*long, *cases[::-1], *others], seed)
        seen |= chosen & set(cases)
    assert seen == set(cases)


def test_a_sample_tries_a_quarter_of_the_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(wide.IS_SAMPLED, raising=False)
    assert wide.examples(100) == 100
    monkeypatch.setenv(wide.IS_SAMPLED, "1")
    assert [wide.examples(n) for n in (100, 4)] == [25, 3]


def test_a_share_has_whole_files_and_each_file_has_its_turn() -> None:
    node_ids = [f"tests/gpu/test_{file}.py::test_{i}" for file in "abcde" for i in range(4)]
    seen: set[str] = set()
    for seed in range(40):
        chosen = wide.share_of_files(node_ids, 2, seed)
        files = {node_id.partition("::")[0] for node_id in chosen}
        assert len(files) == 3
        assert chosen == {node_id for node_id in node_ids if node_id.partition("::")[0] in files}
        assert chosen == wide.share_of_files(node_ids[::-1], 2, seed)
        seen |= chosen
    assert seen == set(node_ids)
    assert wide.share_of_files(node_ids[:4], 9, 0) == set(node_ids[:4])
