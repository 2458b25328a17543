"""Measures the link to a device: bandwidth, and the latencies that every decode is made of."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from mapped import NoMapped, measure_mapped
from setting import Setting
from words import NoWords, measure_words

from lab.timing import seconds
from offload.device import DeviceChoice
from offload.ggml.backend import RouterIds, Stream
from offload.ggml.graph import Graph
from offload.ggml.memory import AnonymousMemory, HostRange, Pinner
from offload.ggml.tensor import Buffer, Tensor, host_bytes, new_tensor

LARGE_BYTES = 256 << 20
SIZES_BYTES = (64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, LARGE_BYTES)
SMALL_BYTES = 64
N_LAUNCHES = 100
_N_SMALL, _N_LARGE = 50, 7  # repetitions of copies below and above 1 MB


def measure(setting: Setting) -> bool:
    """Fill `link` of the report: bandwidth, copies, latencies, kernels, words. Always True."""
    most = (4 << 20) if setting.args.small else LARGE_BYTES
    link = setting.report["link"] = measure_link(setting.choice, most)
    setting.show("host to device", [link])
    setting.save()
    with ExitStack() as stack:
        probe = Probe(stack, setting.choice, most)
        link["copies"] = [probe.copies(n) for n in SIZES_BYTES if n <= most]
        link["latencies"] = probe.latencies()
    setting.show("copies of pinned memory; enqueue = the call, done = until it has arrived",
                 link["copies"])  # fmt: skip
    setting.show("latencies", link["latencies"])
    setting.save()
    try:
        link["mapped"] = measure_mapped(setting.choice, most)
        title = "kernels that read and write pinned memory; beside = while copies go the same way"
        setting.show(title, link["mapped"]["rows"])
        setting.show("what a start measures of it", [link["mapped"]["start"]])
    except NoMapped as reason:
        link["why_no_mapped"] = str(reason)
    setting.save()
    try:
        link["words"] = measure_words()
        setting.show("words between host and streams, without a synchronisation", link["words"])
    except NoWords as reason:
        link["why_no_words"] = str(reason)
    return True


def measure_link(choice: DeviceChoice, size_bytes: int) -> dict[str, Any]:
    """Bytes per second of the fastest copy to the device, from pinned and from pageable memory.

    If pinning is refused, both are from pageable memory, and `why_not_pinned` says why.
    """
    stream = choice.device.open()
    buffer = choice.device.allocate(size_bytes, "the link's measurement")
    host, pinner = AnonymousMemory(), Pinner(choice.device)
    memory = host.allocate(size_bytes)
    target, source = new_tensor("i8", (size_bytes, 1, 1, 1), (buffer, 0)), host_bytes(memory)

    def bytes_per_s() -> float:
        times = []
        for _ in range(_N_LARGE):
            start = time.perf_counter()
            stream.copy(target, 0, source, 0, size_bytes)
            stream.synchronize()
            times.append(time.perf_counter() - start)
        return size_bytes / min(times)

    try:
        pageable = bytes_per_s()
        pinned = pinner.pin(memory)
        fastest = bytes_per_s() if pinned.ok else pageable
    finally:
        pinner.unpin(memory)
        host.free(memory)
        buffer.close()
        stream.close()
    return {
        "pinned_bytes_per_s": fastest,
        "pageable_bytes_per_s": pageable,
        "why_not_pinned": "" if pinned.ok else pinned.reason,
    }


class Probe:
    """Two streams, pinned memory, and a buffer on the device. `stack` closes them."""

    def __init__(self, stack: ExitStack, choice: DeviceChoice, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._stream = self._opened(stack, choice)
        self._other = self._opened(stack, choice)
        self._buffer: Buffer = choice.device.allocate(2 * most_bytes, "the link's measurement")
        stack.callback(self._buffer.close)
        host, pinner = AnonymousMemory(), Pinner(choice.device)
        memory: HostRange = host.allocate(most_bytes)
        stack.callback(host.free, memory)
        pinner.pin(memory)  # a refusal is in the bandwidth's row
        stack.callback(pinner.unpin, memory)
        self._source = host_bytes(memory)
        self._target = new_tensor("i8", (most_bytes, 1, 1, 1), (self._buffer, 0))
        self._small = new_tensor("i8", (most_bytes, 1, 1, 1), (self._buffer, most_bytes))

    @staticmethod
    def _opened(stack: ExitStack, choice: DeviceChoice) -> Stream:
        stream = choice.device.open()
        stack.callback(stream.close)
        return stream

    def copies(self, size_bytes: int) -> dict[str, Any]:
        """The times of a copy of this size on an idle link."""
        enqueued, done = [], []
        for _ in range(_N_SMALL if size_bytes < 1 << 20 else _N_LARGE):
            start_s = time.perf_counter()
            self._stream.copy(self._target, 0, self._source, 0, size_bytes)
            enqueued.append(time.perf_counter() - start_s)
            self._stream.synchronize()
            done.append(time.perf_counter() - start_s)
        taken_s = statistics.median(done)
        return {"copied_bytes": size_bytes, "enqueue_s": statistics.median(enqueued),
                "done_s": taken_s, "rate_bytes_per_s": size_bytes / taken_s}  # fmt: skip

    def latencies(self) -> list[dict[str, Any]]:
        """Median times of the single steps that a decode is made of."""
        ids = RouterIds(new_tensor("i32", (8, 2, 1, 1), (self._buffer, 0)), 1)
        zeros = self._stream  # ids must be experts' numbers, so the memory is zeroed first
        zeros.copy(self._target, 0, self._source, 0, SMALL_BYTES)
        graph = self._graph()

        def small() -> None:
            self._other.copy(self._small, 0, self._source, 0, SMALL_BYTES)
            self._other.synchronize()

        def behind_large() -> float:
            self._stream.copy(self._target, 0, self._source, 0, self._most_bytes)
            start_s = time.perf_counter()
            small()
            taken_s = time.perf_counter() - start_s
            self._stream.synchronize()
            return taken_s

        def launch() -> None:
            self._stream.compute(graph)
            self._stream.synchronize()

        def launches() -> float:
            start_s = time.perf_counter()
            for _ in range(N_LAUNCHES):
                self._stream.compute(graph)
            taken_s = time.perf_counter() - start_s
            self._stream.synchronize()
            return taken_s / N_LAUNCHES

        self._stream.synchronize()
        large = f"{self._most_bytes >> 20} MB"
        rows = {
            "synchronize an idle stream": _median(partial(seconds, self._stream.synchronize)),
            "read 64 bytes back": _median(partial(seconds, lambda: self._stream.read(ids))),
            "copy 64 bytes": _median(partial(seconds, small)),
            f"copy 64 bytes while {large} are queued on another stream": _median(behind_large, 7),
            "launch a graph of one node and wait": _median(partial(seconds, launch)),
            f"launch a graph of one node, {N_LAUNCHES} in a row": _median(launches, 5),
        }
        return [{"step": step, "taken_s": taken_s} for step, taken_s in rows.items()]

    def _graph(self) -> Graph:
        def at(offset: int) -> Tensor:
            return new_tensor("f32", (16, 1, 1, 1), (self._buffer, offset))

        return Graph.of([at(128).computing("ADD", [at(0), at(256)])])


def _median(measured_s: Callable[[], float], n: int = _N_SMALL) -> float:
    measured_s()
    return statistics.median(measured_s() for _ in range(n))
