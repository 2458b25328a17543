"""On a real asynchronous device, every way of streaming gives the bits of the resident model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import ON_GPU
from crossovers import crossover_of
from on_gpu import (
    Logits,
    assert_close,
    assert_same,
    is_standin,
    logits,
    logits_of,
    options,
    slots_for,
)

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import EngineOptions, open_engine
from offload.errors import DoesNotFit
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.splitter import Splitter, all_on_device, stay
from offload.store.store import StoreOptions
from offload.stream.copying import BounceCopier
from offload.times.min_batch import MinBatch
from offload.trace.trace import NO_TRACE

# The first test compiles the shaders, which takes a software driver minutes.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("model", ["moe", "dense"])
def test_the_wrapped_gpu_computes_what_the_plain_one_and_the_cpu_compute(
    model: str, gpu: DeviceChoice, request: pytest.FixtureRequest
) -> None:
    path, resident = request.getfixturevalue(model), request.getfixturevalue(f"resident_{model}")
    with open_engine(path, options(gpu, stream_experts=False)) as engine:
        got = logits(engine)
        assert engine.device is not None
        assert engine.device.n_graphs > 0, "the graphs must pass through our device"
        assert engine.counters().cuts == 0
    np.testing.assert_array_equal(got, resident)
    expected = logits_of(path, engine_options(options(gpu), device="cpu"))
    if is_standin(gpu):
        assert_same(gpu, got, expected)
    assert_close(got, expected)


WAYS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "all slots": ("moe", "all", {}),
    "one copy at a time": ("moe", "all", {"depth": 0, "prefetch": False}),
    "half, one copy at a time": ("moe", "half", {"depth": 0, "prefetch": False}),
    "half, no guesses": ("moe", "half", {"prefetch": False}),
    "half, nothing ahead": ("moe", "half", {"depth": 0}),
    "half, one ahead": ("moe", "half", {"depth": 1}),
    "half, four ahead": ("moe", "half", {"depth": 4}),
    "half, all ahead": ("moe", "half", {"depth": 64}),
    "half, Python places nodes": ("moe", "half", {"native": False}),
    "dense layers and experts": ("moe", "all", {"n_gpu_layers": 1}),
    "dense layers and experts, nothing ahead": ("moe", "all", {"n_gpu_layers": 1, "depth": 0}),
    "one dense layer resident": ("dense", "all", {"n_gpu_layers": 1}),
    "one dense layer resident, least slots": ("dense", "least", {"n_gpu_layers": 1}),
    "least slots, nothing ahead": ("dense", "least", {"n_gpu_layers": 1, "depth": 0}),
    "no layer resident": ("dense", "all", {"n_gpu_layers": 0, "depth": 64}),
    "no layer resident, least slots": ("dense", "least", {"n_gpu_layers": 0, "depth": 64}),
}


@pytest.mark.parametrize("way", WAYS)
def test_streamed_is_resident(way: str, gpu: DeviceChoice, request: pytest.FixtureRequest) -> None:
    model, slots, changes = WAYS[way]
    path, resident = request.getfixturevalue(model), request.getfixturevalue(f"resident_{model}")
    with open_engine(path, options(gpu, slots_for(path, slots, **changes))) as engine:
        assert engine.device is not None
        assert engine.opened.plan is not None
        assert engine.device.is_native == changes.get("native", True)
        before = engine.device.n_asked
        assert_same(gpu, logits(engine), resident)
        assert (engine.device.n_asked > before) != engine.device.is_native
        counters = engine.counters()
        assert counters.copies > 0
        assert not engine.device.declined
        assert (counters.router_reads > 0) == (model == "moe")
        if slots == "least":
            assert counters.streamed_bytes > engine.opened.plan.streamed_bytes, "slots are reused"


def poison(pages: HostRange) -> None:
    """Fill pages with NaN, so that an expert that was not read changes the logits."""
    pages.array()[:] = 0xFF


def memory_for(gpu: DeviceChoice, path: Path, plan: Streaming, share: float) -> dict[str, Any]:
    """Options with memory for a share of the experts, or for those of one layer if that is more."""
    with pytest.raises(DoesNotFit, match="raise --ram") as refused:
        open_engine(path, options(gpu, plan, ram_bytes=1))
    assert refused.value.least_bytes is not None
    ram_bytes = max(refused.value.least_bytes, int(share * read_facts(path).expert_bytes))
    return {"ram_bytes": ram_bytes, "store": StoreOptions(leave=poison)}


@pytest.mark.parametrize("slots", ["all", "half"])
@pytest.mark.parametrize("bounce", [False, True], ids=["one copy engine", "bounce ring"])
@pytest.mark.parametrize("share", [0.7, 0.0])
def test_experts_read_from_the_disk_are_resident(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, slots: str, bounce: bool, share: float
) -> None:
    """Memory holds a share of the experts, or those of one layer. Copies may be late."""
    streaming = slots_for(moe, slots, bounce=bounce)
    memory = memory_for(gpu, moe, streaming, share)
    with open_engine(moe, options(gpu, streaming, **memory)) as engine:
        assert_same(gpu, logits(engine), resident_moe)
        assert engine.opened.weights.store is not None
        assert engine.opened.weights.store.experts is not None
        assert engine.opened.weights.store.experts.used_bytes <= memory["ram_bytes"]
        assert engine.disk_counters()["experts_read"] > 0


@pytest.mark.parametrize(
    ("splitter", "bounce"),
    [(stay, True), (all_on_device, False)],
    ids=["on the CPU, bounce ring", "on the device, one copy engine"],
)
def test_split_layers_from_the_disk_give_the_bits_of_those_in_memory(
    gpu: DeviceChoice, moe: Path, splitter: Splitter, bounce: bool
) -> None:
    """The CPU computes experts when they arrive. Experts of known tokens are read ahead."""
    plan = slots_for(moe, "half", hybrid=True, splitter=splitter, bounce=bounce, passes="on")

    def run(opened: EngineOptions) -> tuple[Logits, dict[str, float]]:
        with open_engine(moe, opened) as engine:
            first = logits(engine)
            return np.concatenate([first, logits(engine)]), engine.disk_counters()

    # Without guesses no expert is promoted, so both runs have the same experts in slots.
    in_memory, _ = run(options(gpu, plan | Streaming(prefetch=False)))
    memory = memory_for(gpu, moe, plan, 0.6)
    from_disk, counters = run(options(gpu, plan | Streaming(prefetch=False), **memory))
    assert_same(gpu, from_disk, in_memory)
    assert counters["experts_read"] > 0
    guessed, counters = run(options(gpu, plan, **memory))
    assert counters["experts_read_ahead"] > 0
    assert_close(guessed, in_memory, 0.08)


@pytest.mark.parametrize("depth", [0, 64])
def test_one_token_at_a_time_through_the_fewest_slots_is_resident(
    gpu: DeviceChoice, moe: Path, depth: int
) -> None:
    ones = (1,) * 6
    expected = logits_of(moe, options(gpu, stream_experts=False), ones)[:6]
    with open_engine(
        moe, options(gpu, slots_for(moe, "least", depth=depth, n_gpu_layers=99))
    ) as engine:
        assert engine.opened.plan is not None
        assert all(pool.n_slots == pool.n_used for pool in engine.opened.plan.layout.pools)
        got = logits(engine, ones)[:6]
        assert engine.counters().evictions > 0
        # The 6 one-token decodes fit the slots. The 3 tokens after the rewind may need more.
        assert engine.counters().cuts == 6 * len(engine.facts.expert_weights)
    assert_same(gpu, got, expected)


def test_larger_batches_through_the_fewest_slots_go_in_passes_or_to_the_cpu(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    """Kernels for few tokens round differently from kernels for many.

    On software Vulkan the difference is 2.5 % of the logits' standard deviation.
    """
    for passes in ("on", "off"):
        streaming = slots_for(moe, "least", n_gpu_layers=99, passes=passes)
        with open_engine(moe, options(gpu, streaming)) as engine:
            got = logits(engine)
            assert engine.device is not None
            assert engine.device.is_native == (passes == "on")
            assert bool(engine.device.declined) == (passes == "off")
            assert (engine.counters().passes > 0) == (passes == "on")
        assert_close(got, resident_moe, 0.05 if passes == "on" else np.inf)


# Layers of two types share slots whose stride fits neither type. Biases are read by original ids.
_SHARING = {
    "mixed": ("deepseek-v3", {"quant": "Q4_K_M", "n_embd": 256, "n_ff_exp": 256, "n_layer": 8}),
    "biased": ("gpt-oss", {}),
}


@pytest.mark.parametrize("name", _SHARING)
def test_slots_that_layers_of_different_types_share_are_resident(
    gpu: DeviceChoice, name: str, models: Path
) -> None:
    preset, changes = _SHARING[name]
    path = write_preset(preset, models / f"gpu_{name}.gguf", size="tiny", seed=3, **changes)
    batches = (1, 3, 12)
    resident = logits_of(path, options(gpu, stream_experts=False), batches)
    plan = make_plan(read_facts(path))
    (pool,) = plan.layout.pools
    for n_slots in (pool.n_experts, 3 * pool.n_experts // 2, 2 * pool.n_experts, pool.n_slots):
        vram = plan.resident_bytes + n_slots * pool.slot_bytes
        assert_same(
            gpu, logits_of(path, options(gpu, Streaming(vram_bytes=vram)), batches), resident
        )


def test_the_mla_switch_rounds_differently_and_streaming_does_not_change_its_bits(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    rows = []
    for opened in (
        options(gpu, stream_experts=False, mla=True),
        options(gpu, slots_for(moe, "half"), mla=True),
    ):
        with crossover_of(64), open_engine(moe, opened) as engine:
            rows.append(logits(engine))
            assert engine.device is not None
            assert engine.device.mla.n_replaced > 0
    assert_close(rows[0], resident_moe)
    assert_same(gpu, rows[1], rows[0])


@pytest.mark.parametrize("native", [True, False])
def test_the_threshold_holds_for_whole_decodes_kind_by_kind(
    gpu: DeviceChoice, moe: Path, native: bool
) -> None:
    streaming = Streaming(n_gpu_layers=1, bounce=False, native=native)
    with open_engine(
        moe, options(gpu, streaming, min_batch=MinBatch(experts=8, dense=4))
    ) as engine:
        for n in (3, 5, 9, 2, 8, 3):
            before = engine.counters().cuts
            engine.sequences.extend(0, [(7 * i) % 200 for i in range(n)])
            assert (engine.counters().cuts > before) == (n >= 4)
        engine.set_min_batch(MinBatch(2, 2))
        before = engine.counters().cuts
        engine.sequences.extend(0, [1, 2, 3, 4])
        assert engine.counters().cuts > before


def test_decodes_without_logits_leave_the_last_layer_no_tokens(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    """In a prompt of several parts, all parts except the last are decoded without logits."""
    with open_engine(moe, options(gpu, slots_for(moe, "half"))) as engine:
        for n in (1, 5, 2, 3):
            engine.sequences.extend(0, [9] * n, n_logits=0)
        assert_same(gpu, logits(engine), resident_moe)


@pytest.mark.parametrize("depth", [0, 8])
def test_copies_through_the_pinned_ring_give_the_same(
    async_gpu: DeviceChoice,
    moe: Path,
    resident_moe: Logits,
    depth: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offload.store.store.Store.is_pinned", False)
    if async_gpu.device.pinned_memory(4096) is None:
        pytest.skip(f"{async_gpu.name} has no pinned memory of its own")
    # Buffers much smaller than a matrix, so that each copy goes around the ring.
    monkeypatch.setattr("offload.stream.building.BOUNCE_BYTES", 3 * 4096)
    monkeypatch.setattr(BounceCopier.__init__, "__defaults__", (NO_TRACE, 4096))
    with open_engine(
        moe, options(async_gpu, slots_for(moe, "half", bounce=True, depth=depth))
    ) as engine:
        assert_same(async_gpu, logits(engine), resident_moe)
        counters = engine.counters()
        assert counters.bounced_bytes == counters.streamed_bytes > 0
        assert any("ring" in note for note in engine.opened.notes)


@pytest.mark.parametrize("warmup", [True, False])
def test_slots_sized_after_a_warm_up_give_the_same(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, warmup: bool
) -> None:
    opened = options(gpu, Streaming(bounce=False, warmup=warmup))
    facts = read_facts(moe)
    plan = make_plan(facts, PlanRequest(budget_bytes=1 << 40, context=opened.wanted.context))
    taken = plan.resident_bytes + plan.reserve_bytes
    if warmup:  # drivers and libraries take more memory than estimated from the header
        free_before = gpu.device.memory_bytes()[0]
        with open_engine(moe, opened) as engine:
            logits(engine)
            assert engine.opened.plan is not None
            used = free_before - gpu.device.memory_bytes()[0]
            taken = max(taken, used - engine.opened.plan.slot_bytes)
    half = {"device_bytes": taken + plan.slot_bytes // 2, "n_gpu_layers": ON_GPU}
    with open_engine(moe, engine_options(opened, **half)) as engine:
        assert engine.opened.plan is not None
        assert 0 < engine.opened.plan.slot_bytes <= plan.slot_bytes // 2
        assert engine.counters().copies == 0, "a warm-up copies nothing"
        assert_same(gpu, logits(engine), resident_moe)
        assert engine.counters().copies > 0
        assert any("after a warm-up of 16 tokens" in note for note in engine.opened.notes) == warmup


def test_a_batch_of_the_same_size_again_reads_other_slots(gpu: DeviceChoice, models: Path) -> None:
    """libllama reuses its graph. A backend that replays a captured graph must not read the
    previous batch's slots."""
    path = write_preset("qwen3moe", models / "gpu_bands.gguf", n_layer=2, n_expert=128, seed=1)
    prompts = [[(i * i + 17 * prompt) % 251 for i in range(9)] for prompt in range(6)]

    def rows(opened: EngineOptions) -> tuple[Logits, int]:
        found = []
        with open_engine(path, opened) as engine:
            for prompt in prompts:
                engine.sequences.rewind(0, 0)
                found.append(engine.sequences.extend(0, prompt))
            return np.concatenate(found), engine.counters().bands

    expected, _ = rows(options(gpu, stream_experts=False))
    got, n_bands = rows(options(gpu))
    assert n_bands > 0
    assert_same(gpu, got, expected)


def test_what_is_taken_from_the_device_is_given_back_when_closed(
    async_gpu: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = library()
    held: Counter[str] = Counter()

    def count(name: str, change: int, what: str) -> None:
        right: Callable[..., Any] = getattr(lib, name)

        def counted(*arguments: Any) -> Any:
            held[what] += change
            held["calls"] += 1
            return right(*arguments)

        monkeypatch.setattr(lib, name, counted)

    count("ggml_backend_event_new", 1, "events")
    count("ggml_backend_event_free", -1, "events")
    count("ggml_backend_dev_init", 1, "backends")
    count("ggml_backend_free", -1, "backends")
    count("ggml_backend_buft_alloc_buffer", 1, "buffers")
    count("ggml_backend_buffer_free", -1, "buffers")
    for _ in range(5):
        with open_engine(moe, options(async_gpu, slots_for(moe, "half"))) as engine:
            engine.sequences.extend(0, [1, 2, 3, 4])
            assert held["events"] > 0
            assert held["backends"] >= 2, "one computes, one copies"
            assert held["buffers"] > 0
        assert (held["events"], held["backends"], held["buffers"]) == (0, 0, 0)
