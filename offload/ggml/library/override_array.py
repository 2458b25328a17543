"""Values that replace a model's metadata, as the library's `llama_model_kv_override` array."""

from __future__ import annotations

import ctypes as C
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from offload.kv_overrides import KvOverride


def override_array(structs: ModuleType, overrides: Sequence[KvOverride]) -> C.Array[Any]:
    """Return the library's array of overrides, which ends with an empty key.

    `structs` is the llama_cpp module. The library copies the array when it loads a model.
    """
    array: C.Array[Any] = (structs.llama_model_kv_override * (len(overrides) + 1))()
    for place, override in zip(array, overrides, strict=False):
        place.key = override.key.encode()
        value = override.value
        if isinstance(value, bool):
            place.tag, place.value.val_bool = structs.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            place.tag, place.value.val_i64 = structs.LLAMA_KV_OVERRIDE_TYPE_INT, value
        elif isinstance(value, float):
            place.tag, place.value.val_f64 = structs.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            place.tag, place.value.val_str = structs.LLAMA_KV_OVERRIDE_TYPE_STR, value.encode()
    return array
