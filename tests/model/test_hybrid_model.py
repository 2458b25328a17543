"""docs/hybrid-model.md is what its script makes, and says what its title promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cache_play import Lru, simulated_hits
from resolved import config_of

from lab import hybrid_model as script
from lab.synth.published import published_facts
from offload.model import ModelFacts
from offload.plan.machine import Machine, Sharing, best_s, streamed_s
from offload.plan.sharing import DECODING, expected_s
from offload.routing import recorded_hits
from specoffload.config.options import Toggle

ROOT = Path(__file__).parents[2]
WORKLOAD = DECODING.workload(0)


def test_the_page_is_what_its_script_makes() -> None:
    page = (ROOT / "docs/hybrid-model.md").read_text(encoding="utf-8")
    assert page == script.page(), "run scripts/lab/run hybrid-model"
    assert "**modelled**" in page


def test_no_cell_is_below_the_better_rival() -> None:
    page = (ROOT / "docs/hybrid-model.md").read_text(encoding="utf-8")
    ratios = [float(found) for found in re.findall(r"\*\*(\d+\.\d\d)\*\* \|$", page, re.M)]
    assert len(ratios) == len(script.MODELS) * len(script.MACHINES) * len(script.ROUTINGS)
    assert min(ratios) >= 1.0
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"decode {min(ratios):.2f} to {max(ratios):.2f} × as fast" in readme


@pytest.mark.parametrize("title", ["DeepSeek-R1", "gpt-oss-120b", "Qwen3-235B-A22B"])
def test_a_plan_by_counted_hits_is_never_behind_the_other(title: str, tmp_path: Path) -> None:
    facts: ModelFacts = published_facts(title, tmp_path)
    for gib, machine in script.MACHINES.values():
        old = script.plan_of(facts, gib, machine, hybrid=False)
        for routing in script.ROUTINGS:
            work = script.work_of(facts, title, routing)
            new = script.plan_of(facts, gib, machine, hybrid=True, hits=work.hits)
            # For the work that plans are made for, layers being split in either.
            old_s, new_s = (
                expected_s(machine, work, WORKLOAD, its.sharing, its.n_ubatch, hybrid=True)
                for its in (old, new)
            )
            assert new_s <= old_s * 1.001
            for n in script.SIZES:
                split_s = best_s(machine, work, new.sharing, n, hybrid=True)
                assert split_s <= best_s(machine, work, new.sharing, n)


def test_a_plan_for_splits_never_has_fewer_slots_and_on_some_machines_more(tmp_path: Path) -> None:
    more = 0
    for title in script.MODELS:
        facts = published_facts(title, tmp_path)
        for gib, machine in script.MACHINES.values():
            old, new = (script.plan_of(facts, gib, machine, hybrid=on) for on in (False, True))
            assert new.n_resident <= old.n_resident
            assert new.resident_bytes + new.reserve_bytes + new.slot_bytes <= gib << 30
            more += new.sharing.n_slots > old.sharing.n_slots
    assert more > 0


def test_auto_leaves_to_counted_hits_what_on_is_certain_of() -> None:
    asked = {hybrid: config_of(hybrid=hybrid).streaming for hybrid in Toggle}
    expected = {Toggle.OFF: False, Toggle.ON: True, Toggle.AUTO: "auto"}
    assert {hybrid: its.plan_for_hybrid for hybrid, its in asked.items()} == expected


def test_drawn_routing_hits_as_was_reported() -> None:
    # llama.cpp #27861, by LRU: 67 and 81 %; lrfu is a little better.
    drifting = script.curve("drifting", "", 512, 10)
    assert drifting.at(64 / 512) == pytest.approx(0.70, abs=0.04)
    assert drifting.at(128 / 512) == pytest.approx(0.82, abs=0.04)


def test_recency_and_frequency_hit_no_less_than_recency_alone() -> None:
    for n_experts, n_used, n_slots in ((512, 10, 64), (128, 4, 32), (256, 8, 64)):
        drawn = script.draw(n_experts, n_used, script.DRAWN["drifting"], 300, 1)
        cuts = [(now >= 150, [(0, expert) for expert in ids]) for now, (ids,) in enumerate(drawn)]
        recency = simulated_hits(Lru(), n_slots, cuts, holds_used=False)
        both = recorded_hits(drawn, n_experts, (n_slots / n_experts,), n_last=150).mean()
        assert both >= recency - 0.005


@pytest.mark.parametrize("kind", ["drifting", "code"])
def test_hits_of_the_rival_are_those_of_an_lru_cache_that_is_played(kind: str) -> None:
    n_experts = 64
    rows = script.draw(n_experts, 4, script.DRAWN[kind], 300, 3)
    n_last, n_layers = 150, rows.shape[1]
    for share in (0.25, 0.5, 0.75):
        found = recorded_hits(
            rows, n_experts, (share,), half_life=script.LRU_HALF_LIFE_STEPS, n_last=n_last
        ).mean()
        cuts = [
            (at >= len(rows) - n_last, [(layer, int(one)) for one in ids])
            for at, token in enumerate(rows)
            for layer, ids in enumerate(token)
        ]
        n_slots = int(share * n_layers * n_experts)
        played = simulated_hits(Lru(), n_slots, cuts, holds_used=False)
        assert found == pytest.approx(played, abs=0.01)


def test_every_miss_of_the_rival_crosses_the_link(tmp_path: Path) -> None:
    facts = published_facts("Qwen3-235B-A22B", tmp_path)
    # All but the link takes no time.
    link = Machine(1e9, 1e30, 1e30, 1e30, 1e30, per_layer_s=0.0, per_switch_s=0.0)
    for routing in script.DRAWN:
        work = script.work_of(facts, "Qwen3-235B-A22B", routing, script.LRU_HALF_LIFE_STEPS)
        for gib in (12, 24, 48):
            lru = script.lru_cache(facts, gib, link, work)
            n_streamed = work.n_expert_layers - lru.n_resident
            room_bytes = (lru.n_slots + lru.n_resident * work.n_experts) * work.expert.size_bytes
            assert room_bytes <= script.expert_room_bytes(facts, gib)
            misses = (1.0 - script.lru_hits(work, lru)) * work.n_used * n_streamed
            copied_s = misses * work.expert.size_bytes / link.link_bytes_per_s
            assert streamed_s(link, work, lru, 1) == pytest.approx(copied_s)
    few = Sharing(work.n_used * work.n_expert_layers)
    assert script.lru_hits(work, few) == 0.0, "each slot is taken again before its expert returns"


def test_published_hits_rise() -> None:
    for points in script.NEAREST.values():
        assert list(points) == sorted(points)
        assert [hit for _, hit in points] == sorted(hit for _, hit in points)
