"""Parts both models share: norms, rotary positions, and a cross entropy that keeps no logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.train.shapes import RMS_EPS, ROPE_BASE

CHUNK_TOKENS = 1024  # 1024 x 4096 float32 logits are 16 MiB, which stays in a last-level cache


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


class _LinearCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T`; gradients are made in the forward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, dtype: Any) -> Tensor:
        n_tokens = hidden.shape[0]
        narrow_hidden, narrow_weight = hidden.to(dtype), weight.to(dtype)
        grad_hidden = torch.empty_like(narrow_hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, n_tokens, CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            logits = (narrow_hidden[part] @ narrow_weight.T).float()
            log_z = torch.logsumexp(logits, -1, keepdim=True)
            rows = labels[part, None]
            total += (log_z - logits.gather(1, rows)).sum()
            grad = logits.sub_(log_z).exp_()
            grad.scatter_add_(1, rows, torch.full_like(log_z, -1.0))
            narrow = grad.mul_(1.0 / n_tokens).to(dtype)
            grad_hidden[part] = narrow @ narrow_weight
            grad_weight += narrow.T @ narrow_hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / n_tokens

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.float() * grad_out, grad_weight * grad_out, None, None


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, dtype: torch.dtype
) -> Tensor:
    """Mean nats per token; hidden [n, embd], weight [n_vocab, embd], labels int64[n]."""
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, dtype)
    return loss


def matrix(rows: int, columns: int, scale: float = 1.0, *, batch: int = 0) -> nn.Parameter:
    """A weight of shape [rows, columns] (with a leading `batch` where given), scaled by fan-in."""
    shape = (batch, rows, columns) if batch else (rows, columns)
    return nn.Parameter(torch.randn(shape) * (scale * columns**-0.5))
