"""Computes the last device's part of a prompt's ubatch on a thread, so that libllama goes on.

libllama hands one ubatch after the other to the devices, and each device's graph in turn. It waits
for a device when it copies the input of the device's next graph. So while the last device computes
its part of one ubatch on the thread, the first devices compute theirs of the next one. A prompt's
last ubatch is computed on the caller's thread.

libllama's next use of the stream waits for the thread, except that the thread itself reads results
that libllama asks for. Our own code uses the stream only between two decodes, and each decode ends
with a wait (Context.decode).
"""

from __future__ import annotations

import ctypes as C
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.ggml.pydevice import FAILED, WrappedStream
from offload.ggml.tensor import TENSOR

# Entries of a stream that read or write its memory, or depend on its progress.
_WAITING = (
    "set_tensor_async", "set_tensor_2d_async", "get_tensor_2d_async", "cpy_tensor_async",
    "event_record", "event_wait",
)  # fmt: skip
_FAILURES = {"cpy_tensor_async": False}


class Deferred:
    """The thread of one stream that libllama has opened."""

    def __init__(
        self, stream: WrappedStream, pending: Pending, waited: Callable[[float, float], None]
    ) -> None:
        """`pending` gets the exceptions of the thread.

        `waited` is called with the clock times between which libllama has waited for the thread.
        """
        self._stream, self._pending, self._waited = stream, pending, waited
        self._newest: Future[None] | None = None  # the thread's newest task that is not waited for
        self._status = 0
        # libllama lets CUDA's backend look at the next graph while this one is being submitted.
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
        """Return the address of an entry that waits, then does what the stream's own does."""
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
        """Read a result on the thread. libllama may overwrite the tensor, but not its data."""
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
        """True if the thread computes."""
        return self._newest is not None and not self._newest.done()

    def start(self, compute: Callable[[], int]) -> None:
        """Call `compute` on the thread. It returns a ggml_status. Call `take_status` before."""
        self._use(self._entries)
        self._submit(compute)

    def _submit(self, work: Callable[[], int]) -> None:
        self._newest = self._thread.submit(self._run, work)

    def _run(self, work: Callable[[], int]) -> None:
        try:
            status = work()
        except BaseException as e:  # libllama's thread raises it
            self._pending.keep(e)
            status = FAILED
        self._status = self._status or status

    def finish(self) -> None:
        """Wait until the thread has nothing to do."""
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
        """Wait for the thread. Return the ggml_status of what it computed, and forget it."""
        self.finish()
        status, self._status = self._status, 0
        return status

    def close(self) -> None:
        self.finish()
        self._thread.shutdown()

    def _use(self, entries: dict[str, int]) -> None:
        for name, address in entries.items():
            setattr(self._stream.struct.iface, name, address)
