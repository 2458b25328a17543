"""A dense decoder in torch, whose weights can be trained. Needs torch.

Its weights have the names and shapes of the file, so a trained network is written as it is. It
computes the same as llama.cpp does for llama, qwen2 and qwen3 (`offload.torch_draft` drafts with
the same models, but keeps no gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload.torch_draft.plan import DraftShape

_LOGIT_BYTES = 64 << 20  # bytes of logits in memory at once
_FREQUENCIES = "rope_freqs.weight"  # divisors of the rotation, which are not trained


class TrainableDraft:
    """The decoder of `shape`, with its weights by the file's names."""

    def __init__(
        self,
        shape: DraftShape,
        weights: Mapping[str, NDArray[np.float32]],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`dtype` is that of products. Weights and sums are f32."""
        self.shape, self._device, self._dtype = shape, device, dtype
        divisors = weights.get(_FREQUENCIES)
        self._divisors = None if divisors is None else divisors.ravel()
        self.weights = {
            name: nn.Parameter(torch.from_numpy(np.array(values)).to(device))
            for name, values in weights.items()
            if name != _FREQUENCIES
        }
        self._turns: dict[int, tuple[Tensor, Tensor]] = {}  # by number of positions

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the weights on the host, by name."""
        return {name: w.detach().cpu().numpy().copy() for name, w in self.weights.items()}

    def load(self, arrays: Mapping[str, NDArray[np.float32]]) -> None:
        """Set the weights to those of `arrays`."""
        with torch.no_grad():
            for name, w in self.weights.items():
                w.copy_(torch.from_numpy(arrays[name]))

    def logits(self, tokens: Tensor) -> Tensor:
        """Logits [n, time, n_vocab] in f32 after each of tokens [n, time]."""
        return self._logits(self._hidden(tokens), self._output)

    def loss(self, tokens: Tensor, goal: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """The mean of `goal` over all of tokens [n, time].

        `goal` gets logits [m, n_vocab] and the range of their tokens among all n * time. It returns
        the sum of their losses. Logits are computed again for the gradients, so few are in memory.
        """
        hidden = self._hidden(tokens).flatten(0, 1)
        output = self._output
        chunk = max(64, _LOGIT_BYTES // (4 * output.shape[0]))

        def part_loss(rows: Tensor, output: Tensor, part: slice) -> Tensor:
            return goal(self._logits(rows, output), part)

        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), chunk):
            part = slice(start, min(start + chunk, len(hidden)))
            total = total + checkpoint(part_loss, hidden[part], output, part, use_reentrant=False)
        return total / len(hidden)

    @property
    def _output(self) -> Tensor:
        """The output matrix. If it is tied, it is the embedding."""
        return self.weights["token_embd.weight" if self.shape.tied else "output.weight"]

    def _logits(self, hidden: Tensor, output: Tensor) -> Tensor:
        return (hidden.to(self._dtype) @ output.to(self._dtype).T).float()

    def _hidden(self, tokens: Tensor) -> Tensor:
        """The normalised residual stream [n, time, n_embd] in f32."""
        x = F.embedding(tokens, self.weights["token_embd.weight"])
        turns = self._turns_of(tokens.shape[1])
        for i in range(self.shape.n_layers):
            x = x + self._attention(f"blk.{i}.", x, turns)
            x = x + self._feed_forward(f"blk.{i}.", x)
        return self._normed(x, "output_norm")

    def _product(self, x: Tensor, name: str) -> Tensor:
        """x [..., n_in] times a matrix of the file, with its bias if it has one."""
        product = F.linear(x.to(self._dtype), self.weights[f"{name}.weight"].to(self._dtype))
        bias = self.weights.get(f"{name}.bias")
        return product.float() if bias is None else product.float() + bias

    def _normed(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self.shape.norm_eps)

    def _attention(self, of: str, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        s = self.shape
        normed = self._normed(x, f"{of}attn_norm")
        q, k, v = (
            self._product(normed, f"{of}attn_{kind}").unflatten(-1, (-1, s.head_size))
            for kind in ("q", "k", "v")
        )
        if s.qk_norm:
            q, k = self._normed(q, f"{of}attn_q_norm"), self._normed(k, f"{of}attn_k_norm")
        q, k = self._rotated(q, turns), self._rotated(k, turns)
        q, k, v = (heads.transpose(1, 2).to(self._dtype) for heads in (q, k, v))
        group = s.n_head // s.n_head_kv
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=s.attention_scale)
        return self._product(out.transpose(1, 2).flatten(2), f"{of}attn_output")

    def _feed_forward(self, of: str, x: Tensor) -> Tensor:
        normed = self._normed(x, f"{of}ffn_norm")
        gate, up = self._product(normed, f"{of}ffn_gate"), self._product(normed, f"{of}ffn_up")
        return self._product(F.silu(gate) * up, f"{of}ffn_down")

    def _turns_of(self, n_positions: int) -> tuple[Tensor, Tensor]:
        """The cosines and sines of each pair's rotation, each [n_positions, head_size / 2]."""
        if n_positions not in self._turns:
            turns = torch.from_numpy(self.shape.rope.turns(n_positions, self._divisors))
            self._turns[n_positions] = turns.real.to(self._device), turns.imag.to(self._device)
        return self._turns[n_positions]

    def _rotated(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate heads [n, time, n_head, head_size] by their positions."""
        cos, sin = (part[:, None, :] for part in turns)
        halves = self.shape.rope.halves
        first, second = x.chunk(2, -1) if halves else (x[..., 0::2], x[..., 1::2])
        turned = first * cos - second * sin, first * sin + second * cos
        return torch.cat(turned, -1) if halves else torch.stack(turned, -1).flatten(-2)
