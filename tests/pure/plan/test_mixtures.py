"""Plans of models whose layers differ in type fit every budget, and hold more with larger ones."""

from __future__ import annotations

from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from wide import examples

from offload.errors import DoesNotFit
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace
from offload.plan.placement import NCpuMoe, Plan, PlanRequest, make_plan
from offload.plan.sharing import UBATCHES
from offload.plan.weights import device_bytes
from offload.times.context_memory import ContextOptions, context_memory

N_EMBD, N_FF = 256, 512
TYPES = ("f32", "q8_0", "q6_K", "q5_K", "q4_K", "q2_K")


def entry(name: str, kind: str, *shape: int) -> TensorEntry:
    n = 1
    for size in shape:
        n *= size
    block, size_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]]
    return TensorEntry(name, kind, shape, 0, n // block * size_bytes)


@st.composite
def models(draw: st.DrawFn) -> ModelFacts:
    """Small models of up to 10 layers, some dense, with any mixture of types."""
    n_layers = draw(st.integers(1, 10))
    n_dense = draw(st.integers(0, n_layers))
    n_experts = draw(st.integers(2, 24))
    entries = [
        entry("token_embd.weight", "q8_0", N_EMBD, 4096),
        entry("output.weight", "q8_0", N_EMBD, 4096),
    ]
    kinds = st.sampled_from(TYPES)
    for i in range(n_layers):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            entries.append(entry(f"blk.{i}.{part}.weight", draw(kinds), N_EMBD, N_EMBD))
        if i < n_dense:
            for part, shape in (("gate", (N_EMBD, N_FF)), ("down", (N_FF, N_EMBD))):
                entries.append(entry(f"blk.{i}.ffn_{part}.weight", draw(kinds), *shape))
            continue
        for part, shape in (
            ("gate", (N_EMBD, N_FF)), ("up", (N_EMBD, N_FF)), ("down", (N_FF, N_EMBD)),
        ):  # fmt: skip
            name = f"blk.{i}.ffn_{part}_exps.weight"
            entries.append(entry(name, draw(kinds), *shape, n_experts))
    metadata = {
        "qwen3moe.block_count": n_layers,
        "qwen3moe.embedding_length": N_EMBD,
        "qwen3moe.attention.head_count": 4,
        "qwen3moe.expert_count": n_experts,
        "qwen3moe.expert_used_count": draw(st.integers(1, n_experts)),
        "qwen3moe.expert_feed_forward_length": N_FF,
        "qwen3moe.feed_forward_length": N_FF,
    }
    header = Header(dict(metadata), tuple(entries))
    places = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    return ModelFacts(Path("m.gguf"), "qwen3moe", "m", header, places)


@st.composite
def askings(draw: st.DrawFn) -> tuple[NCpuMoe, ContextOptions | None, int | None]:
    """Draws -ncmoe, a context or None, and the largest ubatch if the plan is to choose it."""
    context = draw(st.sampled_from([None, ContextOptions(512), ContextOptions(4096)]))
    most = draw(st.sampled_from([None, UBATCHES[-1]]))
    return draw(st.sampled_from([None, "fit", 2])), context, most


def plan_of(
    facts: ModelFacts, budget: int, asked: tuple[NCpuMoe, ContextOptions | None, int | None]
) -> Plan | None:
    n_cpu_moe, context, most = asked
    try:
        return make_plan(
            facts,
            PlanRequest(
                budget_bytes=budget, n_cpu_moe=n_cpu_moe, context=context, most_ubatch=most
            ),
        )
    except DoesNotFit as e:
        # A plan may be refused only if even the least memory it names exceeds the budget.
        if e.least_bytes is None or e.least_bytes <= budget:
            raise
        return None


@settings(max_examples=examples(150), deadline=None)
@given(models(), askings(), st.floats(0.0, 1.2), st.floats(0.0, 0.3))
def test_a_budget_is_kept_and_a_larger_one_is_never_refused(
    facts: ModelFacts,
    asked: tuple[NCpuMoe, ContextOptions | None, int | None],
    share: float,
    more: float,
) -> None:
    most = device_bytes(facts)
    reserve = 0 if asked[1] is None else context_memory(facts, asked[1]).total_bytes
    budget = reserve + int(share * most)
    plan = plan_of(facts, budget, asked)
    if plan is None:
        return
    assert plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes <= budget
    assert plan.resident_bytes + plan.streamed_bytes == most
    larger = plan_of(facts, budget + int(more * most), asked)
    assert larger is not None
