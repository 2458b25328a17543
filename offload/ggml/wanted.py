"""Lists the tensors that the library expects of an architecture, from metadata alone.

`llama_model_init_from_user` builds a model from metadata alone, and passes each tensor to a
callback. The weights get reserved addresses without memory, so a model may have any size. Access to
a weight is a segmentation fault, on purpose.
"""

from __future__ import annotations

import ctypes as C
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import BadModel
from offload.ggml.gguf import opened_header
from offload.ggml.hostbuffer import HostBufferType
from offload.ggml.library import abi, log
from offload.ggml.library.callback import Pending, guard
from offload.ggml.library.lib import library
from offload.ggml.memory import ReservedAddresses

_SET_TENSOR_DATA = C.CFUNCTYPE(None, C.c_void_p, C.c_void_p)


@dataclass(frozen=True)
class WantedTensor:
    """A tensor the library asks for. `shape` is in ggml's order: the row length first."""

    name: str
    shape: tuple[int, ...]


def wanted_tensors(header: Path) -> list[WantedTensor]:
    """The tensors that the architecture described by `header` has, in the library's order.

    `header` is a GGUF file, whose own tensors do not matter. Optional tensors are all included.
    Raises BadModel with the library's reason. Some impossible sizes abort the process instead.
    """
    lib = library()
    pending, tensors = Pending(), dict[str, WantedTensor]()
    buffer_type = HostBufferType("reserved", ReservedAddresses(), pending)

    def see(address: int, _: object) -> None:
        tensor = abi.ggml_tensor.from_address(address)
        shape = list(tensor.ne)
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        name = tensor.name.decode()
        tensors.setdefault(
            name, WantedTensor(name, tuple(shape))
        )  # the library reports tied tensors twice

    thunk, callback = guard(_SET_TENSOR_DATA, pending, None, see)
    model = None
    with opened_header(lib, header) as metadata:
        try:
            model = _init_model(lib, metadata, callback, buffer_type)
            del thunk
            pending.raise_first()
            if not model:
                reason = "; ".join(dict.fromkeys(log.take_errors())) or "no reason given"
                raise BadModel(f"the library refuses the architecture's metadata ({reason})")
        finally:
            if model:
                lib.llama_model_free(model)
    return list(tensors.values())


def _init_model(lib: Any, metadata: int, callback: int, buffer_type: HostBufferType) -> int | None:
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = True
    no_devices = (C.c_void_p * 1)(None)
    params.devices = C.cast(no_devices, C.c_void_p)
    pattern = C.create_string_buffer(b".*")
    overrides = (C.c_void_p * 4)(C.addressof(pattern), buffer_type.address, None, None)
    params.tensor_buft_overrides = C.cast(overrides, C.c_void_p)
    prototype = C.CFUNCTYPE(
        C.c_void_p, C.c_void_p, C.c_void_p, C.c_void_p, lib.structs.llama_model_params
    )
    init = prototype(("llama_model_init_from_user", lib._handle))
    handle: int | None = init(metadata, callback, None, params)
    return handle
