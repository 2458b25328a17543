"""The draft's second loss: the target's own distribution, which is what acceptance depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lab.train.layers import CHUNK_TOKENS
from lab.train.train import Loss


class _LinearDistillation(torch.autograd.Function):
    """Mean cross entropy of `hidden @ weight.T` with `wanted @ head.T` as the distribution.

    Both logits live for one chunk only; gradients of the first two are made in the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, wanted: Tensor, head: Tensor) -> Tensor:
        n_tokens = hidden.shape[0]
        dtype = wanted.dtype
        narrow_hidden, narrow_weight = hidden.to(dtype), weight.to(dtype)
        grad_hidden = torch.empty_like(narrow_hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), device=hidden.device)
        for start in range(0, n_tokens, CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            teacher = torch.softmax((wanted[part] @ head.T).float(), -1)
            logits = (narrow_hidden[part] @ narrow_weight.T).float()
            log_p = logits.sub_(torch.logsumexp(logits, -1, keepdim=True))
            total -= (teacher * log_p).sum()
            narrow = log_p.exp_().sub_(teacher).mul_(1.0 / n_tokens).to(dtype)
            grad_hidden[part] = narrow @ narrow_weight
            grad_weight += narrow.T @ narrow_hidden[part]
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total / n_tokens

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.float() * grad_out, grad_weight * grad_out, None, None


def distilling_loss(teacher: nn.Module, dtype: torch.dtype) -> Loss:
    """Cross entropy with the distribution that the teacher gives for the same tokens."""
    teacher.eval()

    def loss(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher.hidden(tokens, dtype).flatten(0, 1).to(dtype)
            head = teacher.head.to(dtype)
        hidden = model.hidden(tokens, dtype).flatten(0, 1)
        distance: Tensor = _LinearDistillation.apply(hidden, model.embedding, wanted, head)
        return distance

    return loss
