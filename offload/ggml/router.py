"""A router's choice of experts: read back from the device, and given back as ids of slots."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.ggml import tensor
from offload.ggml.library.lib import library


def read_router(ids: int, backend: int) -> NDArray[np.int32]:
    """The choice [n_tokens, n_used] at the tensor `ids`; waits for the backend."""
    lib, view = library(), tensor.at(ids)
    n_used, n_tokens, stride = int(view.ne[0]), int(view.ne[1]), int(view.nb[1]) // 4
    raw = np.empty((n_tokens, stride), np.int32)
    size = ((n_tokens - 1) * stride + n_used) * 4
    lib.ggml_backend_tensor_get_async(backend, ids, raw.ctypes.data, 0, size)
    lib.ggml_backend_synchronize(backend)
    return raw[:, :n_used]


def ids_like(ids: int, buffer: int, data: int) -> Any:
    """A tensor like the router's, but contiguous, for ids that lie at `data` in `buffer`."""
    made = tensor.copy_of(ids)
    made.buffer, made.data = buffer, data
    made.nb[0], made.nb[1] = 4, 4 * made.ne[0]
    made.nb[2] = made.nb[3] = made.nb[1] * made.ne[1]
    made.view_src, made.view_offs, made.extra = None, 0, None
    return made
