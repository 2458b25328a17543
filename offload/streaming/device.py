"""The wrapped device through which weights are streamed.

`llama_decode` runs on our thread; during it the library calls `StreamingDevice._graph_compute`,
once per part of the model that the device computes, also on this thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.device import DeviceChoice
from offload.ggml import tensor
from offload.ggml.graph import Cut, CutList, Cuts
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import op_number
from offload.ggml.mla_rewrite import MlaSwitch
from offload.ggml.pydevice import FAILED, Backend, PyDevice
from offload.mla.decision import Crossover
from offload.plan.min_batch import MinBatch
from offload.plan.placement import ArenaPlan, Shape
from offload.streaming.counters import StreamCounters
from offload.streaming.serial import SerialExecutor
from offload.trace import CPU, NO_TRACE, Trace

WRAPPED_NAME = "SPEC0"


class Executor(Protocol):
    """Computes graphs that have cuts, on one stream of the device."""

    counters: StreamCounters

    def compute(self, cut_list: CutList) -> int: ...

    def close(self) -> None: ...


MakeExecutor = Callable[[Backend], Executor]


class StreamingDevice(PyDevice):
    """A real device that also takes products with weights that lie in our host memory."""

    def __init__(
        self,
        choice: DeviceChoice,
        host: HostBufferType,
        min_batch: MinBatch,
        pending: Pending,
        *,
        arenas: Sequence[ArenaPlan] = (),
        make_executor: MakeExecutor | None = None,
        vram_bytes: int | None = None,
        trace: Trace = NO_TRACE,
        mla_crossover: Crossover = "heads",
    ) -> None:
        """`arenas` limit what the device takes; without them there is always room for a slot.

        `vram_bytes` is what the device says it has, the real device's own when None.
        """
        super().__init__(choice.address, WRAPPED_NAME, pending)
        self.choice, self.host, self.min_batch = choice, host, min_batch
        self.declined: Counter[str] = Counter()  # why products went to the CPU
        self._arenas = {arena.shape: arena for arena in arenas}
        self._make_executor = make_executor
        self._vram_bytes = vram_bytes
        self._shapes: dict[int, Shape] = {}
        self.trace = trace
        self._cpu_since_s: float | None = None  # inside a decode: since when the CPU computes
        self._mul_mat, self._mul_mat_id = op_number("MUL_MAT"), op_number("MUL_MAT_ID")
        self.cuts = Cuts(self._cut_at)
        self.mla = MlaSwitch(self.inner_buft, super()._supports_op, self.host.holds, mla_crossover)
        self.n_graphs = 0
        self.executors: dict[int, Executor] = {}

    def make_executor(self, backend: Backend) -> Executor:
        """The executor of one backend: the plan's, else the serial one."""
        if self._make_executor is not None:
            return self._make_executor(backend)
        return SerialExecutor(self.inner_buft, backend)

    def _memory(self) -> tuple[int, int]:
        if self._vram_bytes is None:
            return super()._memory()
        return self._vram_bytes, self._vram_bytes

    def _opened(self, backend: Backend) -> None:
        self.executors[backend.address] = self.make_executor(backend)

    def _closed(self, backend: Backend) -> None:
        self.executors.pop(backend.address).close()

    def _supports_buft(self, buft: int) -> bool:
        return buft == self.host.address or super()._supports_buft(buft)

    def _supports_op(self, node: int) -> bool:
        op = tensor.op_of(node)
        if op in (self._mul_mat, self._mul_mat_id) and self.host.holds(tensor.source(node, 0)):
            return self._takes(node, experts=op == self._mul_mat_id)
        return super()._supports_op(node)

    def _takes(self, node: int, *, experts: bool) -> bool:
        """True if a product with a streamed weight runs here; what stands against it is counted."""
        view, weight = tensor.at(node), tensor.source(node, 0)
        n_tokens = view.ne[2] if experts else view.ne[1]
        if n_tokens < (self.min_batch.experts if experts else self.min_batch.dense):
            return False
        if self._arenas:
            if tensor.at(weight).view_src or self._shape(weight, experts) not in self._arenas:
                name = tensor.name_of(weight)
                self.declined[f"{name}: the graph reads it in a layout that has no slots"] += 1
                return False
            if experts and not self._has_room(node):
                return False
        if not super()._supports_op(node):
            kind = self._lib.ggml_type_name(tensor.at(weight).type).decode()
            self.declined[f"{self.choice.name} cannot multiply {kind} weights"] += 1
            return False
        return True

    def _has_room(self, node: int) -> bool:
        """True if all experts that the node may use fit the slots at once."""
        weight, ids = tensor.source(node, 0), tensor.at(tensor.source(node, 2))
        arena = self._arenas[self._shape(weight, True)]
        wanted = min(arena.n_experts, int(ids.ne[0]) * int(ids.ne[1]))
        if wanted <= arena.n_slots:
            return True
        self.declined[
            f"{ids.ne[1]} tokens may use {wanted} experts, and --vram leaves {arena.n_slots} slots"
        ] += 1
        return False

    def _shape(self, weight: int, experts: bool) -> Shape:
        shape = self._shapes.get(weight)
        if shape is None:
            view = tensor.at(weight)
            kind = self._lib.ggml_type_name(view.type).decode()
            matrices = 0 if experts else int(view.ne[2])
            shape = self._shapes[weight] = kind, int(view.ne[0]), int(view.ne[1]), matrices
        return shape

    def _cut_at(self, index: int, node: int) -> Cut | None:
        op = tensor.op_of(node)
        if op != self._mul_mat and op != self._mul_mat_id:
            return None
        weight = tensor.source(node, 0)
        if not self.host.holds(weight):
            return None
        if op == self._mul_mat_id:
            return Cut(index, node, "experts", weight, tensor.source(node, 2))
        return Cut(index, node, "dense", weight, 0)

    def _graph_compute(self, backend: Backend, graph: int) -> int:
        self.n_graphs += 1
        if self.trace and self._cpu_since_s is not None:
            self.trace.add(CPU, "CPU part of the graph", self._cpu_since_s, time.perf_counter())
        try:
            return self._compute(backend, graph)
        finally:
            self._cpu_since_s = time.perf_counter()

    def decoding(self, active: bool) -> None:
        """A decode begins or has ended: between our graphs, libllama computes on the CPU."""
        if not active and self.trace and self._cpu_since_s is not None:
            self.trace.add(CPU, "CPU part of the graph", self._cpu_since_s, time.perf_counter())
        self._cpu_since_s = time.perf_counter() if active else None

    def _compute(self, backend: Backend, graph: int) -> int:
        if self.pending.first is not None:
            return FAILED  # a callback failed while this decode's graph was built
        graph = self.mla.apply(graph, backend.inner)
        cut_list = self.cuts.of(graph)
        if not cut_list.cuts:
            return super()._graph_compute(backend, graph)
        return self.executors[backend.address].compute(cut_list)
