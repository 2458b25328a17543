"""The range of slots that a kernel is shown, which holds those that a batch uses. Pure.

A kernel that multiplies several tokens with their experts' matrices has work for every slot that it
is shown, used or not. llama.cpp's CUDA backend (mmq.cuh) starts one block for each slot and 128
rows. It does so from 5 to 9 tokens on, by the GPU and the type of the weights (mmvq.cu). So every
batch of two tokens or more is shown the range between the first and the last slot that it uses.
"""

from __future__ import annotations

from collections.abc import Sequence

_STEPS = 16  # parts of all slots at which a range begins and ends: few ranges, few tensors
_MOST_WIDER = 2  # times as wide as it has to be: such a range is kept
_TILE_ROWS = 128  # of the matrix kernel on NVIDIA; the other GPUs' kernels count nothing
_TILE_TOKENS = 64  # where a GPU has little shared memory, else 128
_MOST_TILE_BLOCKS = 2**30 - 1  # that kernel counts tiles times blocks of a row, and aborts beyond


def band(slots: Sequence[int], n_slots: int, before: tuple[int, int] = (0, 0)) -> tuple[int, int]:
    """Return (first, number) of neighbouring slots that hold all of `slots`.

    `before` is the range that the same nodes were shown the last time. It is kept while it holds
    the slots and is not much too wide, since a backend that replays captured graphs captures a
    graph again when its nodes read from elsewhere.
    """
    step = max(1, n_slots // _STEPS)
    low, high = min(slots), max(slots)
    first = low // step * step
    n = min(n_slots, (high // step + 1) * step) - first
    kept, n_kept = before
    if kept <= low and high < kept + n_kept and n_kept <= _MOST_WIDER * n:
        return before
    return first, n


def most_shown(n_rows: int, row_blocks: int, n_tokens: int) -> int:
    """The most slots that CUDA's matrix kernel can be shown: of matrices of `n_rows` rows, each of
    `row_blocks` blocks of its type, multiplied with `n_tokens` tokens."""
    tiles = -(-n_rows // _TILE_ROWS) * -(-n_tokens // _TILE_TOKENS)
    return _MOST_TILE_BLOCKS // (tiles * row_blocks)
