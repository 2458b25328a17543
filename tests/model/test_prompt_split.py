"""Prompts whose layers the CPU and `sim` share give the resident model's bits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from splits import SPLITTERS, all_host, logits_of, sim_options, split_streaming

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import EngineOptions, open_engine
from offload.errors import DeviceFailed
from offload.schedule import pair_rows, passes
from offload.schedule.slots import StreamCounters
from offload.schedule.splitter import Splitter, stay
from offload.stream.cpu_side import HostGraph, LayerWeights
from offload.stream.pass_runner import PassRunner
from offload.stream.passes import PassStep
from offload.stream.prompt_side import CpuPart, HostThread, PromptSide

Rows = NDArray[np.float32]
PRESETS = {
    "deepseek3": "deepseek-v3",
    "qwen3moe": "qwen3-30b-a3b",
    "gpt-oss": "gpt-oss-20b",  # biases
    "llama4": "llama-4-scout",  # weights before the FFN, which down overwrites
    "glm4moe": "glm-4.5-air",
    "minimax-m2": "minimax-m2",
    "qwen35moe": "qwen3.5-35b-a3b",  # recurrent layers
}
BATCHES = (100, 3, 70, 1, 200)  # the last one has two ubatches


options = partial(sim_options, n_ubatch=128, n_outputs=256)
logits = partial(logits_of, batches=BATCHES)


def shared(splitter: Splitter, path: Path, slots: str) -> EngineOptions:
    return options(split_streaming(splitter, path, slots))


@pytest.fixture(scope="module", params=PRESETS)
def model(request: pytest.FixtureRequest, models: Path) -> Iterator[tuple[Path, Rows]]:
    """A random model of an architecture, and the logits of all of it resident."""
    path = models / f"prompts-{request.param}.gguf"
    write_preset(PRESETS[request.param], path, size="tiny", seed=1)
    with open_engine(path, engine_options(options(Streaming(), 1), stream_experts=False)) as engine:
        yield path, logits(engine)


@pytest.mark.parametrize(
    ("split", "slots"),
    [
        ("all-host", "least"),
        ("all-host", "half"),
        ("all-device", "least"),
        ("random", "half"),
        ("random", "least"),
        ("by-costs", "half"),
    ],
)
def test_a_shared_prompt_gives_the_resident_models_bits(
    model: tuple[Path, Rows], split: str, slots: str
) -> None:
    path, expected = model
    with open_engine(path, shared(SPLITTERS[split](), path, slots)) as engine:
        assert np.array_equal(logits(engine), expected)
        counters = engine.counters()
        assert (counters.passes > 0) == (split != "all-host"), "then the device computes no pair"
        if split == "all-host":
            assert counters.n_pairs_host > counters.n_pairs_streamed == 0
        if split == "all-device":  # small batches may not fit the slots
            assert counters.n_pairs_host < counters.n_pairs_streamed
        if split == "random":
            assert counters.n_pairs_host > 0


@pytest.mark.parametrize("most", [64, 4096])
def test_the_cpus_part_of_a_layer_has_a_limit_and_grows_with_batches(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    with open_engine(
        tiny_moe, engine_options(options(Streaming(), 1), stream_experts=False)
    ) as engine:
        expected = logits(engine)
    sizes: list[int] = []
    choose = HostGraph.choose

    def counted(
        self: HostGraph,
        weights: LayerWeights,
        experts: NDArray[np.int32],
        rows: NDArray[np.int32],
        first: int,
    ) -> None:
        if first == 0:
            sizes.append(0)
        sizes[-1] += len(experts)  # experts of all blocks of the layer
        choose(self, weights, experts, rows, first)

    monkeypatch.setattr(pair_rows, "_LEAST_HOST_PAIRS", 1)
    monkeypatch.setattr(passes, "MOST_HOST_PAIRS", most)
    monkeypatch.setattr(HostGraph, "choose", counted)
    with open_engine(tiny_moe, shared(all_host, tiny_moe, "least")) as engine:
        assert np.array_equal(logits(engine), expected)
    assert 0 < max(sizes) <= most


def test_a_layers_two_sides_begin_before_either_has_ended(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's computation and the device's first launch of each layer wait for each other."""
    both = threading.Barrier(2, timeout=10)
    started = list[bool]()  # True until the layer's first launch has come
    start, launch, compute = PassRunner._start_cpu, PassRunner._launch, HostThread._compute

    def started_cpu(self: PassRunner, *of_layer: Any) -> int:
        started.append(True)
        return start(self, *of_layer)

    def launched(self: PassRunner, *of_launch: Any) -> int:
        if started and started[-1]:
            started[-1] = False
            both.wait()
        return launch(self, *of_launch)

    def computed(self: HostThread, part: CpuPart, block: slice, wait: Callable[[], None]) -> int:
        if started and block.start == 0:
            both.wait()
        return compute(self, part, block, wait)

    with open_engine(tiny_moe, shared(SPLITTERS["random"](), tiny_moe, "half")) as engine:
        monkeypatch.setattr(PassRunner, "_start_cpu", started_cpu)
        monkeypatch.setattr(PassRunner, "_launch", launched)
        monkeypatch.setattr(HostThread, "_compute", computed)
        engine.sequences.extend(0, [(3 * i) % engine.n_vocab for i in range(100)])
    assert len(started) > 1
    assert not any(started), "each layer had both sides"


def test_results_of_a_block_are_placed_while_the_next_one_is_computed(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block of each layer is computed only when the first one has been placed."""
    placed = threading.Event()
    n_blocks = list[int]()
    start, place, compute = PassRunner._start_cpu, PassRunner._place_copied, HostThread._compute

    def started(self: PassRunner, step: PassStep, part: CpuPart) -> int:
        placed.clear()
        n_blocks.append(len(part.blocks))
        return start(self, step, part)

    def placed_one(self: PassRunner, *of_block: Any) -> tuple[int, int]:
        status = place(self, *of_block)
        placed.set()
        return status

    def computed(self: HostThread, part: CpuPart, block: slice, wait: Callable[[], None]) -> int:
        if block.start and block is part.blocks[-1]:
            assert placed.wait(10)
        return compute(self, part, block, wait)

    with open_engine(tiny_moe, shared(all_host, tiny_moe, "least")) as engine:
        text = [(3 * i) % engine.n_vocab for i in range(100)]
        expected = engine.sequences.extend(0, text)
        engine.sequences.rewind(0, 0)
        monkeypatch.setattr(PassRunner, "_start_cpu", started)
        monkeypatch.setattr(PassRunner, "_place_copied", placed_one)
        monkeypatch.setattr(HostThread, "_compute", computed)
        assert np.array_equal(engine.sequences.extend(0, text), expected)
    assert max(n_blocks) > 1


def test_prompts_are_not_shared_while_misses_only_stay(tiny_moe: Path) -> None:
    """That splitter cannot divide: it would leave nearly all of a prompt to the CPU."""
    with open_engine(tiny_moe, shared(stay, tiny_moe, "half")) as engine:
        before = engine.counters().n_pairs_host
        engine.sequences.extend(0, [(3 * i) % engine.n_vocab for i in range(100)])
        assert engine.counters().passes == 0
        assert engine.counters().n_pairs_host == before


def test_a_fault_of_the_cpu_ends_the_prompt_and_the_next_one_has_the_right_bits(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(tiny_moe, shared(SPLITTERS["random"](), tiny_moe, "half")) as engine:
        text = [(3 * i) % engine.n_vocab for i in range(100)]
        expected = engine.sequences.extend(0, text)
        engine.sequences.rewind(0, 0)

        def fail(self: HostGraph, *_: object) -> int:
            raise DeviceFailed("the CPU is gone")

        with monkeypatch.context() as patch:
            patch.setattr(HostGraph, "compute", fail)
            with pytest.raises(DeviceFailed, match="the CPU is gone"):
                engine.sequences.extend(0, text)
        assert engine.sequences.length(0) == 0
        assert np.array_equal(engine.sequences.extend(0, text), expected)


def test_an_interrupted_wait_for_a_block_does_not_forget_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The block's thread goes on, so memory that it uses may only be freed when it has ended."""
    team: Any = SimpleNamespace(stream=None)
    host = SimpleNamespace(choose=lambda *_: None, compute=lambda *_: 0)
    none = np.zeros(1, np.int32)
    part: Any = SimpleNamespace(
        blocks=[slice(0, 1)], host=host, weights=SimpleNamespace(layer=0), experts=none, rows=none
    )
    counters, may_compute = StreamCounters(), threading.Event()
    thread = HostThread(team, counters)
    thread.start(part, [lambda: may_compute.wait(60.0) and None])

    def interrupted(_: Future[int]) -> int:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            thread.join()
    threading.Timer(0.1, may_compute.set).start()
    thread.abandon()
    assert counters.host_s > 0.0, "the block has been computed"
    thread.close()


def test_what_is_remembered_of_prompts_does_not_grow_with_their_sizes(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = set[PassRunner]()
    cpu_part = PassRunner._cpu_part

    def noted(self: PassRunner, *others: Any) -> CpuPart | None:
        runners.add(self)
        return cpu_part(self, *others)

    monkeypatch.setattr(PassRunner, "_cpu_part", noted)
    streaming = split_streaming(SPLITTERS["random"](), tiny_moe, "half")
    with open_engine(tiny_moe, options(streaming, n_ubatch=256)) as engine:

        def sizes(*n_tokens: int) -> set[int]:
            for n in n_tokens:
                engine.sequences.rewind(0, 0)
                engine.sequences.extend(0, [(3 * i) % engine.n_vocab for i in range(n)])
            (runner,) = runners
            return {size for size, _ in runner._n_copied}

        assert sizes(70, 100, 128, 200, 250) == {128, 256}
        monkeypatch.setattr(PromptSide, "splitter", SPLITTERS["random"]())
        assert sizes(100) == {128}, "another splitter forgets what the first one gave"
