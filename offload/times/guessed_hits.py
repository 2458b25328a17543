"""Guesses how many uses of experts hit a cache, before hits are counted with a model. Pure.

Published hits differ more between models than between cache rules. So there is a curve for each
range of numbers of experts, of (share of all experts that have a slot, share of uses that hit).
Each is a middle of what is known of such models in real texts; docs/hybrid-model.md lists the
sources and how far they lie apart:

- up to 32 experts: the routing of a pair with 16 experts, recorded on two kinds of text. A token
  uses 4 of them. No hits of larger models with so few experts were found.
- up to 160: Qwen3-30B-A3B (kekzl/imp #1374), and gpt-oss-120b with few slots
  (Helldez/BigMoeOnEdge #33).
- up to 384: the mean of DeepSeek-V4-Flash (nibor1896/Crow #30), Qwen3.6-35B-A3B once its cache is
  warm (JustVugg/colibri #1040), and GLM-5.3-Flash and Qwen3.5-122B-A10B in chats.
- more: Qwen3.8-Flash-Next. Two sources differ by 2 points (llama.cpp #27861, kekzl/imp #2061).
"""

from __future__ import annotations

import math

import numpy as np

from offload.times.machine import Real

Points = tuple[tuple[float, float], ...]

_CURVES: tuple[tuple[float, Points], ...] = (
    (32, ((0.25, 0.44), (0.5, 0.70), (0.75, 0.88), (1.0, 1.0))),
    (160, ((0.03, 0.085), (0.0625, 0.37), (0.19, 0.74), (0.38, 0.89), (0.635, 0.96), (1.0, 1.0))),
    (384, ((0.066, 0.30), (0.125, 0.51), (0.25, 0.67), (0.35, 0.77), (1.0, 1.0))),
    (math.inf, ((0.061, 0.435), (0.125, 0.65), (0.18, 0.72), (0.25, 0.80), (0.334, 0.85),
                (1.0, 1.0))),
)  # fmt: skip


def points_of(n_experts: int) -> Points:
    """Return the guessed curve of a model whose layers have `n_experts` experts."""
    return next(points for most, points in _CURVES if n_experts <= most)


def hit_rate(share: Real, in_use: Real, n_experts: int) -> Real:
    """Return a guess of the share of uses that hit, for slots that every missing expert enters.

    `share` is the share of all experts that have a slot, `in_use` the share that a decode uses. If
    the slots hold no more than a decode uses, each expert is evicted before its next use, and the
    result is 0.
    """
    rate: Real = 0.0
    low_x, low_y = in_use, rate
    for x, y in points_of(n_experts):
        slope = (y - low_y) / np.maximum(x - low_x, 1e-12)
        is_between = (low_x < share) & (share <= x)
        rate = np.where(is_between, low_y + (share - low_x) * slope, rate)
        low_x, low_y = np.maximum(x, in_use), np.where(x > in_use, y, 0.0)
    return np.where(share < 1.0, rate, 1.0)[()]
