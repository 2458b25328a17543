"""The KV cache is in RAM where that is faster at the end of a full context, or where it must be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.plans import PAGE, caches
from lab.synth.published import PublishedFacts
from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.plan.cache_place import full_context_s
from offload.plan.decision import decide
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.wanted import Wanted
from offload.times.context_memory import (
    ContextOptions,
    context_memory,
    indexer_work,
    layer_context_bytes,
    most_state_bytes,
)
from offload.times.decodes import attention_crossover, attention_s, best_s, ram_attention_s
from offload.times.hits import Sharing
from offload.times.machine import TYPICAL
from offload.times.work import model_work, with_context

GIB = 1 << 30
TITLES = ("Qwen3-235B-A22B", "Kimi-K3", "DeepSeek-R1", "Qwen3.6-35B-A3B", "gpt-oss-120b")
titles, sizes = st.sampled_from(TITLES), st.floats(6.0, 48.0)
contexts = st.sampled_from([4096, 32768, 131072, 262144])


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> PublishedFacts:
    return PublishedFacts(tmp_path_factory.mktemp("headers"))


def decided(
    facts: ModelFacts, gib: float, n_ctx: int, place: str = "chosen", ram_gib: int = 2048,
    n_devices: int = 1, **context: object,
) -> Layout:  # fmt: skip
    """The layout with a cache that is "chosen", or on the "device", or in "ram"."""
    devices = tuple(
        FoundDevice(f"GPU{i}", Kind.GPU, int((gib + 1) * GIB)) for i in range(n_devices)
    )
    options = replace(
        ContextOptions(n_ctx, kv_offload=place != "ram"),
        **context,  # type: ignore[arg-type]
    )
    wanted = Wanted(
        options, n_cpu_moe="fit", plan_for_splits=True, hybrid=True,
        most_ubatch=8192, device_bytes=int(gib * GIB), chooses_cache=place == "chosen",
    )  # fmt: skip
    return decide(facts, Found(devices, ram_bytes=ram_gib * GIB), wanted)


def seconds(layout: Layout) -> float:
    return full_context_s(layout.division, layout.context)


def or_none(*arguments: object, **named: object) -> Layout | None:
    try:
        return decided(*arguments, **named)  # type: ignore[arg-type]
    except DoesNotFit:
        return None


@settings(max_examples=25, deadline=None)
@given(titles, sizes, contexts)
def test_the_choice_is_never_slower_than_either_place(
    headers: PublishedFacts, title: str, gib: float, n_ctx: int
) -> None:
    facts = headers[title]
    places = {place: or_none(facts, gib, n_ctx, place) for place in ("device", "ram")}
    chosen = or_none(facts, gib, n_ctx)
    fitting = {place: seconds(its) for place, its in places.items() if its is not None}
    if chosen is None:
        assert not fitting
        return
    assert seconds(chosen) == pytest.approx(min(fitting.values()))
    assert bool(chosen.cache_reason) is not chosen.context.kv_offload
    if "device" in fitting and not chosen.context.kv_offload:
        assert fitting["ram"] < fitting["device"]


@settings(max_examples=25, deadline=None)
@given(titles, sizes, st.floats(0.0, 12.0), contexts)
def test_more_memory_never_makes_it_slower(
    headers: PublishedFacts, title: str, gib: float, more: float, n_ctx: int
) -> None:
    """Within a tenth: plans are made for shorter texts, and for other hits than the mean."""
    facts = headers[title]
    less = or_none(facts, gib, n_ctx)
    if less is not None:
        assert seconds(decided(facts, gib + more, n_ctx)) <= 1.1 * seconds(less)


def test_128k_tokens_of_qwen3_235b_run_on_12_gib(headers: PublishedFacts) -> None:
    facts = headers["Qwen3-235B-A22B"]
    with pytest.raises(DoesNotFit):
        decided(facts, 12, 131072, "device")
    layout = decided(facts, 12, 131072)
    assert not layout.context.kv_offload
    assert layout.context.flash_attn == "on"
    assert "because it does not fit the GPU" in layout.cache_reason
    assert layout.cache_words in layout.notes
    memory = context_memory(facts, layout.context)
    assert memory.kv_bytes == 0
    assert memory.host_kv_bytes == 94 * 131072 * 2 * 4 * 128 * 2
    plan = layout.plan
    assert plan is not None
    assert plan.used_bytes <= 12 * GIB
    assert plan.attention_batch == 1  # copies hide behind other layers


def test_a_cache_takes_ram_that_weights_then_do_not_have(headers: PublishedFacts) -> None:
    facts = headers["Qwen3-235B-A22B"]
    roomy, tight = (decided(facts, 12, 131072, "ram", ram_gib=gib) for gib in (256, 144))
    assert roomy.experts is None
    assert tight.experts is not None  # 127 GiB of experts beside 24 GiB of cache
    assert tight.experts.later_bytes(512)["the KV cache"] == 94 * 131072 * 2 * 4 * 128 * 2


@pytest.mark.parametrize("place", ["device", "ram"])
def test_layers_have_the_caches_memory_together(headers: PublishedFacts, place: str) -> None:
    facts = headers["Kimi-K3"]
    spec = ContextOptions(32768, kv_offload=place == "device")
    memory = context_memory(facts, spec)
    assert sum(layer_context_bytes(facts, spec)) == memory.kv_bytes + memory.recurrent_bytes
    assert memory.recurrent_bytes > 0  # states are on the device in both cases
    on_device = context_memory(facts, replace(spec, kv_offload=True))
    assert on_device.kv_bytes == memory.kv_bytes + memory.host_kv_bytes
    assert most_state_bytes(facts, spec) == most_state_bytes(facts, replace(spec, kv_offload=True))


def test_a_prompts_attention_needs_copies_of_caches_on_the_device(headers: PublishedFacts) -> None:
    for title, n_copies in (("Qwen3-235B-A22B", 3), ("DeepSeek-R1", 5)):
        facts, spec = headers[title], ContextOptions(32768, flash_attn="on")
        there, here = (
            context_memory(facts, replace(spec, kv_offload=on)) for on in (True, False)
        )  # fmt: skip
        layer_bytes = there.kv_bytes // facts.n_layers
        assert here.compute_bytes - there.compute_bytes == n_copies * layer_bytes


def test_several_devices_share_a_model_with_its_cache_in_ram(headers: PublishedFacts) -> None:
    layout = decided(headers["Qwen3-235B-A22B"], 12, 131072, n_devices=2)
    assert not layout.context.kv_offload
    assert len(layout.devices) == 2
    assert all(its.plan.attention_batch for its in layout.devices)


@given(
    st.floats(1e9, 1e12), st.floats(1e9, 1e11), st.integers(1, 8192),
    st.sampled_from(TITLES), contexts,
)  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_attention_is_priced_where_it_is_fastest(
    headers: PublishedFacts, ram: float, link: float, n_tokens: int, title: str, n_ctx: int
) -> None:
    facts = headers[title]
    machine = replace(TYPICAL, ram_bytes_per_s=ram, link_bytes_per_s=link)
    here = with_context(model_work(facts), facts, ContextOptions(n_ctx, kv_offload=False))
    there = with_context(model_work(facts), facts, ContextOptions(n_ctx))
    on_cpu_s, on_device_s = ram_attention_s(machine, here, n_tokens)
    assert attention_s(machine, here, n_tokens) == min(on_cpu_s, on_device_s)
    assert on_device_s > attention_s(machine, there, n_tokens)
    # Bytes of K and V cross the link, while other layers are computed.
    n_layers = int(here.n_ram_caches)
    dense_s = here.dense.seconds(machine.vram_bytes_per_s, machine.gpu_flops, n_tokens)
    hidden_s = here.n_layers * dense_s + attention_s(machine, there, n_tokens)
    assert on_device_s >= here.context.size_bytes / link / n_layers
    assert on_device_s + hidden_s >= here.context.size_bytes / link
    assert on_cpu_s >= here.context.size_bytes / ram  # or from RAM
    batch = attention_crossover(machine, here)
    assert (batch is not None and n_tokens >= batch) == (on_device_s < on_cpu_s)
    slots = Sharing(facts.n_experts)
    assert best_s(machine, here, slots, n_tokens) - best_s(machine, there, slots, n_tokens) == (
        pytest.approx(min(on_cpu_s, on_device_s) - attention_s(machine, there, n_tokens), abs=1e-9)
    )


@pytest.mark.parametrize(
    ("title", "context", "words"),
    [
        ("DeepSeek-V3.2", {}, "because deepseek32 chooses keys by an indexer"),
        ("Qwen3-235B-A22B", {"type_k": "f32"}, "casts the whole f32 cache"),
        ("Qwen3-235B-A22B", {"flash_attn": "off"}, "because flash attention is off"),
    ],
)
def test_the_cpu_attends_where_copies_do_not_suffice(
    title: str, context: dict[str, Any], words: str, headers: PublishedFacts
) -> None:
    facts = headers[title]
    layout = decided(facts, 24, 32768, "ram", ram_gib=1024, **context)
    assert words in layout.cache_words
    assert layout.plan is not None
    assert layout.plan.attention_batch is None
    assert layout.context.flash_attn == context.get("flash_attn", "on")
    work = with_context(model_work(facts), facts, layout.context)
    on_cpu_s, on_device_s = ram_attention_s(TYPICAL, work, np.array([1, 64, 4096]))
    assert np.all(np.isinf(on_device_s))
    assert np.array_equal(attention_s(TYPICAL, work, np.array([1, 64, 4096])), on_cpu_s)
    memory = context_memory(facts, layout.context)
    assert memory.host_bytes == memory.host_kv_bytes + memory.host_compute_bytes
    assert memory.host_compute_bytes > memory.compute_bytes
    chosen = or_none(facts, 5, 262144, ram_gib=1024, **context)
    assert chosen is None or not chosen.context.kv_offload


def test_buffers_for_attention_on_the_cpu_limit_the_ubatch(headers: PublishedFacts) -> None:
    facts = headers["Qwen3-235B-A22B"]
    for ram_gib in (192, 320, 2048):
        layout = decided(facts, 24, 65536, "ram", ram_gib=ram_gib, flash_attn="off")
        memory = context_memory(facts, layout.context)
        least = layout.context.n_ubatch <= 512
        assert least or memory.host_compute_bytes <= ram_gib * GIB / 8


def test_workers_are_sent_a_cache_in_ram_and_that_is_priced(headers: PublishedFacts) -> None:
    facts = headers["Qwen3-235B-A22B"]
    network = replace(TYPICAL, link_bytes_per_s=1.2e9)
    for chooses in (False, True):
        worker = FoundDevice("RPC0", Kind.STOCK, 200 * GIB, machine=network, measured="measured")
        found = Found((FoundDevice("GPU0", Kind.GPU, 24 * GIB),), workers=(worker,))
        wanted = Wanted(
            ContextOptions(65536, kv_offload=chooses), most_ubatch=512,
            tensor_split=(1, 1), chooses_cache=chooses,
        )  # fmt: skip
        layout = decide(facts, found, wanted)
        assert layout.context.kv_offload is chooses  # it is never in RAM by itself
        if not chooses:
            assert "sends the caches of their layers to RPC0" in layout.cache_words
    here = with_context(model_work(facts), facts, layout.context)
    work = with_context(model_work(facts), facts, replace(layout.context, kv_offload=False))
    room = worker.room(wanted, None)
    on_cpu_s, on_device_s = ram_attention_s(room.machine, work, 1)
    assert np.isinf(on_cpu_s)
    assert on_device_s > work.context.size_bytes / network.link_bytes_per_s
    assert attention_s(room.machine, work, 1) > attention_s(room.machine, here, 1)


def test_the_pages_table_is_what_its_script_makes(tmp_path: Path) -> None:
    part = PAGE.read_text("utf-8").split("<!-- caches -->")[1].split("<!-- end -->")[0]
    assert part.strip() == caches(tmp_path)


def test_an_indexer_on_the_cpu_scores_all_keys(headers: PublishedFacts) -> None:
    facts = headers["DeepSeek-V3.2"]
    short, long = (ContextOptions(n, kv_offload=False) for n in (32768, 131072))
    n_bytes, n_weights = indexer_work(facts, long)
    assert (n_bytes, n_weights) == (61 * 131072 * 128 * 2, 61 * 131072 * 64 * 128)
    on_gpu, on_cpu = (
        with_context(model_work(facts), facts, replace(long, kv_offload=on)).context
        for on in (True, False)
    )
    assert on_cpu.n_weights == on_gpu.n_weights + n_weights
    assert indexer_work(facts, short)[0] * 4 == n_bytes
    assert indexer_work(headers["Qwen3-235B-A22B"], long) == (0, 0)
