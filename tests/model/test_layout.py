"""The layout that is decided from a header, a machine and what was asked for."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from wide import examples

from lab.synth.published import PUBLISHED, published_facts
from offload.errors import DoesNotFit
from offload.model import ModelFacts, is_experts
from offload.plan.decision import decide, decide_part
from offload.plan.found import Found, FoundDevice, Kind
from offload.plan.layout import Layout
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES
from offload.plan.wanted import Wanted
from offload.times.context_memory import ContextOptions, context_memory
from offload.times.machine import TYPICAL

GIB = 1 << 30


@cache
def header(title: str) -> ModelFacts:
    return published_facts(title, Path(mkdtemp()))


COMMON = ("DeepSeek-R1", "GLM-4.6", "Llama-4-Scout", "Qwen3-30B-A3B", "gpt-oss-120b")
TITLES = st.sampled_from(COMMON)
DEVICES = st.lists(
    st.tuples(st.integers(4, 96), st.sampled_from([6e9, 25e9, 50e9])), min_size=1, max_size=3
)


def gpus(sizes: list[tuple[int, float]]) -> tuple[FoundDevice, ...]:
    return tuple(
        FoundDevice(f"GPU{i}", Kind.GPU, gib * GIB, machine=replace(TYPICAL, link_bytes_per_s=rate))
        for i, (gib, rate) in enumerate(sizes)
    )


def wanted(n_ctx: int = 8192, draft_bytes: int = 0, **named: Any) -> Wanted:
    context = ContextOptions(n_ctx=n_ctx)
    return Wanted(
        context, n_cpu_moe="fit", reserve_bytes=draft_bytes, **{"most_ubatch": 2048, **named}
    )


def decided(facts: ModelFacts, found: Found, asked: Wanted) -> Layout:
    try:
        return decide(facts, found, asked)
    except DoesNotFit:
        assume(False)
        raise


def check(layout: Layout, found: Found, asked: Wanted) -> None:
    """Every layer is on one device, and everything fits what it was given."""
    facts = layout.facts
    bounds = [0, *(its.layers.end for its in layout.devices)]
    assert [its.layers.first for its in layout.devices] == bounds[:-1]
    assert bounds[-1] == facts.n_layers + 1
    for its in layout.devices:
        plan = its.plan
        assert plan.n_ubatch == layout.context.n_ubatch
        if its.kind is not Kind.GPU:
            continue
        part = facts.part(its.layers.first, its.layers.end)
        used = plan.resident_bytes + plan.slot_bytes + its.reserve_bytes
        used += context_memory(part, layout.context).total_bytes
        margin = MARGIN_BYTES if its.room.asked_bytes is None else LEAST_FREE_BYTES
        assert used <= its.device.free_bytes - margin
        assert its.room.asked_bytes is None or used <= its.room.asked_bytes
    streamed = [e for its in layout.local for e in its.plan.streamed]
    names = [entry.name for entry in streamed]
    assert len(set(names)) == len(names)
    n_bytes = sum(entry.size_bytes for entry in streamed)
    if layout.experts is None and not asked.keep_page_cache and any(map(is_experts, streamed)):
        assert n_bytes <= found.ram_bytes
        assert asked.ram_bytes is None or n_bytes <= asked.ram_bytes
    if layout.reads_disk:
        assert layout.min_batch.experts == 1, "our device reads the experts of every batch"
    assert layout.context.n_batch >= layout.context.n_ubatch


def test_a_tuned_ubatch_is_used_while_it_fits() -> None:
    facts, asked = header("GLM-4.6"), wanted()
    tuned = replace(asked, tuned_ubatch=256)
    for sizes, n in (([(24, 25e9)], 256), ([(24, 25e9), (16, 25e9)], 256)):
        layout = decide(facts, Found(gpus(sizes)), tuned)
        assert layout.context.n_ubatch == n
        assert any("256 tokens at once, which was the fastest" in r for r in words_of(layout))
        check(layout, Found(gpus(sizes)), tuned)
    larger = wanted(n_ctx=32768)
    larger = replace(larger, tuned_ubatch=1 << 15, most_ubatch=1 << 15)
    found = Found(gpus([(24, 25e9)]))
    layout = decide(facts, found, larger)
    plain = decide(facts, found, replace(larger, tuned_ubatch=None))
    assert layout.context == plain.context
    assert [its.plan.sharing for its in layout.devices] == [
        its.plan.sharing for its in plain.devices
    ]
    assert any("does not fit the memory that is free now" in r for r in words_of(layout))


def words_of(layout: Layout) -> list[str]:
    return [reason for its in layout.devices for reason in its.plan.reasons]


MACHINES = (
    DEVICES, st.sampled_from([4096, 32768]), st.sampled_from([0, GIB]),
    st.sampled_from([1 << 42, 64 * GIB, 16 * GIB]), st.sampled_from([None, 8 * GIB]),
)  # fmt: skip


MachineShape = tuple[list[tuple[int, float]], int, int, int, int | None]


@settings(max_examples=examples(12), deadline=None)
@given(TITLES, st.tuples(*MACHINES))
def test_a_layout_fits_what_it_was_given(title: str, machine: MachineShape) -> None:
    fits(title, *machine)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(PUBLISHED)), st.tuples(*MACHINES))
def test_layouts_of_all_published_shapes_fit(title: str, machine: MachineShape) -> None:
    fits(title, *machine)


def fits(
    title: str, sizes: list[tuple[int, float]], n_ctx: int, draft_bytes: int, ram_bytes: int,
    asked_ram_bytes: int | None,
) -> None:  # fmt: skip
    found = Found(gpus(sizes), takes_all=False, ram_bytes=ram_bytes)
    asked = wanted(n_ctx, draft_bytes, ram_bytes=asked_ram_bytes)
    layout = decided(header(title), found, asked)
    check(layout, found, asked)
    assert layout == decide(header(title), found, asked), "equal facts give equal layouts"
    if draft_bytes:
        reserved = {its.name: its.reserve_bytes for its in layout.devices if its.reserve_bytes}
        has_layers = layout.draft_on in [its.name for its in layout.devices]
        assert reserved == ({layout.draft_on: draft_bytes} if has_layers else {})
        assert layout.draft_on in [device.name for device in found.devices]


@settings(max_examples=examples(12), deadline=None)
@given(
    TITLES, DEVICES, st.lists(st.tuples(st.booleans(), st.integers(8, 96)), min_size=1, max_size=2),
    st.sampled_from(["auto", "last"]), st.booleans(),
)  # fmt: skip
def test_layers_of_workers_follow_those_of_this_machine(
    title: str, sizes: list[tuple[int, float]], offers: list[tuple[bool, int]], order: Any,
    has_gpu: bool,
) -> None:  # fmt: skip
    workers = tuple(
        FoundDevice(f"RPC{i}", Kind.STOCK if is_stock else Kind.WORKER, gib * GIB)
        for i, (is_stock, gib) in enumerate(offers)
    )
    local = gpus(sizes) if has_gpu else (FoundDevice("CPU", Kind.CPU),)
    found = Found(local, workers=workers)
    asked = wanted(order=order)
    layout = decided(header(title), found, asked)
    assert layout.remote
    kinds = [its.kind.is_remote for its in layout.devices]
    local_first = order == "last" or not has_gpu
    assert kinds == sorted(kinds, reverse=not local_first)
    bounds = [0, *(its.layers.end for its in layout.devices)]
    assert [its.layers.first for its in layout.devices] == bounds[:-1]
    is_here = not has_gpu and order == "auto"  # the CPU computes the output, which is no layer
    assert bounds[-1] == header(title).n_layers + (not is_here)


def test_a_size_above_the_free_memory_is_lowered_and_said() -> None:
    found = Found(gpus([(12, 25e9)]))
    layout = decide(header("Qwen3-30B-A3B"), found, wanted(device_bytes=64 * GIB))
    (why,) = [reason for reason in layout.plan.reasons if reason.startswith("--vram")]
    assert "--vram 64.00GiB: 11.50 GiB are used, since GPU0 has 12.00 GiB free" in why
    check(layout, found, wanted(device_bytes=64 * GIB))


def test_experts_beyond_the_memory_are_on_the_disk() -> None:
    facts, asked = header("DeepSeek-R1"), wanted()
    plenty = decide(facts, Found(gpus([(24, 25e9)]), ram_bytes=1 << 42), asked)
    little = decide(facts, Found(gpus([(24, 25e9)]), ram_bytes=64 * GIB), asked)
    assert not plenty.reads_disk
    assert little.reads_disk
    assert little.experts is not None
    assert little.experts.start_bytes(64 * GIB, 512) < 64 * GIB
    assert plenty.experts != little.experts


def test_a_draft_model_elsewhere_takes_no_memory_of_these_devices() -> None:
    found = Found(gpus([(24, 25e9)]), draft_in_ram=True)
    layout = decide(header("Qwen3-30B-A3B"), found, wanted(draft_bytes=GIB, draft_device="cpu"))
    assert layout.draft_on is None
    assert [its.reserve_bytes for its in layout.devices] == [0]


def test_a_workers_part_counts_the_clients_context() -> None:
    facts = header("Qwen3-30B-A3B").part(0, 24)
    found = Found(gpus([(12, 25e9)]), ram_bytes=1 << 40)
    sizes = []
    for context_bytes in (0, 4 * GIB):
        layout = decide_part(facts, found, wanted(draft_bytes=context_bytes))
        sizes.append(layout.plan.resident_bytes + layout.plan.slot_bytes)
        assert sizes[-1] + context_bytes <= 11 * GIB
        assert not layout.plan.declined
    assert sizes[1] < sizes[0]


def test_the_library_without_mtp_is_told() -> None:
    title = next(t for t in sorted(PUBLISHED) if header(t).n_mtp_layers)
    found = Found(gpus([(96, 25e9)]), ram_bytes=1 << 42, has_mtp=False)
    layout = decide(header(title), found, wanted(mtp=True))
    assert not layout.loads_mtp
    assert "has no functions" in layout.no_rows_reason


@pytest.mark.parametrize("n_sizes", [1, 3])
def test_sizes_that_are_not_one_for_each_device_are_refused(n_sizes: int) -> None:
    found = Found(gpus([(24, 25e9)] * 2))
    with pytest.raises(Exception, match=f"--vram has {n_sizes} sizes, but --device has 2"):
        decide(header("Qwen3-30B-A3B"), found, wanted(each_device_bytes=(GIB,) * n_sizes))
