"""The comparison with published speedups of drafts is what its script makes."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.draft_pairs import NEAR, comparisons, page, read_pairs, two_terms_s
from lab.published import PAGE
from offload.plan.machine import TYPICAL, Part


def test_the_page_is_what_its_script_makes_and_two_terms_are_nearer() -> None:
    pairs = read_pairs()
    assert len(pairs) >= 20
    assert all(pair.source.startswith("https://") for pair in pairs)
    some = comparisons(pairs)
    assert page(some) == PAGE.read_text(encoding="utf-8")
    by_model = {
        two_terms: [c.growth(two_terms=two_terms) / c.implied for c in some]
        for two_terms in (False, True)
    }
    near = {k: sum(abs(r - 1) <= NEAR for r in ratios) for k, ratios in by_model.items()}
    assert near[True] > near[False]
    assert 0.9 <= statistics.median(by_model[True]) <= 1.1


@given(st.floats(1e5, 1e9), st.floats(1.0, 64.0), st.floats(1.0, 8.0))
def test_two_terms_equal_the_plan_for_one_row_and_never_fall(
    size: float, rows: float, ratio: float
) -> None:
    part = Part(size, size * 2)
    assert two_terms_s(part, TYPICAL, 1.0) == pytest.approx(float(part.cpu_seconds(TYPICAL, 1.0)))
    few_s, more_s = (two_terms_s(part, TYPICAL, n) for n in (rows, rows * ratio))
    assert float(part.cpu_seconds(TYPICAL, rows)) <= few_s * (1 + 1e-9)
    assert few_s <= more_s * (1 + 1e-9)
