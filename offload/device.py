"""Which device computes, and the wrapped device through which weights are streamed.

`llama_decode` runs on our thread; during it the library calls `StreamingDevice._graph_compute`,
once per part of the model that the device computes, also on this thread.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offload.errors import DeviceUnavailable
from offload.ggml import tensor
from offload.ggml.graph import Cut, CutList, Cuts
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library, op_number
from offload.ggml.mla_rewrite import MlaSwitch
from offload.ggml.pydevice import FAILED, Backend, PyDevice
from offload.mla.decision import Crossover
from offload.plan.placement import ArenaPlan, Shape
from offload.plan.sim import parse_sim
from offload.streaming.counters import StreamCounters
from offload.streaming.serial import SerialStream
from offload.trace import CPU, NO_TRACE, Trace

_CPU = abi.GGML_BACKEND_DEVICE_TYPE_CPU
_GPU = abi.GGML_BACKEND_DEVICE_TYPE_GPU
_IGPU = abi.GGML_BACKEND_DEVICE_TYPE_IGPU
WRAPPED_NAME = "SPEC0"


@dataclass(frozen=True)
class DeviceChoice:
    """The device a model is opened on, and why.

    `address` is the real device; `wrapped` says whether our own stands before it.
    """

    name: str
    description: str
    address: int
    wrapped: bool
    on_gpu: bool
    reason: str

    @property
    def is_sim(self) -> bool:
        return self.wrapped and not self.on_gpu


def devices() -> list[DeviceChoice]:
    """Every device ggml knows, as it would be chosen by name."""
    lib = library()
    found = []
    for i in range(lib.ggml_backend_dev_count()):
        address = lib.ggml_backend_dev_get(i)
        kind = lib.ggml_backend_dev_type(address)
        if kind in (_CPU, _GPU, _IGPU):
            name = lib.ggml_backend_dev_name(address).decode()
            description = lib.ggml_backend_dev_description(address).decode()
            on_gpu = kind != _CPU
            found.append(DeviceChoice(name, description, address, on_gpu, on_gpu, "asked for"))
    return found


def has_gpu() -> bool:
    """True if ggml knows a GPU here."""
    return any(device.on_gpu for device in devices())


def choose_device(wanted: str) -> DeviceChoice:
    """The device for `--device auto|NAME|cpu|sim`.

    `auto` takes the first real GPU, wrapped, else the plain CPU; `cpu` is libllama untouched;
    `sim` wraps the CPU device as if it were a GPU, `sim:...` with limits (offload/plan/sim.py).
    """
    known = devices()
    cpu = next(d for d in known if not d.on_gpu)
    gpus = [d for d in known if d.on_gpu]
    lowered = wanted.lower()
    if lowered == "cpu" or (lowered == "auto" and not gpus):
        reason = "asked for" if lowered == "cpu" else "ggml knows no GPU here"
        return DeviceChoice("cpu", cpu.description, cpu.address, False, False, reason)
    if lowered == "auto":
        best = gpus[0]
        reason = "the first GPU that ggml knows"
        return DeviceChoice(best.name, best.description, best.address, True, True, reason)
    if lowered == "sim" or lowered.startswith("sim:"):
        parse_sim(wanted)
        reason = "asked for: the CPU device posing as a GPU"
        return DeviceChoice(wanted, cpu.description, cpu.address, True, False, reason)
    for device in gpus:
        if device.name.lower() == lowered:
            return device
    names = ["auto", "cpu", "sim", *(d.name for d in gpus)]
    close = difflib.get_close_matches(wanted, names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise DeviceUnavailable(f"--device {wanted}: this machine has {', '.join(names)}{hint}")


@dataclass(frozen=True)
class MinBatch:
    """From how many tokens on a streamed weight's product runs on the device (D03, D04).

    Below it the CPU computes the product in place, at native speed.
    """

    experts: int = 32
    dense: int = 32


class Stream(Protocol):
    """Computes graphs that have cuts."""

    counters: StreamCounters

    def compute(self, cut_list: CutList) -> int: ...

    def close(self) -> None: ...


MakeStream = Callable[[Backend], Stream]


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
        make_stream: MakeStream | None = None,
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
        self._make_stream = make_stream
        self._vram_bytes = vram_bytes
        self._shapes: dict[int, Shape] = {}
        self.trace = trace
        self._cpu_since_s: float | None = None  # inside a decode: since when the CPU computes
        self._mul_mat, self._mul_mat_id = op_number("MUL_MAT"), op_number("MUL_MAT_ID")
        self.cuts = Cuts(self._cut_at)
        self.mla = MlaSwitch(self.inner_buft, super()._supports_op, self.host.holds, mla_crossover)
        self.n_graphs = 0
        self.streams: dict[int, Stream] = {}

    def make_stream(self, backend: Backend) -> Stream:
        """The stream that serves one backend: what the plan asks for, else the serial one."""
        if self._make_stream is not None:
            return self._make_stream(backend)
        return SerialStream(self.inner_buft, backend)

    def _memory(self) -> tuple[int, int]:
        if self._vram_bytes is None:
            return super()._memory()
        return self._vram_bytes, self._vram_bytes

    def _opened(self, backend: Backend) -> None:
        self.streams[backend.address] = self.make_stream(backend)

    def _closed(self, backend: Backend) -> None:
        self.streams.pop(backend.address).close()

    def _supports_buft(self, buft: int) -> bool:
        return buft == self.host.address or super()._supports_buft(buft)

    def _supports_op(self, node: int) -> bool:
        op = tensor.op_of(node)
        if op in (self._mul_mat, self._mul_mat_id) and self.host.holds(tensor.source(node, 0)):
            return self._takes(node, experts=op == self._mul_mat_id)
        return super()._supports_op(node)

    def _takes(self, node: int, *, experts: bool) -> bool:
        """Whether a product with a streamed weight runs here; what stands against it is counted."""
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
        """Whether all experts that the node may use fit the slots at once."""
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
        return self.streams[backend.address].compute(cut_list)
