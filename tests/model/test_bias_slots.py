"""Biases of experts are read from slots, by the ids that their products read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from budgets import budget
from test_chunks import logits

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.ggml.backend import Stream
from offload.ggml.graph import Graph
from offload.ggml.library.lib import op_number
from offload.ggml.tensor import Tensor
from offload.model_file import read_facts
from offload.plan.min_batch import MinBatch
from offload.plan.placement import make_plan
from offload.split.switch import Splitter, all_on_device, stay
from offload.streaming.options import StreamingOptions

BATCHES = (1, 3, 1, 7, 1, 40, 1)
FUSED = ("MUL_MAT_ID", "ADD_ID", "MUL_MAT_ID", "ADD_ID", "GLU")  # in ggml_cuda_can_fuse


@pytest.fixture(scope="module")
def model(models: Path) -> Path:
    return write_preset("gpt-oss-20b", models / "bias-slots.gguf", seed=1, n_expert=16)


def options(streaming: StreamingOptions) -> EngineOptions:
    return EngineOptions(
        device="sim", streaming=streaming, min_batch=MinBatch(1, 1), n_ctx=256, n_ubatch=64,
        n_outputs=128,
    )  # fmt: skip


@pytest.mark.parametrize("slots", ["half", "all"])
@pytest.mark.parametrize("splitter", [None, stay, all_on_device])
def test_the_bits_are_those_of_biases_by_expert(
    model: Path, splitter: Splitter | None, slots: str
) -> None:
    with Engine(model, options(StreamingOptions(depth=0, prefetch=False))) as engine:
        expected = logits(engine, BATCHES)
    streaming = StreamingOptions(hybrid=splitter is not None, splitter=splitter)
    if slots == "half":
        streaming = replace(streaming, vram_bytes=budget(model, streaming, slots))
    with Engine(model, options(streaming)) as engine:
        got = logits(engine, BATCHES)
        assert engine.counters().streamed_experts > 0 or splitter is stay
    if splitter is stay:  # the CPU's kernels round differently
        np.testing.assert_allclose(got, expected, atol=1e-2)
    else:
        assert np.array_equal(got, expected)


def runs_of(graph: Graph) -> list[list[Tensor]]:
    """Neighbouring nodes that do what FUSED says."""
    wanted = [op_number(op) for op in FUSED]
    operations, nodes = graph.operations(), graph.nodes()
    ends = range(len(wanted), len(nodes) + 1)
    return [nodes[end - 5 : end] for end in ends if operations[end - 5 : end] == wanted]


def test_gate_bias_up_bias_and_glu_are_given_to_the_backend_with_one_ids_tensor(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As CUDA's backend has to find them, to fuse them into one kernel."""
    n_fusible = n_with_slots = 0
    compute = Stream.compute

    def look(stream: Stream, graph: Graph) -> int:
        nonlocal n_fusible, n_with_slots
        for first, first_bias, second, second_bias, _ in runs_of(graph):
            ids = [node.source(2) for node in (first, first_bias, second, second_bias)]
            n_fusible += len(set(ids)) == 1
            biases, matrices = (
                [node.source(k) for node in nodes]
                for k, nodes in ((1, (first_bias, second_bias)), (0, (first, second)))
            )
            for bias, matrix in zip(biases, matrices, strict=True):
                assert bias is not None
                assert matrix is not None
                assert bias.shape[1] == matrix.shape[2], "mmvq.cu asserts it"
                n_with_slots += bias.shape[1] > 16
        return compute(stream, graph)

    with Engine(model, options(StreamingOptions())) as engine:
        n_layers = engine.facts.n_layers
        for _ in range(3):  # every expert it uses is there then
            engine.sequences.extend(0, [5])
            engine.sequences.rewind(0, 0)
        monkeypatch.setattr(Stream, "compute", look)
        engine.sequences.extend(0, [5])
    assert n_fusible == n_layers
    assert n_with_slots == 2 * n_layers


def test_slots_have_room_for_biases_in_the_plan(model: Path) -> None:
    facts = read_facts(model)
    plan = make_plan(facts)
    (pool,) = plan.layout.pools
    strides = {kind.name: kind.stride_bytes for kind in pool.kinds}
    for kind in ("gate", "up", "down"):
        entry = facts.weights[f"blk.0.ffn_{kind}_exps.bias"].entry
        assert strides[f"{kind}_bias"] == 4 * entry.shape[0]
    assert plan.slot_bytes == pool.n_slots * sum(strides.values())
