"""Handles of ggml's devices, their streams (which ggml calls backends) and events."""

from __future__ import annotations

import ctypes as C
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.backends import Backend, backend_of
from offload.errors import DeviceFailed
from offload.ggml.graph import Graph
from offload.ggml.library import abi
from offload.ggml.library.interrupt import requested
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange, copy_bytes, pieces_of
from offload.ggml.tensor import Buffer, Tensor

_PADDING_BYTES = 4096  # more than 512 elements of any quantised type
_KINDS = {
    abi.GGML_BACKEND_DEVICE_TYPE_CPU: "cpu",
    abi.GGML_BACKEND_DEVICE_TYPE_GPU: "gpu",
    abi.GGML_BACKEND_DEVICE_TYPE_IGPU: "gpu",
}


class Device:
    """A device that ggml knows. Devices with the same address are equal."""

    def __init__(self, address: int) -> None:
        self._lib = library()
        self.address = address
        self.buffer_type: int = self._lib.ggml_backend_dev_buffer_type(address)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and other.address == self.address

    def __hash__(self) -> int:
        return hash(self.address)

    def __repr__(self) -> str:
        return f"Device({self.name})"

    @property
    def name(self) -> str:
        name: bytes = self._lib.ggml_backend_dev_name(self.address)
        return name.decode()

    @property
    def description(self) -> str:
        text: bytes = self._lib.ggml_backend_dev_description(self.address)
        return text.decode()

    @property
    def kind(self) -> str:
        """`cpu`, `gpu`, or `other` for accelerators that assist the CPU."""
        return _KINDS.get(self._lib.ggml_backend_dev_type(self.address), "other")

    @property
    def is_integrated(self) -> bool:
        """True for a GPU that shares the RAM with the CPU, as far as its backend tells."""
        kind: int = self._lib.ggml_backend_dev_type(self.address)
        return kind == abi.GGML_BACKEND_DEVICE_TYPE_IGPU

    def memory_bytes(self) -> tuple[int, int]:
        """Return the free and the total bytes of device memory."""
        free, total = C.c_size_t(), C.c_size_t()
        self._lib.ggml_backend_dev_memory(self.address, C.byref(free), C.byref(total))
        return free.value, total.value

    @property
    def has_async_and_events(self) -> bool:
        """True if copies can run on a second stream, ordered by events."""
        props = self._props()
        return bool(props.caps.async_ and props.caps.events)

    @property
    def pci_address(self) -> str | None:
        """The device's PCI address, e.g. 0000:01:00.0, or None if its backend tells none."""
        address = self._props().device_id
        return C.string_at(address).decode() if address else None

    def _props(self) -> abi.ggml_backend_dev_props:
        props = abi.ggml_backend_dev_props()
        self._lib.ggml_backend_dev_get_props(self.address, C.addressof(props))
        return props

    @cached_property
    def backend(self) -> Backend:
        """The device's row in the table of backends. Passes ask for it at each launch."""
        return backend_of(self.name)

    def supports(self, node: Tensor) -> bool:
        """True if the device can compute the node."""
        return bool(self._lib.ggml_backend_dev_supports_op(self.address, node.address))

    def supports_memory(self, buffer_type: int) -> bool:
        """True if the device can compute with tensors in memory of this buffer type (address)."""
        return bool(self._lib.ggml_backend_dev_supports_buft(self.address, buffer_type))

    def open(self) -> Stream:
        """Open a new stream; the caller closes it."""
        return Stream(self._lib.ggml_backend_dev_init(self.address, None), self)

    def allocate(self, size_bytes: int, what: str) -> Buffer:
        """Allocate zeroed device memory, padded for kernels that read past a row's end.

        `what` says in errors what the memory is for. Raises DoesNotFit.
        """
        return Buffer(self.buffer_type, size_bytes + _PADDING_BYTES, what)

    def pinned_memory(self, size_bytes: int) -> Buffer | None:
        """Allocate pinned host memory; returns None if the device offers none."""
        kind = self._lib.ggml_backend_dev_host_buffer_type(self.address)
        if not kind:
            return None
        made = Buffer(kind, size_bytes, "a ring of pinned memory")
        if made.kind == kind:
            return made
        made.close()  # CUDA's backend returns pageable memory if it cannot pin more
        return None

    def event(self) -> StreamEvent:
        """Make an event; the caller closes it. Raises DeviceFailed."""
        made = self._lib.ggml_backend_event_new(self.address)
        if not made:
            raise DeviceFailed("the device refused to make another event")
        return StreamEvent(made)


def all_devices() -> list[Device]:
    """Every device of the installed library, in its order."""
    lib = library()
    return [Device(lib.ggml_backend_dev_get(i)) for i in range(lib.ggml_backend_dev_count())]


class StreamEvent:
    """A point in a stream that another stream or the host can wait for."""

    __slots__ = ("_lib", "address")

    def __init__(self, address: int) -> None:
        self._lib, self.address = library(), address

    def synchronize(self) -> None:
        """Return when the event has passed."""
        self._lib.ggml_backend_event_synchronize(self.address)

    def close(self) -> None:
        self._lib.ggml_backend_event_free(self.address)


class RouterIds:
    """Host copy of a router's choice: `values` [n_tokens, n_used] are expert numbers."""

    def __init__(self, ids: Tensor, n_experts: int) -> None:
        self.tensor, self.n_experts = ids, n_experts
        n_used, n_tokens, _, _ = ids.shape
        stride = ids.strides[1] // 4
        # The last layer has no tokens if no logits are wanted.
        self.size_bytes = ((n_tokens - 1) * stride + n_used) * 4 if n_tokens else 0
        self._shape = n_tokens, stride
        self.is_pinned = False
        self.needed_bytes = 4 * n_tokens * stride
        self.lie_in(np.zeros(self.needed_bytes, np.uint8))

    def lie_in(self, memory: NDArray[np.uint8], *, is_pinned: bool = False) -> None:
        """Keep the values in `memory`, which has `needed_bytes` bytes. Earlier values are lost."""
        self.is_pinned = is_pinned
        raw = memory.view(np.int32).reshape(self._shape)
        self.position: int = raw.ctypes.data
        self.values = raw[:, : self.tensor.shape[0]]
        self._unsigned = self.values.view(np.uint32)  # negative ids become large numbers

    def check(self) -> None:
        """Raise DeviceFailed for a number without an expert: kernels would read past the weight."""
        if self._unsigned.size and self._unsigned.max() >= self.n_experts:
            wrong = self.values[self._unsigned >= self.n_experts][0]
            raise wrong_id(self.tensor.name, int(wrong), self.n_experts)


def wrong_id(name: str, expert: int, n_experts: int) -> DeviceFailed:
    """Return the error for a router that chose an expert which its layer does not have, or that
    chose one more than once for a token."""
    often = " more than once for a token" if 0 <= expert < n_experts else ""
    return DeviceFailed(
        f"{name}: the router chose expert {expert} of {n_experts}{often}; the device computed "
        "wrong numbers: ask again, and check the device if it recurs"
    )


class SlotIds:
    """Slot numbers for kernels: host `values` [n_tokens, n_used], and a tensor for a copy."""

    def __init__(
        self, like: Tensor, buffer: Buffer, offset_bytes: int, memory: NDArray[np.uint8] | None
    ) -> None:
        """Make the tensor, contiguous and shaped like the router's ids `like`, in a buffer.

        `memory` is host memory with 4 bytes for each value; None allocates it.
        """
        n_used, n_tokens, _, _ = like.shape
        row = 4 * n_used
        strides = 4, row, row * n_tokens, row * n_tokens
        self.tensor = like.alike(strides=strides, at=(buffer, offset_bytes))
        if memory is None:
            memory = np.zeros(row * n_tokens, np.uint8)
        self.values = memory.view(np.int32).reshape(n_tokens, n_used)
        self.position: int = self.values.ctypes.data
        self.size_bytes = self.values.nbytes


class Stream:
    """An in-order queue of copies and computations on a device."""

    def __init__(self, address: int, device: Device) -> None:
        """Takes ownership of the backend at `address`."""
        self._lib = library()
        self.address, self.device = address, device
        self._set = self._lib.ggml_backend_tensor_set_async
        self._get = self._lib.ggml_backend_tensor_get_async
        self._compute = self._lib.ggml_backend_graph_compute_async
        self._synchronize = self._lib.ggml_backend_synchronize

    def __repr__(self) -> str:
        return f"Stream({self.device.name})" if self.address else "Stream(closed)"

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            self._lib.ggml_backend_free(address)

    def compute(self, graph: Graph) -> int:
        """Enqueue a graph; returns a ggml_status. Its tensors must live until it is complete.

        Enqueues nothing, and returns GGML_STATUS_ABORTED, if a signal has asked to end the decode.
        """
        if requested():
            return int(abi.GGML_STATUS_ABORTED)
        return int(self._compute(self.address, graph.address))

    def hold(self, lock: AbstractContextManager[object]) -> None:
        """Take `lock` from now on whenever a graph is enqueued."""
        compute = self._compute

        def locked(*arguments: int) -> int:
            with lock:
                return int(compute(*arguments))

        self._compute = locked

    def synchronize(self) -> None:
        """Return when everything enqueued is complete."""
        self._synchronize(self.address)

    def copy(
        self, target: Tensor, offset_bytes: int, source: Tensor, source_bytes: int, size_bytes: int
    ) -> None:
        """Enqueue a copy of `size_bytes` bytes from `source`, a tensor in host memory, to `target`.

        The copy begins at `source_bytes` in `source` and at `offset_bytes` in `target`.
        """
        at = source.position + source_bytes
        for start, n in pieces_of(at, size_bytes):
            self._set(self.address, target.address, at + start, offset_bytes + start, n)

    def send(self, target: Tensor, offset_bytes: int, values: NDArray[Any]) -> None:
        """Enqueue a copy of contiguous `values`. They must not change until it is done."""
        at = values.ctypes.data
        self._set(self.address, target.address, at, offset_bytes, values.nbytes)

    def fetch(self, source: Tensor, memory: HostRange) -> None:
        """Enqueue a copy of the first bytes of `source` to host memory, as many as fit."""
        self._get(self.address, source.address, memory.address, 0, memory.size_bytes)

    def put(self, target: Tensor, memory: HostRange) -> None:
        """Enqueue a copy of host memory to `target`. It must not change until it is done."""
        self._set(self.address, target.address, memory.address, 0, memory.size_bytes)

    def upload(self, values: SlotIds | RouterIds) -> None:
        """Enqueue a copy of the values to their tensor. They must not change until it is done."""
        self._set(self.address, values.tensor.address, values.position, 0, values.size_bytes)

    def read(self, ids: RouterIds) -> NDArray[np.int32]:
        """Wait for all enqueued work. Returns a router's choice [n_tokens, n_used].

        The next call overwrites the array. Raises DeviceFailed for a number that is no expert.
        """
        self._get(self.address, ids.tensor.address, ids.position, 0, ids.size_bytes)
        self._synchronize(self.address)
        ids.check()
        return ids.values

    def record(self, event: StreamEvent) -> None:
        """Let the event pass when everything enqueued so far is complete."""
        self._lib.ggml_backend_event_record(event.address, self.address)

    def wait(self, event: StreamEvent) -> None:
        """Make everything that is enqueued from now on wait for the event."""
        self._lib.ggml_backend_event_wait(self.address, event.address)


def fill_from(memory: HostRange, source: Tensor, source_bytes: int, size_bytes: int) -> None:
    """Copy `size_bytes` from byte `source_bytes` of a host tensor to `memory`. Releases the GIL."""
    copy_bytes(memory.address, source.position + source_bytes, size_bytes)


def copy_now(
    target: Tensor, offset_bytes: int, source: Tensor, source_bytes: int, size_bytes: int
) -> None:
    """Copy from host memory in the calling thread, without any order to the work of streams."""
    at = source.position + source_bytes
    for start, n in pieces_of(at, size_bytes):
        library().ggml_backend_tensor_set(target.address, at + start, offset_bytes + start, n)
