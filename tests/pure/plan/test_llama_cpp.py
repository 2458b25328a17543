"""llama.cpp's ways are modelled with its best flags, on the same machine as the plan."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
import pytest

from lab.rival_ways import copied_ahead_s, misses_on_cpu_s
from lab.synth.published import published_facts
from offload.model import ModelFacts
from offload.plan.llama_cpp import (
    CACHE_BUILD,
    CPU_SHARE_BUILD,
    LlamaCpp,
    copied_s,
    llama_speeds,
    read_by_device_s,
)
from offload.routing.routing import HitCurve
from offload.times.context_memory import ContextOptions
from offload.times.decodes import cpu_s, hybrid_s
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.work import ModelWork, WeightWork, even, model_work

GIB = 1 << 30
CONTEXT = ContextOptions(4096)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> ModelFacts:
    return published_facts("Qwen3-235B-A22B", tmp_path_factory.mktemp("published"))


def test_its_flags_place_as_many_layers_as_fit(qwen: ModelFacts) -> None:
    before = 0
    for gib in (8, 12, 24, 48, 96):
        sharing = LlamaCpp(qwen, gib * GIB, CONTEXT).n_cpu_moe()
        n_resident = int(sharing.n_resident)
        layer_bytes = qwen.expert_bytes / 94
        room_bytes = LlamaCpp(qwen, gib * GIB, CONTEXT).expert_room_bytes()
        assert n_resident * layer_bytes <= max(0, room_bytes) < (n_resident + 1) * layer_bytes
        assert n_resident >= before
        before = n_resident
        speeds = llama_speeds(LlamaCpp(qwen, gib * GIB, CONTEXT), TYPICAL, 4096)
        assert speeds.flags == f"--n-cpu-moe {94 - n_resident}"
        assert speeds.decode_tps == pytest.approx(
            1 / float(cpu_s(TYPICAL, model_work(qwen), sharing, 1))
        )


def test_a_model_that_fits_needs_no_flag_and_no_cache(qwen: ModelFacts) -> None:
    speeds = llama_speeds(LlamaCpp(qwen, 160 * GIB, CONTEXT), TYPICAL, 4096)
    assert speeds.flags == "-ngl 99"
    assert speeds.cache_decode_tps is None


def test_a_small_card_keeps_dense_weights_in_ram_too(qwen: ModelFacts) -> None:
    speeds = llama_speeds(LlamaCpp(qwen, 4 * GIB, CONTEXT), TYPICAL, 4096)
    found = speeds.flags.split()
    assert found[0:3:2] == ["--n-cpu-moe", "-ngl"]
    assert 0 < int(found[3]) < 94


def test_dense_models_have_no_experts_to_place(tmp_path: Path) -> None:
    facts = published_facts("Mistral-Large-2411", tmp_path)
    speeds = llama_speeds(LlamaCpp(facts, 24 * GIB, CONTEXT), TYPICAL, 4096)
    assert speeds.flags.startswith("-ngl ")
    assert speeds.cache_decode_tps is None
    assert 0 < speeds.decode_tps < speeds.prefill_tps


def test_its_cache_has_the_hits_that_the_plan_assumes(qwen: ModelFacts) -> None:
    guessed = llama_speeds(LlamaCpp(qwen, 24 * GIB, CONTEXT), TYPICAL, 4096)
    assert guessed.cache_decode_tps is not None
    least, most = guessed.cache_decode_tps
    assert least < most
    for work, tps in ((even(model_work(qwen)), least), (model_work(qwen), most)):
        assert tps == pytest.approx(1 / LlamaCpp(qwen, 24 * GIB, CONTEXT).cache_s(TYPICAL, work))
    hits = HitCurve(((0.1, 0.5), (1.0, 1.0)), 900, date(2026, 3, 1))
    counted = llama_speeds(LlamaCpp(qwen, 24 * GIB, CONTEXT), TYPICAL, 4096, hits)
    assert counted.cache_decode_tps is not None
    assert counted.cache_decode_tps[0] == counted.cache_decode_tps[1] > most * 0.5


def test_the_flags_and_the_build_are_those_of_the_faster_cache(qwen: ModelFacts) -> None:
    """On links where another number of tokens would be decided otherwise."""
    llama, work = LlamaCpp(qwen, 12 * GIB, CONTEXT), model_work(qwen)
    for_build: dict[str, str] = {}
    for link_bytes_per_s in np.geomspace(5e9, 400e9, 60):
        machine = replace(TYPICAL, link_bytes_per_s=float(link_bytes_per_s))
        lru, shared = llama.lru_cache(machine, work), llama.cache_split(machine, work)
        split_s, split_two_s = (float(hybrid_s(machine, work, shared, n)) for n in (1, 2))
        copied, copied_two_s = (float(copied_s(machine, work, lru, n)) for n in (1, 2))
        if lru == shared or not (split_s < copied < split_two_s or copied < split_s < copied_two_s):
            continue
        speeds = llama_speeds(llama, machine, 4096)
        chosen = shared if split_s < copied else lru
        assert speeds.build == (CPU_SHARE_BUILD if chosen is shared else CACHE_BUILD)
        mib = int(chosen.n_slots * work.expert.size_bytes) >> 20
        assert speeds.cache_flags.endswith(f"--moe-cache-mib {mib}")
        assert speeds.cache_flags.startswith(f"--n-cpu-moe {94 - int(chosen.n_resident)} ")
        for_build[speeds.build] = speeds.cache_flags
    assert for_build.keys() == {CPU_SHARE_BUILD, CACHE_BUILD}
    assert len({*for_build.values()}) == 2


def test_copying_every_miss_beats_splitting_where_experts_are_small_and_few_miss(
    tmp_path: Path,
) -> None:
    """A fork of 12 GiB decoded 81 tokens/s so, with half of the experts in slots (PCIe 4.0)."""
    facts = published_facts("Qwen3.6-35B-A3B", tmp_path)
    hits = HitCurve(((0.33, 0.81), (0.375, 0.865)), 900, date(2026, 9, 29))
    work = model_work(facts, hits)
    slots = Sharing(n_slots=work.n_experts * work.n_expert_layers // 2)
    card = replace(TYPICAL, vram_bytes_per_s=288e9, ram_bytes_per_s=36e9)
    assert 65 < 1 / read_by_device_s(card, work, slots, 1) < 90
    most = Sharing(n_slots=work.n_experts * work.n_expert_layers * 3 // 4)
    assert read_by_device_s(card, work, most, 1) < hybrid_s(card, work, most, 1)
    slow = replace(card, link_bytes_per_s=3e9)
    assert read_by_device_s(slow, work, slots, 1) > hybrid_s(slow, work, slots, 1)
    even_work = even(work)
    assert read_by_device_s(card, even_work, slots, 1) > hybrid_s(card, even_work, slots, 1)
    llama = LlamaCpp(facts, 12 * GIB, CONTEXT)
    speeds = llama_speeds(llama, card, 4096, hits)
    assert speeds.read_decode_tps == pytest.approx((1 / llama.read_s(card, work),) * 2)


def test_a_cache_beside_the_cpu_computes_its_misses_before_or_after_its_hits() -> None:
    work = ModelWork(40, WeightWork(), WeightWork(), 40, WeightWork(2e6, 4e6), 256, 8)
    slots = Sharing(n_slots=40 * 64)
    none, half, all_ = (float(misses_on_cpu_s(TYPICAL, work, slots, 1, h)) for h in (0, 0.5, 1))
    assert all_ < half < none
    assert half == pytest.approx((none + all_) / 2)


def test_copies_ahead_hide_the_shorter_of_copying_and_computing() -> None:
    work = ModelWork(40, WeightWork(), WeightWork(), 40, WeightWork(2e6, 4e6), 256, 8)
    ring = Sharing(256)
    copy_s = 40 * 256 * 2e6 / TYPICAL.link_bytes_per_s
    few, many = (float(copied_ahead_s(TYPICAL, work, ring, n)) for n in (512, 32_768))
    assert copy_s < few < 1.1 * copy_s
    assert many > 40 * 2 * 32_768 * 8 * 4e6 / TYPICAL.gpu_flops > copy_s
    assert copied_s(TYPICAL, work, ring, 512) > few
