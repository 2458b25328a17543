"""Loads a draft's weights from a GGUF file into one contiguous block of memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.torch_draft.layout import DraftLayout, TorchDraftOptions
from offload.torch_draft.shape import DraftShape
from offload.torch_draft.weights import Rows, WeightReader

_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "c64": torch.complex64,
    "i64": torch.int64,
    "f64": torch.float64,
}


def allocate(layout: DraftLayout, device: torch.device, name: str) -> dict[str, Tensor]:
    """Allocate the block; return its pieces by name, all zero. Raises DoesNotFit."""
    if device.type == "cuda":
        free_bytes, _ = torch.cuda.mem_get_info(device)
        if free_bytes < layout.total_bytes:
            raise DoesNotFit(
                f"{name}: the torch draft needs {layout.total_bytes / 2**20:.0f} MiB on {device} "
                f"and {free_bytes / 2**20:.0f} MiB are free; lower --vram or --ctx-size"
            )
    try:
        block = torch.zeros(layout.block_bytes, dtype=torch.uint8, device=device)
    except RuntimeError as e:
        raise DoesNotFit(
            f"{name}: {layout.block_bytes / 2**20:.0f} MiB for the torch draft cannot be had on "
            f"{device}; lower --vram or --ctx-size"
        ) from e
    return {
        piece.name: block[piece.offset : piece.offset + piece.size_bytes]
        .view(_DTYPES[piece.dtype])
        .view(piece.shape)
        for piece in layout.pieces.values()
    }


def fill(
    tensors: Mapping[str, Tensor],
    facts: ModelFacts,
    shape: DraftShape,
    options: TorchDraftOptions,
) -> None:
    """Read every weight of the file into the block's tensors."""
    reader = WeightReader(facts)
    target = _Target(tensors)
    _fill_ends(target, reader, shape, options)
    order = shape.rope.order()
    for i in range(shape.n_layers):
        file, at = f"blk.{i}.", f"{i}."
        parts = [
            _reordered(reader.whole(f"{file}attn_q.weight"), order),
            _reordered(reader.whole(f"{file}attn_k.weight"), order),
            reader.whole(f"{file}attn_v.weight"),
        ]
        target.matrix(f"{at}qkv", np.concatenate(parts))
        if shape.qkv_bias:
            q, k, v = (reader.vector(f"{file}attn_{name}.bias") for name in "qkv")
            biases = (_reordered(q, order), _reordered(k, order), v)
            target.vector(f"{at}qkv_bias", np.concatenate(biases))
        if shape.qk_norm:
            q_norm, k_norm = (reader.vector(f"{file}attn_{n}_norm.weight")[order] for n in "qk")
            rows = [q_norm] * shape.n_head + [k_norm] * shape.n_head_kv
            target.vector(f"{at}qk_norm", np.stack(rows))
        gate, up = (reader.whole(f"{file}ffn_{n}.weight") for n in ("gate", "up"))
        target.matrix(f"{at}gate_up", np.concatenate((gate, up)))
        for name in ("attn_output", "ffn_down"):
            target.matrix(f"{at}{name}", reader.whole(f"{file}{name}.weight"))
        for name in ("attn_norm", "ffn_norm"):
            target.vector(f"{at}{name}", reader.vector(f"{file}{name}.weight"))


def _fill_ends(
    target: _Target, reader: WeightReader, shape: DraftShape, options: TorchDraftOptions
) -> None:
    for first, rows in reader.chunks("token_embd.weight"):
        target.matrix("token_embd", rows, first)
    target.vector("output_norm", reader.vector("output_norm.weight"))
    divisors = reader.vector("rope_freqs.weight") if reader.has("rope_freqs.weight") else None
    target.vector("turns", shape.rope.turns(options.n_ctx + 1, divisors))
    if "output" not in target.tensors:
        return
    source = "token_embd.weight" if shape.tied else "output.weight"
    ids = np.asarray(options.kept or range(options.n_out(shape)), np.int64)
    if options.kept:
        target.vector("kept", ids)
    at = 0
    for first, rows in reader.chunks(source):
        chosen = ids[(ids >= first) & (ids < first + len(rows))] - first
        target.matrix("output", rows[chosen], at)
        at += len(chosen)


def _reordered(rows: Rows, order: NDArray[np.int64]) -> Rows:
    """Return the rows with each head's values in the order of `Rope.order`."""
    heads = rows.reshape(-1, len(order), *rows.shape[1:])
    return heads[:, order].reshape(rows.shape)


class _Target:
    """Tensors of the block, written from numpy."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def vector(self, name: str, values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
        self.tensors[name].copy_(torch.from_numpy(np.ascontiguousarray(values)))

    def matrix(self, name: str, rows: Rows, first: int = 0) -> None:
        """Write `rows` from row `first` on."""
        values = torch.from_numpy(np.ascontiguousarray(rows))
        part = slice(first, first + len(rows))
        self.tensors[name][part].copy_(values)
