"""Layers for multi-token prediction: which files have usable ones, and where their experts are."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.row_draft import MtpLayer, expected_tps, no_mtp_reason, plan_mtp
from offload.times.context_memory import ContextOptions
from offload.times.machine import TYPICAL
from offload.times.work import model_work

MIB = 1 << 20
OWN = ("nextn.eh_proj.weight", "nextn.enorm.weight", "nextn.hnorm.weight", "ffn_gate_inp.weight")


def facts(
    architecture: str = "glm4moe", n_mtp: int = 1, n_there: int = 1, without: str = ""
) -> ModelFacts:
    """A header of four layers with experts of 8 MiB. The last `n_mtp` layers are MTP layers.

    The file holds `n_there` of the MTP layers, and lacks the tensor `without`.
    """
    values = {
        "block_count": 4,
        "nextn_predict_layers": n_mtp,
        "embedding_length": 256,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "feed_forward_length": 512,
        "expert_count": 8,
        "expert_used_count": 2,
    }
    entries = []
    for i in range(4 - n_mtp + n_there):
        entries.append(TensorEntry(f"blk.{i}.attn_k.weight", "f16", (256, 128), 0, 65536))
        for kind in ("gate", "up", "down"):
            name = f"blk.{i}.ffn_{kind}_exps.weight"
            entries.append(TensorEntry(name, "f16", (256, 128, 8), 0, 8 * MIB // 3))
        if i >= 4 - n_mtp:
            entries += [TensorEntry(f"blk.{i}.{kind}", "f32", (256,), 0, 1024) for kind in OWN]
    entries = [e for e in entries if e.name != without]
    header = Header({f"{architecture}.{k}": v for k, v in values.items()}, tuple(entries))
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    return ModelFacts(Path("m.gguf"), architecture, "m", header, weights)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (facts(n_mtp=0, n_there=0), "the file has no layers for it"),
        (facts("llama"), "the library cannot compute such layers of llama"),
        (facts(n_there=0), "its layers were left out of the file"),
        (facts("step35", n_mtp=3), "the header counts 3 layers for it, and the file has 1"),
        (facts(n_mtp=2, n_there=2), "the library computes one of glm4moe"),
        (facts(n_mtp=4, n_there=4), "all of the file's 4 layers are said to be for it"),
        (facts(without="blk.3.nextn.hnorm.weight"), "the file lacks blk.3.nextn.hnorm.weight"),
        (facts(without="blk.3.ffn_gate_inp.weight"), "the file lacks blk.3.ffn_gate_inp.weight"),
    ],
)
def test_a_file_without_usable_layers_says_what_lacks(found: ModelFacts, words: str) -> None:
    assert words in no_mtp_reason(found)


def test_usable_layers_have_no_reason() -> None:
    assert no_mtp_reason(facts()) == ""
    assert no_mtp_reason(facts("step35", n_mtp=2, n_there=2)) == ""


def test_experts_are_resident_unless_they_take_a_tenth_of_the_room() -> None:
    found, options = facts(), ContextOptions(1024)
    roomy = plan_mtp(found, options, 128 * MIB)
    assert roomy.host == ()
    assert roomy.weight_bytes >= 8 * MIB - 3
    tight = plan_mtp(found, options, 16 * MIB)
    assert {e.name for e in tight.host} == {f"blk.3.ffn_{k}_exps.weight" for k in
                                            ("gate", "up", "down")}  # fmt: skip
    assert tight.weight_bytes < MIB
    assert "stay in RAM" in tight.reason
    assert plan_mtp(found, options, 64 * MIB).host == tight.host
    assert plan_mtp(found, options, None).host == ()


def test_the_plan_leaves_room_for_the_layers() -> None:
    found = facts()
    request = PlanRequest(budget_bytes=64 * MIB, context=ContextOptions(1024))
    plain = make_plan(found, request)
    drafting = make_plan(found, PlanRequest(**{**vars(request), "mtp": True}))
    assert drafting.mtp is not None
    assert drafting.reserve_bytes == plain.reserve_bytes + drafting.mtp.device_bytes
    assert drafting.mtp.reason in drafting.reasons


def test_expected_speed_weighs_drafts_against_their_steps() -> None:
    found = facts()
    plan = plan_mtp(found, ContextOptions(1024), None)
    work = model_work(found)
    layer = MtpLayer(TYPICAL, found, plan)

    def tps(accepted: float, slope: float) -> float:
        return expected_tps(layer, work, lambda n: 0.05 * (1 + slope * (n - 1)), accepted)

    assert tps(0.75, 1.0) == pytest.approx(20.0), "drafts that do not pay are not made"
    assert 20.0 < tps(0.5, 0.1) < tps(0.75, 0.1) < tps(0.9, 0.1) < 20.0 * 7
    in_ram = MtpLayer(TYPICAL, found, plan_mtp(found, ContextOptions(1024), 16 * MIB))
    assert in_ram.seconds(work, 1) > layer.seconds(work, 1)
