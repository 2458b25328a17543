"""Tiny f32 models with layers for multi-token prediction: sessions, and references for drafts.

Every expert is used, so that no router has to choose between scores that nearly tie.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from budgets import ON_GPU, budget
from lossless_parts import NEAR_TIE
from own_layer_steps import steps_of
from test_slots import open_slots

from lab.options import Streaming
from offload.engine import Engine
from offload.model_file import read_facts
from offload.plan.row_draft import plan_mtp
from offload.sequences.block_draft import BlockDraft
from offload.times.context_memory import ContextOptions
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import Session

LONGEST = 6
WAYS: dict[str, dict[str, Any]] = {
    "resident": {"device": "cpu"},
    "streamed": {"device": "sim", "min_batch": "1"},
    "split": {"device": "sim", "hybrid": "on"},
}


def fresh_draft(engine: Engine, history: Sequence[int], n: int) -> tuple[list[int], list[float]]:
    """The `n` tokens that the layers draft after `history` from an empty memory.

    Returns the tokens, and how far the logit of each is above the second likeliest token's.
    """
    layers = engine.opened.row_draft
    assert layers is not None
    engine.sequences.rewind(0, 0)
    engine.sequences.extend(0, history[:-1], 0)
    tokens: list[int] = []
    gaps: list[float] = []
    feed = layers.tail(0, history)
    block = None
    if isinstance(layers, BlockDraft):
        (block,) = layers.draft_blocks([(0, feed)], layers.shape.n_most)
    while len(tokens) < n:
        if block is None:
            row = layers.extend(0, feed)[-1]
        else:
            row, _ = block.place(len(tokens), tokens[-1] if tokens else None)
        second, best = np.partition(row, -2)[-2:]
        tokens.append(int(row.argmax()))
        gaps.append(float(best - second))
        feed = tokens[-1:]
    return tokens, gaps


def check_each_draft(engine: Engine, fresh: Engine) -> None:
    """Check that all drafts of a run are those of a fresh evaluation, except at near ties.

    Each sequence of `engine` has a text. If there are several, every third draft is compared.
    """
    n_sequences = engine.layout.context.n_sequences
    n_drafts = n_accepted = 0
    for _, before, drafted, n in steps_of(engine):
        n_drafts += 1
        if n_sequences == 1 or n_drafts % 3 == 0:
            tokens, gaps = fresh_draft(fresh, before, len(drafted))
            same = next((i for i, t in enumerate(drafted) if t != tokens[i]), len(drafted))
            assert same == len(drafted) or gaps[same] < NEAR_TIE
        n_accepted += n
    assert n_drafts > 5 * n_sequences
    assert 0 < n_accepted < 3 * n_drafts


def prompts(n: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 500, int(rng.integers(5, 60))).tolist() for _ in range(n)]


def half_of(path: Path) -> int:
    """Device memory for half of the experts that stream, and for the layers that draft."""
    layers = plan_mtp(read_facts(path), ContextOptions(), None)
    return budget(path, Streaming(), "half") + layers.weight_bytes


def open_mtp(path: Path, way: str, parallel: int = 1, **more: Any) -> Session:
    spec = {"--spec-type": "draft-mtp", "--spec-policy": "fixed", "--spec-draft-n-max": LONGEST}
    if more.pop("plain", False):
        spec = {"--spec-type": "none"}
    if way == "split":
        more |= {"vram_bytes": half_of(path), "n_gpu_layers": ON_GPU}
    return open_slots(path, spec, parallel, **WAYS[way], **more)


def written(session: Session, prompt: Sequence[int], n: int = 12, **more: Any) -> list[int]:
    options = GenerateOptions(n_predict=n, ignore_eos=True, **more)
    return [t for piece in session.generate(prompt, options) for t in piece.tokens]
