"""Capture modes in which a draft can capture graphs while the engine makes CUDA calls."""

from __future__ import annotations

import ctypes as C
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import neighbour
import pytest
import standin_calls
from neighbour import GLOBAL, RELAXED, THREAD_LOCAL, CudaError, beside
from on_gpu import options, slots_for

from offload.device import DeviceChoice
from offload.engine import open_engine
from offload.schedule.splitter import stay
from offload.times.min_batch import NEVER, MinBatch

UNSUPPORTED, INVALIDATED, IMPLICIT = 900, 901, 906
N_TOKENS = 24


def malloc() -> None:
    neighbour.call("cudaFree", neighbour.made("cudaMalloc", C.c_size_t(64)))


def legacy_sync() -> None:
    neighbour.call("cudaStreamSynchronize", None)


def device_sync() -> None:
    neighbour.call("cudaDeviceSynchronize")


def code_of(called: Callable[[], None]) -> int:
    try:
        called()
    except CudaError as error:
        return error.code
    return 0


@pytest.mark.parametrize(
    ("called", "mode", "blocking", "own", "other"),
    [
        (malloc, GLOBAL, False, UNSUPPORTED, UNSUPPORTED),
        (malloc, THREAD_LOCAL, False, UNSUPPORTED, 0),
        (malloc, RELAXED, False, 0, 0),
        (legacy_sync, GLOBAL, False, 0, 0),
        (legacy_sync, RELAXED, True, IMPLICIT, IMPLICIT),
        (device_sync, RELAXED, False, UNSUPPORTED, UNSUPPORTED),
    ],
)
def test_a_call_that_cuda_forbids_during_a_capture_is_refused_and_ends_the_capture(
    standin: DeviceChoice,
    called: Callable[[], None],
    mode: int,
    blocking: bool,
    own: int,
    other: int,
) -> None:
    """`own` and `other` are the expected errors in the capturing thread and in another one."""
    stream = neighbour.new_stream(blocking=blocking)
    with ThreadPoolExecutor(1) as thread:
        for expected, code in (
            (own, lambda: code_of(called)),
            (other, lambda: thread.submit(code_of, called).result()),
        ):
            neighbour.call("cudaStreamBeginCapture", stream, mode)
            assert code() == expected
            assert code_of(lambda: discard_capture(stream)) == (INVALIDATED if expected else 0)
    neighbour.call("cudaStreamDestroy", stream)
    code_of(lambda: neighbour.call("cudaGetLastError"))  # clears the error
    standin_calls.reset()


def discard_capture(stream: C.c_void_p) -> None:
    neighbour.call("cudaGraphDestroy", neighbour.made_by_capture(stream))


def greedy(gpu: DeviceChoice, path: Path, *, split: bool) -> list[int]:
    """A prompt and the likeliest tokens after it, decoded one at a time."""
    streaming = slots_for(path, "half", hybrid=split, splitter=stay if split else None)
    least = NEVER if split else 1
    with open_engine(path, options(gpu, streaming, min_batch=MinBatch(least, least))) as engine:
        tokens = [7, 8, 9]
        rows = engine.sequences.extend(0, tokens)
        for _ in range(N_TOKENS):
            tokens.append(int(rows[-1].argmax()))
            rows = engine.sequences.extend(0, tokens[-1:])
    return tokens


@pytest.mark.parametrize("split", [False, True], ids=["streamed", "split"])
def test_a_draft_on_its_own_thread_and_stream_changes_no_token_and_meets_no_error(
    standin: DeviceChoice, moe: Path, split: bool
) -> None:
    mode = int(os.environ.get("NEIGHBOUR_MODE", THREAD_LOCAL))  # mode of offload/torch_draft
    free_bytes = standin.device.memory_bytes()[0]
    expected = greedy(standin, moe, split=split)
    before = standin_calls.counters()
    with beside(mode) as other:
        got = greedy(standin, moe, split=split)
    assert got == expected
    assert other.n_rounds > 5
    after = standin_calls.counters()
    assert after["captures"] - before["captures"] > other.n_rounds, "the engine captures, too"
    assert standin.device.memory_bytes()[0] == free_bytes


def test_torchs_default_capture_mode_would_break_the_engine_or_the_draft() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--capture=sys"]
    command += [__file__, "-k", "changes_no_token"]
    env = {name: value for name, value in os.environ.items() if "PYTEST" not in name}
    env["NEIGHBOUR_MODE"] = str(GLOBAL)
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=200)
    found = done.stdout + done.stderr
    assert done.returncode != 0, found
    assert "operation not permitted when stream is capturing" in found or "error 90" in found
