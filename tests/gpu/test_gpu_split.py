"""Layers split between the CPU and a GPU give the resident model's logits, except for rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from on_gpu import BATCHES, Logits, assert_close, assert_same, logits, logits_of, options, slots_for
from splits import all_host, at_random

from lab.options import engine_options
from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import EngineOptions, open_engine
from offload.ggml.graph import Graph
from offload.ggml.tensor import Relocation
from offload.measuring import measure_split
from offload.model_file import read_facts
from offload.schedule.schedule import Schedule
from offload.schedule.splitter import ByCosts, Splitter, all_on_device, stay
from offload.stream.nodes_ahead import Behind, NodesAhead, Ordered, Orderer
from offload.stream.prompt_side import PromptSide
from offload.times.min_batch import NEVER, MinBatch

halves = at_random(1)


def split(gpu: DeviceChoice, path: Path, splitter: Splitter, **changes: bool) -> EngineOptions:
    """Engine options with slots for half of the experts, and layers split by `splitter`."""
    streaming = slots_for(path, "half", hybrid=True, splitter=splitter, **changes)
    return options(gpu, streaming, min_batch=MinBatch(NEVER, NEVER))


@pytest.mark.parametrize("splitter", [stay, all_on_device, halves])
def test_a_split_layer_gives_what_the_resident_model_gives(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits, splitter: Splitter
) -> None:
    with open_engine(moe, split(gpu, moe, splitter)) as engine:
        got = logits(engine)
        counters = engine.counters()
        assert engine.opened.weights.hybrid is not None
        assert not engine.opened.weights.ways.now.declined
        assert counters.split_layers > 0
    assert (counters.n_pairs_host > 0) == (splitter is not all_on_device)
    assert_close(got, resident_moe, 0.08)


@pytest.mark.parametrize("slots", ["least", "half"])
@pytest.mark.parametrize("splitter", [all_host, all_on_device, halves])
def test_a_shared_prompt_gives_what_the_resident_model_gives(
    gpu: DeviceChoice, moe: Path, splitter: Splitter, slots: str
) -> None:
    batches, sizes = (100, 3, 80), {"n_ubatch": 128, "n_ctx": 256, "n_outputs": 256}
    resident = logits_of(moe, options(gpu, stream_experts=False, **sizes), batches)
    streaming = slots_for(moe, slots, hybrid=True, splitter=splitter, n_gpu_layers=99)
    never = MinBatch(NEVER, NEVER)
    with open_engine(moe, options(gpu, streaming, min_batch=never, **sizes)) as engine:
        got = logits(engine, batches)
        counters = engine.counters()
    assert (counters.passes > 0) == (splitter is not all_host), "then the device computes no pair"
    # The CPU computes what the fewest slots cannot hold of the batch of 3 tokens.
    facts = read_facts(moe)
    n_small = 3 * facts.n_experts_used * facts.n_layers
    assert (counters.n_pairs_host > n_small) == (splitter is not all_on_device)
    assert_close(got, resident, 0.08)


def test_what_goes_ahead_of_the_cpus_rows_changes_no_bit(
    gpu: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def in_order(_: Orderer, graph: Graph, layers: Sequence[Behind]) -> Ordered:
        return Ordered(graph, [NodesAhead()] * len(layers), Relocation())

    found = []
    for ahead in (True, False):
        with open_engine(moe, split(gpu, moe, halves)) as engine:
            found.append(logits(engine))
            counters = engine.counters()
            assert counters.n_pairs_host > 0
            assert (counters.n_nodes_ahead > 0) == ahead
        monkeypatch.setattr(Orderer, "order", in_order)
    np.testing.assert_array_equal(*found)


def test_a_gpu_is_measured_and_layers_are_split_by_it(
    gpu: DeviceChoice, moe: Path, resident_moe: Logits
) -> None:
    with open_engine(moe, split(gpu, moe, stay)) as engine:
        assert engine.opened.weights.hybrid is not None
        (costs,) = measure_split(engine).values()
        arrays = costs.costs()
        assert min(arrays.copy_s, arrays.host_s[1]) > 0
        engine.opened.weights.ways.change(splitter=ByCosts(arrays))
        assert_close(logits(engine), resident_moe, 0.08)


@pytest.mark.parametrize("preset", ["deepseek-v3", "gpt-oss-20b"])
def test_all_experts_on_the_cpu_give_the_bits_of_what_is_below_min_batch(
    gpu: DeviceChoice, moe: Path, models: Path, preset: str
) -> None:
    """gpt-oss has biases in device memory. They are read back for the CPU."""
    path = moe
    if preset != "deepseek-v3":
        path = write_preset(preset, models / "gpu_biases.gguf", size="tiny", seed=1)
    opened = split(gpu, path, all_host)
    below = engine_options(opened, hybrid=False)
    with open_engine(path, below) as engine:
        expected = logits(engine, BATCHES[:2])
        assert engine.counters().cuts == 0
    with open_engine(path, opened) as engine:
        np.testing.assert_array_equal(logits(engine, BATCHES[:2]), expected)
        assert engine.counters().n_pairs_host > 0
    assert_close(logits_of(path, split(gpu, path, halves), BATCHES[:2]), expected, 0.08)


@pytest.mark.parametrize("hybrid", [False, True])
def test_a_decode_without_logits_has_no_ids_to_read_in_its_last_layer(
    gpu: DeviceChoice, models: Path, hybrid: bool
) -> None:
    """The last layer's expert products have no tokens, so the GPU handles them itself."""
    path = write_preset("qwen3moe", models / "gpu_no_logits.gguf", n_layer=2, n_expert=32, seed=1)
    least = 8 if hybrid else 1  # batches of 8 run on the device, smaller ones are split
    streaming = slots_for(path, "half", hybrid=hybrid, splitter=stay if hybrid else None)
    opened = options(gpu, streaming, min_batch=MinBatch(least, least))
    tokens = [5, 6, 7]
    with open_engine(path, engine_options(opened, device="cpu")) as engine:
        expected = engine.sequences.extend(0, tokens)[-1:]
    with open_engine(path, opened) as engine:
        for token in tokens[:-1]:
            engine.sequences.extend(0, [token], n_logits=0)
        counters = engine.counters()
        assert counters.router_reads + counters.layers_rung == 2, "of the first layer alone"
        assert_close(engine.sequences.extend(0, tokens[-1:]), expected, 0.08)


def test_a_prompt_goes_around_the_experts_that_decodes_left(
    gpu: DeviceChoice, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt may use experts out of order, which gives the same logits as in order.

    A prompt that the CPU shares is computed in passes, which read every expert where it lies.
    """
    monkeypatch.setattr(PromptSide, "shares", lambda *_: False)
    deeper = models / "gpu_deeper.gguf"
    path = write_preset("deepseek-v3", deeper, size="tiny-vulkan", seed=1, n_layer=12)
    opened = engine_options(
        split(gpu, path, all_on_device), min_batch=MinBatch(65, 65), n_ubatch=80
    )

    def run() -> tuple[Logits, int]:
        with open_engine(path, opened) as engine:
            rows = [engine.sequences.extend(0, [11 * i]) for i in range(6)]
            engine.sequences.rewind(0, 0)
            tokens = [7 * i % engine.n_vocab for i in range(80)]
            rows.append(engine.sequences.extend(0, tokens, n_logits=4))
            return np.concatenate(rows), engine.counters().layers_out_of_order

    got, n_layers = run()
    assert n_layers > 0
    monkeypatch.setattr(Schedule, "saves_out_of_order", lambda *_: False)
    expected, n_layers = run()
    assert n_layers == 0
    assert_same(gpu, got, expected)
