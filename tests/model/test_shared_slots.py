"""Experts that share slots on `sim` give the resident model's bits.

Slots are shared by the parts of experts, by layers and by the passes of a layer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from budgets import budget, limited
from numpy.typing import NDArray
from player_calls import Compute, computing, reading

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import DeviceFailed
from offload.ggml.backend import RouterIds, Stream
from offload.ggml.graph import Graph, Product
from offload.ggml.library.lib import op_number
from offload.ggml.tensor import Tensor
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule import passes as schedule_passes
from offload.schedule.splitter import Splitter, all_on_device, stay
from offload.stream import passes
from offload.stream.copying import ThreadCopier, Transfer
from offload.stream.executor import Executor
from offload.stream.forms import ExpertForm, NoForm
from offload.times.min_batch import MinBatch
from offload.trace.trace import COPY, Trace

N_EXPERTS = 16
# Tokens per batch. 70 exceeds the ubatch of 64, so that its second ubatch is short.
BATCHES = (1, 5, 40, 3, 70)
# Q4_K_M has layers whose down is q6_K. UD-Q4_K_XL has layers of three mixtures. gpt-oss has biases
# that are read by the router's own ids. "fused" has gate and up in one matrix. llama-4's down
# overwrites its input.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixed": ("deepseek-v3", {"quant": "Q4_K_M", "n_embd": 256, "n_ff_exp": 256, "n_layer": 8}),
    "very mixed": ("qwen3moe", {"quant": "UD-Q4_K_XL", "n_embd": 256, "n_ff_exp": 256}),
    "biased": ("gpt-oss-20b", {"n_expert": N_EXPERTS}),
    "fused": ("qwen3moe", {"fused_experts": True}),
    "overwritten": ("llama-4-scout", {}),
    "plain": ("deepseek-v3", {}),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, models: Path) -> Path:
    return written(request.param, models)


def written(name: str, models: Path) -> Path:
    path = models / f"sharing-{name.replace(' ', '-')}.gguf"
    preset, changes = MODELS[name]
    return path if path.exists() else write_preset(preset, path, seed=3, **changes)


def options(streaming: Streaming, **changes: Any) -> EngineOptions:
    return engine_options(
        device="sim", streaming=streaming, min_batch=MinBatch(1, 1), n_ctx=256, n_ubatch=64,
        n_outputs=128, n_threads=1, n_threads_batch=1, **changes,
    )  # fmt: skip


def tight(path: Path, n_more: int = 0, **changes: object) -> Streaming:
    """Streaming options with slots for one token's experts, and `n_more` further slots."""
    streaming = Streaming(n_gpu_layers=99, passes="on")
    least = budget(path, streaming, "least")
    plan = make_plan(read_facts(path), PlanRequest(budget_bytes=least, n_gpu_layers=99))
    slot_bytes = max(pool.slot_bytes for pool in plan.layout.pools)
    return streaming | Streaming(vram_bytes=least + n_more * slot_bytes, **changes)


def with_slots(path: Path, n_slots: int | None, **changes: Any) -> Streaming:
    """Streaming options with `n_slots` slots, or with a slot for every piece if None."""
    streaming = Streaming(n_gpu_layers=99, **changes)  # no other weights stream
    if n_slots is None:
        return streaming
    plan = make_plan(read_facts(path))
    (pool,) = plan.layout.pools
    vram = plan.resident_bytes + n_slots * pool.slot_bytes
    return streaming | Streaming(vram_bytes=vram)


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> NDArray[np.float32]:
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    return np.concatenate(rows)


@pytest.fixture(scope="module")
def resident(model: Path) -> NDArray[np.float32]:
    with open_engine(model, options(Streaming(), stream_experts=False)) as engine:
        return logits(engine)


# -- slots -----------------------------------------------------------------------------------------


# A layer needs 16 slots. The cases: one layer, part of the next, two layers, more, all.
@pytest.mark.parametrize(("n_slots", "depth"), [(N_EXPERTS, 0), (23, 8), (45, 8), (None, 0)])
def test_streamed_is_resident_for_every_slot_count(
    model: Path, resident: NDArray[np.float32], n_slots: int | None, depth: int
) -> None:
    with open_engine(model, options(with_slots(model, n_slots, depth=depth))) as engine:
        assert engine.opened.plan is not None
        (pool,) = engine.opened.plan.layout.pools
        # Kinds with one stride need a little more memory (`SlotPool.joined`).
        assert n_slots is None or n_slots * 15 // 16 <= pool.n_slots <= n_slots
        assert np.array_equal(logits(engine), resident)
        assert engine.counters().cuts > 0
        assert engine.device is not None
        assert not engine.device.declined


def test_layers_of_different_types_go_through_the_same_slots(models: Path) -> None:
    path = written("mixed", models)
    facts = read_facts(path)
    types = {entry.type for entry in facts.expert_weights if "down" in entry.name}
    assert types == {"q4_K", "q6_K"}
    trace = Trace()
    streaming = with_slots(path, N_EXPERTS, trace=trace)
    with open_engine(path, options(streaming)) as engine:
        engine.sequences.extend(0, list(range(40)))
        copied = engine.counters().streamed_bytes
    # One layer's slots serve all seven, and only the bytes of each type cross the link.
    expected = sum(entry.size_bytes for entry in facts.expert_weights)
    assert copied == expected
    assert sum(int(e.args["bytes"]) for e in trace.events() if e.lane == COPY) == expected


def test_a_layer_is_one_cut_whatever_it_is_made_of(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[Product]] = []
    prepare = Executor.prepare

    def noting(self: Executor, graph: Graph, products: Any) -> Callable[[], int]:
        seen.append(list(products))
        return prepare(self, graph, products)

    monkeypatch.setattr(Executor, "prepare", noting)
    with open_engine(model, options(Streaming())) as engine:
        engine.sequences.extend(0, [1, 2])
        assert engine.opened.plan is not None
        n_layers = len(engine.opened.plan.layout.groups)
        counters = engine.counters()
        assert counters.router_reads == n_layers
        assert counters.cuts == len(engine.facts.expert_weights)
        (products,) = (p for p in seen if p)
        ids = {product.ids for product in products}
        assert len(ids) == n_layers, "each layer's products read the same ids"


@pytest.mark.parametrize("slots", ["half", "all"])
@pytest.mark.parametrize("splitter", [stay, all_on_device])
def test_split_layers_read_the_same_biases(models: Path, splitter: Splitter, slots: str) -> None:
    model = written("biased", models)
    with open_engine(model, options(Streaming(depth=0, prefetch=False))) as engine:
        expected = logits(engine)
    streaming = Streaming(hybrid=True, splitter=splitter)
    if slots == "half":
        streaming = limited(model, streaming, slots)
    with open_engine(model, options(streaming)) as engine:
        got = logits(engine)
        assert engine.counters().streamed_experts > 0 or splitter is stay
    if splitter is stay:  # the CPU's kernels round differently
        np.testing.assert_allclose(got, expected, atol=1e-2)
    else:
        assert np.array_equal(got, expected)


FUSED = ("MUL_MAT_ID", "ADD_ID", "MUL_MAT_ID", "ADD_ID", "GLU")  # as in ggml_cuda_can_fuse


def runs_of(graph: Graph) -> list[list[Tensor]]:
    """Runs of neighbouring nodes with the operations of FUSED."""
    wanted = [op_number(op) for op in FUSED]
    operations, nodes = graph.operations(), graph.nodes()
    ends = range(len(wanted), len(nodes) + 1)
    return [nodes[end - 5 : end] for end in ends if operations[end - 5 : end] == wanted]


# With a slot for each expert, nodes see the layer's own slots alone: `sim` looks at each slot seen.
@pytest.mark.parametrize(("n_slots", "n_seen"), [(45, 45), (None, N_EXPERTS)])
def test_gate_bias_up_bias_and_glu_are_given_to_the_backend_with_one_ids_tensor(
    models: Path, monkeypatch: pytest.MonkeyPatch, n_slots: int | None, n_seen: int
) -> None:
    """CUDA's backend needs this to fuse them into one kernel."""
    model = written("biased", models)
    n_fusible = n_with_slots = 0
    wrong: list[Tensor | None] = []

    def look(graph: Graph) -> None:
        nonlocal n_fusible, n_with_slots
        for first, first_bias, second, second_bias, _ in runs_of(graph):
            ids = [node.source(2) for node in (first, first_bias, second, second_bias)]
            n_fusible += len(set(ids)) == 1
            biases, matrices = (
                [node.source(k) for node in nodes]
                for k, nodes in ((1, (first_bias, second_bias)), (0, (first, second)))
            )
            for bias, matrix in zip(biases, matrices, strict=True):
                if bias is None or matrix is None or bias.shape[1] != matrix.shape[2]:
                    wrong.append(bias)
                else:
                    n_with_slots += bias.shape[1] == n_seen

    def looking(inner: Compute) -> Compute:
        def compute(stream: int, graph: int) -> int:
            look(Graph(graph))
            return inner(stream, graph)

        return compute

    with open_engine(model, options(with_slots(model, n_slots))) as engine:
        n_layers = engine.facts.n_layers
        for _ in range(3):  # then all experts of this token are in slots
            engine.sequences.extend(0, [5])
            engine.sequences.rewind(0, 0)
        computing(monkeypatch, looking)
        engine.sequences.extend(0, [5])
    assert not wrong, "mmvq.cu asserts equal shapes"
    assert n_fusible == n_layers > 1
    assert n_with_slots == 2 * n_layers


# -- passes over groups of experts -----------------------------------------------------------------


@pytest.mark.parametrize("n_more", [0, 6])
def test_passes_give_the_bits_of_the_resident_model(
    model: Path, resident: NDArray[np.float32], n_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if n_more:  # groups of one expert, so that most slots are not part of the ring
        monkeypatch.setattr(schedule_passes, "_LEAST_BYTES", 0)
    with open_engine(model, options(tight(model, n_more))) as engine:
        assert np.array_equal(logits(engine), resident)
        counters = engine.counters()
        assert engine.device is not None
        assert not engine.device.declined
        assert counters.passes > 3 * 3
        assert counters.hits > 0 or not n_more, "later batches find experts in slots"


def test_products_one_by_one_give_the_same_where_the_form_is_unknown(
    model: Path, resident: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(model, options(tight(model, 3))) as engine:
        logits(engine)
        together = engine.counters()

    def refuse(*_: Any) -> ExpertForm:
        raise NoForm("its rows are folded")

    monkeypatch.setattr(passes, "find_form", refuse)
    with open_engine(model, options(tight(model, 3))) as engine:
        assert np.array_equal(logits(engine), resident)
        assert engine.counters().passes > 2 * together.passes
        assert engine.counters().streamed_bytes > together.streamed_bytes


def test_a_copy_that_fails_in_a_pass_fails_that_decode(
    model: Path, resident: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, n_copies = ThreadCopier._copy, 0

    def fail_once(self: ThreadCopier, transfer: Transfer) -> None:
        nonlocal n_copies
        n_copies += 1
        if n_copies == 40:
            raise OSError("the link is gone")
        copy(self, transfer)

    monkeypatch.setattr(ThreadCopier, "_copy", fail_once)
    with open_engine(model, options(tight(model, 2))) as engine:
        with pytest.raises(DeviceFailed, match="the link is gone"):
            engine.sequences.extend(0, [(3 * i) % 200 for i in range(40)])
        engine.sequences.rewind(0, 0)
        assert np.array_equal(logits(engine), resident)


@pytest.mark.parametrize("batches", [(9, 1, 12, 20, 9), (2, 3, 1, 8, 2, 5)])
def test_a_band_of_the_slots_gives_the_same(models: Path, batches: Sequence[int]) -> None:
    """The second case has small batches, which some GPUs multiply by a matrix kernel too."""
    path = write_preset("deepseek-v3", models / "band.gguf", seed=1, n_expert=64)
    with open_engine(path, options(Streaming(depth=0, prefetch=False))) as engine:
        expected = logits(engine, batches)
    with open_engine(path, options(Streaming())) as engine:
        assert np.array_equal(logits(engine, batches), expected)
        assert engine.counters().bands > 0


@pytest.mark.parametrize("bad", [-1, 1 << 20])
@pytest.mark.parametrize("way", ["chosen", "passes", "split", "serial"])
def test_a_choice_that_is_no_expert_ends_the_decode_and_not_the_process(
    model: Path, way: str, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A faulty device may return any expert id. Using it would read memory past the weights."""
    streaming = {
        "chosen": Streaming(),
        "passes": tight(model),
        "split": Streaming(hybrid=True, splitter=all_on_device),
        "serial": Streaming(depth=0, prefetch=False),
    }[way]
    read = Stream.read

    def damaged(self: Stream, ids: RouterIds, *more: Any) -> NDArray[np.int32]:
        damage(ids.tensor.address)
        return read(self, ids, *more)

    def damage(tensor: int) -> None:
        if Tensor(tensor).type == "i32":
            ctypes.c_int32.from_address(Tensor(tensor).position).value = bad

    text = [(3 * i) % 200 for i in range(40 if way == "passes" else 2)]
    with open_engine(model, options(streaming)) as engine:
        wanted = engine.sequences.extend(0, text)
        engine.sequences.rewind(0, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "read", damaged)
            reading(patch, damage, lambda *_: None)
            with pytest.raises(DeviceFailed, match=rf"the router chose expert {bad} of \d+"):
                engine.sequences.extend(0, text)
        assert engine.sequences.length(0) == 0
        assert np.array_equal(engine.sequences.extend(0, text), wanted)
