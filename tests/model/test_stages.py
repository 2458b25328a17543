"""The last device computes a prompt's ubatch on a thread while the others compute the next one."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_devices import MODELS, options, sims, written

from offload.engine import Engine
from offload.errors import DeviceFailed
from offload.plan.min_batch import NEVER, MinBatch
from offload.streaming.deferred import Deferred

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
    shares = SHARES[device.count("sim")]
    chosen = options(device, mode, tensor_split=shares, **changes)
    with Engine(path, replace(chosen, n_ubatch=UBATCH, n_ctx=512)) as engine:
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
    # Logits of each ubatch, so libllama reads results of the last device between two ubatches.
    rows.append(sequences.extend(0, tokens(engine, 128, 7)))
    rows.append(sequences.extend(0, tokens(engine, 2 * UBATCH, 9), n_logits=2))
    return rows, state


def check(path: Path, device: str, n_deferred: int | None = 5, **changes: Any) -> None:
    """Compare with one device. `n_deferred`: ubatches of the last device; None: some."""
    with opened(path, "sim", **changes) as engine:
        expected, saved = texts(engine)
    with opened(path, device, **changes) as engine:
        found, state = texts(engine)
        *first, last = engine.counters_by_device().values()
        assert not any(device.declined for device in engine.devices)
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
def test_the_cpu_waits_for_results_of_the_thread(models: Path) -> None:
    """The CPU computes attention between the layers of experts of both devices."""
    path = written("qwen3moe", models)
    changes = {"min_batch": MinBatch(1, NEVER), "streaming": {"n_gpu_layers": 0}}
    check(path, sims(path, SHARES[2], FAST[:2]), n_deferred=None, **changes)


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


def test_ctrl_c_ends_a_prompt_on_both_devices(models: Path) -> None:
    path = written("qwen3moe", models)
    with opened(path, "sim") as engine:
        expected = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
    with opened(path, sims(path, SHARES[2], ("2MB/s", "2MB/s"))) as engine:
        (deferred,) = engine.devices[1]._deferred.values()
        press = partial(os.kill, os.getpid(), signal.SIGINT)
        entered = threading.Event()
        watch = threading.Thread(target=pressed, args=(deferred, press, entered))
        watch.start()
        with pytest.raises(KeyboardInterrupt):
            engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
        watch.join()
        assert entered.is_set(), "the thread was computing"
        assert not deferred.is_busy
        engine.sequences.rewind(0, 0)
        found = engine.sequences.extend(0, tokens(engine, PROMPT), n_logits=1)
        assert np.array_equal(found, expected)


def pressed(deferred: Deferred, press: Callable[[], None], entered: threading.Event) -> None:
    until_s = time.monotonic() + 20
    while not deferred.is_busy and time.monotonic() < until_s:
        time.sleep(0.01)
    if deferred.is_busy:
        entered.set()
    press()
