"""Reads the router's ids back to the host, and uploads slot ids to the device.

The device's product with a split layer's experts cannot skip a pair (token, expert). It computes
the CPU's pairs too, with whatever is in a slot, and those results are overwritten. For these pairs,
a slot that is read anyway costs least. But no token may name a slot twice, because CUDA's products
of several tokens with experts (mmid.cu and mmf.cuh in llama.cpp) look for each expert only once in
a token's ids. A second occurrence would leave a wrong row. A single token may name a slot twice if
the weights are quantised, because its product (mmvq.cu) computes pair by pair.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from offload.alignment import aligned
from offload.errors import DeviceFailed
from offload.ggml.backend import SlotIds, Stream
from offload.ggml.rewriting import Scratch
from offload.ggml.tensor import Buffer
from offload.plan.working import LEAST_BYTES
from offload.schedule.slots import StreamCounters
from offload.stream.cuts import CutStep
from offload.stream.passes import PassStep
from offload.trace.trace import COMPUTE, Trace

_NO_SLOT = -1
_PINNED_BYTES = 1 << 20  # pinned memory for small batches' ids; large batches' ids are pageable


class IdExchange:
    """Reads the routers' ids, and uploads slot numbers in their place."""

    def __init__(self, stream: Stream, most_experts: int, counters: StreamCounters,
                 trace: Trace) -> None:  # fmt: skip
        self._stream, self._counters, self._trace = stream, counters, trace
        self._buffers = Scratch(stream.device, "expert ids", LEAST_BYTES)
        self._pinned: Buffer | None = None
        self._may_pin = True
        self.slot_of = np.zeros(most_experts, np.int32)  # slot by expert, for the cut being entered

    @property
    def device_bytes(self) -> int:
        return self._buffers.device_bytes

    def close(self) -> None:
        self._buffers.close()
        if self._pinned is not None:
            self._pinned.close()

    def prepare(self, steps: Sequence[CutStep]) -> None:
        """Give each step of a graph memory for its ids. Raises DoesNotFit.

        Steps of different graphs share this memory. That is safe because reading a layer's ids
        waits for all earlier uploads.
        """
        buffer = self._buffers.reserve(sum(aligned(step.ids_bytes) for step in steps))
        pinned, offset = self._pinned_memory(steps), 0
        for step in steps:
            if step.ids is not None:
                n_read, n_sent = step.ids.needed_bytes, step.ids_bytes
                memory = None
                if len(pinned) >= n_read + n_sent:
                    step.ids.lie_in(pinned[:n_read], is_pinned=True)
                    memory, pinned = pinned[n_read : n_read + n_sent], pinned[n_read + n_sent :]
                step.slot_ids = SlotIds(step.ids.tensor, buffer, offset, memory)
            offset += aligned(step.ids_bytes)

    def _pinned_memory(self, steps: Sequence[CutStep]) -> NDArray[np.uint8]:
        """Return pinned host memory, or an empty array if there is none."""
        if self._pinned is None and self._may_pin and any(step.ids is not None for step in steps):
            self._pinned = self._stream.device.pinned_memory(_PINNED_BYTES)
            self._may_pin = self._pinned is not None
        if self._pinned is None:
            return np.zeros(0, np.uint8)
        return self._pinned.host_range.array()[:_PINNED_BYTES]

    def read(self, step: CutStep | PassStep) -> NDArray[np.int32]:
        """Wait for all submitted work and return the router's choice [n_tokens, n_used]."""
        assert step.ids is not None
        start_s = time.perf_counter()
        ids = self._stream.read(step.ids)
        self._counters.router_reads += 1
        if self._trace.is_on:
            self._trace.add(COMPUTE, "read router ids", start_s, time.perf_counter(),
                            layer=step.layer, cause="ids")  # fmt: skip
        return ids

    def send(
        self,
        slot_ids: SlotIds,
        ids: NDArray[np.int32],
        experts: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Upload `ids` with each of `experts` replaced by its slot.

        Raises DeviceFailed if `ids` have an expert that is not among `experts`.
        """
        slot_of = self.slot_of
        slot_of.fill(_NO_SLOT)  # no expert keeps the slot that it had in another layer
        slot_of[experts] = slots
        np.take(slot_of, ids, out=slot_ids.values)
        if slot_ids.values.size and slot_ids.values.min() < 0:
            raise DeviceFailed("a router chose an expert that has no slot")
        self._stream.upload(slot_ids)


_NOT_QUANTISED = ("f32", "f16", "bf16")


def may_repeat(n_tokens: int, types: Collection[str]) -> bool:
    """True if a token may name a slot twice, in a batch of `n_tokens` with weights of `types`."""
    return n_tokens == 1 and not any(name in _NOT_QUANTISED for name in types)
