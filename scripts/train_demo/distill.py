"""The draft's second loss: the target's own distribution, which is what acceptance depends on."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

from train_demo.train import Loss

CHUNK_TOKENS = 1024


def distilling_loss(teacher: nn.Module, start: float, dtype: torch.dtype) -> Loss:
    """Cross entropy with the text before share `start` of the run, with the teacher after it."""
    teacher.eval()

    def loss(
        model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor, share: float
    ) -> torch.Tensor:
        if share < start:
            result: torch.Tensor = model.loss(tokens, labels, dtype)
            return result
        with torch.no_grad():
            wanted = teacher.hidden(tokens, dtype).flatten(0, 1).to(dtype)
            head = teacher.head.to(dtype)
        hidden = model.hidden(tokens, dtype).flatten(0, 1).to(dtype)
        weight = model.embedding.to(dtype)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), CHUNK_TOKENS):
            part = slice(begin, begin + CHUNK_TOKENS)
            with torch.no_grad():
                probabilities = (wanted[part] @ head.T).float().softmax(-1)
            logits = (hidden[part] @ weight.T).float()
            total = total + F.cross_entropy(logits, probabilities, reduction="sum")
        return total / len(hidden)

    return loss
