"""Computes the last device's part of a prompt's ubatch on a thread, while libllama goes on.

libllama computes one ubatch after the other, and hands each device its graph in turn. Before it
copies the inputs of a device's next graph, it waits for that device. So the other devices compute
their parts of the next ubatch while the thread computes the last device's part of this one. The
last ubatch of a decode is computed on the caller's thread.

libllama's next call on the stream waits for the thread. `get_tensor_async` does not wait: the
thread reads the result after the computation. Our own code uses the stream only between two
decodes, and each decode ends with a wait (Context.decode).
"""

from __future__ import annotations

import ctypes as C
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml.graph import GRAPH, Graph, node_array
from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.ggml.pydevice import FAILED, WrappedStream
from offload.ggml.tensor import (
    TENSOR,
    buffer_at,
    op_at,
    pointers_of,
    read_by,
    root_at,
    structs_at,
)

# Entries of a stream's vtable that use its memory or depend on its progress, so they must wait.
_WAITING = (
    "set_tensor_async", "set_tensor_2d_async", "get_tensor_2d_async", "cpy_tensor_async",
    "event_record", "event_wait",
)  # fmt: skip
_FAILURES = {"cpy_tensor_async": False}
_SIZE_BYTES = C.sizeof(TENSOR)
_IGNORED_BITS = 4  # lowest bits of an address that ggml's hash function ignores
_COMPUTE = 2  # enum ggml_backend_buffer_usage: memory for the results of graphs


class Deferred:
    """Runs computations of one stream, which libllama has opened, on a thread."""

    def __init__(
        self, stream: WrappedStream, pending: Pending, waited: Callable[[float, float], None]
    ) -> None:
        """`pending` keeps the exceptions of the thread.

        `waited` is called after each wait for the thread, with the wait's start and end in seconds
        of `time.perf_counter`.
        """
        self._stream, self._pending, self._waited = stream, pending, waited
        self._newest: Future[None] | None = None  # newest task; None after a wait
        self._status = 0
        # Held while a graph is being submitted. libllama lets CUDA's backend optimize the next
        # graph at that time.
        self._submitting = threading.Lock()
        self._keep: list[Any] = []
        iface = stream.struct.iface
        fields = ["synchronize", "get_tensor_async"]
        fields += [name for name in _WAITING if getattr(iface, name)]
        if iface.graph_optimize:
            fields.append("graph_optimize")
            stream.inner.hold(self._submitting)
        self._own = {name: getattr(iface, name) for name in fields}
        self._entries = {name: self._entry(name) for name in self._own}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="last device")
        # The thread starts here. A decode may bind its caller to a processor, and a thread that
        # starts then would be bound too.
        self._thread.submit(int).result()

    def _entry(self, name: str) -> int:
        """Return the address of a function to use instead of the stream's own entry.

        The function waits for the thread and then calls the own entry. There are two exceptions: a
        read is queued, and `graph_optimize` waits only while a graph is being submitted.
        """
        prototype = abi.PROTOTYPES[f"ggml_backend_i.{name}"]
        native: Any = prototype(self._own[name]) if self._own[name] else None

        def call(*arguments: Any) -> Any:
            if name == "get_tensor_async":
                return self._read(native, *arguments)
            if name == "graph_optimize":
                with self._submitting:
                    return native(*arguments)
            self.finish()
            return None if native is None else native(*arguments)

        thunk, address = guard(prototype, self._pending, _FAILURES.get(name), call)
        self._keep.append(thunk)
        return address

    def _read(self, native: Any, stream: int, tensor: int, data: int, *span: int) -> None:
        """Queue the read of a result. Copies the tensor, which libllama may overwrite meanwhile."""
        copy = TENSOR.from_buffer_copy(TENSOR.from_address(tensor))
        copy.view_src = None

        def read() -> int:
            if native is None:
                library().ggml_backend_tensor_get(C.addressof(copy), data, *span)
            else:
                native(stream, C.addressof(copy), data, *span)
            return 0

        self._submit(read)

    @property
    def is_busy(self) -> bool:
        """True while the thread has work."""
        return self._newest is not None and not self._newest.done()

    def start(self, compute: Callable[[], int]) -> None:
        """Run `compute`, which returns a ggml_status, on the thread. Call `take_status` first."""
        self._use(self._entries)
        self._submit(compute)

    def _submit(self, work: Callable[[], int]) -> None:
        self._newest = self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], int]) -> None:
        try:
            status = work()
        except BaseException as e:  # raised later, in the thread that decodes
            self._pending.keep(e)
            status = FAILED
        self._status = self._status or status

    def finish(self) -> None:
        """Wait until the thread has no work, and let libllama use the stream's own entries."""
        if self._newest is None:
            return
        start_s = time.perf_counter()
        while self._newest is not None:
            try:
                self._newest.result()
            except BaseException as e:  # a signal's handler raised it in this thread
                self._pending.keep(e)
            else:
                self._newest = None
        self._use(self._own)
        self._waited(start_s, time.perf_counter())

    def take_status(self) -> int:
        """Wait for the thread. Return its first failed ggml_status or 0, and reset it to 0."""
        self.finish()
        status, self._status = self._status, 0
        return status

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()

    def _use(self, entries: dict[str, int]) -> None:
        for name, address in entries.items():
            setattr(self._stream.struct.iface, name, address)


def detached(graph: Graph) -> Graph:
    """Return a copy of the graph and of all its tensors that ggml overwrites for the next graph.

    The tensors' data stay where they are. The copy has the graph's use counts, so that backends
    fuse the same nodes. It is valid as long as the buffers of its tensors are.
    """
    nodes = np.array(graph.addresses(), np.uint64)
    known = _overwritten(nodes)
    n = len(known)
    copies = structs_at(known)
    first = copies.ctypes.data
    assert first % (1 << _IGNORED_BITS) == 0, "malloc aligns to 16 bytes"
    addresses = np.uint64(first) + np.arange(n, dtype=np.uint64) * np.uint64(_SIZE_BYTES)

    def moved(pointers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        at = np.minimum(np.searchsorted(known, pointers), n - 1)
        return np.where(known[at] == pointers, addresses[at], pointers)

    pointers = pointers_of(copies)
    pointers[:] = moved(pointers)
    array = node_array(moved(nodes).tolist())
    # In a hash table of this size, each tensor has a place of its own.
    n_places = n * (_SIZE_BYTES >> _IGNORED_BITS)
    at = (addresses >> np.uint64(_IGNORED_BITS)) % np.uint64(n_places)
    use_counts = graph.use_counts(known)
    is_counted = use_counts >= 0
    at = at[is_counted]
    keys, counts = np.zeros(n_places, np.uint64), np.zeros(n_places, np.int32)
    keys[at], counts[at] = addresses[is_counted], use_counts[is_counted]
    used = np.packbits(keys != 0, bitorder="little")
    used = np.pad(used, (0, -len(used) % 4))

    struct = GRAPH.from_buffer_copy(GRAPH.from_address(graph.address))
    struct.size = struct.n_leafs = 0
    struct.grads = struct.grad_accs = struct.leafs = None
    struct.nodes, struct.use_counts = C.addressof(array), counts.ctypes.data
    table = struct.visited_hash_set
    table.size, table.used, table.keys = n_places, used.ctypes.data, keys.ctypes.data
    return Graph.own(struct, (copies, array, keys, counts, used))


def _overwritten(nodes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the sorted addresses of all tensors that `nodes` reach, except the model's own.

    Weights and the KV cache are the model's own tensors. They have no operation, are no views, and
    lie in buffers that are not for computing.
    """
    usage = library().ggml_backend_buffer_get_usage

    def is_own(address: int) -> bool:
        if op_at(address) or root_at(address) != address:
            return False
        buffer = buffer_at(address)
        return bool(buffer) and usage(buffer) != _COMPUTE

    known = new = np.unique(nodes)
    while len(new):
        addresses = np.setdiff1d(read_by(structs_at(new)), known, assume_unique=True)
        new = np.array([at for at in addresses.tolist() if not is_own(at)], np.uint64)
        known = np.union1d(known, new)
    return known
