"""Trains a draft on a target's texts, with the target's likeliest tokens as the goal. Needs torch.

The loop ends at a time limit, and can be stopped before and resumed. The weights that agreed best
with texts that are not trained on are kept.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offload.measuring import Clock
from specdec.whole_file import whole_file
from specoffload.draft_making.continuations import N_PROMPT, Records
from specoffload.draft_making.network import TrainableDraft
from specoffload.draft_making.schedule import batch_rows, rate_factor
from specoffload.errors import UsageError

_CHECK_SHARE = 0.05  # share of the time between two checks
_SAVE_S = 60.0  # seconds between two checkpoints
_BETAS = (0.9, 0.95)


@dataclass(frozen=True)
class TrainingPlan:
    """How long and how fast to train.

    `rate` is the largest change of a weight in a step, as a share of the root mean square of its
    matrix, as in Adafactor (Shazeer & Stern 2018, "relative step size"). Matrices of any size and
    any model then learn equally fast.
    """

    limit_s: float
    rate: float
    n_batch: int  # records of a step
    checkpoint: Path
    draft_hash: str  # of the file whose weights are trained


@dataclass
class Trained:
    """How far the training got, in all runs together."""

    n_steps: int = 0
    took_s: float = 0.0
    best_agreement: float = 0.0  # of the weights that are kept, with texts for checks
    first_agreement: float = 0.0  # of the weights at the beginning


OnStep = Callable[[float, str], None]


def pick_device() -> tuple[torch.device, torch.dtype]:
    """The device to train on, and the type of products there."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16


def agreement(network: TrainableDraft, records: Records, n_batch: int) -> float:
    """Share of the target's greedy tokens that the network finds likeliest, too."""
    n_right = n = 0
    device = next(iter(network.weights.values())).device
    with torch.no_grad():
        for at in range(0, len(records), n_batch):
            tokens = np.array(records["tokens"][at : at + n_batch], np.int64)
            rows = network.logits(torch.from_numpy(tokens[:, :-1]).to(device))
            chosen = rows[:, N_PROMPT - 1 :].argmax(-1).cpu().numpy()
            n_right += int((chosen == tokens[:, N_PROMPT:]).sum())
            n += chosen.size
    return n_right / n


def train(
    network: TrainableDraft,
    records: Records,
    checks: Records,
    plan: TrainingPlan,
    on_step: OnStep,
    clock: Clock = time.monotonic,
) -> Trained:
    """Train until the limit. The network then has the weights that agreed best with `checks`.

    An exception, Ctrl-C included, keeps a checkpoint. A later call goes on there.
    """
    optimizer = _optimizer(network, plan)
    first = agreement(network, checks, plan.n_batch)
    done = Trained(best_agreement=first, first_agreement=first)
    best = network.arrays()
    if plan.checkpoint.exists():
        done, best = _load(plan, network, optimizer)
    since_save = since_check = 0.0
    try:
        while done.took_s < plan.limit_s:
            began = clock()
            _step(network, optimizer, records, plan, done)
            done.n_steps += 1
            step_s = clock() - began
            done.took_s += step_s
            since_save, since_check = since_save + step_s, since_check + step_s
            is_last = done.took_s >= plan.limit_s
            if since_check > _CHECK_SHARE * plan.limit_s or is_last:
                since_check, began = 0.0, clock()
                reached = agreement(network, checks, plan.n_batch)
                if reached > done.best_agreement:
                    done.best_agreement, best = reached, network.arrays()
                done.took_s += clock() - began
            words = f"step {done.n_steps}, agreement {done.best_agreement:.3f}"
            on_step(min(1.0, done.took_s / plan.limit_s), words)
            if since_save > _SAVE_S:
                since_save = 0.0
                _save(plan, network, optimizer, done, best)
    finally:
        _save(plan, network, optimizer, done, best)
    network.load(best)
    return done


def _optimizer(network: TrainableDraft, plan: TrainingPlan) -> torch.optim.Optimizer:
    """AdamW, with a learning rate for each tensor that fits the size of its values."""
    groups = []
    for w in network.weights.values():
        size = float(w.detach().square().mean().sqrt())
        groups.append({"params": [w], "lr": 0.0, "peak": plan.rate * max(size, 1e-3)})
    return torch.optim.AdamW(groups, betas=_BETAS, eps=1e-10, weight_decay=0.0)


def _step(
    network: TrainableDraft,
    optimizer: torch.optim.Optimizer,
    records: Records,
    plan: TrainingPlan,
    done: Trained,
) -> None:
    rows = np.sort(batch_rows(len(records), plan.n_batch, done.n_steps))
    device = next(iter(network.weights.values())).device
    batch = np.array(records[rows])
    tokens = torch.from_numpy(batch["tokens"][:, :-1].astype(np.int64)).to(device)
    ids = torch.from_numpy(batch["ids"].astype(np.int64)).to(device).flatten(0, 1)
    goal = torch.from_numpy(batch["probabilities"].astype(np.float32)).to(device).flatten(0, 1)
    goal = goal / goal.sum(-1, keepdim=True)

    def cross_entropy(logits: Tensor, part: slice) -> Tensor:
        chosen = logits.gather(1, ids[part]) - logits.logsumexp(-1, keepdim=True)
        return -(goal[part] * chosen).sum()

    network.loss(tokens, cross_entropy).backward()
    factor = rate_factor(done.took_s / plan.limit_s)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


# -- checkpoints -----------------------------------------------------------------------------------


def _save(
    plan: TrainingPlan,
    network: TrainableDraft,
    optimizer: torch.optim.Optimizer,
    done: Trained,
    best: dict[str, NDArray[np.float32]],
) -> None:
    state: dict[str, Any] = {
        "weights": {name: w.detach() for name, w in network.weights.items()},
        "best": {name: torch.from_numpy(values) for name, values in best.items()},
        "optimizer": optimizer.state_dict(),
        "done": asdict(done),
        "draft": plan.draft_hash,
    }
    with whole_file(plan.checkpoint) as file:
        torch.save(state, file)


def _load(
    plan: TrainingPlan, network: TrainableDraft, optimizer: torch.optim.Optimizer
) -> tuple[Trained, dict[str, NDArray[np.float32]]]:
    state = torch.load(plan.checkpoint, map_location="cpu", weights_only=True)
    if state["draft"] != plan.draft_hash:
        raise UsageError(
            f"{plan.checkpoint} belongs to another draft; name another file with -o, or delete it"
        )
    network.load({name: w.numpy() for name, w in state["weights"].items()})
    peaks = [group["peak"] for group in optimizer.param_groups]
    optimizer.load_state_dict(state["optimizer"])
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        group["peak"] = peak  # by this run's rate
    best = {name: w.numpy() for name, w in state["best"].items()}
    return Trained(**state["done"]), best
