"""ggml's RPC: the devices of other machines, and the server that offers this machine's devices.

A client may have only the names of the weights that a worker holds (`RemoteWeights`). ggml's
scheduler gives products with such weights to the worker's device. ggml's RPC client then sends the
weights' names and shapes with the graph. It sends no address, because the memory is not its own
(`serialize_tensor` in ggml-rpc.cpp). The worker puts its own tensors in their place.
"""

from __future__ import annotations

import ctypes as C
import resource
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from offload.errors import DeviceFailed, DeviceUnavailable, LibraryMismatch
from offload.ggml.backend import Device
from offload.ggml.hostbuffer import HostBufferType, OnDemand
from offload.ggml.library import abi, log
from offload.ggml.library.callback import Pending
from offload.ggml.library.lib import library
from offload.ggml.memory import HasAddress, HostRange, ReservedAddresses

VERSION = (abi.RPC_PROTO_MAJOR_VERSION, abi.RPC_PROTO_MINOR_VERSION)
_LOOK_S = 0.01
_MOST_DEVICE_BYTES = 512 << 20  # growth of memory that objects for a worker's devices never need
REMEDY = (
    "run scripts/setup again, or install it by CMAKE_ARGS=-DGGML_RPC=on pip install "
    "--force-reinstall --no-cache-dir"
)


def check_built() -> None:
    """Raise LibraryMismatch, with the remedy, if the library is compiled without ggml's RPC."""
    _function("ggml_backend_rpc_add_server")


def _function(name: str) -> int:
    """Return the address of a function of the RPC registry. Raises LibraryMismatch."""
    lib = library()
    registry = lib.ggml_backend_reg_by_name(b"RPC")
    address: int | None = registry and lib.ggml_backend_reg_get_proc_address(
        registry, name.encode()
    )
    if not address:
        raise LibraryMismatch(
            f"the installed library is compiled without ggml's RPC: {REMEDY} "
            f"llama-cpp-python=={abi.PACKAGE_VERSION}"
        )
    return address


def add_worker(endpoint: str, n_devices: int | None = None, shown: str = "") -> list[Device]:
    """Connect to a worker (HOST:PORT), and return its devices, named RPC0, RPC1, ...

    `shown` is its address in messages, if `endpoint` is that of a passage to it.

    A second call returns the same devices. They are not registered with ggml, so lists of this
    machine's devices do not have them. ggml ends the process if the worker does not answer.
    ggml asks for the number of devices again, and makes an object for each. If the worker then
    claims so many that they fill memory, the process ends with a sentence.
    Raises LibraryMismatch, or DeviceUnavailable if the worker offers no device, or another number
    than `n_devices`, its earlier answer.
    """
    add = C.CFUNCTYPE(C.c_void_p, C.c_char_p)(_function("ggml_backend_rpc_add_server"))
    lib = library()
    shown = shown or endpoint
    with _few_devices(shown):
        registry = add(endpoint.encode())
    if not registry:
        raise DeviceUnavailable(f"the worker at {shown} offers no device")
    n = lib.ggml_backend_reg_dev_count(registry)
    if n_devices not in (None, n):
        raise DeviceUnavailable(
            f"the worker at {shown} offered {n_devices} devices, and then {n}: it is no RPC "
            "server of ggml (--rpc)"
        )
    return [Device(lib.ggml_backend_reg_dev_get(registry, i)) for i in range(n)]


@contextmanager
def _few_devices(endpoint: str) -> Iterator[None]:
    """End the process if its memory grows too much in the block, which runs in ggml."""
    ended, before_bytes = threading.Event(), _resident_bytes()

    def look() -> None:
        while not ended.wait(_LOOK_S):
            if _resident_bytes() > before_bytes + _MOST_DEVICE_BYTES:
                log.stop(
                    f"the worker at {endpoint} claims so many devices that they fill memory: it "
                    "is no RPC server of ggml, or it is hostile (--rpc)"
                )

    thread = threading.Thread(target=look, name="device count", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def serve_devices(endpoint: str, devices: Sequence[HasAddress], n_threads: int) -> None:
    """Run ggml's server at `endpoint` (HOST:PORT) on this thread. It serves one client at a time.

    Returns only if the port cannot be used. Raises LibraryMismatch.
    """
    types = (C.c_char_p, C.c_char_p, C.c_size_t, C.c_size_t, C.c_void_p)
    start = C.CFUNCTYPE(None, *types)(_function("ggml_backend_rpc_start_server"))
    addresses = (C.c_void_p * len(devices))(*(device.address for device in devices))
    start(endpoint.encode(), None, n_threads, len(devices), C.addressof(addresses))


class _Nowhere:
    """Leaves tensors without memory, so that what libllama writes to them is dropped."""

    experts = next_experts = None  # its weights are all on another machine

    @property
    def on_demand(self) -> OnDemand:
        return self

    def place(self, name: str, size_bytes: int) -> HostRange:
        raise AssertionError(name)

    def is_filling(self) -> bool:
        return True


class RemoteWeights(HostBufferType):
    """The buffer type for the weights of `device`, a worker's device. Pass it when loading a model.

    Call `loaded` after loading.
    """

    def __init__(self, name: str, device: Device, pending: Pending) -> None:
        super().__init__(name, ReservedAddresses(), pending, placer=_Nowhere())
        self._device = device
        for struct in self._structs:
            struct.iface.is_host = None  # otherwise the CPU's backend would take the weights

    def _on_init_tensor(self, _: int, address: int) -> int:
        return int(abi.GGML_STATUS_SUCCESS)  # libllama's addresses are reserved, never read

    def loaded(self) -> None:
        """Let the device take products with these weights. Call it before contexts are opened."""
        if not self.pass_for(self._device):
            raise DeviceFailed(f"{self._device.name} does not take a worker's weights")
        self.offer(experts=True, dense=True)
