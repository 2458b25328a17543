"""Checks numbers of rows, experts and states in a client's data, on any device.

Kernels turn these numbers into addresses. ggml's CPU backend checks some of them, and ends the
process; GPU backends check none. The numbers are copied back from the device, which takes
microseconds: they are one for each token, cell or state.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from offload.errors import GraphRefused
from offload.ggml.library import abi
from offload.ggml.node_table import NodeTable
from offload.worker.graph_check import IdRange

_N_KV_MAX = 4  # parameter of FLASH_ATTN_EXT


def check_ids(ids: Iterable[IdRange]) -> None:
    """Raise GraphRefused if a number is out of range. Reads the data as it is now."""
    for one in ids:
        values = one.tensor.integers()
        if (values < 0).any() or (values >= one.limit).any():
            wrong = values[(values < 0) | (values >= one.limit)].flat[0]
            raise GraphRefused(
                f"{one.tensor.name!r} has the number {wrong}, and numbers from 0 to "
                f"{one.limit - 1} exist"
            )


def drop_hints(table: NodeTable) -> None:
    """Remove the hint how many cells of attention are not masked: GPU kernels allocate by it."""
    for row in np.flatnonzero(table.rows("FLASH_ATTN_EXT")).tolist():
        abi.ggml_tensor.from_address(int(table.addresses[row])).op_params[_N_KV_MAX] = 0
