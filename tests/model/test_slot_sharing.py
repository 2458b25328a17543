"""Slots shared by gate, up and down of an expert, and by layers of different types, on `sim`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.ggml.graph import Graph, Product
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.streaming.executor import Executor
from offload.streaming.options import StreamingOptions
from offload.trace import COPY, Trace

N_EXPERTS, N_USED = 16, 4
BATCHES = (1, 3, 40, 2, 9)  # 40 tokens use nearly all experts
# Q4_K_M has layers whose down is q6_K, UD-Q4_K_XL layers of three mixtures, gpt-oss biases that
# are read by the router's own ids; fused are gate and up in one matrix.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("deepseek-v3", {"quant": "Q4_K_M", "n_embd": 256, "n_ff_exp": 256, "n_layer": 8}),
    "very mixed": ("qwen3moe", {"quant": "UD-Q4_K_XL", "n_embd": 256, "n_ff_exp": 256}),
    "biased": ("gpt-oss", {}),
    "fused": ("qwen3moe", {"fused_experts": True}),
}


@pytest.fixture(scope="module")
def written(models: Path) -> Callable[[str], Path]:
    def write(name: str) -> Path:
        path = models / f"sharing-{name.replace(' ', '-')}.gguf"
        preset, changes = MODELS[name]
        return path if path.exists() else write_preset(preset, path, seed=3, **changes)

    return write


def options(streaming: StreamingOptions, **changes: Any) -> EngineOptions:
    return EngineOptions(
        device="sim",
        streaming=streaming,
        min_batch=MinBatch(1, 1),
        n_ctx=256,
        n_ubatch=64,
        n_threads=1,
        n_threads_batch=1,
        **changes,
    )


def logits(engine: Engine) -> NDArray[np.float32]:
    n_vocab = engine.n_vocab
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % n_vocab for i in range(n)]) for n in BATCHES
    ]
    return np.concatenate(rows)


def with_slots(path: Path, n_slots: int | None, **changes: Any) -> StreamingOptions:
    """Streaming through that many slots, None: one for everything."""
    streaming = StreamingOptions(**changes)
    if n_slots is None:
        return streaming
    plan = make_plan(read_facts(path))
    (pool,) = plan.layout.pools
    vram = plan.resident_bytes + n_slots * pool.slot_bytes
    return replace(streaming, vram_bytes=vram)


@pytest.mark.parametrize("name", MODELS)
def test_streamed_is_resident_for_every_slot_count(
    name: str, written: Callable[[str], Path]
) -> None:
    path = written(name)
    with Engine(path, options(StreamingOptions(), stream_experts=False)) as engine:
        resident = logits(engine)
    # A layer needs 16: none but one token's, one layer, part of the next, two layers, all.
    for n_slots in (N_USED, N_EXPERTS, 23, 2 * N_EXPERTS, 45, None):
        for depth in (0, 8):
            streaming = with_slots(path, n_slots, depth=depth)
            with Engine(path, options(streaming)) as engine:
                assert engine.plan is not None
                (pool,) = engine.plan.layout.pools
                assert n_slots in (None, pool.n_slots)
                assert np.array_equal(logits(engine), resident), f"{n_slots} slots, depth {depth}"
                assert engine.counters().cuts > 0
                assert engine.device is not None
                assert bool(engine.device.declined) == (n_slots == N_USED)


def test_layers_of_different_types_go_through_the_same_slots(
    written: Callable[[str], Path],
) -> None:
    path = written("mixed")
    facts = read_facts(path)
    types = {entry.type for entry in facts.expert_weights if "down" in entry.name}
    assert types == {"q4_K", "q6_K"}
    trace = Trace()
    streaming = with_slots(path, N_EXPERTS, trace=trace)
    with Engine(path, options(streaming)) as engine:
        engine.sequences.extend(0, list(range(40)))
        copied = engine.counters().streamed_bytes
    # One layer's slots serve all seven, and only the bytes of each type cross the link.
    expected = sum(entry.size_bytes for entry in facts.expert_weights)
    assert copied == expected
    assert sum(int(e.args["bytes"]) for e in trace.events() if e.lane == COPY) == expected


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_is_one_cut_whatever_it_is_made_of(
    name: str, written: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Product]] = []
    prepare = Executor.prepare

    def noting(self: Executor, graph: Graph, products: Any) -> Callable[[], int]:
        seen.append(list(products))
        return prepare(self, graph, products)

    monkeypatch.setattr(Executor, "prepare", noting)
    path = written(name)
    with Engine(path, options(StreamingOptions())) as engine:
        engine.sequences.extend(0, [1, 2])
        assert engine.plan is not None
        n_layers = len(engine.plan.layout.groups)
        counters = engine.counters()
        assert counters.router_reads == n_layers
        assert counters.cuts == len(engine.facts.expert_weights)
        (products,) = (p for p in seen if p)
        ids = {product.ids for product in products}
        assert len(ids) == n_layers, "each layer's products read the same ids"
