"""On a real asynchronous device, every switch of streaming gives the bits of the resident model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from on_gpu import (
    BATCHES,
    SERIAL,
    Logits,
    assert_same,
    budget,
    executor_of,
    half,
    is_standin,
    logits,
    logits_of,
    options,
)

from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import Engine, EngineOptions, context_spec
from offload.errors import DoesNotFit
from offload.ggml.library import abi
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.routing import RoutingGuess
from offload.streaming.copying import BounceCopier
from offload.streaming.options import StreamingOptions
from offload.trace import NO_TRACE

# The first test compiles the shaders, minutes of work for a driver in software.
pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("model", ["moe", "dense"])
def test_the_gpu_computes_what_the_cpu_computes(
    model: str, gpu: DeviceChoice, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    got = request.getfixturevalue(f"resident_{model}")
    expected = logits_of(path, replace(options(gpu), device="cpu"))
    if is_standin(gpu):
        assert_same(gpu, got, expected)
    assert_close_but_for_near_ties(got, expected)


def assert_close_but_for_near_ties(got: Logits, expected: Logits) -> None:
    """Other kernels round otherwise, and random routers leave near-ties that this decides."""
    alike = [np.corrcoef(mine, its)[0, 1] for mine, its in zip(got, expected, strict=True)]
    assert np.median(alike) > 0.99
    assert min(alike) > 0.5


@pytest.mark.parametrize("model", ["moe", "dense"])
def test_the_wrapped_gpu_without_streaming_gives_the_bits_of_the_plain_one(
    model: str, gpu: DeviceChoice, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    with Engine(path, options(gpu, stream_experts=False)) as engine:
        got = logits(engine)
        assert engine.device is not None
        assert engine.device.n_graphs > 0, "the graphs must pass through our device"
        assert engine.counters().cuts == 0
    np.testing.assert_array_equal(got, request.getfixturevalue(f"resident_{model}"))


def test_the_serial_stream_gives_the_bits_of_the_resident_model(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    with Engine(moe, options(gpu, SERIAL)) as engine:
        assert_same(gpu, logits(engine), resident_moe)
        n_graphs = len(BATCHES) + 2  # one decode takes two ubatches, and one follows the rewind
        assert engine.counters().cuts == n_graphs * len(engine.facts.expert_weights)


@pytest.mark.parametrize("slots", ["all", "half", "least"])
def test_overlapped_is_resident_for_every_slot_count(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, slots: str
) -> None:
    streaming = StreamingOptions(bounce=False)
    if slots != "all":
        streaming = replace(streaming, vram_bytes=budget(moe, streaming, slots))
    with Engine(moe, options(gpu, streaming)) as engine:
        got = logits(engine)
        counters = engine.counters()
        assert engine.device is not None
        declined = sum(engine.device.declined.values())
    assert counters.copies > 0
    assert counters.router_reads > 0
    if slots == "least":
        # Batches that may use more experts than there are slots are the CPU's.
        assert declined > 0
        assert_close_but_for_near_ties(got, resident_moe)
    else:
        assert declined == 0
        assert_same(gpu, got, resident_moe)


@pytest.mark.parametrize("depth", [0, 1, 4, 64])
def test_one_token_at_a_time_through_the_fewest_slots_is_resident(
    gpu: DeviceChoice, moe: Path, depth: int
) -> None:
    ones = (1,) * 6
    expected = logits_of(moe, options(gpu, stream_experts=False), ones)[:6]
    streaming = StreamingOptions(depth=depth, n_gpu_layers=99, bounce=False)
    streaming = replace(streaming, vram_bytes=budget(moe, streaming, "least"))
    with Engine(moe, options(gpu, streaming)) as engine:
        assert engine.plan is not None
        assert all(pool.n_slots == pool.n_used for pool in engine.plan.layout.pools)
        got = logits(engine, ones)[:6]
        assert engine.counters().evictions > 0
        # 3 tokens after the rewind may use more experts than there are slots; the 6 before may not.
        assert engine.counters().cuts == 6 * len(engine.facts.expert_weights)
    assert_same(gpu, got, expected)


def test_less_than_the_fewest_slots_is_refused(gpu: DeviceChoice, moe: Path) -> None:
    least = budget(moe, StreamingOptions(), "least")
    with pytest.raises(DoesNotFit, match="--vram"):
        Engine(moe, options(gpu, StreamingOptions(vram_bytes=least - 1)))


@pytest.mark.parametrize("depth", [0, 1, 4, 64])
def test_any_look_ahead_is_resident(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, depth: int
) -> None:
    with Engine(moe, options(gpu, half(moe, depth=depth))) as engine:
        assert_same(gpu, logits(engine), resident_moe)


def test_guesses_change_the_copies_and_never_the_logits(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(prefetch: bool) -> int:
        with Engine(moe, options(gpu, half(moe, prefetch=prefetch))) as engine:
            assert_same(gpu, logits(engine), resident_moe)
            return engine.counters().streamed_bytes

    right = RoutingGuess.predict
    n_wrong = 0

    def wrong(self: RoutingGuess, layer: int, n_tokens: int) -> list[int]:
        nonlocal n_wrong
        guess = set(right(self, layer, n_tokens))
        n_wrong += bool(guess)
        return [expert for expert in range(8) if expert not in guess] if guess else []

    honest, silent = run(prefetch=True), run(prefetch=False)
    monkeypatch.setattr(RoutingGuess, "predict", wrong)
    mistaken = run(prefetch=True)
    assert n_wrong > 0
    assert mistaken > silent, "wrong guesses cost copies"
    assert honest > 0


@pytest.mark.parametrize("depth", [0, 4])
def test_dense_layers_and_experts_stream_together(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, depth: int
) -> None:
    streaming = StreamingOptions(n_gpu_layers=1, depth=depth, bounce=False)
    with Engine(moe, options(gpu, streaming)) as engine:
        assert engine.plan is not None
        assert {pool.n_experts > 0 for pool in engine.plan.layout.pools} == {True, False}
        assert_same(gpu, logits(engine), resident_moe)


@pytest.mark.parametrize(
    "streaming",
    [
        StreamingOptions(n_gpu_layers=1, depth=0, prefetch=False, bounce=False),
        StreamingOptions(n_gpu_layers=1, depth=0, bounce=False),
        StreamingOptions(n_gpu_layers=1, bounce=False),
        StreamingOptions(n_gpu_layers=0, depth=64, bounce=False),
    ],
    ids=["serial", "depth0", "depth4", "everything"],
)
@pytest.mark.parametrize("slots", ["all", "least"])
def test_a_dense_model_of_which_few_layers_fit_is_resident(
    gpu: DeviceChoice, dense: Path, resident_dense: Logits, streaming: StreamingOptions, slots: str
) -> None:
    if slots == "least":
        streaming = replace(streaming, vram_bytes=budget(dense, streaming, "least"))
    with Engine(dense, options(gpu, streaming)) as engine:
        assert_same(gpu, logits(engine), resident_dense)
        counters = engine.counters()
        assert counters.cuts > 0
        assert counters.router_reads == 0
        assert engine.plan is not None
        if slots == "least" and streaming.overlap:
            assert counters.streamed_bytes > engine.plan.streamed_bytes, "slots are reused"


# Layers of two types in the same slots, whose stride is neither's; biases read by original ids.
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

    def rows(streaming: StreamingOptions, **changes: bool) -> Logits:
        with Engine(path, options(gpu, streaming, **changes)) as engine:
            n_vocab = engine.n_vocab
            return np.concatenate(
                [
                    engine.sequences.extend(0, [(13 * i + 5 * n) % n_vocab for i in range(n)])
                    for n in batches
                ]
            )

    resident = rows(SERIAL, stream_experts=False)
    assert_same(gpu, rows(SERIAL), resident)
    plan = make_plan(read_facts(path), budget_bytes=None)
    (pool,) = plan.layout.pools
    for n_slots in (pool.n_experts, 3 * pool.n_experts // 2, 2 * pool.n_experts, pool.n_slots):
        vram = plan.resident_bytes + n_slots * pool.slot_bytes
        assert_same(gpu, rows(StreamingOptions(vram_bytes=vram)), resident)


def test_the_mla_switch_rounds_otherwise_and_streaming_does_not_change_its_bits(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    with Engine(moe, options(gpu, stream_experts=False, mla_crossover=64)) as engine:
        switched = logits(engine)
        assert engine.device is not None
        assert engine.device.mla.counters.replaced > 0, engine.device.mla.counters
    assert_close_but_for_near_ties(switched, resident_moe)
    with Engine(moe, options(gpu, half(moe), mla_crossover=64)) as engine:
        assert_same(gpu, logits(engine), switched)
        assert engine.device is not None
        assert engine.device.mla.counters.replaced > 0


def test_products_below_the_threshold_stay_with_the_cpu(gpu: DeviceChoice, moe: Path) -> None:
    opened: EngineOptions = options(gpu, StreamingOptions(), min_batch=MinBatch(experts=4, dense=4))
    with Engine(moe, opened) as engine:
        engine.sequences.extend(0, [1, 2, 3])
        assert engine.counters().cuts == 0
        engine.sequences.extend(0, [1, 2, 3, 4])
        assert engine.counters().cuts == len(engine.facts.expert_weights)


def test_slots_lie_in_the_memory_of_the_device(gpu: DeviceChoice, moe: Path) -> None:
    with Engine(moe, options(gpu, StreamingOptions(n_gpu_layers=1))) as engine:
        engine.sequences.extend(0, [1, 2, 3])
        assert engine.device is not None
        buffers = [b for memory in executor_of(engine).memories for b in memory.buffers]
        assert len(buffers) > 3, "gate, up and down, and dense weights"
        for buffer in buffers:
            struct = abi.ggml_backend_buffer.from_address(buffer.address)
            assert struct.buft == engine.device.inner.buffer_type
            assert not buffer.is_host
        assert engine.host is not None
        assert engine.host.buffers, "and what streams through them lies in host memory"


@pytest.mark.parametrize("overlap", [True, False])
def test_copies_through_the_pinned_ring_give_the_same(
    async_gpu: DeviceChoice,
    moe: Path,
    resident_moe: Logits,
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("offload.store.store.Store.is_pinned", False)
    if async_gpu.device.pinned_memory(4096) is None:
        pytest.skip(f"{async_gpu.name} has no pinned memory of its own")
    # Parts far smaller than a matrix, so that each copy goes around the ring.
    monkeypatch.setattr("offload.streaming.options.RING_BYTES", 3 * 4096)
    monkeypatch.setattr(BounceCopier.__init__, "__defaults__", (NO_TRACE, 4096))
    with Engine(
        moe, options(async_gpu, half(moe, bounce=True, depth=8 if overlap else 0))
    ) as engine:
        assert_same(async_gpu, logits(engine), resident_moe)
        counters = engine.counters()
        assert counters.bounced_bytes == counters.streamed_bytes > 0
        assert any("pinned ring" in note for note in engine.notes)


@pytest.mark.parametrize("warmup", [True, False])
def test_slots_sized_after_a_warm_up_give_the_same(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, warmup: bool
) -> None:
    opened = options(gpu, StreamingOptions(bounce=False, warmup=warmup))
    facts = read_facts(moe)
    plan = make_plan(facts, budget_bytes=1 << 40, context=context_spec(facts, opened))
    taken = plan.resident_bytes + plan.reserve_bytes
    if warmup:  # Drivers and their libraries take more than the header tells.
        free_before = gpu.device.memory_bytes()[0]
        with Engine(moe, opened) as engine:
            logits(engine)
            assert engine.plan is not None
            used = free_before - gpu.device.memory_bytes()[0]
            taken = max(taken, used - engine.plan.slot_bytes)
    limit = taken + plan.slot_bytes // 2
    streaming = replace(opened.streaming, device_bytes=limit)
    with Engine(moe, replace(opened, streaming=streaming)) as engine:
        assert engine.plan is not None
        assert 0 < engine.plan.slot_bytes <= plan.slot_bytes // 2
        assert engine.counters().copies == 0, "a warm-up copies nothing"
        assert_same(gpu, logits(engine), resident_moe)
        assert engine.counters().copies > 0
        assert any("after a warm-up of 16 tokens" in note for note in engine.notes) == warmup


def test_chunks_of_tokens_give_what_the_resident_model_gives(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    """Not bit for bit: few tokens run on other kernels than many, which round otherwise (2.5 % of
    the logits' deviation on software Vulkan)."""
    streaming = StreamingOptions(chunks="on", n_gpu_layers=99, bounce=False)
    streaming = replace(streaming, vram_bytes=budget(moe, streaming, "least"))
    with Engine(moe, options(gpu, streaming)) as engine:
        got = logits(engine)
        assert engine.counters().chunks > 0
        assert engine.device is not None
        assert not engine.device.declined
    np.testing.assert_allclose(got, resident_moe, atol=5e-2 * float(resident_moe.std()))


def test_a_batch_of_the_same_size_again_reads_other_slots(gpu: DeviceChoice, models: Path) -> None:
    """libllama uses its graph again, and a backend may replay what it captured of it: not what the
    batch before read."""
    path = write_preset("qwen3moe", models / "gpu_bands.gguf", n_layer=2, n_expert=128, seed=1)
    prompts = [[(i * i + 17 * prompt) % 251 for i in range(9)] for prompt in range(6)]

    def rows(opened: EngineOptions) -> tuple[Logits, int]:
        found = []
        with Engine(path, opened) as engine:
            for prompt in prompts:
                engine.sequences.rewind(0, 0)
                found.append(engine.sequences.extend(0, prompt))
            return np.concatenate(found), engine.counters().bands

    expected, _ = rows(options(gpu, stream_experts=False))
    got, n_bands = rows(options(gpu, StreamingOptions(bounce=False)))
    assert n_bands > 0
    assert_same(gpu, got, expected)
