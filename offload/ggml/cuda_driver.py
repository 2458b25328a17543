"""Calls of CUDA's driver, with which a stream and the host wait for each other without a
synchronisation.

ggml's interface has neither streams nor waits for a value. Its events hold CUDA's own. The calls
are those of https://docs.nvidia.com/cuda/archive/13.0.0/cuda-driver-api/group__CUDA__MEMOP.html.
"""

from __future__ import annotations

import contextlib
import ctypes as C
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

from offload.backends import number_of
from offload.errors import DeviceFailed
from offload.ggml.backend import Device
from offload.ggml.library import abi

_SHARED_BYTES = 97  # CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
_LEAST_SHARED_BYTES = 48 << 10  # of a block, on every card
_TOKEN_BYTES = 4  # shared memory for each token of a product with ids (ggml-cuda/mmid.cu)
_NON_BLOCKING = 1
_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_TRIAL_S = 2.0  # longest wait in each step of a trial
_LOOK_S = 1e-4
_CALLS = {
    "cuDeviceGet": [C.c_void_p, C.c_int],
    "cuDeviceGetAttribute": [C.c_void_p, C.c_int, C.c_int],
    "cuDevicePrimaryCtxRetain": [C.c_void_p, C.c_int],
    "cuDevicePrimaryCtxRelease_v2": [C.c_int],
    "cuCtxPushCurrent_v2": [C.c_void_p],
    "cuCtxPopCurrent_v2": [C.c_void_p],
    "cuStreamCreate": [C.c_void_p, C.c_uint],
    "cuStreamDestroy_v2": [C.c_void_p],
    "cuStreamSynchronize": [C.c_void_p],
    "cuStreamQuery": [C.c_void_p],
    "cuStreamWaitEvent": [C.c_void_p, C.c_void_p, C.c_uint],
    "cuEventRecord": [C.c_void_p, C.c_void_p],
    "cuStreamWriteValue32_v2": [C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint],
    "cuStreamWaitValue32_v2": [C.c_void_p, C.c_uint64, C.c_uint32, C.c_uint],
}


def is_cuda(device: Device) -> bool:
    """True if the device is one of CUDA's driver."""
    return device.backend.has_driver and number_of(device.name) is not None


def maps_pinned(device: Device) -> bool:
    """True if the device's kernels read pinned host memory over a link, by its host address.

    CUDA maps it into each device's address space (unified addressing). An integrated GPU has no
    link.
    """
    return is_cuda(device) and not device.is_integrated


class NoDriver(Exception):
    """There is no driver of CUDA, it lacks a call, or it refused one. The text says which."""


class StuckStream(Exception):
    """A stream waits for a word for ever, although the host has written it.

    Calls that wait for the whole device, such as freeing memory, would then never return.
    """


class Driver:
    """The driver's functions by name."""

    def __init__(self) -> None:
        """Raises NoDriver."""
        try:
            library = C.CDLL("libcuda.so.1")
            self._calls = {name: getattr(library, name) for name in _CALLS}
        except (OSError, AttributeError) as e:
            raise NoDriver(f"CUDA's driver lacks a call: {e}") from e
        for name, arguments in _CALLS.items():
            self._calls[name].argtypes, self._calls[name].restype = arguments, C.c_int

    def address(self, name: str) -> int:
        """Return the address of a function."""
        return C.cast(self._calls[name], C.c_void_p).value or 0

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises NoDriver if it refuses."""
        error = self._calls[name](*arguments)
        if error:
            raise NoDriver(f"{name} failed with error {error}")

    def is_over(self, stream: int) -> bool:
        """True if all work of a stream is complete. Raises NoDriver if it failed."""
        error = self._calls["cuStreamQuery"](stream)
        if error not in {0, _NOT_READY}:
            raise NoDriver(f"the work of a stream failed with error {error}")
        return not error

    @contextlib.contextmanager
    def on(self, device: Device) -> Iterator[None]:
        """Let the calls inside the context be for a device. Raises NoDriver."""
        number, context = C.c_int(), C.c_void_p()
        ordinal = number_of(device.name)
        if ordinal is None or not is_cuda(device):
            raise NoDriver(f"{device.name} is no device of CUDA's driver")
        self.call("cuDeviceGet", C.byref(number), ordinal)
        self.call("cuDevicePrimaryCtxRetain", C.byref(context), number)
        try:
            self.call("cuCtxPushCurrent_v2", context)
            try:
                yield
            finally:
                self.call("cuCtxPopCurrent_v2", C.byref(context))
        finally:
            self.call("cuDevicePrimaryCtxRelease_v2", number)  # ggml has retained it, too


@functools.cache
def driver() -> Driver:
    """Return the driver. Raises NoDriver."""
    return Driver()


def most_batch_tokens(device: Device) -> int | None:
    """Return the most tokens of a batch whose products with ids the device computes.

    ggml-cuda sorts a product's tokens by expert in the shared memory of a block, and aborts if they
    do not fit (`launch_mm_ids_helper` in ggml/src/ggml-cuda/mmid.cu). Without calls of the driver
    that the doorbell needs, the least of all cards is returned. None: the device is none of CUDA.
    """
    ordinal, number, shared_bytes = number_of(device.name), C.c_int(), C.c_int()
    if ordinal is None or not is_cuda(device):
        return None
    try:
        driver().call("cuDeviceGet", C.byref(number), ordinal)
        driver().call("cuDeviceGetAttribute", C.byref(shared_bytes), _SHARED_BYTES, number)
    except NoDriver:
        return _LEAST_SHARED_BYTES // _TOKEN_BYTES
    return (shared_bytes.value or _LEAST_SHARED_BYTES) // _TOKEN_BYTES


class DriverStream:
    """A stream of our own on a device, for calls that ggml's streams lack."""

    def __init__(self, device: Device) -> None:
        """Raises NoDriver."""
        self._driver, self.device = driver(), device
        made = C.c_void_p()
        with self._driver.on(device):
            self._driver.call("cuStreamCreate", C.byref(made), _NON_BLOCKING)
        self.address: int = made.value or 0

    def try_words(self, rung: C.c_uint32, answered: C.c_uint32) -> None:
        """Let the device write a word and wait for the host's, as in a layer with a doorbell.

        Both words lie in pinned memory. The host answers in any case, so that the device goes on.
        Raises NoDriver if a call is refused, or if a word is not seen within `_TRIAL_S`. Raises
        StuckStream if the device does not go on either.
        """
        call, rung_at, answered_at = self._driver.call, C.addressof(rung), C.addressof(answered)
        rung.value = answered.value = 0
        with self._driver.on(self.device):
            try:
                call("cuStreamWriteValue32_v2", self.address, rung_at, 1, 0)
                call("cuStreamWaitValue32_v2", self.address, answered_at, 1, 0)
                call("cuStreamWriteValue32_v2", self.address, rung_at, 2, 0)
                if not _soon(lambda: rung.value >= 1):
                    raise NoDriver("the host does not see a word that the device wrote")
                time.sleep(_LOOK_S)
                if rung.value > 1:
                    raise NoDriver("the device does not wait for the host's word")
                answered.value = 1
                if not _soon(lambda: rung.value > 1):
                    raise NoDriver("the device does not see a word that the host wrote")
            finally:
                answered.value = 1
                if not _soon(lambda: self._driver.is_over(self.address)):
                    raise StuckStream(
                        f"{self.device.name} waits for the host for ever, in a trial of words that "
                        "both write"
                    )
        rung.value = answered.value = 0

    def close(self) -> None:
        """Free the stream, on which nothing may wait for the host. Raises DeviceFailed."""
        address, self.address = self.address, 0
        if address:
            try:
                self._driver.call("cuStreamDestroy_v2", address)
            except NoDriver as e:
                raise DeviceFailed(f"{self.device.name}: {e}") from e


def _soon(is_true: Callable[[], bool]) -> bool:
    """Return True as soon as the condition is true, or False after `_TRIAL_S`."""
    until_s = time.monotonic() + _TRIAL_S
    while not is_true():
        if time.monotonic() > until_s:
            return False
        time.sleep(_LOOK_S)
    return True


def event_of(address: int) -> int:
    """Return the CUDA event that ggml's event at `address` holds."""
    return int(abi.ggml_backend_event.from_address(address).context)
