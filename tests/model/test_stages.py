"""The last device computes a prompt's ubatch on a thread while the others compute the next one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_devices import MODELS, options, sims, written

from lab.options import Streaming, engine_options
from lab.synth import write_preset
from offload.engine import Engine, open_engine
from offload.errors import DeviceFailed
from offload.ggml.context import with_a_row_each
from offload.ggml.deferred import Deferred
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from offload.times.min_batch import NEVER, MinBatch
from offload.trace.trace import COMPUTE, COPY, CPU, Trace, TraceEvent

UBATCH = 80
PROMPT = 3 * UBATCH + 30  # the last ubatch is shorter
FAST = ("4GB/s", "1GB/s", "2GB/s")
# Shares by number of devices. The last of three devices has a layer whose rows are all computed.
SHARES: dict[int, tuple[float, ...]] = {1: (), 2: (1, 1), 3: (2, 2, 3)}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, models: Path) -> Path:
    return written(request.param, models)


@contextmanager
def opened(path: Path, device: str, mode: str = "streamed", **changes: Any) -> Iterator[Engine]:
    changes.setdefault("tensor_split", SHARES[device.count("sim")])
    chosen = options(device, mode, **changes)
    with open_engine(path, engine_options(chosen, n_ubatch=UBATCH, n_ctx=512)) as engine:
        yield engine


def tokens(engine: Engine, n: int, start: int = 0) -> list[int]:
    return [(13 * (i + start) + 5) % engine.n_vocab for i in range(n)]


def texts(engine: Engine) -> tuple[list[NDArray[np.float32]], bytes]:
    """Return logits after prompts and small batches, and the state saved after a prompt."""
    sequences = engine.sequences
    rows = [sequences.extend(0, tokens(engine, PROMPT), n_logits=1)]
    state = sequences.save(0)
    rows.append(sequences.extend(0, tokens(engine, 3, PROMPT)))
    sequences.rewind(0, 0)
    # The thread reads logits and hidden rows, which libllama wants of each ubatch.
    rows.append(sequences.extend(0, tokens(engine, 128, 7)))
    engine.opened.context.keep_rows()
    rows.append(sequences.extend(0, tokens(engine, 2 * UBATCH, 9), n_logits=2))
    return [*rows, engine.opened.context.rows(2 * UBATCH)], state


def check(path: Path, device: str, n_deferred: int | None = 5, **changes: Any) -> None:
    """Compare with one device. `n_deferred`: ubatches of the last device; None: some."""
    with opened(path, "sim", **changes) as engine:
        expected, saved = texts(engine)
    with opened(path, device, **changes) as engine:
        found, state = texts(engine)
        *first, last = engine.counters_by_device().values()
        assert not any(device.declined for device in engine.opened.devices)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    assert state == saved
    assert [counters.n_deferred for counters in first] == [0] * len(first)
    assert last.n_deferred == n_deferred or (n_deferred is None and last.n_deferred)


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the thread begin when libllama has long built and begun the next ubatch."""
    start = Deferred.start

    def later(self: Deferred, compute: Callable[[], int]) -> None:
        def wait() -> int:
            time.sleep(0.2)
            return compute()

        start(self, wait)

    monkeypatch.setattr(Deferred, "start", later)


@pytest.mark.usefixtures("late")
def test_an_ubatch_that_is_computed_late_has_the_bits_of_one_device(model: Path) -> None:
    check(model, sims(model, SHARES[2], FAST[:2]))


@pytest.mark.parametrize("mode", ["streamed", "dense streamed"])
def test_ubatches_at_the_same_time_have_the_bits_of_one_device(model: Path, mode: str) -> None:
    check(model, sims(model, SHARES[2], FAST[:2]), mode=mode)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("preset", ["qwen3next", "qwen35moe"])
def test_a_recurrent_memory_is_that_of_one_device(models: Path, preset: str) -> None:
    path = write_preset(preset, models / f"stages-{preset}.gguf", seed=5, n_layer=8)
    found = []
    for device in ("sim", "sim,sim"):
        with opened(path, device) as engine:
            rows = [engine.sequences.extend(0, tokens(engine, n), n_logits=1) for n in (PROMPT, 3)]
            found.append(np.concatenate(rows))
            assert engine.counters().n_deferred == (3 if device == "sim,sim" else 0)
    assert np.array_equal(*found)


@pytest.mark.usefixtures("late")
def test_a_trace_has_no_waiting_as_work_of_the_cpu(models: Path) -> None:
    trace = Trace()
    with opened(written("qwen3moe", models), "sim,sim", streaming={"trace": trace}) as engine:
        engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
        trace.restart()
        start_s = time.perf_counter()
        engine.sequences.extend(0, tokens(engine, 3 * UBATCH, PROMPT), n_logits=1)
        took_s = time.perf_counter() - start_s
    of_cpu_s = sum(e.end_s - e.start_s for e in trace.events() if e.lane == CPU)
    assert took_s >= 0.4, "libllama waits twice for the thread, which sleeps for 0.2 s"
    assert of_cpu_s < took_s / 2


@pytest.mark.usefixtures("late")
def test_the_cpu_waits_for_results_of_the_thread(models: Path) -> None:
    """The CPU computes attention between the layers of experts of both devices."""
    path = written("qwen3moe", models)
    changes = {"min_batch": MinBatch(1, NEVER), "streaming": {"n_gpu_layers": 0}}
    check(path, sims(path, SHARES[2], FAST[:2]), n_deferred=None, **changes)
    # The second device has three streamed graphs an ubatch, one for each of its layers.
    shares = (1, 2)
    with opened(path, sims(path, shares, FAST[:2]), tensor_split=shares, **changes) as engine:
        engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
        assert engine.counters().n_deferred >= 6


@pytest.mark.usefixtures("late")
def test_the_last_of_three_devices_computes_at_the_same_time(models: Path) -> None:
    path = written("qwen3moe", models)
    check(path, sims(path, SHARES[3], FAST))


def test_split_layers_resident_ones_and_small_batches_are_not_deferred(models: Path) -> None:
    path = written("qwen3moe", models)
    for mode, n in (("split", PROMPT), ("resident", PROMPT), ("streamed", UBATCH)):
        with opened(path, "sim,sim", mode) as engine:
            engine.sequences.extend(0, tokens(engine, n), n_logits=1)
            assert engine.counters().n_deferred == 0, mode


@pytest.mark.parametrize(("most", "n_each"), [(8192, 4), (512, 1)])
def test_a_decode_of_several_devices_takes_several_ubatches(
    models: Path, most: int, n_each: int
) -> None:
    """Unless --batch-size was given, which is then the largest ubatch."""
    path = written("qwen3moe", models)
    for device, n in (("sim", 1), ("sim,sim", n_each)):
        chosen = engine_options(options(device), n_ctx=4096, n_batch=512, most_ubatch=most)
        with open_engine(path, chosen) as engine:
            assert engine.sequences.n_batch == max(512, n * engine.layout.context.n_ubatch)


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, how: Callable[[], int]) -> Iterator[None]:
    with monkeypatch.context() as patch:
        start = Deferred.start
        patch.setattr(Deferred, "start", lambda self, _: start(self, how))
        yield


def test_a_failure_of_the_thread_fails_the_decode_and_the_next_is_right(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written("qwen3moe", models)

    def fail() -> int:
        raise DeviceFailed("copying weights failed: the link is down")

    with opened(path, "sim") as engine:
        expected = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
    with opened(path, "sim,sim") as engine:
        for how, words in ((fail, "the link is down"), (lambda: -1, "status -3")):
            with failing(monkeypatch, how), pytest.raises(DeviceFailed, match=words):
                engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
            assert engine.sequences.length(0) == 0
            found = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
            assert np.array_equal(found, expected)
            engine.sequences.rewind(0, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_a_prompt_on_both_devices(models: Path, number: signal.Signals) -> None:
    """The decode is redone if the signal's handler returns."""
    path = written("qwen3moe", models)
    with opened(path, "sim") as engine:
        expected = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with opened(path, sims(path, SHARES[2], ("2MB/s", "2MB/s"))) as engine:
            (deferred,) = engine.opened.devices[1]._deferred.values()
            entered = threading.Event()
            press = partial(os.kill, os.getpid(), number)
            watch = threading.Thread(target=pressed, args=(deferred, press, entered))
            watch.start()
            ends = pytest.raises(KeyboardInterrupt) if number == signal.SIGINT else nullcontext()
            with ends:
                found = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
                assert np.array_equal(found, expected)
            watch.join()
            assert entered.is_set(), "the thread was computing"
            assert not deferred.is_busy
            engine.sequences.rewind(0, 0)
            found = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
            assert np.array_equal(found, expected)
    finally:
        signal.signal(signal.SIGUSR1, before)


def pressed(deferred: Deferred, press: Callable[[], None], entered: threading.Event) -> None:
    until_s = time.monotonic() + 20
    while not deferred.is_busy and time.monotonic() < until_s:
        time.sleep(0.01)
    if deferred.is_busy:
        entered.set()
    press()


def test_the_links_of_two_devices_copy_at_the_same_time_for_a_small_batch(models: Path) -> None:
    """The second device's guessed copies begin while the first device decodes."""
    path, trace = models / "links.gguf", Trace()
    write_preset("qwen3moe", path, seed=5, n_layer=7)
    device = sims(path, SHARES[2], ("600KB/s", "600KB/s"), 1.0)
    streaming = {"trace": trace, "cache": False}
    with opened(path, device, streaming=streaming) as engine:
        batch, steps = tokens(engine, 2), []  # at most 20 guessed experts per device
        engine.sequences.extend(0, batch)
        for _ in range(3):
            engine.sequences.rewind(0, 0)
            engine.settle()
            trace.restart()
            start_s = time.perf_counter()
            engine.sequences.extend(0, batch)
            took_s = time.perf_counter() - start_s
            engine.settle()
            events = [e for e in trace.events() if "device" in e.args]
            computed = [e for e in events if e.lane == COMPUTE and e.args["device"] == "sim0"]
            copies = [e for e in events if e.lane == COPY]
            second = [e for e in copies if e.args["device"] == "sim1"]
            assert min(e.start_s for e in second) < max(e.end_s for e in computed)
            size_bytes = total_bytes(second)
            steps.append(took_s / (max(size_bytes, total_bytes(copies) - size_bytes) / 6e5))
        assert engine.counters_by_device()["sim1"].n_early == 3
        print(f"a step {median(steps):.2f} x a stage's copies")
        assert min(steps) <= 1.1


def total_bytes(copies: Sequence[TraceEvent]) -> int:
    return sum(int(copy.args["bytes"]) for copy in copies)


# Layers of each device. Ubatches without logits need no experts of the model's last layer.
N_LAYERS = (12, 13)
RATE_BYTES_PER_S = 10e6
N_UBATCHES = 4


def prefill(path: Path, n_devices: int) -> tuple[float, float]:
    """Compute a prompt with slots for three layers. Return its seconds and the seconds of a stage.

    The latter are the seconds in which the busiest link copies for one ubatch.
    """
    facts = read_facts(path)
    whole = make_plan(facts, PlanRequest(n_gpu_layers=99))
    vram_bytes = whole.resident_bytes + 3 * whole.slot_bytes // facts.n_layers
    one = f"sim:vram={vram_bytes // 1024}KiB,bw={RATE_BYTES_PER_S / 1e6:g}MB/s"
    shares = (N_LAYERS[0], N_LAYERS[1] + 1) if n_devices == 2 else ()
    chosen = options(",".join([one] * n_devices), tensor_split=shares)
    chosen = engine_options(chosen, n_ubatch=72, n_ctx=512, streaming=Streaming(
        n_gpu_layers=99, passes="on"
    ))  # fmt: skip
    with open_engine(path, chosen) as engine:
        engine.sequences.extend(0, tokens(engine, 72), n_logits=1)
        engine.sequences.rewind(0, 0)
        before = engine.counters_by_device()
        start_s = time.perf_counter()
        engine.sequences.extend(0, tokens(engine, N_UBATCHES * 72), n_logits=1)
        took_s = time.perf_counter() - start_s
        copied = [
            counters.streamed_bytes - before[name].streamed_bytes
            for name, counters in engine.counters_by_device().items()
        ]
    return took_s, max(copied) / RATE_BYTES_PER_S / N_UBATCHES


def test_two_devices_read_a_prompt_almost_twice_as_fast(models: Path) -> None:
    """Copies are the bottleneck, so that the machine's load hardly matters."""
    path = models / "stages.gguf"
    write_preset("qwen3-30b-a3b", path, seed=3, n_layer=sum(N_LAYERS), n_expert=16)
    for _ in range(2):  # once more if the machine was disturbed
        runs = [(prefill(path, 1), prefill(path, 2)) for _ in range(3)]
        one_s = median(one_s for (one_s, _), _ in runs)
        both_s = median(both_s for _, (both_s, _) in runs)
        # The second device finishes one stage after the first.
        step = both_s / (N_UBATCHES + 1) / runs[0][1][1]
        print(f"one {one_s:.2f} s, two {both_s:.2f} s: {one_s / both_s:.2f} x; a step {step:.2f} x")
        if one_s >= 1.7 * both_s and step <= 1.1:
            return
    raise AssertionError(f"{one_s / both_s:.2f} x as fast, a step {step:.2f} x a stage's copies")


@pytest.mark.parametrize(
    ("wanted", "added"),
    [("....|....|...x", [3, 7]), ("....|.x..|....", [3]), ("x...|....|....", []),
     ("....|....|....", [3, 7, 11]), ("....|..", [3])],
)  # fmt: skip
def test_each_ubatch_before_the_wanted_rows_gets_one(wanted: str, added: list[int]) -> None:
    rows = [mark == "x" for mark in wanted.replace("|", "")]
    asked = with_a_row_each(rows, 4, 64)
    assert [i for i, is_asked in enumerate(asked) if is_asked] == sorted(
        {*added, *(i for i, is_wanted in enumerate(rows) if is_wanted)}
    )
    assert with_a_row_each(rows, 4, 0) is rows, "there is no room for more rows"
