"""Keeps libllama from reading a whole file into the page cache when it maps it.

With load mode `mmap` libllama maps with MAP_POPULATE, unless the CPU backend's registry says that
the machine was set up for NUMA (llama_model_loader::init_mappings). While a model is loaded our
function stands in the registry's place for that one question.
"""

from __future__ import annotations

import ctypes as C
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offload.ggml.library import abi
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library

_QUESTION = b"ggml_backend_cpu_is_numa"
_lock = threading.Lock()  # one loader at a time: the registry is the process's
_always = C.CFUNCTYPE(C.c_bool)(lambda: True)


class Asked:
    """A count of libllama's questions, once per file: the proof that nothing was populated."""

    def __init__(self) -> None:
        self.times = 0


@contextmanager
def mapping_without_reading(pending: Pending) -> Iterator[Asked]:
    """Models loaded inside are mapped without being read. The registry is restored in any case."""
    lib = library()
    asked = Asked()
    prototype: Any = abi.PROTOTYPES["ggml_backend_reg_i.get_proc_address"]
    cpu = lib.ggml_backend_dev_by_type(abi.GGML_BACKEND_DEVICE_TYPE_CPU)
    registry = abi.ggml_backend_reg.from_address(lib.ggml_backend_dev_backend_reg(cpu))
    with _lock:
        original: int = registry.iface.get_proc_address
        inner = prototype(original)

        def proc_address(reg: int, name: bytes) -> int | None:
            if name == _QUESTION:
                asked.times += 1
                return C.cast(_always, C.c_void_p).value
            found: int | None = inner(reg, name)
            return found

        thunk, address = guard(prototype, pending, None, proc_address)
        registry.iface.get_proc_address = address
        try:
            yield asked
        finally:
            registry.iface.get_proc_address = original
            del thunk
