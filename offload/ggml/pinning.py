"""Page-locked memory: registers host memory of ours with a GPU backend, so that copies overlap.

CUDA's backend does it only where GGML_CUDA_REGISTER_HOST is in the environment.
"""

from __future__ import annotations

import ctypes as C
import resource
from dataclasses import dataclass
from typing import Any

from offload.ggml.library import abi
from offload.ggml.library.lib import library
from offload.ggml.memory import HostRange

_REGISTER = b"ggml_backend_register_host_buffer"
_UNREGISTER = b"ggml_backend_unregister_host_buffer"
_register_type = C.CFUNCTYPE(C.c_bool, C.c_void_p, C.c_size_t)
_unregister_type = C.CFUNCTYPE(None, C.c_void_p)


@dataclass(frozen=True)
class PinResult:
    """True if the memory is pinned; else `reason` says why not."""

    ok: bool
    reason: str


class Pinner:
    """Pins memory for the device at address `device` (the real one, not our wrapper of it)."""

    def __init__(self, device: int) -> None:
        lib = library()
        device_struct = abi.ggml_backend_device.from_address(device)
        get_name = abi.PROTOTYPES["ggml_backend_reg_i.get_name"]
        self._registry = device_struct.reg
        registry = abi.ggml_backend_reg.from_address(self._registry)
        name = C.string_at(get_name(registry.iface.get_name)(self._registry)).decode()
        self.backend_name = name
        self._register = self._entry(lib, _REGISTER, _register_type)
        self._unregister = self._entry(lib, _UNREGISTER, _unregister_type)
        self._pinned: set[int] = set()

    def _entry(self, lib: Any, name: bytes, prototype: Any) -> Any:
        address = lib.ggml_backend_reg_get_proc_address(self._registry, name)
        return prototype(address) if address else None

    @property
    def can_pin(self) -> bool:
        """True if the backend offers it at all."""
        return self._register is not None and self._unregister is not None

    def pin(self, memory: HostRange) -> PinResult:
        """Page-lock a range. A refusal is a result, not an error: copies work, but slower.

        The memory-lock limit is told where it may be the cause; NVIDIA's driver does not count
        against it, so it does not keep us from asking.
        """
        if not self.can_pin:
            return PinResult(False, f"the {self.backend_name} backend cannot pin memory of ours")
        size_bytes = memory.size_bytes
        if self._register(memory.address, size_bytes):
            self._pinned.add(memory.address)
            return PinResult(True, f"pinned by the {self.backend_name} backend")
        return PinResult(
            False,
            f"the {self.backend_name} backend refused to pin {size_bytes / 2**30:.1f} GiB "
            f"({_likely_cause(size_bytes)})",
        )

    def unpin(self, memory: HostRange) -> None:
        """Give the range back; nothing for one that is not pinned."""
        if memory.address in self._pinned:
            self._pinned.discard(memory.address)
            self._unregister(memory.address)


def _likely_cause(size_bytes: int) -> str:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY and limit < size_bytes:
        return (
            f"the memory-lock limit is {limit / 2**20:.0f} MiB: raise it with ulimit -l; "
            "or GGML_CUDA_REGISTER_HOST is not set"
        )
    return "GGML_CUDA_REGISTER_HOST is not set, or the driver has no room"
