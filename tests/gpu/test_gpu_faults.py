"""What goes wrong on the device ends the request, and nothing is left behind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from on_gpu import Logits, assert_same, logits, options, slots_for

from offload.device import DeviceChoice
from offload.engine import Engine
from offload.errors import DeviceFailed
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange
from offload.ggml.tensor import host_bytes, new_tensor
from offload.streaming.copying import DeviceCopier, Transfer
from offload.streaming.executor import Executor


class Broken(Exception):
    pass


@pytest.mark.parametrize("n_good", [0, 3])
@pytest.mark.parametrize("entry", ["copy", "mark", "wait", "fence"])
def test_a_failing_copier_ends_the_request_and_the_next_one_is_served(
    async_gpu: DeviceChoice,
    moe: Path,
    resident_moe: Logits,
    entry: str,
    n_good: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = getattr(DeviceCopier, entry)
    left = n_good

    def fail(self: DeviceCopier, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise Broken(entry)
        return right(self, *arguments)

    with Engine(moe, options(async_gpu, slots_for(moe, "half"))) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(DeviceCopier, entry, fail)
            with pytest.raises(Broken, match=entry):
                engine.sequences.extend(0, [(13 * i) % engine.n_vocab for i in range(24)])
        assert engine.sequences.length(0) == 0
        assert_same(async_gpu, logits(engine), resident_moe)


@pytest.mark.parametrize("n_good", [0, 4])
def test_a_failing_computation_ends_the_request_and_the_next_one_is_served(
    async_gpu: DeviceChoice,
    moe: Path,
    resident_moe: Logits,
    n_good: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = Executor._submit
    left = n_good

    def fail(self: Executor, *arguments: Any) -> int:
        nonlocal left
        left -= 1
        return right(self, *arguments) if left >= 0 else -1

    with Engine(moe, options(async_gpu, slots_for(moe, "half"))) as engine:
        first = engine.sequences.extend(0, [1, 2, 3])
        with monkeypatch.context() as patch:
            patch.setattr(Executor, "_submit", fail)
            with pytest.raises(DeviceFailed, match="failed with status"):
                engine.sequences.extend(0, [5, 6, 7, 8])
        assert engine.sequences.length(0) == 3, "what the sequence held before is still there"
        engine.sequences.rewind(0, 0)
        assert_same(async_gpu, engine.sequences.extend(0, [1, 2, 3]), first)
        assert_same(async_gpu, logits(engine), resident_moe)


def test_what_is_taken_from_the_device_is_given_back_when_closed(
    async_gpu: DeviceChoice, moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lib = library()
    held: Counter[str] = Counter()

    def count(name: str, change: int, what: str) -> None:
        right: Callable[..., Any] = getattr(lib, name)

        def counted(*arguments: Any) -> Any:
            held[what] += change
            held["calls"] += 1
            return right(*arguments)

        monkeypatch.setattr(lib, name, counted)

    count("ggml_backend_event_new", 1, "events")
    count("ggml_backend_event_free", -1, "events")
    count("ggml_backend_dev_init", 1, "backends")
    count("ggml_backend_free", -1, "backends")
    count("ggml_backend_buft_alloc_buffer", 1, "buffers")
    count("ggml_backend_buffer_free", -1, "buffers")
    for _ in range(5):
        with Engine(moe, options(async_gpu, slots_for(moe, "half"))) as engine:
            engine.sequences.extend(0, [1, 2, 3, 4])
            assert held["events"] > 0
            assert held["backends"] >= 2, "one computes, one copies"
            assert held["buffers"] > 0
        assert (held["events"], held["backends"], held["buffers"]) == (0, 0, 0)


def test_what_copies_leave_behind_is_freed_from_graph_to_graph(async_gpu: DeviceChoice) -> None:
    device, process = async_gpu.device, psutil.Process()
    source = np.zeros(4096, np.uint8)
    held = host_bytes(HostRange(source.ctypes.data, source.nbytes, source))
    buffer = device.allocate(source.nbytes, "a copy's target")
    target = new_tensor("i8", (source.nbytes, 1, 1, 1), (buffer, 0))
    compute = device.open()
    copier = DeviceCopier(compute)

    def grown_bytes(n_graphs: int) -> int:
        before = process.memory_info().rss
        for _ in range(n_graphs):
            copier.begin()
            for _ in range(40):
                copier.copy(Transfer(target, 0, held, 0, source.nbytes), None)
                copier.mark()
        return int(process.memory_info().rss - before)

    try:
        grown_bytes(50)  # the first make what all others use again
        assert grown_bytes(100) < 100 * 40 * 100
    finally:
        copier.close()
        compute.close()
        buffer.close()
