"""Target and draft in torch. They compute the same as llama.cpp does for deepseek2 and llama."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lab.train.shapes import RMS_EPS, ROPE_BASE, DraftShape, TargetShape

CHUNK_TOKENS = 1024  # 1024 x 4096 float32 logits are 16 MiB, which stays in a last-level cache


def matrix(rows: int, columns: int, *, batch: int = 0) -> nn.Parameter:
    """A random weight [rows, columns] (with a leading `batch` where given), scaled by fan-in."""
    shape = (batch, rows, columns) if batch else (rows, columns)
    return nn.Parameter(torch.randn(shape) * columns**-0.5)


class RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + RMS_EPS) * self.weight


def rope_table(n_pos: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, each [n_pos, width / 2], for neighbouring pairs (ggml's NORM type)."""
    inverse = ROPE_BASE ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(n_pos, dtype=torch.float64)[:, None] * inverse
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates [batch, time, head, width] by position; cos and sin are [time, width / 2]."""
    pairs = x.float().unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; all [batch, time, head, width]; gives [batch, time, head * width]."""
    q, k, v = (x.transpose(1, 2).to(v.dtype) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out.transpose(1, 2).flatten(2)


class DenseMLP(nn.Module):
    def __init__(self, embd: int, ff: int) -> None:
        super().__init__()
        self.gate_up = matrix(2 * ff, embd)
        self.down = nn.Parameter(torch.zeros(embd, ff))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, self.down)


class Experts(nn.Module):
    """Routed experts. Each token uses the `n_used` with the highest sum of sigmoid score and bias.

    Weights are the normalised and scaled scores. The bias balances loads, and affects only the
    choice (DeepSeek-V3).
    """

    bias: Tensor
    load: Tensor

    def __init__(self, shape: TargetShape) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Parameter(torch.randn(shape.n_exp, shape.embd) * 0.02)
        self.gate_up = matrix(2 * shape.ff_exp, shape.embd, batch=shape.n_exp)
        self.down = nn.Parameter(torch.zeros(shape.n_exp, shape.embd, shape.ff_exp))
        self.register_buffer("bias", torch.zeros(shape.n_exp))
        self.register_buffer("load", torch.zeros(shape.n_exp), persistent=False)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Maps x, float32 [n, embd], to [n, embd]. Training adds each expert's number of tokens
        to `load`."""
        k = self.shape.n_used
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(x @ self.router.T)
            chosen = torch.topk(scores.detach() + self.bias, k, -1).indices
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) * self.shape.weights_scale
            flat = chosen.flatten()
            counts = torch.bincount(flat, minlength=self.shape.n_exp)
            if self.training:
                self.load += counts
            order = torch.argsort(flat, stable=True)  # rows sorted by expert
            parts = x.to(dtype)[order // k].split(counts.tolist())
            done = []
            for part, gate_up, down in zip(parts, self.gate_up, self.down, strict=True):
                gate, up = F.linear(part, gate_up.to(dtype)).chunk(2, -1)
                done.append(F.linear(F.silu(gate) * up, down.to(dtype)))
            y = torch.cat(done)[torch.argsort(order)].unflatten(0, (-1, k))
            return torch.bmm(weights.to(dtype)[:, None, :], y)[:, 0, :]

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Move each expert's bias by `step` so that loads even out, then reset the loads."""
        self.bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class MLA(nn.Module):
    """Multi-head latent attention with expanded keys and values (llama.cpp absorbs k_b instead)."""

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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        normed = self.attn_norm(x)
        q, k, v = (
            F.linear(normed, w).unflatten(-1, (self.shape.n_head, -1))
            for w in (self.q, self.k, self.v)
        )
        x = x + F.linear(attend(rotate(q, cos, sin), rotate(k, cos, sin), v), self.out)
        return x + self.dense(self.ffn_norm(x))


class LanguageModel(nn.Module):
    """Target or draft; tokens are int64 [batch, time]."""

    layers: nn.ModuleList

    def __init__(self, shape: TargetShape | DraftShape) -> None:
        super().__init__()
        self.shape = shape
        if isinstance(shape, TargetShape):
            self.embedding = nn.Parameter(torch.randn(shape.n_vocab, shape.embd))
            self.layers = nn.ModuleList(TargetLayer(shape, i) for i in range(shape.n_layer))
            self.head = nn.Parameter(torch.randn(shape.n_vocab, shape.embd) * 0.001)
        else:
            # Tied embeddings begin small, so that the first logits are near zero after the norm.
            self.embedding = nn.Parameter(torch.randn(shape.n_vocab, shape.embd) * 0.05)
            self.layers = nn.ModuleList(DraftLayer(shape) for _ in range(shape.n_layer))
        self.norm = RMSNorm(shape.embd)

    @property
    def output(self) -> Tensor:
        return self.head if isinstance(self.shape, TargetShape) else self.embedding

    def hidden(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normalised float32 [batch, time, embd]."""
        shape = self.shape
        width = shape.rope if isinstance(shape, TargetShape) else shape.head_dim
        cos, sin = rope_table(tokens.shape[1], width, tokens.device)
        x = F.embedding(tokens, self.embedding)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            for layer in self.layers:
                x = layer(x, cos, sin, dtype)
        return self.norm(x)

    def logits(self, tokens: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        return (self.hidden(tokens, dtype).to(dtype) @ self.output.to(dtype).T).float()

    def loss(self, tokens: Tensor, goal: Callable[[slice], Tensor], dtype: torch.dtype) -> Tensor:
        """Mean cross entropy in nats; `goal` gives the labels [n], or the distributions
        [n, n_vocab], of a range of all tokens. Logits are made anew for the gradients."""
        hidden = self.hidden(tokens, dtype).flatten(0, 1)

        def chunk(rows: Tensor, weight: Tensor, part: slice) -> Tensor:
            logits = (rows.to(dtype) @ weight.to(dtype).T).float()
            return F.cross_entropy(logits, goal(part), reduction="sum")

        total = torch.zeros((), device=hidden.device)
        for start in range(0, len(hidden), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            total = total + checkpoint(chunk, hidden[part], self.output, part, use_reentrant=False)
        return total / len(hidden)

    def balance(self, step: float) -> None:
        """Balance the experts' loads in all layers with experts."""
        for layer in self.layers:
            if isinstance(layer, TargetLayer) and layer.experts is not None:
                layer.experts.balance(step)
