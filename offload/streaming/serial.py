"""Streamed weights the simple way: copy what a node needs, wait, compute, go on.

The slow twin of the scheduled path: no cache, no look-ahead, no overlap. Every other path is tested
to give the same bits as this one.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml import tensor
from offload.ggml.arena import Arena, DeviceMemory
from offload.ggml.graph import Cut, CutList
from offload.ggml.library.lib import library
from offload.ggml.pydevice import Backend
from offload.ggml.router import ids_like, read_router
from offload.model import layer_of
from offload.streaming.copy import Copier, Transfer
from offload.streaming.counters import StreamCounters
from offload.trace import COMPUTE, NO_TRACE, Trace


class SerialExecutor:
    """Runs graphs with cuts on one inner backend."""

    def __init__(
        self,
        buft: int,
        backend: Backend,
        copier: Copier | None = None,
        trace: Trace = NO_TRACE,
    ) -> None:
        """`copier` holds the copies to a link; without one they go straight to the backend."""
        self._lib = library()
        self._buft, self._backend, self._copier = buft, backend, copier
        self._trace = trace
        self._arenas: dict[tuple[int, int, int, int], Arena] = {}
        self._ids_memory: DeviceMemory | None = None
        self.counters = StreamCounters()

    def close(self) -> None:
        if self._copier is not None:
            self._copier.close()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        if self._ids_memory is not None:
            self._ids_memory.close()
            self._ids_memory = None

    def compute(self, cut_list: CutList) -> int:
        """Run the whole graph; a ggml_status."""
        self.counters.graphs += 1
        if self._copier is not None:
            self._copier.begin()
        done = 0
        for cut in cut_list.cuts:
            status = self._run(cut_list, done, cut.index) or self._run_cut(cut_list, cut)
            if status:
                return status
            done = cut.index + 1
        return self._run(cut_list, done, cut_list.n_nodes)

    def _run(self, cut_list: CutList, first: int, end: int) -> int:
        if first >= end:
            return 0
        part = cut_list.part(first, end)
        start_s = time.perf_counter()
        status = int(self._lib.ggml_backend_graph_compute_async(self._backend.inner, part))
        if self._trace:
            self._trace.add(COMPUTE, f"nodes {first}-{end}", start_s, time.perf_counter())
        return status

    def _run_cut(self, cut_list: CutList, cut: Cut) -> int:
        self._lib.ggml_backend_synchronize(self._backend.inner)
        self.counters.cuts += 1
        weight = tensor.at(cut.weight)
        if cut.kind == "dense":
            size = self._lib.ggml_nbytes(cut.weight)
            slots = self._arena(cut.weight, 1, size).slots(0, 1)
            self._copy(cut.weight, slots, 0, weight.data, size)
            return self._run_patched(cut_list, cut, slots, None)
        raw = read_router(cut.ids, self._backend.inner)
        used, inverse = np.unique(raw, return_inverse=True)
        remapped = np.ascontiguousarray(inverse.reshape(raw.shape), np.int32)
        arena = self._arena(cut.weight, int(weight.ne[2]), int(weight.nb[2]))
        slots = arena.slots(0, len(used))
        for slot, expert in enumerate(used):
            source = weight.data + int(expert) * arena.slot_bytes
            self._copy(cut.weight, slots, slot * arena.slot_bytes, source, arena.slot_bytes)
        self.counters.streamed_experts += len(used)
        ids = self._upload_ids(cut.ids, remapped)
        return self._run_patched(cut_list, cut, slots, ids)

    def _arena(self, weight: int, n_slots: int, slot_bytes: int) -> Arena:
        view = tensor.at(weight)
        key = (view.type, int(view.ne[0]), int(view.ne[1]), slot_bytes)
        arena = self._arenas.get(key)
        if arena is None or arena.n_slots < n_slots:
            if arena is not None:
                arena.close()
            arena = self._arenas[key] = Arena(self._buft, weight, n_slots, slot_bytes)
        return arena

    def _copy(self, weight: int, target: Any, offset: int, source: int, size: int) -> None:
        if self._copier is not None:
            self._copier.copy(
                Transfer(target, offset, source, size, *self._described(weight)), None
            )
            self._copier.drain()
        else:
            self._lib.ggml_backend_tensor_set_async(
                self._backend.inner, tensor.address_of(target), source, offset, size
            )
            self._lib.ggml_backend_synchronize(self._backend.inner)
        self.counters.copies += 1
        self.counters.streamed_bytes += size

    def _described(self, weight: int) -> tuple[str, dict[str, int | str]]:
        """A copy's name and arguments, for the trace."""
        if not self._trace:
            return "", {}
        name = tensor.name_of(weight)
        return name, {"layer": layer_of(name), "reason": "needed", "graph": self.counters.graphs}

    def _upload_ids(self, ids: int, remapped: NDArray[np.int32]) -> Any:
        if self._ids_memory is None or self._ids_memory.size_bytes < remapped.nbytes:
            if self._ids_memory is not None:
                self._ids_memory.close()
            size_bytes = max(1 << 16, 2 * remapped.nbytes)
            self._ids_memory = DeviceMemory(self._buft, size_bytes, "expert ids")
        assert self._ids_memory.buffer is not None
        view = ids_like(ids, self._ids_memory.buffer, self._ids_memory.base)
        self._lib.ggml_backend_tensor_set(
            tensor.address_of(view), remapped.ctypes.data, 0, remapped.nbytes
        )
        return view

    def _run_patched(self, cut_list: CutList, cut: Cut, slots: Any, ids: Any) -> int:
        tensor.set_source(cut.node, 0, tensor.address_of(slots))
        if ids is not None:
            tensor.set_source(cut.node, 2, tensor.address_of(ids))
        try:
            status = self._run(cut_list, cut.index, cut.index + 1)
            # The slots are overwritten by the next cut: nothing may still be reading them.
            self._lib.ggml_backend_synchronize(self._backend.inner)
        finally:
            tensor.set_source(cut.node, 0, cut.weight)
            if ids is not None:
                tensor.set_source(cut.node, 2, cut.ids)
        return status
