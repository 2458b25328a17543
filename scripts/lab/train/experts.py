"""Routed experts: tokens sorted by expert once, then one matrix product per expert and weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lab.train.layers import matrix
from lab.train.shapes import TargetShape


class _Sort(torch.autograd.Function):
    """Rows of x [n, d] copied to their experts' places [n * k, d]; both ways are gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse).unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Unsort(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return y.index_select(0, inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, order), None, None


class _ExpertMLP(torch.autograd.Function):
    """silu(x gate) * (x up), then down, over row ranges; written out to avoid per-expert nodes."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, ends: list[int]
    ) -> Tensor:  # x [m, d], gate_up [e, 2f, d], down [e, d, f]
        w_gate_up, w_down = gate_up.to(x.dtype), down.to(x.dtype)
        both = x.new_empty(x.shape[0], gate_up.shape[1])
        for w, start, end in _ranges(w_gate_up, ends):
            torch.mm(x[start:end], w.T, out=both[start:end])
        gate, up = both.chunk(2, -1)
        act = F.silu(gate) * up
        y = torch.empty_like(x)
        for w, start, end in _ranges(w_down, ends):
            torch.mm(act[start:end], w.T, out=y[start:end])
        ctx.save_for_backward(x, both, act, w_gate_up, w_down)
        ctx.ends = ends
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, both, act, w_gate_up, w_down = ctx.saved_tensors
        d_act = torch.empty_like(act)
        d_down = torch.zeros(w_down.shape, device=x.device)
        for i, (w, start, end) in enumerate(_ranges(w_down, ctx.ends)):
            torch.mm(dy[start:end], w, out=d_act[start:end])
            d_down[i] = dy[start:end].T @ act[start:end]
        gate, up = both.chunk(2, -1)
        sigma = torch.sigmoid(gate)
        d_both = torch.empty_like(both)
        d_gate, d_up = d_both.chunk(2, -1)
        silu = gate * sigma
        torch.mul(d_act, silu, out=d_up)
        torch.mul(d_act * up, sigma + silu * (1 - sigma), out=d_gate)
        dx = torch.empty_like(x)
        d_gate_up = torch.zeros(w_gate_up.shape, device=x.device)
        for i, (w, start, end) in enumerate(_ranges(w_gate_up, ctx.ends)):
            torch.mm(d_both[start:end], w, out=dx[start:end])
            d_gate_up[i] = d_both[start:end].T @ x[start:end]
        return dx, d_gate_up, d_down, None


def _ranges(weights: Tensor, ends: list[int]) -> list[tuple[Tensor, int, int]]:
    starts = [0, *ends[:-1]]
    return list(zip(weights.unbind(0), starts, ends, strict=True))


class Experts(nn.Module):
    """Sigmoid gate, top `n_used` by score plus balancing bias, weights normalised and scaled.

    The bias takes part in the choice only, never in the weights (DeepSeek-V3).
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
        """x float32 [n, embd] -> [n, embd]; adds the tokens each expert got to `load`."""
        k = self.shape.n_used
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(x @ self.router.T)
            chosen = torch.topk(scores.detach() + self.bias, k, -1).indices
            weights = scores.gather(1, chosen)
            weights = weights / weights.sum(-1, keepdim=True) * self.shape.weights_scale
            flat = chosen.flatten()
            counts = torch.bincount(flat, minlength=self.shape.n_exp)
            order = torch.argsort(flat, stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=x.device)
            if self.training:
                self.load += counts
            rows = _Sort.apply(x.to(dtype), order, inverse, k)
            y = _ExpertMLP.apply(rows, self.gate_up, self.down, counts.cumsum(0).tolist())
            y = _Unsort.apply(y, order, inverse).unflatten(0, (-1, k))
            return torch.bmm(weights.to(dtype)[:, None, :], y)[:, 0, :]

    @torch.no_grad()
    def balance(self, step: float) -> None:
        """Moves the bias of each expert by `step` towards the mean load, then forgets the load."""
        self.bias += step * torch.sign(self.load.mean() - self.load)
        self.load.zero_()
