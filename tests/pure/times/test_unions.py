"""Curves that leave out different tokens' experts are recognised, and priced as lower ends."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.simulation import published_curves
from lab.synth.published import published_facts
from offload.routing.routing import (
    UNION_SIZES,
    CountedHits,
    UnionCurve,
    counted_hits,
    counted_unions,
    expected_union,
    union_of_neighbours,
    usual_sharing,
)
from offload.times.table import CostTable, DecodeTime, Way
from offload.times.work import ModelWork, WeightWork, model_work, product_s
from specdec.costs.profile import CostProfile
from specdec.costs.unions import cheaper_than_one, fit_curve, with_unions
from specoffload.commands.profile import show_table
from specoffload.speculation.draft_prices import curve_as_prices

R1, DAY = "deepseek-r1-0528-numa", date(2026, 3, 1)


def unions(n_max: int, n_used: int = 8, n_experts: int = 256) -> list[float]:
    return [float(expected_union(n, n_used, n_experts)) / n_used for n in range(1, n_max + 1)]


def test_the_published_curve_of_a_mixture_is_a_straight_line_without_unions() -> None:
    curve = published_curves()[R1]
    line = fit_curve(curve)
    assert (line.fixed, line.per_row) == pytest.approx((0.778, 0.226), abs=0.001)
    assert line.worst < 0.03
    assert fit_curve(curve, unions(64)).per_union < 0.02


@given(st.floats(0.1, 0.9), st.floats(0.01, 0.5), st.floats(0.0, 0.6))
def test_the_terms_of_a_curve_are_found(fixed: float, per_row: float, per_union: float) -> None:
    step_s = [fixed + per_row * n + per_union * (u - 1) for n, u in enumerate(unions(64), 1)]
    fit = fit_curve(CostProfile(tuple(step_s)), unions(64))
    one_s = fixed + per_row
    found = np.array([fit.fixed, fit.per_row, fit.per_union]) * one_s
    assert found == pytest.approx([fixed, per_row, per_union], abs=1e-6)


@given(
    st.lists(st.floats(0.01, 10.0), min_size=1, max_size=40),
    st.integers(1, 64),
    st.integers(2, 300),
)
def test_a_corrected_curve_is_never_below_the_curve(
    step_s: list[float], n_used: int, n_experts: int
) -> None:
    curve = CostProfile(tuple(step_s))
    found = with_unions(curve, unions(len(step_s), min(n_used, n_experts), n_experts))
    assert all(a >= b for a, b in zip(found.step_s, step_s, strict=True))
    assert found.step_s[0] == pytest.approx(step_s[0])


def test_a_curve_that_has_its_unions_already_is_left_as_it_is() -> None:
    step_s = tuple(0.3 + 0.1 * n + 0.6 * (u - 1) for n, u in enumerate(unions(64), 1))
    curve = CostProfile(step_s)
    assert with_unions(curve, unions(64)).step_s == pytest.approx(step_s)
    assert with_unions(curve, [1.0] * 64) is curve, "a model without experts"


def test_batches_that_seem_cheaper_than_one_token_are_found_beyond_rounding() -> None:
    found = cheaper_than_one(CostProfile.from_normalised((1.0, 0.497, 0.333, 0.25)))
    assert found == [2]


def test_an_imported_curve_warns_and_a_mixture_is_priced_above_it() -> None:
    curve = published_curves()[R1]
    prices, warnings = curve_as_prices(curve, 256, 8, "--import")
    assert 1.3 <= prices.time(2) / curve.time(2) <= 1.55
    assert 1.7 <= prices.time(8) / curve.time(8) <= 2.45
    (said,) = warnings
    assert said.startswith("--import: the curve is a lower end for this mixture")
    assert curve_as_prices(curve, 0, 0, "--import") == (curve, []), "a dense model"
    cold = CostProfile.from_normalised((1.0, 0.497, 0.4))
    (said,) = curve_as_prices(cold, 0, 0, "GGML_BATCH_COSTS")[1]
    assert said.startswith("GGML_BATCH_COSTS: c[2] is below 1/2, so 2 tokens would take less time")


# -- unions of neighbouring tokens -----------------------------------------------------------------


@given(st.integers(1, 8), st.integers(8, 512), st.integers(1, 512))
def test_neighbours_use_between_one_tokens_experts_and_those_of_even_routing(
    n_used: int, n_experts: int, n_tokens: int
) -> None:
    low, high = (
        float(union_of_neighbours(n_tokens, n_used, n_experts, exponent))
        for exponent in (0.66, 1.0)
    )
    assert n_used * (1 - 1e-9) <= low <= high
    assert high == pytest.approx(float(expected_union(n_tokens, n_used, n_experts)))


def test_unions_are_counted_in_recorded_routing() -> None:
    rng = np.random.default_rng(1)
    even = {layer: np.argsort(rng.random((400, 64)), axis=1)[:, :4] for layer in (3, 4)}
    counted = counted_unions(even, 64)
    assert counted[1] == 4.0
    assert counted[8] == pytest.approx(expected_union(8, 4, 64), rel=0.03)
    # Eight tokens in a row choose the same experts.
    same = {layer: np.repeat(ids[::8], 8, axis=0) for layer, ids in even.items()}
    assert counted_unions(same, 64)[8] == 4.0
    assert counted_unions({}, 64) == {}
    assert counted_unions({3: even[3][:63]}, 64) == {}, "too few tokens"
    assert counted_unions({3: even[3], 4: even[4][:, :2]}, 64) == {}


@given(
    st.integers(1, 8),
    st.integers(8, 512),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12),
    st.floats(1.0, 4096.0),
    st.floats(1.0, 4.0),
)
def test_counted_unions_rise_from_one_tokens_experts_to_all(
    n_used: int, n_experts: int, shares: list[float], n_tokens: float, ratio: float
) -> None:
    """Also if counts of larger batches are lower by chance, and beyond the largest one."""
    sizes = UNION_SIZES[1 : len(shares)]
    counts = (n_used + share * (n_experts - n_used) for share in shares[1:])
    curve = UnionCurve(((1, float(n_used)), *zip(sizes, counts, strict=True)), 100, DAY)
    few, more = curve.at(np.array([n_tokens, n_tokens * ratio]), n_used, n_experts).tolist()
    assert n_used * (1 - 1e-9) <= few <= more * (1 + 1e-9)
    assert more <= expected_union(n_tokens * ratio, n_used, n_experts) * (1 + 1e-9)
    assert curve.at(1, n_used, n_experts) == pytest.approx(n_used)


def test_counted_unions_go_through_their_counts_and_on_as_independent_batches() -> None:
    curve = UnionCurve(((1, 4.0), (2, 7.0), (4, 12.0)), 100, DAY)
    assert [curve.at(n, 4, 64) for n in (1, 2, 3, 4)] == pytest.approx([4.0, 7.0, 9.5, 12.0])
    assert curve.at(8, 4, 64) == pytest.approx(64 * (1 - (1 - 12 / 64) ** 2))
    work = ModelWork(1, WeightWork(), WeightWork(), 1, WeightWork(1e6, 2e6), 64, 4)
    assert replace(work, unions=curve).union(4) == 12.0
    assert work.union(4) == union_of_neighbours(4, 4, 64)


def test_unions_of_routing_are_kept_and_newer_counts_weigh_more() -> None:
    rng = np.random.default_rng(1)
    even = {layer: np.argsort(rng.random((400, 64)), axis=1)[:, :4] for layer in (3, 4)}
    same = {layer: np.repeat(ids[::8], 8, axis=0) for layer, ids in even.items()}
    before, after = (counted_hits(routing, 64, DAY) for routing in (even, same))
    assert before is not None
    assert after is not None
    assert after.unions == counted_unions(same, 64)
    both = before.merged(after).union_curve
    assert both is not None
    assert both.n_tokens == round(before.merged(after).n_tokens)
    middle = (before.unions[8] + after.unions[8]) / 2
    assert after.unions[8] < both.at(8, 4, 64) < middle, "the same number of newer tokens"
    assert CountedHits(64, 4, {3: (0.5,)}, 9.0, DAY).union_curve is None


def test_a_row_more_adds_a_part_of_one_rows_time_until_computing_hides_reading() -> None:
    times = [float(product_s(1.0, 0.05, n)) for n in (1, 2, 8, 9, 20, 64)]
    assert times == pytest.approx([1.0, 1.05, 1.35, 1.35, 1.35, 3.2])
    slow = [float(product_s(1.0, 0.4, n)) for n in (1, 2, 4, 8)]
    assert slow == pytest.approx([1.0, 1.2, 1.6, 3.2])
    assert product_s(1.0, 2.0, 1) == 2.0, "one row that takes longer than reading"


def test_a_lone_size_in_place_grows_as_the_cpu_reads_and_computes() -> None:
    table = CostTable(64, 4, {Way.IN_PLACE: {1: DecodeTime(0.01, n_timed=3)}})
    unions = float(union_of_neighbours(4, 4, 64)) / 4
    assert table.seconds(Way.IN_PLACE, 4) == pytest.approx(0.01 * (0.8 * unions + 0.2 * 4))
    assert table.seconds(Way.IN_PLACE, 1) == 0.01


def test_a_table_interpolates_counted_experts_and_refuses_impossible_ones() -> None:
    table = CostTable(64, 4, unions={1: 4.0, 2: 7.0, 4: 12.0})
    assert [table.experts(n) for n in (1, 2, 3, 4)] == [4.0, 7.0, 9.5, 12.0]
    assert table.experts(5) is None
    assert CostTable(64, 4).experts(1) is None
    with pytest.raises(ValueError, match="not valid"):
        CostTable(64, 4, unions={8: 65.0})


def test_a_profile_shows_the_experts_beside_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    entries = {n: DecodeTime(0.01 * n, n_timed=3) for n in (1, 8, 512)}
    show_table(CostTable(64, 4, {Way.IN_PLACE: entries}, unions={1: 4.0, 8: 25.25}))
    shown = capsys.readouterr().out
    assert "experts" in shown
    assert "25.2" in shown
    assert "of 64" in shown


def test_a_model_that_was_counted_has_its_own_sharing(tmp_path: Path) -> None:
    """GLM-5.2's next tokens use other experts, but for chance; most models' share some."""
    glm, qwen = (
        model_work(published_facts(name, tmp_path)) for name in ("GLM-5", "Qwen3.6-35B-A3B")
    )
    assert (glm.sharing_exponent, qwen.sharing_exponent) == (1.0, 0.83)
    for n in (2, 4):
        assert glm.union(n) == pytest.approx(expected_union(n, 8, 256))
        assert qwen.union(n) < 0.95 * expected_union(n, 8, 256)
    assert usual_sharing("nobody's") == 0.83
