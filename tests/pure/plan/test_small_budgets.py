"""Gemma-3-270M in small budgets: more memory never makes a plan impossible."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from offload.errors import DoesNotFit
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.context import ContextSpec
from offload.plan.placement import Plan, make_plan

MIB = 1 << 20
N_LAYERS, N_EMBD, N_FF, N_VOCAB = 18, 640, 2048, 262144
SHAPES = {
    "attn_q": (N_EMBD, 1024), "attn_k": (N_EMBD, 256), "attn_v": (N_EMBD, 256),
    "attn_output": (1024, N_EMBD), "ffn_gate": (N_EMBD, N_FF), "ffn_up": (N_EMBD, N_FF),
    "ffn_down": (N_FF, N_EMBD), "attn_norm": (N_EMBD,), "ffn_norm": (N_EMBD,),
    "attn_q_norm": (256,), "attn_k_norm": (256,), "post_attention_norm": (N_EMBD,),
    "post_ffw_norm": (N_EMBD,),
}  # fmt: skip
METADATA = {
    "general.architecture": "gemma3", "gemma3.block_count": N_LAYERS,
    "gemma3.context_length": 32768, "gemma3.embedding_length": N_EMBD,
    "gemma3.feed_forward_length": N_FF, "gemma3.attention.head_count": 4,
    "gemma3.attention.head_count_kv": 1, "gemma3.attention.key_length": 256,
    "gemma3.attention.value_length": 256, "gemma3.attention.sliding_window": 512,
}  # fmt: skip


def gemma() -> ModelFacts:
    """The published model's shapes as Q4_K_M has them: rows of 640 fit no K type, so that layers
    are q5_0, and the embeddings, which are the output too, q8_0."""
    entries = [_entry("token_embd.weight", (N_EMBD, N_VOCAB)), _entry("output_norm.weight", (640,))]
    for layer in range(N_LAYERS):
        entries += [_entry(f"blk.{layer}.{name}.weight", shape) for name, shape in SHAPES.items()]
    weights = {entry.name: WeightPlace(Path("gemma.gguf"), entry) for entry in entries}
    return ModelFacts(
        Path("gemma.gguf"), "gemma3", "Gemma 3", Header(METADATA, tuple(entries)), weights
    )


def _entry(name: str, shape: tuple[int, ...]) -> TensorEntry:
    if len(shape) == 1:
        return TensorEntry(name, "f32", shape, 0, 4 * math.prod(shape))
    kind, block_bytes = ("q8_0", 34) if name.startswith("token_embd") else ("q5_0", 22)
    return TensorEntry(name, kind, shape, 0, math.prod(shape) // 32 * block_bytes)


def plan_in(budget_mib: int, context: ContextSpec | None) -> Plan | None:
    try:
        return make_plan(gemma(), budget_bytes=budget_mib * MIB, context=context)
    except DoesNotFit:
        return None


@pytest.mark.parametrize("budget_mib", [180, 200, 205])
def test_budgets_of_which_one_between_two_that_work_was_refused(budget_mib: int) -> None:
    plan = plan_in(budget_mib, None)
    assert plan is not None
    assert plan.resident_bytes + plan.slot_bytes <= budget_mib * MIB
    assert plan.streamed, "not all of it fits"


@pytest.mark.parametrize("context", [None, ContextSpec(512), ContextSpec(4096)])
def test_more_memory_never_makes_a_plan_impossible_and_streams_no_more(
    context: ContextSpec | None,
) -> None:
    plans = [plan_in(mib, context) for mib in range(0, 1200, 7)]
    works = [plan is not None for plan in plans]
    assert works == sorted(works)
    assert set(works) == {True, False}
    streamed = [plan.streamed_bytes for plan in plans if plan is not None]
    assert streamed == sorted(streamed, reverse=True)
    assert streamed[-1] == 0
