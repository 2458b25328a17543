"""Figures of a GGUF's quality through llama.cpp alone: bits per byte, greedy agreement."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from lab.train.llama import LlamaModel
from lab.train.shapes import EOS_ID, N_CTX

STRIDE = 1536  # windows of N_CTX tokens overlap by a quarter, so most tokens see 512 before them
N_NEW = 64


@dataclass(frozen=True)
class Likelihood:
    nats: float
    n_tokens: int
    n_bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.nats / np.log(2.0) / self.n_bytes


def negative_log_likelihood(model: LlamaModel, ids: list[int]) -> float:
    """Nats of ids[1:] given what comes before each, within windows of N_CTX tokens."""
    total, scored = 0.0, 1
    for start in range(0, max(1, len(ids) - N_CTX + STRIDE), STRIDE):
        window = ids[start : start + N_CTX]
        skip = scored - start
        if skip >= len(window):
            break
        logits = model.logits(window)[skip - 1 : -1]
        labels = np.array(window[skip:])
        top = logits.max(-1)
        log_z = np.log(np.exp(logits - top[:, None]).sum(-1, dtype=np.float64)) + top
        total += float((log_z - logits[np.arange(len(labels)), labels]).sum())
        scored = start + len(window)
    return total


def likelihood(model: LlamaModel, text: str, n_tokens: int | None = None) -> Likelihood:
    """Of a whole file after EOS, or of its first `n_tokens` tokens."""
    ids = model.tokenize(text)[:n_tokens]
    n_bytes = len(model.llama.detokenize(ids)) if n_tokens else len(text.encode())
    return Likelihood(negative_log_likelihood(model, [EOS_ID, *ids]), len(ids), n_bytes)


def agreement(target: LlamaModel, draft: LlamaModel, prompt: str) -> float:
    """Share of the target's `N_NEW` greedy tokens that are the draft's first choice there."""
    ids = target.tokenize(prompt)
    made = target.greedy(ids, N_NEW)
    guesses = draft.logits(ids + made)[len(ids) - 1 : -1].argmax(-1)
    return float((guesses == np.array(made)).mean())
