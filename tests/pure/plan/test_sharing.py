"""Device memory is divided by expected time into resident weights, slots and ubatch buffers."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.decode import SMALL_BATCH
from offload.model import Header, ModelFacts, TensorEntry, WeightPlace, layer_of
from offload.plan.objective import MOST_LOSS, Objective
from offload.plan.placement import PlanRequest, make_plan
from offload.plan.sharing import SMALL_UBATCHES, UBATCHES, Choice, choose_sharing, sized
from offload.plan.slot_layout import slot_layout
from offload.plan.weights import Weights, device_bytes, least_slots, ring_slots
from offload.plan.workload import DECODING, USUAL, TokenMix
from offload.routing.routing import HitCurve
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.decodes import best_s, cpu_s, hybrid_s
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.prompts import prefill_s
from offload.times.work import model_work

N_LAYERS, N_EXPERTS, N_USED = 12, 64, 4
ROW, N_FF = 2048, 1024
EXPERT = ROW * N_FF * 34 // 32  # bytes of one matrix of one expert, q8_0
DENSE = ROW * ROW * 34 // 32


def facts() -> ModelFacts:
    entries = [
        TensorEntry("token_embd.weight", "q8_0", (ROW, 32000), 0, ROW * 32000 * 34 // 32),
        TensorEntry("output.weight", "q8_0", (ROW, 32000), 0, ROW * 32000 * 34 // 32),
    ]
    for i in range(N_LAYERS):
        for kind in ("attn_k", "attn_output"):
            entries.append(TensorEntry(f"blk.{i}.{kind}.weight", "q8_0", (ROW, ROW), 0, DENSE))
        for kind, shape in (("gate", (ROW, N_FF)), ("up", (ROW, N_FF)), ("down", (N_FF, ROW))):
            name = f"blk.{i}.ffn_{kind}_exps.weight"
            size = EXPERT * N_EXPERTS
            entries.append(TensorEntry(name, "q8_0", (*shape, N_EXPERTS), 0, size))
    metadata = {
        "qwen3moe.block_count": N_LAYERS,
        "qwen3moe.embedding_length": ROW,
        "qwen3moe.expert_count": N_EXPERTS,
        "qwen3moe.expert_used_count": N_USED,
    }
    header = Header(dict(metadata), tuple(entries))
    weights = {e.name: WeightPlace(Path("m.gguf"), e) for e in entries}
    return ModelFacts(Path("m.gguf"), "qwen3moe", "m", header, weights)


FACTS = facts()
EXPERTS = [e for e in FACTS.loaded if "_exps" in e.name]
DENSE_WEIGHTS = [e for e in FACTS.loaded if ".attn_" in e.name]
WEIGHTS = Weights(FACTS, EXPERTS, DENSE_WEIGHTS)
WORK = model_work(FACTS)
ALL = device_bytes(FACTS)
LAYER = 3 * EXPERT * N_EXPERTS
UBATCH_BYTES = 40_000  # bytes of buffers per token of a ubatch


LIMITS = PlanRequest(n_cpu_moe="fit").limits(WEIGHTS.whole)


def rooms(budget: int, ubatches: tuple[int, ...]) -> dict[int, int]:
    return {n: budget - UBATCH_BYTES * n for n in ubatches}


def choose(
    budget: int,
    ubatches: tuple[int, ...] = (*UBATCHES, *SMALL_UBATCHES),
    host_bytes: int | None = None,
    mix: TokenMix | None = None,
    disk_bytes_per_s: float | None = None,
) -> Choice | None:
    """`disk_bytes_per_s`: speed of the disk that holds what exceeds `host_bytes`; None: refuse."""
    rate = disk_bytes_per_s or TYPICAL.disk_bytes_per_s
    return choose_sharing(
        WEIGHTS,
        WORK,
        replace(TYPICAL, disk_bytes_per_s=rate),
        Objective((mix or USUAL).workload(4096)),
        LIMITS,
        rooms(budget, ubatches),
        host_bytes=host_bytes,
        reads_disk=disk_bytes_per_s is not None,
    )


def expected_s(choice: Choice) -> float:
    assert choice is not None
    work = Objective(USUAL.workload(4096))
    return float(work.seconds(TYPICAL, WORK, choice.sharing, choice.n_ubatch).mean_s)


@given(st.integers(0, N_LAYERS * N_EXPERTS), st.floats(0, 1), st.booleans())
def test_only_small_batches_find_experts_in_lent_slots(
    n_slots: int, share: float, hybrid: bool
) -> None:
    n_lent = int(share * (N_LAYERS * N_EXPERTS - n_slots))
    own, lent = Sharing(n_slots), Sharing(n_slots, n_lent=n_lent)
    for n in (1, 8, SMALL_BATCH):
        all_own_s = hybrid_s(TYPICAL, WORK, Sharing(n_slots + n_lent), n)
        assert hybrid_s(TYPICAL, WORK, lent, n) == all_own_s
        here_s, own_s = (best_s(TYPICAL, WORK, its, n, hybrid=hybrid) for its in (lent, own))
        # The device computes all hits, which may take a little longer than leaving some to the CPU.
        assert here_s <= 1.05 * own_s
    here_s, own_s = (
        prefill_s(TYPICAL, WORK, its, 4096, 2048, hybrid=hybrid) for its in (lent, own)
    )
    assert here_s == own_s


def test_experts_in_lent_slots_are_copied_again_after_each_prompt() -> None:
    n_lent, workload = 60, USUAL.workload(4096)
    lent, own = (
        Objective(workload).seconds(TYPICAL, WORK, its, 2048)
        for its in (Sharing(100, n_lent=n_lent), Sharing(100))
    )
    copies_s = n_lent * WORK.expert.size_bytes / TYPICAL.link_bytes_per_s
    for total in ("mean_s", "even_s"):
        decode_s = "mean_decode_s" if total == "mean_s" else "even_decode_s"
        without_s = lent.prompt_s + workload.n_decodes * getattr(lent, decode_s)
        assert getattr(lent, total) == pytest.approx(without_s + copies_s)
    assert own.refill_s == 0.0
    answers = replace(workload, n_prompt=0)
    assert Objective(answers).seconds(TYPICAL, WORK, Sharing(100, n_lent=60), 2048).refill_s == 0.0


def test_a_ubatch_whose_buffer_is_lent_costs_decodes_less() -> None:
    budget, lent = ALL // 2, {n: UBATCH_BYTES * (n - SMALL_BATCH) for n in UBATCHES}
    made = [
        choose_sharing(
            WEIGHTS, WORK, TYPICAL, Objective(USUAL.workload(8192), splits=True), LIMITS,
            rooms(budget, UBATCHES), lent_bytes=its,
        )
        for its in ({}, lent)
    ]  # fmt: skip
    assert made[0] is not None
    assert made[1] is not None
    assert made[0].sharing.n_lent == 0
    assert made[1].sharing.n_lent == lent[made[1].n_ubatch] // (3 * EXPERT)
    assert made[1].n_ubatch >= made[0].n_ubatch
    decodes_s = [best_s(TYPICAL, WORK, its.sharing, 1, hybrid=True) for its in made if its]
    assert decodes_s[1] < decodes_s[0]


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("it is turned off", {"lend": False}),
        ("of a test", {"not_lent_reason": "of a test"}),
        (
            "the KV cache is in RAM",
            {"context": ContextOptions(4096, 2048, kv_offload=False, flash_attn="on")},
        ),
        (
            "buffers of 64 tokens are too small",
            {"context": ContextOptions(4096, SMALL_BATCH)},
        ),
        ("each streamed expert has a slot of its own", {"budget_bytes": 8 * ALL, "n_cpu_moe": 12}),
    ],
)
def test_a_plan_that_lends_nothing_counts_nothing(why: str, changes: dict[str, Any]) -> None:
    request = PlanRequest(
        budget_bytes=ALL // 2, context=ContextOptions(4096, 2048), n_cpu_moe="fit"
    )
    assert make_plan(FACTS, request).n_lent > 0
    plan = make_plan(FACTS, replace(request, **changes))
    assert plan.lending() == (plan, why)
    assert plan.n_lent == plan.sharing.n_lent == 0


def test_embeddings_that_are_only_looked_up_are_not_on_the_device() -> None:
    everything = sum(e.size_bytes for e in FACTS.loaded)
    assert device_bytes(FACTS) == everything - FACTS.weights["token_embd.weight"].entry.size_bytes


@settings(max_examples=60)
@given(st.integers(1, 2 * ALL), st.integers(1, ALL // 2))
def test_more_memory_never_stops_fitting_nor_loses_time(budget: int, more: int) -> None:
    less, larger = choose(budget), choose(budget + more)
    if less is None:
        return
    assert larger is not None
    # Passes have whole numbers of experts, so a few slots more may make the last pass longer.
    assert expected_s(larger) <= expected_s(less) * (1 + 1e-3)


@settings(max_examples=60)
@given(st.integers(1, 2 * ALL))
def test_what_is_chosen_fits(budget: int) -> None:
    choice = choose(budget)
    if choice is None:
        return
    streamed = [e for e in EXPERTS if int(e.name.split(".")[1]) in choice.streamed_experts]
    dense = [e for e in DENSE_WEIGHTS if int(e.name.split(".")[1]) in choice.streamed_dense]
    resident = ALL - sum(e.size_bytes for e in (*streamed, *dense))
    room = budget - UBATCH_BYTES * choice.n_ubatch - resident
    layout = sized(slot_layout([*dense, *streamed], N_EXPERTS, N_USED), room)
    assert layout is not None
    assert layout.size_bytes <= room
    experts = [pool for pool in layout.pools if pool.n_experts]
    assert sum(pool.n_slots for pool in experts) >= choice.sharing.n_slots
    if choice.sharing.n_slots >= N_EXPERTS:
        assert all(pool.n_slots >= ring_slots(pool) for pool in experts)


@pytest.mark.parametrize("n_more", range(0, 6))
def test_no_single_ubatch_is_faster_than_the_chosen_one(n_more: int) -> None:
    """A large ubatch with streamed dense weights may be faster than a small one with room for a
    ring."""
    ring = ring_slots(WEIGHTS.layout.pools[0]) * WEIGHTS.layout.pools[0].slot_bytes
    budget = ALL - N_LAYERS * LAYER + ring + UBATCH_BYTES * 512 + n_more * (DENSE << 1)
    chosen = choose(budget)
    assert chosen is not None
    each = [choose(budget, (n,)) for n in (*UBATCHES, *SMALL_UBATCHES)]
    assert expected_s(chosen) == min(expected_s(c) for c in each if c is not None)


def test_what_streams_fits_host_memory_wherever_some_plan_does() -> None:
    budget = ALL // 2
    unlimited = choose(budget)
    assert unlimited is not None
    for host_bytes in range(0, unlimited.streamed_bytes, LAYER // 2):
        found = choose(budget, host_bytes=host_bytes)
        least = ALL - budget + UBATCH_BYTES * SMALL_UBATCHES[0]
        assert (found is not None) or host_bytes < least + 2 * LAYER
        assert found is None or found.streamed_bytes <= host_bytes
        assert found is None or expected_s(found) >= expected_s(unlimited) * (1 - MOST_LOSS)


MIXES = [TokenMix(1, 0), TokenMix(64, 1), TokenMix(8, 1), TokenMix(1, 1), TokenMix(1, 50), DECODING]


@given(
    st.integers(ALL // 12, ALL),
    st.booleans(),
    st.floats(1e9, 100e9),
    st.floats(20e9, 400e9),
)
@settings(deadline=None, max_examples=60)
def test_more_weight_on_decoding_never_slows_decoding(
    budget: int, hybrid: bool, link_bytes_per_s: float, ram_bytes_per_s: float
) -> None:
    machine = replace(TYPICAL, link_bytes_per_s=link_bytes_per_s, ram_bytes_per_s=ram_bytes_per_s)
    seconds = []
    work = replace(WORK, hits=HitCurve(((0.2, 0.5),), 1, date(2026, 3, 1)))  # with one end
    for mix in MIXES:
        choice = choose_sharing(
            WEIGHTS, work, machine, Objective(mix.workload(4096), hybrid), LIMITS,
            rooms(budget, (*UBATCHES, *SMALL_UBATCHES)),
        )  # fmt: skip
        if choice is None:
            return
        seconds.append(best_s(machine, work, choice.sharing, 1, hybrid=hybrid))
    for slower, faster in pairwise(seconds[1:]):  # without the plan for prompts only
        assert faster <= slower * (1 + 1e-9)


def test_a_plan_for_decoding_is_no_slower_than_the_layers_that_fit() -> None:
    """The budget has room for llama.cpp's --n-cpu-moe layers, and for slots for one token."""
    for n in range(1, N_LAYERS):
        least = sum(pool.n_used * pool.slot_bytes for pool in WEIGHTS.layout.pools)
        budget = ALL - (N_LAYERS - n) * LAYER + UBATCH_BYTES * 512 + least
        choice = choose(budget, mix=DECODING)
        assert choice is not None
        theirs_s = cpu_s(TYPICAL, WORK, Sharing(0, n), 1)
        assert best_s(TYPICAL, WORK, choice.sharing, 1) <= theirs_s


# -- sizing


@given(st.integers(0, 2 * N_LAYERS * LAYER))
def test_a_layout_is_sized_to_its_room_or_refused(room: int) -> None:
    whole = slot_layout([*EXPERTS, *DENSE_WEIGHTS], N_EXPERTS, N_USED)
    least = whole.with_slots(least_slots(whole)).size_bytes
    found = sized(whole, room)
    assert (found is None) == (room < least)
    if found is None:
        return
    assert found.size_bytes <= room
    for pool, n in zip(found.pools, least_slots(whole), strict=True):
        assert n <= pool.n_slots <= pool.most_slots
    experts = [pool for pool in found.pools if pool.n_experts]
    wasted = room - found.size_bytes
    assert found == whole or all(
        pool.n_slots == pool.most_slots or wasted < pool.slot_bytes for pool in experts
    )


def test_types_that_share_no_slots_each_get_a_ring_before_any_gets_more() -> None:
    other = [
        TensorEntry(e.name, "f32", e.shape, 0, e.size_bytes * 4 * 32 // 34)
        if int(e.name.split(".")[1]) % 2
        else e
        for e in EXPERTS
    ]
    whole = slot_layout(other, N_EXPERTS, N_USED)
    assert len(whole.pools) == 2
    rings = sum(ring_slots(pool) * pool.slot_bytes for pool in whole.pools)
    found = sized(whole, rings + 10 * max(pool.slot_bytes for pool in whole.pools))
    assert found is not None
    assert all(pool.n_slots >= ring_slots(pool) for pool in found.pools)


@pytest.mark.parametrize("cuts", [(0, 13), (0, 5, 13), (0, 1, 4, 11, 12, 13)])
def test_parts_of_a_model_have_each_weight_and_its_caches_once(cuts: tuple[int, ...]) -> None:
    spec = ContextOptions(n_ctx=4096)
    parts = [FACTS.part(first, end) for first, end in pairwise(cuts)]
    assert parts[0] is FACTS or [i for part in parts for i in part.layers] == list(range(N_LAYERS))
    assert sum(device_bytes(part) for part in parts) == ALL
    kv_bytes = [context_memory(part, spec).kv_bytes for part in parts]
    assert 0 < sum(kv_bytes) == context_memory(FACTS, spec).kv_bytes
    assert sum(model_work(part).n_expert_layers for part in parts) == N_LAYERS
    assert [model_work(part).head for part in parts][-1] == WORK.head
    streamed = PlanRequest(budget_bytes=LAYER + (1 << 30), n_gpu_layers=0)
    for part in parts:
        plan = make_plan(part, streamed)
        assert {layer_of(e.name) for e in plan.streamed} == set(part.layers)
        assert plan.sharing.n_dense_streamed == len(part.layers)


def test_a_slow_disk_makes_ubatches_larger() -> None:
    """Each ubatch reads the experts that memory does not hold."""
    budget, host_bytes, mix = ALL // 16, LAYER, TokenMix(20, 1)
    assert choose(budget, host_bytes=host_bytes) is None
    fast, slow = (
        choose(budget, host_bytes=host_bytes, disk_bytes_per_s=r, mix=mix) for r in (1e15, 1e9)
    )
    in_memory = choose(budget, mix=mix)
    assert fast is not None
    assert slow is not None
    assert in_memory is not None
    assert fast.n_ubatch == in_memory.n_ubatch
    assert slow.n_ubatch > fast.n_ubatch
