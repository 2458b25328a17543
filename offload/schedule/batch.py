"""Computes a batch's needs in a layer: experts to copy, and range of slots. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from offload.routing.routing import expected_union

# Share of a layer's experts from which copying the others too is cheaper than reading ids.
_WHOLE_SHARE = 0.8
LAYER_RING = 3  # most layers in order whose slots hold no kept experts (docs/log.md)
_RANGE_STEPS = 16  # possible borders of a range of slots; few ranges need few tensors
_MOST_WIDER = 2  # largest ratio of an earlier range to the needed one at which the former is kept
_TILE_ROWS = 128  # rows of a tile of NVIDIA's matrix kernel; others have no such limit
_TILE_TOKENS = 64  # tokens of a tile on GPUs with little shared memory; others have 128
# Product of tiles and blocks of a row above which NVIDIA's matrix kernel aborts.
_MOST_TILE_BLOCKS = 2**30 - 1


class Fetch(enum.Enum):
    """The experts of a layer that are copied, and the time at which they are known."""

    CHOSEN = "those that the router chose, when its ids have been read back"
    ALL = "all of them before the router has run, into any slots"
    ALL_IN_ORDER = "all of them before the router has run, so that its ids need not be read"


def fetch_of(n_tokens: int, n_used: int, n_experts: int, n_slots: int) -> Fetch:
    """Return which of a layer's experts to copy for a batch.

    In order, a layer's experts take `n_experts` neighbouring slots. If there are slots for more
    than one layer but fewer than two, experts may go into any slots, so that the next layer can use
    the remaining slots.
    """
    if (
        n_slots < n_experts
        or expected_union(n_tokens, n_used, n_experts) < _WHOLE_SHARE * n_experts
    ):
        return Fetch.CHOSEN
    return Fetch.ALL if n_experts < n_slots < 2 * n_experts else Fetch.ALL_IN_ORDER


def slot_range(
    slots: Sequence[int], n_slots: int, before: tuple[int, int] = (0, 0)
) -> tuple[int, int]:
    """Return (first, number) of neighbouring slots that include all of `slots`.

    The range matters because a kernel that multiplies several tokens with their experts' matrices
    has work for every slot in the range, used or not. For example, llama.cpp's CUDA backend
    (mmq.cuh) starts one thread block for each slot and 128 rows. It uses this kernel from 5 to 9
    tokens on, depending on the GPU and the weights' type (mmvq.cu).

    `before` is the range of the same nodes in the last decode. It is returned again while it
    includes `slots` and is not much too wide, because a new range would make backends that replay
    captured graphs capture the graph again.
    """
    step = max(1, n_slots // _RANGE_STEPS)
    low, high = min(slots), max(slots)
    first = low // step * step
    n = min(n_slots, (high // step + 1) * step) - first
    kept, n_kept = before
    if kept <= low and high < kept + n_kept and n_kept <= _MOST_WIDER * n:
        return before
    return first, n


def most_in_range(n_rows: int, row_blocks: int, n_tokens: int) -> int:
    """Return the most slots that CUDA's matrix kernel takes at once.

    Each slot's matrix has `n_rows` rows of `row_blocks` quantisation blocks. The matrices are
    multiplied with `n_tokens` tokens.
    """
    tiles = -(-n_rows // _TILE_ROWS) * -(-n_tokens // _TILE_TOKENS)
    return _MOST_TILE_BLOCKS // (tiles * row_blocks)
