"""Plans for the published shapes, at every memory and context that people have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts, layer_of
from offload.model_file import read_facts
from offload.plan.context import ContextSpec, context_memory
from offload.plan.machine import TYPICAL, Machine, Sharing, cpu_s, model_work, prefill_s, streamed_s
from offload.plan.placement import Plan, make_plan
from offload.plan.sharing import UBATCHES, device_bytes, ring_slots
from offload.plan.slot_layout import slot_layout
from offload.synth import plan_preset, write_header_only

GIB = 1 << 30
SHAPES = (
    *("deepseek-r1", "kimi-k2", "deepseek-v3.2", "glm-4.6", "glm-5"),
    *("qwen3-30b-a3b", "qwen3-235b-a22b", "qwen3-next-80b-a3b", "qwen3.5-122b-a10b"),
    *("gpt-oss-120b", "minimax-m2", "llama-4-maverick", "llama-4-scout", "gemma-3n-e4b"),
    *("mistral-large-2411", "qwen2.5-32b", "deepseek-r1 UD-Q2_K_XL", "deepseek-r1 UD-Q4_K_XL"),
)
VRAM_GIB = (8, 12, 16, 24, 48, 80)
CONTEXTS = (4096, 32768, 131072)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    folder = tmp_path_factory.mktemp("headers")
    found = {}
    for name in SHAPES:
        preset, _, quant = name.partition(" ")
        planned = plan_preset(preset, size="full", vocab="none", quant=quant or None)
        found[name] = read_facts(write_header_only(planned, folder / f"{len(found)}.gguf"))
    return found


def plan_of(facts: ModelFacts, gib: float, n_ctx: int, machine: Machine = TYPICAL) -> Plan | None:
    try:
        return make_plan(
            facts,
            budget_bytes=int(gib * GIB),
            n_cpu_moe="fit",
            context=ContextSpec(n_ctx),
            most_ubatch=UBATCHES[-1],
            machine=machine,
        )
    except DoesNotFit:
        return None


def ring_bytes(facts: ModelFacts) -> int:
    """Slots for a whole layer's experts and some of the next."""
    experts = [e for e in facts.loaded if is_experts(e)]
    layout = slot_layout(experts, facts.n_experts, facts.n_experts_used)
    return sum(ring_slots(pool) * pool.slot_bytes for pool in layout.pools)


def dense_bytes(facts: ModelFacts) -> int:
    return device_bytes(facts) - facts.expert_bytes


@pytest.mark.parametrize("name", SHAPES)
def test_no_batch_of_experts_is_declined_where_a_layer_s_experts_fit(
    name: str, shapes: dict[str, ModelFacts]
) -> None:
    facts = shapes[name]
    for gib in VRAM_GIB:
        for n_ctx in CONTEXTS:
            plan = plan_of(facts, gib, n_ctx)
            context = context_memory(facts, ContextSpec(n_ctx, UBATCHES[0])).total_bytes
            ring_fits = dense_bytes(facts) + context + ring_bytes(facts) <= gib * GIB
            if plan is None:
                assert not ring_fits
                continue
            assert plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes <= gib * GIB
            pools = [pool for pool in plan.layout.pools if pool.n_experts]
            if ring_fits:
                assert plan.declined == ()
                assert plan.chunk_tokens == 0
                assert all(pool.n_slots > pool.n_experts for pool in pools)
                # As llama.cpp does, dense weights are resident while experts can make room.
                assert all(is_experts(entry) for entry in plan.streamed)
            if plan.declined:
                assert any(pool.n_slots < pool.n_experts for pool in pools)


def test_r1_on_24_gib_has_a_ring_a_cache_and_a_large_ubatch(shapes: dict[str, ModelFacts]) -> None:
    plan = plan_of(shapes["deepseek-r1"], 24, 4096)
    assert plan is not None
    (pool,) = plan.layout.pools
    assert {kind.name for kind in pool.kinds} == {"gate", "up", "down"}
    assert pool.n_slots > 1.25 * 256
    assert plan.n_ubatch >= 2048
    assert plan.min_batch is not None
    assert plan.min_batch < plan.n_ubatch


@pytest.mark.parametrize(
    ("name", "gib", "n_ctx"), [("gpt-oss-120b", 16, 131072), ("qwen3-30b-a3b", 8, 32768)]
)
def test_what_was_refused_or_declined_has_a_ring(
    name: str, gib: int, n_ctx: int, shapes: dict[str, ModelFacts]
) -> None:
    plan = plan_of(shapes[name], gib, n_ctx)
    assert plan is not None
    assert all(pool.n_slots > pool.n_experts for pool in plan.layout.pools)
    assert plan.n_ubatch >= 2048


@pytest.mark.parametrize("name", ["deepseek-r1", "glm-4.6", "gpt-oss-120b", "mistral-large-2411"])
def test_more_memory_is_never_refused(name: str, shapes: dict[str, ModelFacts]) -> None:
    fits = False
    for tenths in range(20, 260, 3):
        plan = plan_of(shapes[name], tenths / 10, 32768)
        assert plan is not None or not fits
        fits = plan is not None
    assert fits


def test_layers_that_are_not_loaded_are_not_planned(shapes: dict[str, ModelFacts]) -> None:
    for name in ("glm-4.6", "glm-5", "deepseek-v3.2"):
        facts = shapes[name]
        extra = facts.number("block_count") - 1
        plan = plan_of(facts, 48, 4096)
        assert plan is not None
        assert max(layer_of(entry.name) for entry in plan.streamed) == extra - 1
        assert plan.resident_bytes + plan.streamed_bytes < facts.size_bytes


def test_embeddings_of_every_layer_cost_no_device_memory(shapes: dict[str, ModelFacts]) -> None:
    facts = shapes["gemma-3n-e4b"]
    embeddings = facts.weights["per_layer_token_embd.weight"].entry.size_bytes
    plan = plan_of(facts, 8, 4096)
    assert plan is not None
    assert plan.streamed == ()
    assert plan.resident_bytes <= facts.size_bytes - embeddings


# -- the machine model, applied to R1


MACHINES = [
    TYPICAL,
    Machine(link_bytes_per_s=12e9, ram_bytes_per_s=45e9, cpu_flops=0.4e12),
    Machine(link_bytes_per_s=50e9, ram_bytes_per_s=300e9, cpu_flops=3e12, n_cores=64),
]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("gib", [16, 24, 48])
def test_the_plan_s_threshold_is_the_modelled_crossover(
    machine: Machine, gib: int, shapes: dict[str, ModelFacts]
) -> None:
    facts = shapes["deepseek-r1"]
    plan, work = plan_of(facts, gib, 4096, machine), model_work(facts)
    assert plan is not None
    assert plan.min_batch is not None
    n_dense = len({layer_of(e.name) for e in plan.streamed if not is_experts(e)})
    n_streamed = len({layer_of(e.name) for e in plan.streamed if is_experts(e)})
    n_slots = sum(pool.n_slots for pool in plan.layout.pools if pool.n_experts)
    sharing = Sharing(n_slots, work.n_expert_layers - n_streamed, n_dense)
    times = [(cpu_s(machine, work, sharing, n), streamed_s(machine, work, sharing, n))
             for n in range(1, 8193)]  # fmt: skip
    exact = max(n for n, (cpu, streamed) in enumerate(times, 1) if streamed > cpu) + 1
    assert abs(plan.min_batch - exact) <= 0.2 * exact


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize(("gib", "n_ctx"), [(16, 4096), (24, 4096), (24, 32768), (48, 131072)])
def test_the_chosen_ubatch_prefills_nearly_as_fast_as_any(
    machine: Machine, gib: int, n_ctx: int, shapes: dict[str, ModelFacts]
) -> None:
    facts, work = shapes["deepseek-r1"], model_work(shapes["deepseek-r1"])
    n_prompt = min(n_ctx, UBATCHES[-1])

    def expected_s(plan: Plan) -> float:
        n_dense = len({layer_of(e.name) for e in plan.streamed if not is_experts(e)})
        n_streamed = len({layer_of(e.name) for e in plan.streamed if is_experts(e)})
        n_slots = sum(pool.n_slots for pool in plan.layout.pools if pool.n_experts)
        sharing = Sharing(n_slots, work.n_expert_layers - n_streamed, n_dense)
        decode = min(f(machine, work, sharing, 1) for f in (cpu_s, streamed_s))
        return prefill_s(machine, work, sharing, n_prompt, plan.n_ubatch) + 512 * decode

    chosen = plan_of(facts, gib, n_ctx, machine)
    assert chosen is not None
    best = math.inf
    for n_ubatch in range(256, 8193, 256):
        try:
            plan = make_plan(
                facts,
                budget_bytes=gib * GIB,
                n_cpu_moe="fit",
                context=replace(ContextSpec(n_ctx), n_ubatch=n_ubatch),
                machine=machine,
            )
        except DoesNotFit:
            continue
        best = min(best, expected_s(plan))
    assert expected_s(chosen) <= 1.05 * best


def test_a_plan_prices_few_ways(shapes: dict[str, ModelFacts]) -> None:
    """A plan takes milliseconds; counted, since times on a busy machine mean nothing."""
    facts = shapes["glm-4.6"]
    priced = 0

    class Counting(Machine):
        def __getattribute__(self, name: str) -> object:
            nonlocal priced
            if name == "per_layer_s":
                priced += 1
            return super().__getattribute__(name)

    assert plan_of(facts, 24, 32768, Counting()) is not None
    assert priced < 10_000
