"""Limits of CUDA runtime calls per one-token decode, some relative to plain llama.cpp's calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import standin_calls
from on_gpu import options

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.device import DeviceChoice
from offload.engine import EngineOptions, open_engine
from offload.ggml.library.callback import calls_into_python
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.schedule.splitter import Splitter, all_on_device, stay
from offload.times.min_batch import NEVER, MinBatch

N_LAYERS = 24
N_DECODES = 20
SIZES = (1, 5, 2, 9, 3)  # tokens of decodes that follow each other, as drafts change them
COLUMNS = (
    "launches",
    "graph_launches",
    "graph_kernels",
    "captures",
    "instantiations",
    "stream_syncs",
    "pageable",
)

Calls = dict[str, float]
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def deep(models: Path) -> Path:
    return write_preset("qwen3moe", models / "gpu_deep.gguf", n_layer=N_LAYERS, n_expert=64, seed=1)


def calls_per_decode(
    path: Path, opened: EngineOptions, *, n_warm: int, repeats: bool, filled: bool = False
) -> tuple[Calls, float]:
    """CUDA calls by name, and copies of weights, both per decode after `n_warm` decodes.

    With `repeats` the tokens are always the same, so that all of their experts have slots. With
    `filled` all experts are copied into slots first.
    """
    with open_engine(path, opened) as engine:
        if filled:
            assert engine.device is not None
            n_copied = sum(1 for _ in engine.device.fill(dict.fromkeys(range(N_LAYERS), [1] * 64)))
            assert n_copied == N_LAYERS * 64
        for i in range(n_warm + N_DECODES):
            if i == n_warm:
                standin_calls.reset()
                before = engine.counters()
            if repeats:
                engine.sequences.rewind(0, 0)
            engine.sequences.extend(0, [7 if repeats else (13 * i) % engine.n_vocab])
        found, after = standin_calls.counters(), engine.counters()
    calls = {name: found[name] / N_DECODES for name in COLUMNS}
    return calls, (after.copies - before.copies) / N_DECODES


@pytest.fixture(scope="module")
def plain(standin: DeviceChoice, deep: Path) -> Calls:
    calls, _ = calls_per_decode(deep, _opened(standin, wrapped=False), n_warm=4, repeats=False)
    return calls


def _opened(gpu: DeviceChoice, **changes: object) -> EngineOptions:
    return options(gpu, **{"n_ctx": 256, "mla": True, "flash_attn": "auto", **changes})


def _streaming(path: Path, share: float, splitter: Splitter | None) -> Streaming:
    """Options with slots for `share` of the experts. With a splitter, layers are split."""
    plan = make_plan(read_facts(path), PlanRequest(n_cpu_moe=99))
    chosen = Streaming(n_cpu_moe=99, hybrid=splitter is not None, splitter=splitter)
    return chosen | Streaming(vram_bytes=plan.resident_bytes + int(plan.slot_bytes * share))


def _streamed(
    gpu: DeviceChoice, path: Path, share: float, splitter: Splitter | None = None
) -> EngineOptions:
    least = 1 if splitter is None else NEVER
    streaming = _streaming(path, share, splitter)
    return _opened(gpu, streaming=streaming, min_batch=MinBatch(least, least))


def test_plain_llama_cpp_launches_one_graph(plain: Calls, record_property: Record) -> None:
    record_property("counters", ["resident, plain llama.cpp", plain])
    assert plain["graph_launches"] == 1
    assert plain["graph_kernels"] > N_LAYERS
    assert plain["launches"] == plain["captures"] == plain["pageable"] == 0


def test_the_wrapped_device_calls_what_plain_llama_cpp_calls(
    standin: DeviceChoice, deep: Path, plain: Calls, record_property: Record
) -> None:
    opened = _opened(standin, stream_experts=False)
    calls, _ = calls_per_decode(deep, opened, n_warm=4, repeats=False)
    record_property("counters", ["resident, wrapped", calls])
    assert calls == plain


# The player needs some decodes to see that no expert is missing.
@pytest.mark.parametrize(
    ("name", "share", "splitter"),
    [
        ("streamed, hits only", 1.0, None),
        ("split, hits only", 1.0, all_on_device),
    ],
)
def test_hits_wait_for_no_layer(
    standin: DeviceChoice,
    deep: Path,
    plain: Calls,
    name: str,
    share: float,
    splitter: Splitter | None,
    record_property: Record,
) -> None:
    opened = _streamed(standin, deep, share, splitter)
    calls, copies = calls_per_decode(deep, opened, n_warm=120, repeats=True)
    record_property("counters", [name, calls])
    assert copies == 0
    assert calls["launches"] == calls["captures"] == calls["pageable"] == 0
    assert calls["graph_launches"] == 1
    assert calls["stream_syncs"] == plain["stream_syncs"] + 1
    # Some experts of other tokens are missing, so the device looks up the slots of each layer.
    assert plain["graph_kernels"] < calls["graph_kernels"] <= 1.05 * plain["graph_kernels"]


@pytest.mark.parametrize("splitter", [None, all_on_device], ids=["streamed", "split"])
def test_all_experts_in_slots_need_the_calls_of_a_resident_model(
    standin: DeviceChoice,
    deep: Path,
    plain: Calls,
    splitter: Splitter | None,
    record_property: Record,
) -> None:
    opened = _streamed(standin, deep, 1.0, splitter)
    calls, copies = calls_per_decode(deep, opened, n_warm=8, repeats=False, filled=True)
    name = "streamed" if splitter is None else "split"
    record_property("counters", [f"{name}, all experts in slots", calls])
    assert copies == 0
    assert calls == plain


@pytest.mark.parametrize("repeats", [True, False], ids=["hits", "misses"])
def test_split_layers_wait_for_the_logits_alone(
    standin: DeviceChoice, deep: Path, plain: Calls, repeats: bool, record_property: Record
) -> None:
    """Each layer has two parts: its products, and what comes from its rows to the next router."""
    opened = _streamed(standin, deep, 0.5, stay)
    calls, copies = calls_per_decode(deep, opened, n_warm=60, repeats=repeats)
    name = "hits only, slots for half" if repeats else "misses on the CPU"
    record_property("counters", [f"split, {name}", calls])
    assert (copies == 0) == repeats
    assert calls["launches"] == calls["captures"] == calls["pageable"] == 0
    assert calls["graph_launches"] == 2 * N_LAYERS + 1
    assert calls["stream_syncs"] == plain["stream_syncs"]
    # Each layer writes ids and rows to pinned memory, looks up slots, and fetches rows.
    assert calls["graph_kernels"] <= plain["graph_kernels"] + 3 * N_LAYERS


# If a layer waits and the CPU computes misses, it has three parts that warm up: the whole, what
# comes before the CPU's rows, and what comes after them.
@pytest.mark.parametrize(
    ("name", "share", "splitter", "n_warm"),
    [
        ("streamed, cache filling", 1.0, None, 12),
        ("streamed, slots for half", 0.5, None, 12),
        ("split, misses copied", 0.5, all_on_device, 120),
        ("split, misses on the CPU, each layer waiting", 0.5, stay, 60),
    ],
)
def test_misses_are_replayed_from_captured_graphs(
    standin: DeviceChoice,
    deep: Path,
    plain: Calls,
    name: str,
    share: float,
    splitter: Splitter | None,
    n_warm: int,
    record_property: Record,
) -> None:
    opened = _streamed(standin, deep, share, splitter)
    opened = engine_options(opened, doorbell=False)
    calls, copies = calls_per_decode(deep, opened, n_warm=n_warm, repeats=False)
    record_property("counters", [name, calls])
    # Measured times decide which layers are computed ahead and repaired. Parts that were never
    # repaired before are launched kernel by kernel, and captured the next time.
    repairs = splitter is all_on_device
    assert copies > 0
    assert calls["captures"] <= (0.5 if repairs else 0.1)
    assert calls["pageable"] == 0
    assert calls["stream_syncs"] <= N_LAYERS + plain["stream_syncs"]
    # In each layer one kernel places the rows that the CPU computed. It is not worth a graph.
    assert calls["launches"] <= (N_LAYERS if splitter is stay or repairs else 0)
    if not repairs:
        assert calls["launches"] + calls["graph_kernels"] <= 1.05 * plain["graph_kernels"]


@pytest.mark.parametrize(
    ("name", "share", "splitter", "changes", "most_calls"),
    [
        ("resident, changing sizes", 1.0, None, {"stream_experts": False}, 2),
        ("streamed, changing sizes", 1.0, None, {}, 4),
        ("streamed, slots for half, changing sizes", 0.5, None, {}, 4),
        ("streamed, experts in place, changing sizes", 0.5, None, {"min_batch": NEVER}, 4),
        ("split, changing sizes", 0.5, stay, {}, 4),
    ],
)
def test_changing_sizes_hardly_call_python_and_prepare_nothing(
    standin: DeviceChoice,
    deep: Path,
    name: str,
    share: float,
    splitter: Splitter | None,
    changes: dict[str, object],
    most_calls: int,
    record_property: Record,
) -> None:
    opened = _streamed(standin, deep, share, splitter)
    if changes.get("stream_experts") is False:
        opened = _opened(standin, stream_experts=False)
    if changes.get("min_batch") == NEVER:
        opened = engine_options(opened, min_batch=MinBatch(NEVER, NEVER))
    with open_engine(deep, opened) as engine:
        device = engine.device
        assert device is not None
        for i in range(40 * len(SIZES)):
            if i == 36 * len(SIZES):
                standin_calls.reset()
                before = calls_into_python(), device.n_prepared
            engine.sequences.rewind(0, 0)
            engine.sequences.extend(0, [7] * SIZES[i % len(SIZES)])
        found = standin_calls.counters()
        n = 4 * len(SIZES)
        calls = {column: found[column] / n for column in COLUMNS}
        calls["python_calls"] = (calls_into_python() - before[0]) / n
        calls["prepared"] = (device.n_prepared - before[1]) / n
    record_property("counters", [name, calls])
    assert calls["prepared"] == 0
    assert calls["python_calls"] <= most_calls


def test_each_batch_size_holds_an_instance_per_part_until_the_engine_closes(
    standin: DeviceChoice, deep: Path
) -> None:
    def held() -> int:
        calls = standin_calls.counters()
        return calls["instantiations"] - calls["instances_freed"]

    standin_calls.reset()
    with open_engine(deep, _streamed(standin, deep, 1.0)) as engine:
        for n in (1, 2, 3):
            for _ in range(4):
                engine.sequences.rewind(0, 0)
                engine.sequences.extend(0, [7] * n)
        assert N_LAYERS < held() <= 3 * (N_LAYERS + 1)
    assert held() == 0
