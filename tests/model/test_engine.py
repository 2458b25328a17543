"""The engine on tiny random models: wrapped and streamed logits are right, thresholds, errors."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import pytest
from budgets import budget
from numpy.typing import NDArray

from lab.options import Streaming, engine_options
from offload.engine import EngineOptions, open_engine
from offload.errors import BadRequest, DeviceUnavailable, DoesNotFit
from offload.stream.device import StreamingDevice
from offload.times.min_batch import MinBatch

ALWAYS = MinBatch(experts=1, dense=1)


def options(device: str, **changes: object) -> EngineOptions:
    return engine_options(device=device, n_ctx=256, **changes)  # type: ignore[arg-type]


def logits_of(path: Path, opened: EngineOptions, batches: Sequence[int]) -> NDArray[np.float32]:
    """Logits of batches of the given sizes, one after the other in one sequence."""
    with open_engine(path, opened) as engine:
        rows = [
            engine.sequences.extend(0, [(11 * i + 3 * n) % engine.n_vocab for i in range(n)])
            for n in batches
        ]
    return np.concatenate(rows)


@pytest.mark.parametrize("model", ["tiny_moe", "tiny_dense"])
def test_the_wrapped_device_gives_the_bits_of_plain_libllama(
    model: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(model)
    plain = logits_of(path, options("cpu"), (1, 2, 7, 33))
    wrapped = logits_of(path, options("sim", stream_experts=False), (1, 2, 7, 33))
    assert np.isfinite(plain).all()
    assert plain.std() > 0
    assert np.array_equal(plain, wrapped)


def test_below_the_threshold_nothing_reaches_the_copy_path_and_at_it_everything_does(
    tiny_moe: Path,
) -> None:
    with open_engine(tiny_moe, options("sim", min_batch=MinBatch(experts=3, dense=3))) as engine:
        n_cuts = len(engine.facts.expert_weights)
        assert n_cuts > 0
        for n in (1, 2):
            engine.sequences.extend(0, [5] * n)
            assert engine.counters().cuts == 0, f"{n} tokens are below the threshold of 3"
        for i, n in enumerate((3, 4, 9), start=1):
            engine.sequences.extend(0, [5] * n)
            assert engine.counters().cuts == i * n_cuts
        assert engine.counters().streamed_bytes > 0


def test_rewinding_gives_the_logits_of_a_fresh_evaluation(tiny_moe: Path) -> None:
    with open_engine(tiny_moe, options("sim", min_batch=ALWAYS)) as engine:
        engine.sequences.extend(0, [1, 2, 3, 4])
        engine.sequences.extend(0, [9, 9, 9])
        engine.sequences.rewind(0, 4)
        again = engine.sequences.extend(0, [5])
    with open_engine(tiny_moe, options("sim", min_batch=ALWAYS)) as engine:
        engine.sequences.extend(0, [1, 2, 3, 4])
        fresh = engine.sequences.extend(0, [5])
    assert np.array_equal(again, fresh)


def test_sequences_do_not_see_each_other(tiny_moe: Path) -> None:
    with open_engine(tiny_moe, options("sim", n_sequences=2)) as engine:
        engine.sequences.extend(0, [1, 2, 3])
        engine.sequences.extend(1, [7, 7])
        one, two = engine.sequences.extend_batch([(0, [4, 5], 2), (1, [8], 1)])
        assert (engine.sequences.length(0), engine.sequences.length(1)) == (5, 3)
    with open_engine(tiny_moe, options("sim")) as engine:
        alone = engine.sequences.extend(0, [1, 2, 3, 4, 5], n_logits=2)
    assert one.shape == (2, alone.shape[1])
    assert two.shape == (1, alone.shape[1])
    np.testing.assert_allclose(one, alone, atol=1e-3)


def test_only_the_wanted_rows_come_back_and_long_inputs_are_cut_into_batches(
    tiny_dense: Path,
) -> None:
    tokens = [(7 * i) % 250 for i in range(150)]
    with open_engine(tiny_dense, options("cpu", n_batch=64, n_ubatch=64, n_outputs=16)) as engine:
        last = engine.sequences.extend(0, tokens, n_logits=1)
        assert last.shape[0] == 1
        engine.sequences.rewind(0, 0)
        rows = engine.sequences.extend(0, tokens, n_logits=40)
        assert rows.shape[0] == 40
        # Other batch sizes use other kernels. So bits may differ, but the likeliest token must not.
        assert np.argmax(rows[-1]) == np.argmax(last)
        assert np.corrcoef(rows[-1], last[0])[0, 1] > 0.999
        assert engine.sequences.extend(0, [1], n_logits=0).shape[0] == 0


@pytest.mark.parametrize(
    ("tokens", "error", "words"),
    [
        ([], BadRequest, "empty"),
        ([10**9], BadRequest, "not in the vocabulary"),
        ([-1], BadRequest, "not in the vocabulary"),
        ([1] * 257, DoesNotFit, "context of 256"),
    ],
)
def test_tokens_that_cannot_be_evaluated_are_refused_and_nothing_is_lost(
    tiny_moe: Path, tokens: list[int], error: type[Exception], words: str
) -> None:
    with open_engine(tiny_moe, options("sim")) as engine:
        engine.sequences.extend(0, [1, 2])
        with pytest.raises(error, match=words):
            engine.sequences.extend(0, tokens)
        assert engine.sequences.length(0) == 2
        assert engine.sequences.extend(0, [3]).shape == (1, engine.n_vocab)


def test_an_unknown_device_is_refused_with_the_names_that_exist(tiny_moe: Path) -> None:
    with pytest.raises(DeviceUnavailable, match="auto, cpu, sim"):
        open_engine(tiny_moe, options("cuda7"))


class Boom(Exception):
    pass


@pytest.mark.parametrize("hook", ["compute", "takes"])
def test_what_a_callback_raises_during_a_decode_comes_out_of_extend(
    tiny_moe: Path, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*_: object) -> int:
        raise Boom(hook)

    with open_engine(tiny_moe, options("sim", min_batch=ALWAYS)) as engine:
        before = engine.sequences.extend(0, [1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr(StreamingDevice, hook, explode)
            with pytest.raises(Boom, match=hook):
                engine.sequences.extend(0, [4, 5])  # another size, so that the graph is built anew
        assert engine.sequences.length(0) == 3
        engine.sequences.rewind(0, 0)
        assert np.array_equal(engine.sequences.extend(0, [1, 2, 3]), before), "the engine goes on"


@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_ctrl_c_ends_a_decode_and_the_engine_goes_on(tiny_moe: Path, device: str) -> None:
    opened = engine_options(device=device, n_ctx=4096, min_batch=ALWAYS)
    tokens = [(7 * i) % 250 for i in range(4000)]
    with open_engine(tiny_moe, opened) as engine:
        start = time.perf_counter()
        engine.sequences.extend(0, tokens, n_logits=1)
        whole_s = time.perf_counter() - start
        engine.sequences.rewind(0, 0)
        timer = threading.Timer(whole_s / 5, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()

        def decode_on() -> None:  # other programs may have lengthened the first decode
            while True:
                engine.sequences.extend(0, tokens, n_logits=1)
                engine.sequences.rewind(0, 0)

        with pytest.raises(KeyboardInterrupt):
            decode_on()
        timer.join()
        assert engine.sequences.length(0) == 0
        assert np.isfinite(engine.sequences.extend(0, [1, 2, 3])).all()


def test_a_signal_whose_handler_returns_does_not_lose_the_decode(tiny_moe: Path) -> None:
    seen: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))
    tokens = [(7 * i) % 250 for i in range(2000)]
    try:
        with open_engine(tiny_moe, engine_options(device="cpu", n_ctx=2048)) as engine:
            start = time.perf_counter()
            expected = engine.sequences.extend(0, tokens, n_logits=1)
            whole_s = time.perf_counter() - start
            engine.sequences.rewind(0, 0)
            timer = threading.Timer(whole_s / 3, os.kill, (os.getpid(), signal.SIGUSR1))
            timer.start()
            again = engine.sequences.extend(0, tokens, n_logits=1)
            timer.join()
            assert seen == [signal.SIGUSR1]
            assert np.array_equal(again, expected)
    finally:
        signal.signal(signal.SIGUSR1, previous)


def test_a_signal_is_looked_at_before_each_part_of_a_graph(
    tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, asked = [(7 * i) % 250 for i in range(24)], 0

    def at_the_third_part() -> bool:
        nonlocal asked
        asked += 1
        return asked == 3

    streaming = Streaming(n_gpu_layers=0, depth=0, prefetch=False)
    streaming = streaming | Streaming(vram_bytes=budget(tiny_moe, streaming, "half"))
    with open_engine(tiny_moe, options("sim", min_batch=ALWAYS, streaming=streaming)) as engine:
        expected = engine.sequences.extend(0, tokens)
        engine.sequences.rewind(0, 0)
        whole = engine.counters().cuts
        monkeypatch.setattr("offload.ggml.backend.requested", at_the_third_part)
        again = engine.sequences.extend(0, tokens)
        assert asked > 3, "nobody raised anything: the decode was done again"
        assert np.array_equal(again, expected)
        assert 2 * whole < engine.counters().cuts < 3 * whole, "the first try ended at a cut"


def test_opening_and_closing_a_hundred_times_leaks_nothing(tiny_moe: Path) -> None:
    process = psutil.Process()

    def cycle(n: int) -> None:
        for _ in range(n):
            with open_engine(tiny_moe, options("sim", min_batch=ALWAYS)) as engine:
                engine.sequences.extend(0, [1, 2, 3])
        gc.collect()

    cycle(15)  # pools and caches fill first
    grown = []
    for _ in range(4):
        before = process.memory_info().rss
        cycle(25)
        grown.append(process.memory_info().rss - before)
    # The allocator sometimes keeps pages. A leak grows every time.
    size = tiny_moe.stat().st_size
    assert min(grown) < size // 4, f"{grown} bytes grown over 25 models of {size} bytes each time"
