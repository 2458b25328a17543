"""Measures how fast weights are copied to devices, one device alone and all at once.

Two cards may share a root complex, and all share the RAM. So a link can be much slower while the
other links copy, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter

from offload.device import DeviceChoice
from offload.errors import DeviceFailed
from offload.ggml.memory import AnonymousMemory
from offload.ggml.tensor import host_bytes, new_tensor
from offload.stream.copying import Copier, DeviceCopier, LinkSpeed, ThreadCopier, Transfer

_COPY_BYTES = 2 << 20  # bytes of one copy, about those of an expert's matrix
_N_PLACES = 64  # number of copies after which the same memory is read again
_MOST_AT_ONCE = 8  # copies that are enqueued before the host waits
_LEAST_S = 0.15
_LEAST_EXPERT_BYTES = 3 << 20  # bytes of three matrices, each of which is a copy


@dataclass(frozen=True)
class LinkSpeeds:
    """Rates of copies from host memory, by device."""

    alone: tuple[float, ...]  # bytes/s while no other link copies
    together: tuple[float, ...]  # bytes/s while all links copy


def link_speeds(choices: Sequence[DeviceChoice], least_s: float = _LEAST_S) -> LinkSpeeds:
    """Return the rates of these devices' links. Raises DoesNotFit and DeviceFailed."""
    with ExitStack() as closing:
        probes = [_LinkProbe(choice, closing) for choice in choices]
        for probe in probes:
            probe.run(0.0)  # the first copy takes longer
        alone = tuple(probe.run(least_s) for probe in probes)
        together = _at_once(probes, least_s) if len(probes) > 1 else alone
    return LinkSpeeds(alone, together)


def seen_link_rates(
    copies_s: Mapping[str, float], expert_bytes: Collection[int]
) -> dict[str, float]:
    """Return the bytes/s of links alone, as serving saw them, by the name of the device. Pure.

    `copies_s`: the seconds of an expert's copy, of many that followed each other while nothing else
    ran (offload/stream/split_measuring.py). Bytes that decodes copy give no rate, because nothing
    tells for how long the link was busy with them. Links of other devices rest meanwhile, so
    serving sees no rate of links together.

    `expert_bytes`: the size of an expert in each layer. There are no rates if layers differ,
    because the layer that was timed is not known, or if experts are so small that calls matter.
    """
    sizes = {*expert_bytes}
    if len(sizes) != 1 or (size_bytes := min(sizes)) < _LEAST_EXPERT_BYTES:
        return {}
    return {name: size_bytes / copy_s for name, copy_s in copies_s.items() if copy_s > 0.0}


def _at_once(probes: Sequence[_LinkProbe], least_s: float) -> tuple[float, ...]:
    start = threading.Barrier(len(probes))

    def run(probe: _LinkProbe) -> float:
        start.wait()
        return probe.run(least_s)

    with ThreadPoolExecutor(len(probes)) as pool:
        try:
            return tuple(pool.map(run, probes))
        except Exception as e:
            raise DeviceFailed(f"measuring links failed: {e}") from e


class _LinkProbe:
    """Copies from host memory to one device, in the way that streamed weights are copied."""

    def __init__(self, choice: DeviceChoice, closing: ExitStack) -> None:
        device = choice.device
        stream = device.open()
        closing.callback(stream.close)
        size_bytes = _N_PLACES * _COPY_BYTES
        pinned = device.pinned_memory(size_bytes)
        if pinned is not None:
            closing.callback(pinned.close)
        unpinned = AnonymousMemory()
        self._memory = unpinned.allocate(size_bytes) if pinned is None else pinned.host_range
        self._memory.array()[:] = 1  # otherwise first copies would wait for the kernel's pages
        target = device.allocate(_COPY_BYTES, "measuring the link")
        closing.callback(target.close)
        self._source = host_bytes(self._memory)
        self._target = new_tensor("i8", (_COPY_BYTES, 1, 1, 1), (target, 0))
        self._copier: Copier
        if device.has_async_and_events:
            self._copier = DeviceCopier(stream)
        else:
            sim = choice.sim
            link = (
                LinkSpeed() if sim is None else LinkSpeed(sim.bandwidth_bytes_per_s, sim.latency_s)
            )
            self._copier = ThreadCopier(link)
        closing.callback(self._copier.close)

    def run(self, least_s: float, now: Callable[[], float] = perf_counter) -> float:
        """Copy for about `least_s` seconds, at least once, and return bytes/s.

        This is the median of many short stretches. A program that disturbs less than half of them
        does not change it, so the kept rate is not spoilt for later starts.
        """
        n_copied, n_at_once = 0, 1
        began_s = ends_s = now()
        rates = list[float]()
        while n_copied == 0 or ends_s - began_s < least_s:
            from_s = ends_s
            self._copier.begin()
            for i in range(n_copied, n_copied + n_at_once):
                at = i % _N_PLACES * _COPY_BYTES
                transfer = Transfer(self._target, 0, self._source, at, _COPY_BYTES)
                self._copier.copy([transfer], None)
            self._copier.drain()
            ends_s = now()
            rates.append(n_at_once * _COPY_BYTES / max(ends_s - from_s, 1e-9))
            n_copied += n_at_once
            n_at_once = min(_MOST_AT_ONCE, 2 * n_at_once)
        return median(rates)
