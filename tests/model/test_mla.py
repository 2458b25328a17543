"""The MLA permute switch keeps a tiny random DeepSeek's logits, and overwrites no used memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossovers import crossover_of
from numpy.typing import NDArray

import offload.mla
import offload.opening.placing
import offload.stream.device
from lab.options import engine_options
from lab.synth import write_preset
from offload.device import choose_device
from offload.engine import Engine, open_engine
from offload.errors import DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.graph import Graph
from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.ggml.pydevice import WrappedStream
from offload.ggml.tensor import Redirect, Tensor
from offload.mla import (
    REPLACED,
    MlaBench,
    MlaSwitch,
    MlaTiming,
    Outcome,
    Site,
    choose_crossover,
    chosen_crossover,
    measured_sizes,
)
from offload.model_file import read_facts
from offload.stream.device import StreamingDevice
from offload.times.min_batch import MinBatch

N_HEAD, N_LAYERS = 4, 4
SIZES = (*range(1, 10), 16, 17, 33, 64)
Logits = list[NDArray[np.float32]]
Open = Callable[..., Engine]


class Recorded(MlaSwitch):
    """An MLA switch that records each graph with its rewritten graph."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.graphs: list[tuple[Graph, Graph]] = []

    def rewrite(self, graph: Graph) -> tuple[Graph, Counter[Outcome]]:
        made, counts = super().rewrite(graph)
        self.graphs.append((graph, made))
        return made, counts


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A function that opens an engine on `sim` with a recording MLA switch and a given
    crossover."""
    monkeypatch.setattr(offload.stream.device, "MlaSwitch", Recorded)

    def opened_with(path: Path, n_tokens: int | None, **changes: Any) -> Engine:
        options = engine_options(device="sim", n_ctx=256, n_threads=1)
        with crossover_of(n_tokens):
            return open_engine(path, engine_options(options, **changes))

    return opened_with


def switch_of(engine: Engine) -> Recorded:
    switch = engine.device.mla  # type: ignore[union-attr]
    assert isinstance(switch, Recorded)
    return switch


def evaluate(engine: Engine, sizes: Sequence[int]) -> Logits:
    """Logits of batches of these sizes, each after the same three tokens."""
    rows = []
    for n in sizes:
        engine.sequences.rewind(0, 0)
        engine.sequences.extend(0, [3, 1, 4], n_logits=0)
        rows.append(engine.sequences.extend(0, [(7 * i + n) % engine.n_vocab for i in range(n)]))
    return rows


def largest_difference(some: Logits, others: Logits) -> float:
    """The largest difference, in standard deviations of the logits."""
    return max(float(abs(a - b).max() / b.std()) for a, b in zip(some, others, strict=True))


@pytest.fixture(scope="module")
def tiny_float(models: Path) -> Path:
    """A model with f32 weights, whose products need no conversion of the other factor.

    The two forms therefore differ only in the order of sums. All experts are used, because a
    near-tie between two experts would amplify the difference.
    """
    all_used = {"expert_count": 4, "expert_used_count": 4}
    ungrouped = {"expert_group_count": 0, "expert_group_used_count": 0}
    path = models / "tiny_float.gguf"
    return write_preset("deepseek-v3", path, quant="f32", seed=3, metadata=all_used | ungrouped)


class Compared(StreamingDevice):
    """Computes each value projection both ways from the same input, and goes on with ggml's
    result."""

    differences: list[tuple[int, float]]  # tokens, largest difference in standard deviations

    def compute(self, stream: WrappedStream, graph: Graph) -> int:
        done = 0

        def run(part: Graph) -> None:
            assert not stream.inner.compute(part)

        assert self.host is not None
        for site in MlaSwitch(None, self.inner.supports, self.host.holds).sites(graph):
            run(graph.part(done, site.at[0]))
            done = site.at[2] + 1
            product, _ = site.broadcast(Outcome.COPIED)
            run(Graph.of([product]))
            broadcast = floats(product)
            run(graph.part(site.at[0], done))
            matrix = floats(site.output)
            difference = float(abs(broadcast - matrix).max() / matrix.std())
            self.differences.append((site.n_tokens, difference))
        run(graph.part(done, graph.n_nodes))
        return 0


def floats(tensor: Tensor) -> NDArray[np.float32]:
    return HostRange(tensor.position, tensor.size_bytes).array().view(np.float32).copy()


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("model", ["tiny_moe", "tiny_float"])
def test_both_forms_of_a_projection_give_the_same_numbers(
    model: str, flash_attn: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request.getfixturevalue(model)
    monkeypatch.setattr(offload.opening.placing, "StreamingDevice", Compared)
    opened = engine_options(
        device="sim", n_ctx=256, n_threads=1, flash_attn=flash_attn, stream_experts=False
    )
    with open_engine(path, opened) as engine:
        assert isinstance(engine.device, Compared)
        engine.device.differences = []
        evaluate(engine, SIZES)
        measured = engine.device.differences
    assert {n for n, _ in measured} == {*SIZES}
    assert max(difference for _, difference in measured) < 1e-5


@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("tiny_moe", 1e-3),
        # A difference of 1e-7 may round a value of the half-precision KV cache to its neighbour,
        # 5e-4 away.
        ("tiny_float", 5e-3),
    ],
)
def test_1_to_64_tokens_give_the_same_logits_with_the_switch_as_without(
    opened: Open, model: str, limit: float, flash_attn: str, request: pytest.FixtureRequest
) -> None:
    path, sizes = request.getfixturevalue(model), SIZES
    with opened(path, 0, flash_attn=flash_attn) as engine:
        without = evaluate(engine, sizes)
        assert switch_of(engine).n_replaced == 0
    runs = []
    for _ in range(2):
        with opened(path, 64, flash_attn=flash_attn) as engine:
            runs.append(evaluate(engine, sizes))
            outcomes = switch_of(engine).outcomes
            assert outcomes.total() == switch_of(engine).n_replaced == 2 * len(SIZES) * N_LAYERS
            assert outcomes[Outcome.DIRECT], "both ways through memory occur"
            assert outcomes[Outcome.COPIED]
    assert largest_difference(runs[0], without) < limit
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True)), "bit by bit, each time"


@pytest.mark.parametrize(("model", "crossover"), [("tiny_moe", 1), ("tiny_float", 8)])
def test_the_cpu_s_crossover_is_that_of_its_kernels(
    opened: Open, model: str, crossover: int, request: pytest.FixtureRequest
) -> None:
    """docs/mla.md has the times. The number of heads would be up to 128 tokens."""
    with opened(request.getfixturevalue(model), None) as engine:
        switch = switch_of(engine)
        for n in range(1, 11):
            before = switch.outcomes.copy()
            engine.sequences.extend(0, [5] * n)
            added = switch.outcomes - before
            replaced = sum(added[outcome] for outcome in REPLACED)
            above = added[Outcome.ABOVE_CROSSOVER]
            is_replaced = n <= crossover
            assert (replaced, above) == ((N_LAYERS, 0) if is_replaced else (0, N_LAYERS)), n


def test_switched_off_ggml_gets_its_own_graph(opened: Open, tiny_moe: Path) -> None:
    with opened(tiny_moe, 0, min_batch=MinBatch(1, 1)) as engine:
        evaluate(engine, (1, 4))
        assert switch_of(engine).graphs
        assert all(graph is made for graph, made in switch_of(engine).graphs)
        assert not switch_of(engine).outcomes


def test_writing_over_the_attention_output_would_be_seen(
    opened: Open, tiny_float: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_float, 0, flash_attn="on") as engine:
        expected = evaluate(engine, (2, 4))
    monkeypatch.setattr(Site, "decide", lambda site, crossover: Outcome.DIRECT)
    with opened(tiny_float, 64, flash_attn="on") as engine:
        careless = evaluate(engine, (2, 4))
    assert largest_difference(careless, expected) > 0.01


def test_without_room_between_the_nodes_the_copied_form_gives_the_same_logits(
    opened: Open, tiny_float: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_float, 0) as engine:
        expected = evaluate(engine, (1, 3, 9))
    monkeypatch.setattr(Site, "decide", lambda site, crossover: Outcome.COPIED)
    with opened(tiny_float, 64) as engine:
        copied = evaluate(engine, (1, 3, 9))
        assert set(switch_of(engine).outcomes) == {Outcome.COPIED}
    assert largest_difference(copied, expected) < 1e-3


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [("_is_streamed", True, Outcome.STREAMED), ("_supports", False, Outcome.UNSUPPORTED)],
)
def test_streamed_weights_and_products_the_device_does_not_take_are_left_alone(
    opened: Open, tiny_moe: Path, name: str, answer: bool, reason: Outcome
) -> None:
    with opened(tiny_moe, 0) as engine:
        expected = evaluate(engine, (2,))
    with opened(tiny_moe, 64) as engine:
        setattr(switch_of(engine), name, lambda tensor: answer)
        left = evaluate(engine, (2,))
        assert switch_of(engine).outcomes == {reason: 2 * N_LAYERS}
    assert np.array_equal(left[0], expected[0])


def test_a_product_that_somebody_else_reads_is_left_alone(opened: Open, tiny_moe: Path) -> None:
    with opened(tiny_moe, 64, stream_experts=False) as engine:
        engine.sequences.extend(0, [1, 2])
        switch = switch_of(engine)
        graph, _ = switch_of(engine).graphs[-1]
        sites = switch.sites(graph)
        assert len(sites) == N_LAYERS
        assert not any(site.is_shared for site in sites)
        wanted = abi.ggml_tensor.from_address(sites[1].product.address)
        wanted.flags |= abi.GGML_TENSOR_FLAG_OUTPUT
        assert [site.is_shared for site in switch.sites(graph)] == [False, True, False, False]


def test_uses_are_counted_as_in_the_whole_graph(opened: Open, tiny_moe: Path) -> None:
    with opened(tiny_moe, 1, stream_experts=False) as engine:
        engine.sequences.extend(0, [1, 2])
        graph, _ = switch_of(engine).graphs[-1]
        nodes = graph.nodes()
        sources = [node.source(i) for node in nodes for i in range(10)]
        counts = {node: graph.use_count(node) for node in nodes[:-1]}
        assert counts == {node: sources.count(node) for node in counts}
        assert max(counts.values()) > 1
        assert graph.use_count(Tensor(0x1230)) == -1


def test_streamed_experts_and_the_switch_give_the_bits_of_resident_ones_and_the_switch(
    opened: Open, tiny_moe: Path
) -> None:
    with opened(tiny_moe, 64, stream_experts=False) as engine:
        resident = evaluate(engine, (1, 3, 30))
    with opened(tiny_moe, 64, min_batch=MinBatch(experts=1, dense=1)) as engine:
        streamed = evaluate(engine, (1, 3, 30))
        assert switch_of(engine).n_replaced > 0
        assert engine.counters().cuts > 0
    assert all(np.array_equal(a, b) for a, b in zip(resident, streamed, strict=True))


@pytest.mark.parametrize("token_major", [True, False])
@pytest.mark.parametrize("model", ["tiny_moe", "tiny_float"])
def test_a_gpu_times_both_forms_for_1_to_2_n_head_tokens(
    model: str, token_major: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts, device = read_facts(request.getfixturevalue(model)), choose_device("sim").device
    monkeypatch.setattr(Device, "kind", "gpu")
    chosen = chosen_crossover(facts, device, token_major=token_major)
    sizes = measured_sizes(N_HEAD)
    assert tuple(t.n_tokens for t in chosen.table) == sizes[: len(chosen.table)]
    assert all(t.matrix_s > 0 and t.broadcast_s > 0 for t in chosen.table)
    assert chosen.n_tokens == choose_crossover(chosen.table)
    assert not chosen.note


@pytest.mark.parametrize("token_major", [True, False])
def test_what_is_timed_is_computed_for_every_token(token_major: bool) -> None:
    """ggml skips nodes without its compute flag, so the timed nodes must have it."""
    kv_lora, v_dim, n_head, n_max = 64, 16, 4, 8
    device, random = choose_device("sim").device, np.random.default_rng(5)
    weight = random.standard_normal((n_head, v_dim, kv_lora)).astype(np.float32)
    attended = random.standard_normal((n_max, n_head, kv_lora)).astype(np.float32)
    for n in (1, 3, n_max):
        bench = MlaBench(device, "f32", (kv_lora, v_dim, n_head), n_max, token_major)
        try:
            vectors = attended[:n] if token_major else attended[:n].transpose(1, 0, 2)
            site = bench.site(n)
            stored(bench.weight, weight)
            flat = site.attended.alike((vectors.size, 1, 1, 1), (4, *[4 * vectors.size] * 3))
            stored(flat, np.ascontiguousarray(vectors))
            expected = np.einsum("hvk,thk->thv", weight, attended[:n])
            ours = site.broadcast(Outcome.DIRECT)
            for nodes in ((site.product, site.permuted, site.output), ours):
                out = nodes[-1]
                stored(out, np.full(expected.size, 7, np.float32))
                assert bench.time_s(nodes) > 0
                found = floats(out).reshape(expected.shape)
                assert np.allclose(found, expected, atol=1e-4)
        finally:
            bench.close()


def stored(tensor: Tensor, values: NDArray[np.float32]) -> None:
    library().ggml_backend_tensor_set(tensor.address, values.ctypes.data, 0, values.nbytes)


def test_nothing_is_measured_that_the_device_does_not_take(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Device, "supports", lambda _, node: node.shape[3] == 1)
    device = choose_device("sim").device
    monkeypatch.setattr(Device, "kind", "gpu")
    chosen = chosen_crossover(read_facts(tiny_moe), device, token_major=True)
    assert [timing.n_tokens for timing in chosen.table] == [1]
    assert chosen.n_tokens in (0, 1)


def test_a_gpu_measures_unless_told_and_takes_one_token_where_it_cannot(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_memory(*_: object, **__: object) -> None:
        raise DoesNotFit("7 MiB of device memory could not be had")

    facts, device = read_facts(tiny_moe), choose_device("sim").device
    assert chosen_crossover(facts, device, token_major=True).n_tokens == 1
    monkeypatch.setattr(Device, "kind", "gpu")
    chosen = chosen_crossover(facts, device, token_major=True)
    assert chosen.n_tokens == choose_crossover(chosen.table)
    monkeypatch.setattr(offload.mla, "measure_crossover", no_memory)
    chosen = chosen_crossover(facts, device, token_major=True)
    assert chosen.n_tokens == 1
    assert "7 MiB of device memory could not be had): taking 1 token" in chosen.note


def test_no_part_of_a_graph_and_no_copy_of_one_has_its_uid(opened: Open, tiny_moe: Path) -> None:
    """CUDA stores captured graphs by uid, and assumes that a graph with a known uid is
    unchanged."""
    with opened(tiny_moe, 64, stream_experts=False) as engine:
        engine.sequences.extend(0, [1, 2])
        original, copy = switch_of(engine).graphs[-1]
        assert original.uid > 0
        assert copy.uid not in (0, original.uid)
        assert original.part(0, 3).uid == copy.part(0, 3).uid == 0


def test_a_part_has_one_uid_for_each_way_its_sources_are_pointed(
    opened: Open, tiny_moe: Path
) -> None:
    """CUDA can then replay its captured graph, which it finds by the first node."""
    with opened(tiny_moe, 64, stream_experts=False) as engine:
        engine.sequences.extend(0, [1, 2])
        graph, _ = switch_of(engine).graphs[-1]
        source = Redirect(graph.nodes()[0], 0)
        part = graph.part(0, 3, [source])
        as_it_is = part.uid
        assert as_it_is not in (0, graph.uid)
        source.to(graph.nodes()[5])
        assert graph.part(0, 3, [source]).uid not in (0, as_it_is)
        source.back()
        assert graph.part(0, 3, [source]).uid == as_it_is
        longer = graph.part(0, 4, [source])
        assert longer.uid != as_it_is
        assert longer.addresses()[0] != part.addresses()[0]
        assert longer.addresses()[1:4] == part.addresses()[1:] == graph.addresses()[:3]


def test_a_model_without_the_projection_is_not_measured(
    tiny_dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.mla, "measure_crossover", None)
    device = choose_device("sim").device
    monkeypatch.setattr(Device, "kind", "gpu")
    chosen = chosen_crossover(read_facts(tiny_dense), device, token_major=True)
    assert (chosen.n_tokens, chosen.table) == (0, ())


def test_models_without_latent_attention_have_no_sites(opened: Open, tiny_dense: Path) -> None:
    with opened(tiny_dense, 64) as engine:
        evaluate(engine, (1, 3))
        assert not switch_of(engine).outcomes


def test_other_shapes_are_not_value_projections() -> None:
    bench = MlaBench(choose_device("sim").device, "f32", (64, 16, 4), 4, True)
    try:
        site = bench.site(3)
        a, b, c, d = site.output.shape
        _, row, matrix, whole = site.output.strides
        others: list[dict[str, Tensor]] = [
            {"weight": site.weight.alike((64, 16, 1, 1))},
            {"weight": site.weight.alike((64, 16, 2, 1))},  # shared by groups of heads
            {"weight": site.weight.alike((32, 16, 4, 1))},
            {"permuted": site.product},  # no permutation
            {"output": site.output.alike((a, b, c - 1, d))},  # a part of the output
            {"output": site.output.alike(strides=(4, row + 4, matrix, whole))},  # gaps between rows
            {"output": site.output.alike(strides=(2, row, matrix, whole))},  # half floats
        ]
        assert site.is_value_projection()
        assert [o for o in others if replace(site, **o).is_value_projection()] == []
    finally:
        bench.close()


@pytest.mark.parametrize(
    ("gains", "crossover"),
    [
        ((2.0, 2.0, 1.5, 0.5), 4),
        ((0.9, 0.8, 0.5), 0),
        ((3.0, 0.9, 3.0, 0.4), 4),  # a single loss among wins is noise
        ((1.1, 0.5, 1.2, 0.5), 1),  # so is a single win among losses
        ((1.0, 1.0), 0),  # without a gain the switch stays off
        ((), 0),
    ],
)
def test_the_crossover_is_where_the_broadcast_form_stops_winning(
    gains: Sequence[float], crossover: int
) -> None:
    """`gains`: how many times as fast the broadcast form is, for 1, 2, 4, ... tokens."""
    table = [MlaTiming(1 << i, gain, 1.0) for i, gain in enumerate(gains)]
    assert choose_crossover(table) == choose_crossover(table[::-1]) == crossover
