"""One training loop for both models: its length is a wall-clock deadline, its state resumable."""

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
from torch import nn

from lab.train.batches import Cursor, Replay, Stream, sequence_length
from lab.train.muon import make_optimizers
from lab.train.shapes import SEED

BATCH_TOKENS = 8192
CHECKPOINT_EVERY_S = 300.0
LOG_EVERY_S = 15.0
WARMUP = 0.02
BALANCE_STEP = 0.01


@dataclass
class Counters:
    """What a run has used so far, resumed runs added up."""

    step: int = 0
    n_tokens: int = 0
    elapsed_s: float = 0.0
    cursor: Cursor = field(default_factory=Cursor)


@dataclass(frozen=True)
class Plan:
    """`deadline_s` is the whole run's wall-clock time; the rate falls to zero exactly there."""

    deadline_s: float
    micro_tokens: int
    checkpoint: Path
    device: torch.device
    dtype: torch.dtype
    peak: float = 1.0  # factor of the learning rates
    # step, n_tokens and elapsed_s of an earlier run that the weights come from, if any.
    earlier: dict[str, float] = field(default_factory=dict)
    # From this share of the run on the feed follows a teacher (1.0: never); kept for the card.
    distill_from: float = 1.0


Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class TextFeed:
    """Batches of text, at the sequence length of the run's share."""

    stream: Stream
    loss: Loss
    begins_at: float  # of the lengths of sequences, as a share of a whole run

    def next(self, share: float, step: int) -> tuple[np.ndarray, Loss]:
        length = sequence_length(self.begins_at + (1.0 - self.begins_at) * share)
        return self.stream.batch(BATCH_TOKENS, length), self.loss


@dataclass
class FollowingFeed(TextFeed):
    """Text alone before share `start`; then in turns text with the teacher's distribution as the
    goal, and the teacher's own continuations, which are what a draft has to guess."""

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


def save_checkpoint(plan: Plan, model: nn.Module, optimizers: list[Any], done: Counters) -> None:
    path = plan.checkpoint
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "counters": asdict(done),
        "shape": model.shape.to_dict(),
        "distill_from": plan.distill_from,
        "earlier": plan.earlier,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, path)


def load_checkpoint(path: Path, model: nn.Module, optimizers: list[Any]) -> Counters:
    state = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    counters = dict(state["counters"])
    counters["cursor"] = Cursor(**counters["cursor"])
    return Counters(**counters)


def plain_loss(dtype: torch.dtype) -> Loss:
    def loss(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model.loss(tokens, labels, dtype)
        return result

    return loss


def train(model: nn.Module, feed: TextFeed, plan: Plan) -> Counters:
    """Runs until the deadline; Ctrl-C saves and stops, and a second call goes on from there."""
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
    model: nn.Module, optimizers: list[Any], feed: TextFeed, plan: Plan, done: Counters
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
