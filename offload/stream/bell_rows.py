"""Moves ids and rows over the link by kernels, for layers with a doorbell.

A copy costs an engine's time and latency, and a card has one engine for each direction. CUDA maps
pinned memory into the device's address space, at the same address
(https://docs.nvidia.com/cuda/cuda-c-programming-guide/#unified-virtual-address-space), so ggml's
own kernels read and write it:

- A GET_ROWS of one row, which is a layer's ids and rows, writes them to pinned memory.
- A GET_ROWS fetches a row for each pair. Its source spans all memory between the output of the
  layer's last product and the CPU's results, so that a number names a row of either. The host
  writes the numbers. A pair that the device computed names its own row, and so only rows that the
  CPU computed cross the link. The kernel never touches what lies between the two.

A number is an i32. If the two memories are too far apart for it, or not a whole number of rows, a
SET_ROWS reads all rows of the CPU's results, and writes those that nothing was computed for behind
the output.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.alignment import ALIGNMENT_BYTES
from offload.ggml.tensor import Buffer, Tensor, new_tensor
from offload.stream.cpu_side import HostGraph

_MOST_ROW = (1 << 31) - 1
ALL_ROWS = -1  # in place of the number of a row: each row of the results is written to a place


def sending_node(source: tuple[Buffer, int], n_bytes: int, to: Buffer, first: Tensor) -> Tensor:
    """Return the node that writes `n_bytes` from an offset of a buffer to pinned memory.

    `first`: a number on the device, which is 0.
    """
    shape = (n_bytes // 4, 1, 1, 1)
    row = new_tensor("i32", shape, source)
    return new_tensor("i32", shape, (to, 0), "GET_ROWS", [row, first])


@dataclass(frozen=True)
class RowSpan:
    """Two memories of equally long rows, whose rows have one numbering. Pure."""

    shift_bytes: int  # the device's rows begin so much later than they could
    device_row: int  # number of the first row of each
    host_row: int


def span_of(device_at: int, host_at: int, row_bytes: int, n_rows: int) -> RowSpan | None:
    """Return the numbering of `n_rows` rows from each of two addresses. None: there is none.

    The rows of the device may begin up to `row_bytes` after `device_at`.
    """
    shift = (host_at - device_at) % row_bytes
    device_at += shift
    low = min(device_at, host_at)
    device_row, host_row = ((at - low) // row_bytes for at in (device_at, host_at))
    if shift % ALIGNMENT_BYTES or max(device_row, host_row) + n_rows > _MOST_ROW:
        return None
    return RowSpan(shift, device_row, host_row)


@dataclass(frozen=True, eq=False)
class Placing:
    """The node that gives a layer's output the CPU's rows. `into`: where the output has to lie.

    `device_row` and `host_row`: the numbers of the first rows of the output and of the CPU's
    results. The second one is ALL_ROWS if each of the results is written to a place.
    """

    node: Tensor
    into: int  # offset in the buffer
    device_row: int
    host_row: int


def placing_of(host: HostGraph, n_rows: int, into: tuple[Buffer, int]) -> Placing:
    """Return how the first `n_rows` rows from `into` on get the CPU's rows from pinned memory.

    `into` has room for one row more.
    """
    (buffer, offset), n_out, rows_at = into, host.n_out, host.header_bytes
    places = new_tensor("i32", (n_rows, 1, 1, 1), (host.results, 0))
    span = span_of(buffer.base + offset, host.results.base + rows_at, 4 * n_out, host.most)
    if span is None:
        rows = new_tensor("f32", (n_out, n_rows, 1, 1), (host.results, rows_at))
        whole = new_tensor("f32", (n_out, n_rows + 1, 1, 1), into)
        return Placing(whole.computing("SET_ROWS", [rows, places, whole]), offset, 0, ALL_ROWS)
    offset += span.shift_bytes
    low = (host.results, rows_at) if span.device_row else (buffer, offset)
    n_spanned = max(span.device_row + n_rows, span.host_row + host.most)
    both = new_tensor("f32", (n_out, n_spanned, 1, 1), low)
    output = new_tensor("f32", (n_out, n_rows, 1, 1), (buffer, offset))
    node = output.computing("GET_ROWS", [both, places])
    return Placing(node, offset, span.device_row, span.host_row)
