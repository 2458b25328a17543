"""The comparison with published speedups of drafts is what its script makes."""

from __future__ import annotations

import statistics

import pytest

from lab.draft_pairs import NEAR, Comparison, comparisons, page, read_pairs
from lab.published import PAGE


@pytest.fixture(scope="module")
def found() -> list[Comparison]:
    return comparisons(read_pairs())


def test_the_page_is_what_its_script_makes(found: list[Comparison]) -> None:
    assert len(found) >= 20
    assert all(c.pair.source.startswith("https://") for c in found)
    assert page(found) == PAGE.read_text(encoding="utf-8")


def test_batches_of_few_tokens_take_what_was_published(found: list[Comparison]) -> None:
    """The longer of reading and computing, and even choices, had 48 % near and a median of 1.14."""
    ratios = [c.growth / c.implied for c in found]
    assert 0.95 <= statistics.median(ratios) <= 1.05
    assert sum(abs(r - 1) <= NEAR for r in ratios) >= 14
    speedups = [c.speedup / c.pair.speedup for c in found]
    assert 0.9 <= statistics.median(speedups) <= 1.1
    assert sum(abs(r - 1) <= NEAR for r in speedups) >= 15


def test_all_runs_of_a_machine_and_model_are_in_one_half(found: list[Comparison]) -> None:
    halves: dict[str, set[bool]] = {}
    for c in found:
        halves.setdefault(c.pair.place, set()).add(c.pair.corrects)
    assert all(len(half) == 1 for half in halves.values())
    n_correcting = sum(True in half for half in halves.values())
    assert len(halves) >= 12
    assert 0.35 <= n_correcting / len(halves) <= 0.65
