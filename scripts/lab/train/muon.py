"""Muon (momentum, orthogonalised by a Newton-Schulz iteration) for matrices, AdamW for the rest.

Keller Jordan, "Muon: an optimizer for hidden layers in neural networks", 2024.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.05


def orthogonalise(update: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest semi-orthogonal matrices of [..., rows, columns], approximately."""
    a, b, c = NS_COEFFICIENTS
    x = update.to(dtype)
    wide = x.shape[-2] <= x.shape[-1]
    if not wide:
        x = x.mT.contiguous()
    x = x / (x.float().flatten(-2).norm(dim=-1)[..., None, None] + 1e-7).to(dtype)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Steps matrices [rows, columns] and stacks of them; a name with gate_up holds two by rows."""

    def __init__(self, named: list[tuple[str, nn.Parameter]], dtype: torch.dtype) -> None:
        groups = [{"params": [p], "halves": 2 if "gate_up" in name else 1} for name, p in named]
        super().__init__(groups, {"lr": MUON_LR})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            (p,) = group["params"]
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            momentum = state["momentum"].lerp_(p.grad, 1 - MUON_MOMENTUM)
            update = p.grad.lerp(momentum, MUON_MOMENTUM)
            halves = group["halves"]
            split = update.unflatten(-2, (halves, -1))
            rows, columns = split.shape[-2:]
            stacked = split.reshape(-1, rows, columns)
            step = orthogonalise(stacked, self.dtype).float().view_as(split).flatten(-3, -2)
            p.mul_(1 - group["lr"] * MUON_DECAY)
            p.add_(step, alpha=-group["lr"] * max(1.0, rows / columns) ** 0.5)


def make_optimizers(model: nn.Module, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices; AdamW, each at its own rate, for tables, router and gains."""
    matrices: list[tuple[str, nn.Parameter]] = []
    rest: dict[float, list[nn.Parameter]] = {}
    tied = not hasattr(model, "head")
    for name, p in model.named_parameters():
        if name == "embedding":
            rest.setdefault(0.006 if tied else 0.05, []).append(p)
        elif name == "head":
            rest.setdefault(0.005, []).append(p)
        elif name.endswith("router"):
            rest.setdefault(0.004, []).append(p)
        elif p.ndim == 1:
            rest.setdefault(0.01, []).append(p)
        else:
            matrices.append((name, p))
    groups = [{"params": params, "lr": lr} for lr, params in rest.items()]
    adam = torch.optim.AdamW(groups, betas=(0.85, 0.95), eps=1e-9, weight_decay=0.0)
    optimizers: list[torch.optim.Optimizer] = [Muon(matrices, dtype), adam]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
