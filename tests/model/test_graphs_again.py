"""Graphs that libllama builds again are recognised if, and only if, their contents are equal."""

from __future__ import annotations

import ctypes as C
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossovers import crossover_of
from numpy.typing import NDArray
from player_calls import Compute, computing

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import Engine, open_engine
from offload.ggml.graph import GRAPH, Graph
from offload.ggml.library import abi
from offload.ggml.library.callback import calls_into_python
from offload.ggml.pydevice import WrappedStream
from offload.ggml.tensor import TENSOR
from offload.schedule.splitter import all_on_device, stay
from offload.stream.device import StreamingDevice
from offload.times.min_batch import NEVER, MinBatch

SIZES = (1, 3, 5)
WAYS = {
    "streamed": Streaming(),
    "one after the other": Streaming(depth=0, prefetch=False),
    "stay": Streaming(hybrid=True, splitter=stay),
    "all on the device": Streaming(hybrid=True, splitter=all_on_device),
}


def engine_of(
    path: Path, way: str = "streamed", n_tokens: int | None = 3, **changes: Any
) -> Engine:
    options: dict[str, Any] = {"device": "sim", "n_ctx": 1024, "n_threads": 1}
    options |= {"min_batch": MinBatch(1, 1), "streaming": WAYS[way]}
    with crossover_of(n_tokens):
        return open_engine(path, engine_options(**options | changes))


def device_of(engine: Engine) -> StreamingDevice:
    assert isinstance(engine.device, StreamingDevice)
    return engine.device


def evaluate(engine: Engine, sizes: Sequence[int] = SIZES) -> list[NDArray[np.float32]]:
    """Logits of batches of these sizes, each after the same three tokens."""
    rows = []
    for n in sizes:
        engine.sequences.rewind(0, 3)
        rows.append(engine.sequences.extend(0, [(7 * i + n) % engine.n_vocab for i in range(n)]))
    return rows


def begin(engine: Engine) -> None:
    """Decode the three tokens that `evaluate` expects."""
    engine.sequences.extend(0, [3, 1, 4])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("preset", ["deepseek-v3", "qwen3moe"])
def test_batches_that_alternate_are_prepared_once_and_give_the_same_bits(
    models: Path, preset: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_preset(preset, models / f"again-{preset}.gguf", size="tiny", seed=5)

    def rounds() -> Iterator[tuple[Any, ...]]:
        with engine_of(path, way) as engine:
            device = device_of(engine)
            begin(engine)
            for _ in range(4):
                rows = evaluate(engine)
                replaced = device.mla.n_replaced
                yield rows, replaced, device.n_prepared, device.n_recognised

    found = [*rounds()]
    with monkeypatch.context() as patched:
        patched.setattr(StreamingDevice, "_circumstances", lambda *_: object())
        anew = [*rounds()]
    # ggml lays results out for the largest batch so far, so they move in the first rounds.
    n_prepared = [one[2] for one in found]
    assert n_prepared[1] == n_prepared[-1]
    n_recognised = [one[3] for one in found]
    assert np.diff(n_recognised[1:]).tolist() == [len(SIZES)] * 2
    assert anew[-1][2] - anew[1][2] == 2 * len(SIZES)
    assert anew[-1][3] == 0
    for (rows, replaced, *_), (others, replaced_too, *_) in zip(found, anew, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(rows, others, strict=True))
        assert replaced == replaced_too


def test_the_parts_of_a_graph_that_is_recognised_have_the_uids_they_had(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal uids let a GPU backend skip comparing a graph that it has recorded."""
    uids: list[int] = []

    def noted(inner: Compute) -> Compute:
        def compute(stream: int, graph: int) -> int:
            uids.append(Graph(graph).uid)
            return inner(stream, graph)

        return compute

    computing(monkeypatch, noted)
    with engine_of(tiny_moe) as engine:
        begin(engine)
        rounds = []
        for _ in range(4):
            uids.clear()
            evaluate(engine)
            rounds.append(uids.copy())
    assert len(rounds[-1]) > len(SIZES)
    assert all(rounds[-1])
    assert rounds[-1] == rounds[-2]


@pytest.mark.parametrize(
    ("way", "least", "most_calls"),
    [(way, 1, 2.0) for way in WAYS] + [("streamed", NEVER, 1.0), ("streamed", 3, 2.0)],
)
def test_batches_that_alternate_hardly_call_python(
    tiny_moe: Path, way: str, least: int, most_calls: float
) -> None:
    """ggml asks a device some thousand times about each graph that it builds."""
    with engine_of(tiny_moe, way, n_tokens=0, min_batch=MinBatch(least, least)) as engine:
        device = device_of(engine)
        begin(engine)
        for _ in range(4):  # results move when a larger batch comes
            evaluate(engine)
        n_calls, n_prepared, n_asked = calls_into_python(), device.n_prepared, device.n_asked
        for _ in range(4):
            evaluate(engine)
        assert device.n_prepared == n_prepared
        assert device.n_asked == n_asked
        assert (calls_into_python() - n_calls) / (4 * len(SIZES)) <= most_calls


@pytest.mark.parametrize("change", ["min batch", "unsplit"])
def test_answers_that_a_switch_changes_are_asked_for_again(tiny_moe: Path, change: str) -> None:
    with engine_of(tiny_moe, "stay", n_tokens=0, min_batch=MinBatch(NEVER, NEVER)) as engine:
        device = device_of(engine)
        begin(engine)
        for _ in range(2):
            rows = evaluate(engine)
        copies, split = engine.counters().copies, engine.counters().split_layers
        assert split
        engine.opened.weights.ways.change(unsplit=frozenset(SIZES))
        if change == "min batch":
            engine.set_min_batch(MinBatch(1, 1))
        again = evaluate(engine)
        assert engine.counters().split_layers == split
        assert (engine.counters().copies > copies) == (change == "min batch")
        engine.opened.weights.ways.change(unsplit=frozenset())
        evaluate(engine)
        assert engine.counters().split_layers > split
        assert device.n_asked > 0
        for mine, its in zip(again, rows, strict=True):
            np.testing.assert_allclose(mine, its, atol=0.05 * float(its.std()))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Graph]:
    """The graphs that the device computed, in order."""
    graphs: list[Graph] = []
    compute = StreamingDevice.compute

    def noted(self: StreamingDevice, stream: WrappedStream, graph: Graph) -> int:
        graphs.append(graph)
        return compute(self, stream, graph)

    monkeypatch.setattr(StreamingDevice, "compute", noted)
    return graphs


def bytes_of(field: str) -> tuple[int, int]:
    at = getattr(TENSOR, field)
    return at.offset, at.size


FIELDS = ("type", "buffer", "ne", "nb", "op", "op_params", "flags", "data", "view_offs", "name",
          "extra")  # fmt: skip


def test_a_graph_with_one_other_byte_is_another(tiny_moe: Path, seen: list[Graph]) -> None:
    with engine_of(tiny_moe) as engine:
        begin(engine)
        graph, host = seen[-1], device_of(engine).host
        assert host is not None
        node = graph.nodes()[len(graph.nodes()) // 2]
        weight = next(iter(graph.products(host))).weight
        roots = {n.address: abi.ggml_tensor.from_address(n.address).view_src for n in graph.nodes()}
        outside = next(root for root in roots.values() if root and root not in roots)
        before = graph.state()
        for address in (node.address, weight.address, outside):
            for field in FIELDS:
                first, size = bytes_of(field)
                for at in (first, first + size - 1):
                    byte = C.c_ubyte.from_address(address + at)
                    byte.value ^= 1
                    is_equal = before.matches(graph)
                    byte.value ^= 1
                    assert not is_equal, field
        assert before.matches(graph)


def test_a_graph_with_other_sources_uses_or_nodes_is_another(
    tiny_moe: Path, seen: list[Graph]
) -> None:
    with engine_of(tiny_moe) as engine:
        begin(engine)
        graph = seen[-1]
        before = graph.state()
        struct: Any = GRAPH.from_address(graph.address)
        table, node = struct.visited_hash_set, graph.nodes()[9]
        counts = np.frombuffer((C.c_int32 * table.size).from_address(struct.use_counts), np.int32)
        counts += 1
        assert not before.matches(graph)
        counts -= 1
        struct.n_nodes -= 1
        assert not before.matches(graph)
        struct.n_nodes += 1
        sources: Any = abi.ggml_tensor.from_address(node.address).src
        source = sources[0]
        sources[0] = graph.nodes()[0].address
        assert not before.matches(graph)
        sources[0] = source
        struct.uid += 1
        assert before.matches(graph)
        struct.uid -= 1


@pytest.mark.parametrize(
    "change",
    [
        lambda device: setattr(device.mla, "crossover", 0),
        lambda device: setattr(device.mla, "crossover", 5),
        lambda device: device.ways.change(unsplit=frozenset({3})),
        lambda device: device.ways.decline("for a test"),
        lambda device: device.ways.change(may_split=False),
    ],
)
def test_what_a_switch_decided_before_is_not_taken_for_what_it_decides_now(
    tiny_moe: Path, change: Callable[[StreamingDevice], None]
) -> None:
    with engine_of(tiny_moe, "stay") as engine:
        device = device_of(engine)
        begin(engine)
        for _ in range(3):
            evaluate(engine)
        n_prepared, n_recognised = device.n_prepared, device.n_recognised
        change(device)
        evaluate(engine)
        assert device.n_prepared == n_prepared + len(SIZES)
        assert device.n_recognised == n_recognised
        evaluate(engine)
        assert device.n_prepared == n_prepared + len(SIZES)


@pytest.mark.parametrize("preset", ["qwen3moe", "deepseek-v3"])
def test_parts_between_layers_that_the_cpu_computes_are_prepared_once(
    models: Path, preset: str
) -> None:
    """Each of DeepSeek's parts has an MLA site. The other model's parts run as they were built."""
    path = write_preset(preset, models / f"deep-{preset}.gguf", size="tiny", n_layer=60, seed=5)
    crossover = 8 if preset == "deepseek-v3" else 0
    with engine_of(path, n_tokens=crossover, min_batch=MinBatch(64, 64)) as engine:
        device = device_of(engine)
        begin(engine)
        for _ in range(2):  # results move when a larger batch comes
            evaluate(engine, (1, 4))
        expected = evaluate(engine, (1, 4))
        n_prepared, n_graphs = device.n_prepared, device.n_graphs
        got = evaluate(engine, (1, 4))
        assert device.n_graphs - n_graphs >= 2 * 57, "the first layers have no experts"
        assert device.n_prepared == n_prepared
        assert (device.mla.n_replaced > 0) == (crossover > 0)
    for mine, its in zip(got, expected, strict=True):
        np.testing.assert_array_equal(mine, its)
