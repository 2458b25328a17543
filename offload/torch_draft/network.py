"""Loads a draft's weights into one block of memory, and computes a dense decoder with them.

A step can be captured as a CUDA graph: every product is a library kernel, every shape is known
before the step starts, and no number is read from the device. Factors of products are in the
weights' type. Sums (the residual stream, scores, logits) are in f32. With bf16 weights attention is
in f16, like libllama's KV cache, because f16 is 8 times finer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from offload.errors import DoesNotFit
from offload.model import ModelFacts
from offload.torch_draft.plan import DraftLayout, DraftShape, DType, TorchDraftOptions

_DTYPES = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "c64": torch.complex64,
    "i64": torch.int64,
    "f64": torch.float64,
}
_CHUNK_BYTES = 32 << 20  # bytes of f32 rows in memory at once


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
    tensors, at = {}, 0
    for piece in layout.pieces.values():
        part = block[at : at + piece.size_bytes]
        tensors[piece.name] = part.view(_DTYPES[piece.dtype]).view(piece.shape)
        at += piece.aligned_bytes
    return tensors


def fill(
    tensors: Mapping[str, Tensor],
    facts: ModelFacts,
    shape: DraftShape,
    layout: DraftLayout,
    options: TorchDraftOptions,
) -> None:
    """Read every weight of the file into the block's tensors."""
    order = shape.rope.order()
    kept = np.asarray(options.kept or range(options.n_out(shape)), np.int64)
    if options.kept:
        tensors["kept"].copy_(torch.from_numpy(kept))
    frequencies = "rope_freqs.weight"
    divisors = (
        np.concatenate([*_rows(facts, frequencies)]) if frequencies in facts.weights else None
    )
    turns = shape.rope.turns(options.n_ctx + 1, None if divisors is None else divisors[:, 0])
    tensors["turns"].copy_(torch.from_numpy(turns))
    for piece in layout.pieces.values():
        target, at = tensors[piece.name].view(-1), 0
        for source in piece.sources:
            first = 0
            chunks = _rows(facts, source.name)
            if source.is_rotated:
                whole = np.concatenate([*chunks])
                heads = whole.reshape(-1, len(order), *whole.shape[1:])[:, order]
                chunks = iter([heads.reshape(whole.shape)] * source.times)
            for rows in chunks:
                n_rows = len(rows)
                if piece.name == "output":
                    rows = rows[kept[(kept >= first) & (kept < first + n_rows)] - first]
                first += n_rows
                target[at : at + rows.size].copy_(torch.from_numpy(rows.ravel()))
                at += rows.size


def _rows(facts: ModelFacts, name: str) -> Iterator[NDArray[np.float32]]:
    """Yield the rows [n, n_in] of a matrix chunk by chunk, in f32; a vector has n_in 1."""
    place = facts.weights[name]
    n_in, n_rows = (*place.entry.shape, 1)[:2]
    start = place.entry.offset_bytes
    file = np.memmap(place.file, np.uint8, "r")
    data = file[start : start + place.entry.size_bytes].reshape(n_rows, -1)
    kind = GGMLQuantizationType[place.entry.type.upper()]
    step = max(1, _CHUNK_BYTES // (4 * n_in))
    for first in range(0, n_rows, step):
        rows = dequantize(np.ascontiguousarray(data[first : first + step]), kind)
        width = n_in if len(place.entry.shape) > 1 else 1
        yield np.require(rows.reshape(-1, width), np.float32, "W")


def product(x: Tensor, w: Tensor) -> Tensor:
    """Return x [..., n, n_in] times w [..., n_in, n_out] in f32.

    `x` and `w` are both matrices, or both batches of matrices.
    """
    multiply = torch.mm if x.dim() == 2 else torch.bmm
    if x.dtype == torch.float32:
        return multiply(x, w)
    if x.is_cuda:
        return multiply(x, w, out_dtype=torch.float32)
    return multiply(x.float(), w.float())


class Network:
    """Computes a draft's layers over the tensors of a block. Owns no memory."""

    def __init__(self, shape: DraftShape, tensors: Mapping[str, Tensor], dtype: DType) -> None:
        """`tensors` are the block's pieces by name."""
        self.shape = shape
        self._t = tensors
        self._dtype = torch.bfloat16 if dtype == "bf16" else torch.float32
        cache = tensors["kv"]
        n_lanes, self._n_slots = cache.shape[2], cache.shape[4]
        device = cache.device
        self._turns = tensors["turns"]
        self._cache, self._kv_dtype = cache, cache.dtype
        # Rows of a layer's cache, seen as [k or v, lane, head, position] flattened.
        n_kv = shape.n_head_kv
        part = torch.arange(2, device=device)[:, None] * n_lanes * n_kv
        head = torch.arange(n_kv, device=device)[None, :]
        lane = torch.arange(n_lanes, device=device)[:, None] * n_kv
        of_head = (part + head).flatten()
        self._row_base = (of_head[None, :] + lane) * self._n_slots  # [n_lanes, 2 n_head_kv]
        self._columns = torch.arange(self._n_slots, device=device)

    def output(self, n_out: int) -> Tensor:
        """Return the output matrix; if it is tied, the embedding's first `n_out` rows."""
        if "output" in self._t:
            return self._t["output"]
        return self._t["token_embd"][:n_out]

    def held(self, lane: int, n_tokens: int) -> Tensor:
        """Return the lane's cache [n_layers, 2, n_head_kv, n_tokens, head_size], not a copy."""
        return self._cache[:, :, lane, :, :n_tokens]

    def hidden(self, tokens: Tensor, positions: Tensor, n_kv: int, lane: int = 0) -> Tensor:
        """Return the residual stream [n_lanes, n_tokens, n_embd] after all layers.

        `tokens` and `positions` are [n_lanes, n_tokens], for the lanes from `lane` on. Keys and
        values are written at the positions. A token attends to the positions of its lane up to its
        own, among the first `n_kv`.
        """
        s = self.shape
        n_lanes, n_tokens = tokens.shape
        lanes = slice(lane, lane + n_lanes)
        x = self._t["token_embd"][tokens.flatten()].float()
        turns = self._turns_of(positions)
        rows = (self._row_base[lanes, None, :] + positions[:, :, None]).flatten()
        unseen = self._columns[:n_kv] > positions[:, None, None, :, None]
        mask = torch.zeros(unseen.shape, device=x.device).masked_fill_(unseen, float("-inf"))
        for i in range(s.n_layers):
            x += self._attention(i, x, turns, rows, mask, lanes)
            x += self._feed_forward(i, x)
        return x.view(n_lanes, n_tokens, s.n_embd)

    def logits(self, x: Tensor, n_out: int) -> Tensor:
        """Return logits [n, n_out] in f32 from rows of the residual stream [n, n_embd]."""
        return product(self._normed(x, "output_norm"), self.output(n_out).t())

    def _turns_of(self, positions: Tensor) -> Tensor:
        """Return the rotary factors of each head's pairs: scaled for queries, 1 for values."""
        s = self.shape
        turns = self._turns[positions.flatten()][:, None, :]
        q = (turns * s.attention_scale).expand(-1, s.n_head, -1)
        k = turns.expand(-1, s.n_head_kv, -1)
        return torch.cat((q, k, torch.ones_like(k)), 1)

    def _attention(
        self,
        i: int,
        x: Tensor,
        turns: Tensor,
        rows: Tensor,
        mask: Tensor,
        lanes: slice,
    ) -> Tensor:
        s = self.shape
        n_lanes, n_tokens, n_kv = mask.shape[0], mask.shape[3], mask.shape[4]
        qkv = product(self._normed(x, f"{i}.attn_norm"), self._t[f"{i}.qkv"].t())
        if s.qkv_bias:
            qkv += self._t[f"{i}.qkv_bias"]
        heads = qkv.view(-1, s.n_head + 2 * s.n_head_kv, s.head_size)
        if s.qk_norm:
            turned = heads[:, : s.n_head + s.n_head_kv]
            normed = F.rms_norm(turned, (s.head_size,), eps=s.norm_eps)
            torch.mul(normed, self._t[f"{i}.qk_norm"], out=turned)
        pairs = torch.view_as_complex(heads.view(*heads.shape[:2], -1, 2))
        heads = torch.view_as_real(pairs * turns).flatten(2).to(self._kv_dtype)
        layer = self._cache[i]
        layer.view(-1, s.head_size).index_copy_(
            0, rows, heads[:, s.n_head :].reshape(-1, s.head_size)
        )
        group = s.n_head // s.n_head_kv
        keys, values = (part[lanes, :, :n_kv].flatten(0, 1) for part in layer.unbind(0))
        q = heads[:, : s.n_head].view(n_lanes, n_tokens, s.n_head_kv, group, s.head_size)
        q = q.permute(0, 2, 3, 1, 4).reshape(-1, group * n_tokens, s.head_size)
        scores = product(q, keys.transpose(1, 2))
        scores.view(n_lanes, s.n_head_kv, group, n_tokens, n_kv).add_(mask)
        weighed = product(torch.softmax(scores, -1).to(self._kv_dtype), values).to(self._dtype)
        out = weighed.view(n_lanes, s.n_head, n_tokens, s.head_size).transpose(1, 2)
        return product(out.reshape(n_lanes * n_tokens, -1), self._t[f"{i}.attn_output"].t())

    def _feed_forward(self, i: int, x: Tensor) -> Tensor:
        both = product(self._normed(x, f"{i}.ffn_norm"), self._t[f"{i}.gate_up"].t())
        gate, up = both.chunk(2, 1)
        return product((F.silu(gate) * up).to(self._dtype), self._t[f"{i}.ffn_down"].t())

    def _normed(self, x: Tensor, name: str) -> Tensor:
        normed = F.rms_norm(x, (self.shape.n_embd,), self._t[name], self.shape.norm_eps)
        return normed.to(self._dtype)
