"""Trains both models: batches of text, the optimisers, and a loop until a wall-clock deadline.

The loop can be stopped and resumed. Muon (momentum, orthogonalised by a Newton-Schulz iteration)
steps matrices, and AdamW all other weights: Keller Jordan, "Muon: an optimizer for hidden layers in
neural networks", 2024.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor, nn

from lab.train.model import LanguageModel
from lab.train.shapes import SEED, DraftShape

BLOCK = 2048
POOL_BLOCKS = 64
# (share of the run, tokens per sequence from that share on). Short sequences come first because
# they train faster. Long ones at the end train all positions of the declared context.
LENGTHS = ((0.0, 256), (0.35, 512), (0.70, 1024), (0.90, 2048))


def sequence_length(share: float) -> int:
    return [length for start, length in LENGTHS if share >= start][-1]


@dataclass
class Cursor:
    """The next pool and its epoch. A resumed run starts at a pool boundary."""

    epoch: int = 0
    pool: int = 0


class Stream:
    """Sequences of the training text. Each pool of `POOL_BLOCKS` random blocks is cut into
    sequences, which are shuffled."""

    def __init__(self, tokens: np.ndarray, cursor: Cursor) -> None:
        if len(tokens) < 2 * BLOCK:
            raise ValueError(f"{len(tokens)} tokens are fewer than two blocks of {BLOCK}")
        self.tokens, self.cursor = tokens, cursor
        self.rows: list[tuple[int, int]] = []

    def batch(self, n_tokens: int, length: int) -> np.ndarray:
        """The next batch, int64 [n_tokens / length, length + 1]. Labels are the inputs shifted by
        one."""
        windows: list[np.ndarray] = []
        while len(windows) < n_tokens // length:
            if not self.rows or self.rows[-1][1] != length:
                self.rows = self._next_pool(length)
            start, size = self.rows.pop()
            windows.append(self.tokens[start : start + size + 1])
        return np.stack(windows).astype(np.int64)

    def _next_pool(self, length: int) -> list[tuple[int, int]]:
        rng = np.random.default_rng((SEED, self.cursor.epoch))
        offset = int(rng.integers(BLOCK))
        n_blocks = (len(self.tokens) - 1 - offset) // BLOCK
        order = rng.permutation(n_blocks)
        first = self.cursor.pool * POOL_BLOCKS
        chosen = order[first : first + POOL_BLOCKS]
        starts = [(b, s) for b in chosen for s in range(0, BLOCK, length)]
        rows = [(offset + int(b) * BLOCK + s, length) for b, s in starts]
        np.random.default_rng((SEED, self.cursor.epoch, self.cursor.pool)).shuffle(rows)
        self.cursor.pool += 1
        if first + POOL_BLOCKS >= n_blocks:
            self.cursor = Cursor(self.cursor.epoch + 1, 0)
        return [(int(start), int(size)) for start, size in rows]


class Replay:
    """The target's continuations [n, length], in a new random order in each pass over them."""

    def __init__(self, rows: np.ndarray, seed: int) -> None:
        self.rows, self.rng = rows, np.random.default_rng((SEED, seed))
        self.order: list[int] = []

    def batch(self, n_tokens: int) -> np.ndarray:
        """The next batch, int64 [n_tokens / length, length]. Labels are inputs shifted by one."""
        n_rows = n_tokens // self.rows.shape[1]
        while len(self.order) < n_rows:
            self.order.extend(self.rng.permutation(len(self.rows)).tolist())
        chosen, self.order = self.order[:n_rows], self.order[n_rows:]
        return self.rows[chosen].astype(np.int64)


# -- optimisers ------------------------------------------------------------------------------------

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5
MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.05


def orthogonalise(update: Tensor, dtype: torch.dtype) -> Tensor:
    """The semi-orthogonal matrices that are nearest to `update` [..., rows, columns], roughly."""
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
    """Steps matrices [rows, columns] and stacks of them. Names with gate_up have two, by rows."""

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


def make_optimizers(model: LanguageModel, dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    """Muon for hidden matrices; AdamW for tables, router and gains, each at a rate of its own."""
    matrices: list[tuple[str, nn.Parameter]] = []
    rest: dict[float, list[nn.Parameter]] = {}
    tied = isinstance(model.shape, DraftShape)
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


# -- the loop --------------------------------------------------------------------------------------

BATCH_TOKENS = 8192
CHECKPOINT_EVERY_S = 300.0
LOG_EVERY_S = 15.0
WARMUP = 0.02
BALANCE_STEP = 0.01


@dataclass
class Counters:
    """Steps, tokens and seconds so far, including those before a resume."""

    step: int = 0
    n_tokens: int = 0
    elapsed_s: float = 0.0
    cursor: Cursor = field(default_factory=Cursor)


@dataclass(frozen=True)
class Plan:
    """`deadline_s` is the wall-clock time of the whole run. The learning rate falls to zero at
    its end."""

    deadline_s: float
    micro_tokens: int
    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    peak: float = 1.0  # factor of the learning rates
    # Share of the run from which the feed follows a teacher (1.0: never). Stored for the model
    # card.
    distill_from: float = 1.0


Loss = Callable[[LanguageModel, Tensor, Tensor], Tensor]


@dataclass
class TextFeed:
    """Batches of text. The share of the run that has passed decides the sequence length."""

    stream: Stream
    loss: Loss

    def next(self, share: float, step: int) -> tuple[np.ndarray, Loss]:
        return self.stream.batch(BATCH_TOKENS, sequence_length(share)), self.loss


@dataclass
class FollowingFeed(TextFeed):
    """Batches of plain text before share `start` of the run. Afterwards two kinds of batches
    alternate: text with the teacher's distribution as the goal, and the teacher's own
    continuations, which a draft has to predict."""

    start: float
    distilling: Loss
    replay: Replay

    def next(self, share: float, step: int) -> tuple[np.ndarray, Loss]:
        if share < self.start:
            return super().next(share, step)
        if step % 2:
            return self.replay.batch(BATCH_TOKENS), self.loss
        return super().next(share, step)[0], self.distilling


def rate(share: float) -> float:
    """Learning-rate factor: linear warm-up, then linear decay to 0 at share 1."""
    return min(share / WARMUP + 0.02, max(0.0, (1.0 - share) / (1.0 - WARMUP)), 1.0)


def pick_device() -> tuple[torch.device, torch.dtype]:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16


def save_checkpoint(
    plan: Plan, model: LanguageModel, optimizers: list[Any], done: Counters
) -> None:
    path = plan.checkpoint
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "counters": asdict(done),
        "shape": asdict(model.shape),
        "distill_from": plan.distill_from,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, model: LanguageModel, optimizers: list[Any]) -> Counters:
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    counters = dict(state["counters"])
    counters["cursor"] = Cursor(**counters["cursor"])
    return Counters(**counters)


def plain_loss(dtype: torch.dtype) -> Loss:
    """Cross entropy with the text's own tokens."""
    return lambda model, tokens, labels: model.loss(
        tokens, lambda part: labels.flatten()[part], dtype
    )


def distilling_loss(teacher: LanguageModel, dtype: torch.dtype) -> Loss:
    """Cross entropy with the teacher's distribution for the same tokens. Acceptance depends on
    how well the draft matches that."""
    teacher.eval()

    def loss(model: LanguageModel, tokens: Tensor, labels: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher.hidden(tokens, dtype).flatten(0, 1).to(dtype)
            head = teacher.output.to(dtype).T
        return model.loss(
            tokens, lambda part: torch.softmax((wanted[part] @ head).float(), -1), dtype
        )

    return loss


def train(model: LanguageModel, feed: TextFeed, plan: Plan) -> Counters:
    """Train until the deadline. Ctrl-C saves a checkpoint and stops; a second call resumes
    there."""
    torch.manual_seed(SEED)
    model.to(plan.device).train()
    optimizers = make_optimizers(model, plan.dtype)
    done = Counters()
    if plan.checkpoint.exists():
        done = load_checkpoint(plan.checkpoint, model, optimizers)
        feed.stream.cursor = done.cursor
    last_save = last_log = last = time.monotonic()
    average = float("nan")
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, refresh_per_second=0.1) as progress:
        bar = progress.add_task("training", total=plan.deadline_s, completed=done.elapsed_s)
        try:
            while done.elapsed_s < plan.deadline_s:
                loss = _step(model, optimizers, feed, plan, done)
                now = time.monotonic()
                done.step += 1
                done.n_tokens += BATCH_TOKENS
                speed = BATCH_TOKENS / (now - last)
                done.elapsed_s += now - last
                last = now
                done.cursor = feed.stream.cursor
                average = loss if average != average else 0.95 * average + 0.05 * loss
                note = f"step {done.step}  {done.n_tokens / 1e6:.2f}M tokens  nats {average:.3f}"
                note += f"  {speed:.0f} tokens/s  {done.elapsed_s:.0f} s"
                progress.update(bar, completed=done.elapsed_s, description=note)
                if now - last_log > LOG_EVERY_S:
                    last_log = now
                    if not progress.console.is_terminal:
                        progress.console.print(note)
                if now - last_save > CHECKPOINT_EVERY_S:
                    last_save = now
                    save_checkpoint(plan, model, optimizers, done)
        finally:
            save_checkpoint(plan, model, optimizers, done)
    return done


def _step(
    model: LanguageModel, optimizers: list[Any], feed: TextFeed, plan: Plan, done: Counters
) -> float:
    share = done.elapsed_s / plan.deadline_s
    batch, loss_of = feed.next(share, done.step)
    rows = max(1, plan.micro_tokens // (batch.shape[1] - 1))
    total = 0.0
    for start in range(0, len(batch), rows):
        part = torch.from_numpy(batch[start : start + rows]).to(plan.device)
        weight = len(part) / len(batch)
        loss = loss_of(model, part[:, :-1], part[:, 1:].contiguous()) * weight
        loss.backward()
        total += float(loss.detach())
    factor = rate(share) * plan.peak
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.balance(max(0.001, BALANCE_STEP * factor))
    return total
