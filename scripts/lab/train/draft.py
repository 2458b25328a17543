"""The draft in torch: what llama.cpp computes for a llama GGUF without output.weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.train.layers import RMSNorm, attend, linear_cross_entropy, matrix, rope_table, rotate
from lab.train.shapes import DraftShape
from lab.train.target import DenseMLP


class DraftLayer(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.n_head * shape.head_dim
        self.attn_norm = RMSNorm(shape.embd)
        self.q = matrix(width, shape.embd)
        self.k = matrix(width, shape.embd)
        self.v = matrix(width, shape.embd)
        self.out = nn.Parameter(torch.zeros(shape.embd, width))
        self.ffn_norm = RMSNorm(shape.embd)
        self.dense = DenseMLP(shape.embd, shape.ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.attn_norm(x)
        q, k, v = (
            F.linear(normed, w).unflatten(-1, (self.shape.n_head, -1))
            for w in (self.q, self.k, self.v)
        )
        x = x + F.linear(attend(rotate(q, cos, sin), rotate(k, cos, sin), v), self.out)
        return x + self.dense(self.ffn_norm(x))


class Draft(nn.Module):
    def __init__(self, shape: DraftShape) -> None:
        super().__init__()
        self.shape = shape
        # Tied: small enough for first logits near zero after the final norm's unit rows.
        self.embedding = nn.Parameter(torch.randn(shape.n_vocab, shape.embd) * 0.05)
        self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.n_layer))
        self.norm = RMSNorm(shape.embd)

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """int64 [batch, time] -> normalised float32 [batch, time, embd]."""
        cos, sin = rope_table(tokens.shape[1], self.shape.head_dim, tokens.device)
        x = F.embedding(tokens, self.embedding)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            for layer in self.layers:
                x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.hidden(tokens, dtype).to(dtype) @ self.embedding.to(dtype).T).float()

    def loss(self, tokens: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        hidden = self.hidden(tokens, dtype).flatten(0, 1)
        return linear_cross_entropy(hidden, self.embedding, labels.flatten(), dtype)

    def balance(self, step: float) -> None:
        """Nothing to balance: no experts."""
