"""Plans decide from a header and a memory budget which weights are resident and which stream."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import DoesNotFit
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.weights import spread
from offload.units import parse_bytes, parse_rate, parse_seconds

N_LAYERS, N_EXPERTS, N_USED = 6, 8, 2


def facts() -> ModelFacts:
    entries = [TensorEntry("token_embd.weight", "q8_0", (64, 100), 0, 6800)]
    for i in range(N_LAYERS):
        for kind in ("attn_q", "attn_output", "ffn_up_shexp"):
            entries.append(TensorEntry(f"blk.{i}.{kind}.weight", "q8_0", (64, 64), 0, 4352))
        entries.append(TensorEntry(f"blk.{i}.attn_norm.weight", "f32", (64,), 0, 256))
        for kind in ("gate", "up", "down"):
            name = f"blk.{i}.ffn_{kind}_exps.weight"
            entries.append(TensorEntry(name, "q8_0", (64, 64, N_EXPERTS), 0, 4352 * N_EXPERTS))
    metadata = {
        "deepseek2.block_count": N_LAYERS,
        "deepseek2.expert_count": N_EXPERTS,
        "deepseek2.expert_used_count": N_USED,
    }
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    header = Header(metadata, tuple(entries))
    return ModelFacts(Path("m.gguf"), "deepseek2", "m", header, weights)


EXPERT_BYTES = 3 * N_LAYERS * N_EXPERTS * 4352
DENSE_BYTES = 6800 + N_LAYERS * (3 * 4352 + 256)


@given(st.integers(DENSE_BYTES // 4, DENSE_BYTES + 2 * EXPERT_BYTES))
def test_whatever_the_budget_the_plan_keeps_it_or_says_that_nothing_fits(budget: int) -> None:
    try:
        plan = make_plan(facts(), PlanRequest(budget_bytes=budget))
    except DoesNotFit:
        return
    assert plan.resident_bytes + plan.slot_bytes <= budget
    assert all(1 <= pool.n_slots <= pool.n_pieces for pool in plan.layout.pools)
    assert all(pool.n_slots >= N_USED for pool in plan.layout.pools if pool.n_experts)
    assert plan.resident_bytes + plan.streamed_bytes == DENSE_BYTES + EXPERT_BYTES
    assert plan.reasons


def test_what_cannot_fit_is_refused_with_numbers_and_the_flag() -> None:
    with pytest.raises(DoesNotFit, match=r"MiB.*--vram"):
        make_plan(facts(), PlanRequest(budget_bytes=1000))


def test_the_patterns_match_the_streamed_weights_and_nothing_else() -> None:
    model = facts()
    plan = make_plan(model, PlanRequest(n_gpu_layers=4))
    streamed = {entry.name for entry in plan.streamed}
    for name in model.weights:
        matched = any(re.search(pattern, name) for pattern in plan.patterns())
        assert matched == (name in streamed), name


@given(st.integers(0, 80), st.integers(1, 80))
def test_streamed_layers_are_as_many_as_asked_and_evenly_spread(n: int, n_layers: int) -> None:
    layers = sorted(spread(n, n_layers))
    assert len(layers) == min(n, n_layers)
    gaps = [b - a for a, b in zip(layers, layers[1:], strict=False)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64MiB", 64 << 20), ("8G", 8 << 30), ("1.5GB", 1_500_000_000), ("4194304", 4 << 20)],
)
def test_sizes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


def test_no_size_is_no_hint_at_a_unit() -> None:
    with pytest.raises(ValueError, match="^0 is no size: write one such as 8GiB$"):
        parse_bytes("0")


@pytest.mark.parametrize("text", ["24", "1.5", "1048575"])
def test_a_small_number_without_a_unit_is_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^{text} would be \d+ bytes; write {text}GiB for GiB$"):
        parse_bytes(text)


def test_rates_and_times_too() -> None:
    assert parse_rate("2GB/s") == 2e9
    assert parse_seconds("20us") == pytest.approx(2e-5)
    for bad in ("2GB/h", "0GB/s", "fast"):
        with pytest.raises(ValueError, match=bad):
            parse_rate(bad)


def test_experts_of_as_few_layers_stream_as_the_budget_makes_necessary() -> None:
    layer = 3 * N_EXPERTS * 4352
    everything = make_plan(
        facts(), PlanRequest(budget_bytes=DENSE_BYTES + EXPERT_BYTES, n_cpu_moe="fit")
    )
    assert everything.streamed == ()
    assert "whole model fits" in everything.reasons[0]
    streamed = []
    for missing in range(1, N_LAYERS - 2):
        budget = DENSE_BYTES + EXPERT_BYTES - missing * layer
        plan = make_plan(facts(), PlanRequest(budget_bytes=budget, n_cpu_moe="fit"))
        assert plan.resident_bytes + plan.slot_bytes <= budget
        streamed.append(len(plan.streamed) // 3)
    assert streamed == [2, 3, 4], "one layer's slots are kept for what streams"


@given(st.frozensets(st.integers(0, N_LAYERS + 3)), st.booleans())
def test_experts_of_named_layers_are_resident_and_no_others(
    named: frozenset[int], has_budget: bool
) -> None:
    budget = DENSE_BYTES + 2 * EXPERT_BYTES if has_budget else None
    plan = make_plan(facts(), PlanRequest(budget_bytes=budget, n_cpu_moe=named))
    others = set(range(N_LAYERS)) - named
    assert {int(e.name.split(".")[1]) for e in plan.streamed} == others
    assert plan.n_resident == N_LAYERS - len(others)
