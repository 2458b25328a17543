"""The target in torch: what llama.cpp computes for a deepseek2 GGUF with these tensors."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.train.experts import Experts
from lab.train.layers import RMSNorm, attend, linear_cross_entropy, matrix, rope_table, rotate
from lab.train.shapes import N_CTX, TargetShape


class MLA(nn.Module):
    """Multi-head latent attention, keys and values expanded (llama.cpp absorbs k_b instead)."""

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        heads = shape.n_head
        self.q_a = matrix(shape.q_lora, shape.embd)
        self.q_a_norm = RMSNorm(shape.q_lora)
        self.q_b = matrix(heads * (shape.nope + shape.rope), shape.q_lora)
        self.kv_a = matrix(shape.kv_lora + shape.rope, shape.embd)
        self.kv_a_norm = RMSNorm(shape.kv_lora)
        self.k_b = matrix(heads * shape.nope, shape.kv_lora)
        self.v_b = matrix(heads * shape.v_dim, shape.kv_lora)
        self.out = nn.Parameter(torch.zeros(shape.embd, heads * shape.v_dim))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = self.shape
        q = F.linear(self.q_a_norm(F.linear(x, self.q_a)), self.q_b)
        q = q.unflatten(-1, (shape.n_head, -1))
        q_nope, q_rope = q.split((shape.nope, shape.rope), -1)
        latent, k_rope = F.linear(x, self.kv_a).split((shape.kv_lora, shape.rope), -1)
        latent = self.kv_a_norm(latent)
        k_nope = F.linear(latent, self.k_b).unflatten(-1, (shape.n_head, -1))
        v = F.linear(latent, self.v_b).unflatten(-1, (shape.n_head, -1))
        q_rope = rotate(q_rope, cos, sin).to(q.dtype)
        k_rope = rotate(k_rope[:, :, None, :], cos, sin).to(q.dtype)
        q = torch.cat((q_nope, q_rope), -1)
        k = torch.cat((k_nope, k_rope.expand(-1, -1, shape.n_head, -1)), -1)
        return F.linear(attend(q, k, v), self.out)


class DenseMLP(nn.Module):
    def __init__(self, embd: int, ff: int) -> None:
        super().__init__()
        self.gate_up = matrix(2 * ff, embd)
        self.down = nn.Parameter(torch.zeros(embd, ff))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class TargetLayer(nn.Module):
    def __init__(self, shape: TargetShape, index: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(shape.embd)
        self.attn = MLA(shape)
        self.ffn_norm = RMSNorm(shape.embd)
        routed = index >= shape.n_dense
        self.experts = Experts(shape) if routed else None
        self.dense = DenseMLP(shape.embd, shape.n_shared * shape.ff_exp if routed else shape.ff)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        x = x + self.attn(self.attn_norm(x), cos, sin)
        normed = self.ffn_norm(x)
        out = self.dense(normed)
        if self.experts is not None:
            out = out + self.experts(normed.flatten(0, 1), dtype).view_as(x)
        return x + out


class Target(nn.Module):
    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Parameter(torch.randn(shape.n_vocab, shape.embd))
        self.layers = nn.ModuleList(TargetLayer(shape, i) for i in range(shape.n_layer))
        self.norm = RMSNorm(shape.embd)
        self.head = nn.Parameter(torch.randn(shape.n_vocab, shape.embd) * 0.001)

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """int64 [batch, time] -> normalised float32 [batch, time, embd]."""
        cos, sin = rope_table(tokens.shape[1], self.shape.rope, tokens.device)
        x = F.embedding(tokens, self.embedding)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            for layer in self.layers:
                x = layer(x, cos, sin, dtype)
        return self.norm(x)

    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.hidden(tokens, dtype).to(dtype) @ self.head.to(dtype).T).float()

    def loss(self, tokens: Tensor, labels: Tensor, dtype: torch.dtype) -> Tensor:
        hidden = self.hidden(tokens, dtype).flatten(0, 1)
        return linear_cross_entropy(hidden, self.head, labels.flatten(), dtype)

    def balance(self, step: float) -> None:
        for layer in self.layers:
            if layer.experts is not None:
                layer.experts.balance(step)


__all__ = ["N_CTX", "Target"]
