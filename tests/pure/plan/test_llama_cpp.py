"""llama.cpp's ways are modelled with its best flags, on the same machine as the plan."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from lab.synth.published import published_facts
from offload.model import ModelFacts
from offload.plan.llama_cpp import LlamaCpp, llama_speeds
from offload.routing.routing import HitCurve
from offload.times.context import ContextOptions
from offload.times.decodes import cpu_s
from offload.times.machine import TYPICAL
from offload.times.work import even, model_work

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
