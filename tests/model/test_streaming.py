"""Streaming on `sim` gives the bits of the resident model with every option."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from budgets import limited
from numpy.typing import NDArray
from player_calls import computing

from lab.options import Streaming, engine_options
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import DeviceFailed, DeviceUnavailable, DoesNotFit
from offload.ggml.backend import Device
from offload.ggml.tensor import Tensor
from offload.routing.routing import RoutingGuess
from offload.stream.copying import ThreadCopier, Transfer
from offload.times.min_batch import MinBatch
from specoffload.config.resolution import demo_file

EMBEDDED = demo_file("target.gguf")
BATCHES = (1, 5, 40, 3, 12, 2, 70, 4)


def options(streaming: Streaming, device: str = "sim", min_batch: int = 1) -> EngineOptions:
    return engine_options(
        device=device,
        streaming=streaming,
        min_batch=MinBatch(min_batch, min_batch),
        n_ctx=512,
        n_ubatch=64,
        n_outputs=128,
        n_threads=1,
        n_threads_batch=1,
    )


def logits(engine: Engine, batches: Sequence[int] = BATCHES) -> NDArray[np.float32]:
    rows = [
        engine.sequences.extend(0, [(13 * i + 5 * n) % engine.n_vocab for i in range(n)])
        for n in batches
    ]
    engine.sequences.rewind(0, 4)
    return np.concatenate([*rows, engine.sequences.extend(0, [7, 8, 9])])


@pytest.fixture(scope="module")
def expected(tiny_moe: Path) -> NDArray[np.float32]:
    """The logits of the resident model."""
    with open_engine(
        tiny_moe, engine_options(options(Streaming()), stream_experts=False)
    ) as engine:
        return logits(engine)


@pytest.mark.parametrize(
    "streaming",
    [
        Streaming(),
        Streaming(depth=0, prefetch=False),
        Streaming(depth=1),
        Streaming(depth=1000),
        Streaming(prefetch=False),
        Streaming(n_gpu_layers=0),
        Streaming(n_gpu_layers=2, depth=2),
    ],
    ids=lambda s: "-".join(f"{name}={value}" for name, value in s.items()) or "default",
)
@pytest.mark.parametrize("slots", ["all", "half", "least"])
def test_streamed_is_resident_for_every_option_and_slot_count(
    tiny_moe: Path, expected: NDArray[np.float32], streaming: Streaming, slots: str
) -> None:
    if slots != "all":
        streaming = limited(tiny_moe, streaming, slots)
    with open_engine(tiny_moe, options(streaming)) as engine:
        assert np.array_equal(logits(engine), expected)
        counters = engine.counters()
        assert counters.cuts > 0
        assert counters.copies > 0
        if slots == "least":
            assert engine.device is not None
            assert sum(engine.device.declined.values()) > 0, "large batches must go to the CPU"


def test_always_wrong_guesses_cost_bandwidth_and_nothing_else(
    tiny_moe: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = RoutingGuess.predict

    def wrong(self: RoutingGuess, layer: int, n_tokens: int) -> list[int]:
        guess = set(right(self, layer, n_tokens))
        return [expert for expert in range(16) if expert not in guess] if guess else []

    half = limited(tiny_moe, Streaming(), "half")
    with open_engine(tiny_moe, options(half)) as engine:
        logits(engine)
        honest = engine.counters().streamed_bytes
    monkeypatch.setattr(RoutingGuess, "predict", wrong)
    with open_engine(tiny_moe, options(half)) as engine:
        assert np.array_equal(logits(engine), expected)
        assert engine.counters().streamed_bytes > honest


def test_guesses_by_token_save_copies_that_computation_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are decoded in batches of 4, so that the batch before says little of their experts."""

    def counted() -> tuple[float, int]:
        with open_engine(EMBEDDED, options(half)) as engine:
            tokens = engine.tokenize("def read(self, path):\n    with open(path) as f:\n" * 6)
            for i in range(0, len(tokens), 4):
                engine.sequences.extend(0, tokens[i : i + 4])
            counters = engine.counters()
        used, wasted = counters.prefetched_used, counters.prefetched_wasted
        return used / (used + wasted), counters.misses

    half = limited(EMBEDDED, Streaming(), "half")
    share, n_misses = counted()
    monkeypatch.setattr(RoutingGuess, "expect", lambda self, tokens: None)
    share_by_batch, n_misses_by_batch = counted()
    assert share > share_by_batch
    assert n_misses < n_misses_by_batch


def test_a_dense_model_of_which_few_layers_fit_streams_the_rest(tiny_dense: Path) -> None:
    with open_engine(tiny_dense, options(Streaming(), "cpu")) as engine:
        plain = logits(engine)
    for streaming in (Streaming(n_gpu_layers=1), Streaming(n_gpu_layers=1, depth=0)):
        with open_engine(tiny_dense, options(streaming)) as engine:
            assert engine.opened.plan is not None
            assert engine.opened.plan.streamed_bytes > 0
            assert np.array_equal(logits(engine), plain)
            assert engine.counters().copies > 0


def test_what_is_cached_is_not_copied_again(tiny_moe: Path) -> None:
    with open_engine(tiny_moe, options(Streaming())) as engine:
        engine.sequences.extend(0, [5] * 4)
        engine.sequences.rewind(0, 0)
        before = engine.counters().streamed_bytes
        engine.sequences.extend(0, [5] * 4)
        assert engine.counters().streamed_bytes == before


def test_the_link_is_held_to_its_bandwidth(tiny_moe: Path) -> None:
    with open_engine(tiny_moe, options(Streaming(), "sim:bw=20MB/s")) as engine:
        engine.sequences.extend(0, [1, 2])
        before, start = engine.counters().streamed_bytes, time.perf_counter()
        engine.sequences.extend(0, [3, 4])
        elapsed_s = time.perf_counter() - start
        streamed = engine.counters().streamed_bytes - before
    assert streamed > 0
    assert elapsed_s >= streamed / 20e6


@pytest.mark.parametrize(
    "device",
    ["sim:vram=5B", "sim:bw=0", "sim:bw=fast", "sim:size=3MiB", "sim:disk=0", "sim:latency=3"],
)
def test_a_bad_sim_is_named(tiny_moe: Path, device: str) -> None:
    expected = DoesNotFit if device == "sim:vram=5B" else DeviceUnavailable
    with pytest.raises(expected):
        open_engine(tiny_moe, options(Streaming(), device))


class Broken(Exception):
    pass


def test_a_failing_copy_ends_the_request_and_the_next_one_is_served(
    tiny_moe: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: ThreadCopier, transfer: Transfer) -> None:
        raise Broken("the link is down")

    with open_engine(tiny_moe, options(Streaming())) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(ThreadCopier, "_copy", fail)
            with pytest.raises(DeviceFailed, match="the link is down"):
                engine.sequences.extend(0, [1, 2, 3])
        assert engine.sequences.length(0) == 0
        assert np.array_equal(logits(engine), expected)


def test_a_failing_computation_ends_the_request_and_the_next_one_is_served(
    tiny_moe: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_engine(tiny_moe, options(Streaming())) as engine:
        with monkeypatch.context() as patch:
            computing(patch, lambda _: lambda *_: -1)
            with pytest.raises(DeviceFailed, match="failed with status"):
                engine.sequences.extend(0, [1, 2, 3])
        assert np.array_equal(logits(engine), expected)


def test_the_threshold_may_change_while_the_model_is_open(
    tiny_moe: Path, expected: NDArray[np.float32]
) -> None:
    with open_engine(tiny_moe, options(Streaming(), min_batch=1000)) as engine:
        engine.sequences.extend(0, [1, 2])
        engine.sequences.rewind(0, 0)
        assert engine.counters().cuts == 0
        engine.set_min_batch(MinBatch(1, 1))
        engine.build_anew()
        assert np.array_equal(logits(engine), expected)
        streamed = engine.counters().cuts
        assert streamed > 0
        engine.sequences.rewind(0, 0)
        engine.set_min_batch(MinBatch(1000, 1000))
        engine.build_anew()
        at = engine.counters().cuts
        engine.sequences.extend(0, [1, 2])
        assert engine.counters().cuts == at


def test_a_type_the_device_cannot_multiply_goes_to_the_cpu_and_is_said(
    tiny_moe: Path, expected: NDArray[np.float32], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Device, node: Tensor) -> bool:
        return not node.is_op("MUL_MAT_ID")

    monkeypatch.setattr(Device, "supports", refuse)
    with open_engine(tiny_moe, options(Streaming())) as engine:
        assert np.array_equal(logits(engine), expected)
        assert engine.counters().cuts == 0
        assert engine.device is not None
        assert any("cannot multiply q8_0" in why for why in engine.device.declined)
