"""The experts that a batch finds in a plan's slots. Pure.

Hits are guessed before they are counted with a model. Published hits differ more between models
than between cache rules. So there is a curve for each range of numbers of experts. Each is a middle
of what is known of such models in real texts; docs/hybrid-model.md lists the sources and how far
they lie apart:

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
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offload.decode import SMALL_BATCH
from offload.schedule.batch import LAYER_RING
from offload.schedule.cached_choice import RouteOptions
from offload.schedule.passes import group_size, is_in_passes, ring_slots
from offload.times.machine import Real
from offload.times.work import ModelWork

Points = tuple[tuple[float, float], ...]  # (share of experts with a slot, share of uses that hit)

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


# Share of misses that are left, by strength of the preference for cached experts. It is that of
# drawn routing with slots for a sixteenth of the experts. With fewer slots, more are left
# (docs/hybrid.md).
_DRAWN_SHARE = 1 / 16
_MISSES_LEFT = ((0.0, 1.0), (0.1, 0.7), (0.25, 0.38), (0.5, 0.25), (1.0, 0.25))


def misses_left(route: RouteOptions, n_used: int, share: float = 1.0) -> float:
    """Return a guess of the share of misses that are left if routers prefer cached experts.

    A token uses `n_used` experts, and `share` of all experts have a slot. The best `route.n_kept`
    of them miss as often as before. They are used more often than the others, so they miss about
    two thirds as often as these.
    """
    strengths, left = zip(*_MISSES_LEFT, strict=True)
    n_kept = min(route.n_kept, n_used)
    of_kept = n_kept / max(1e-12, n_kept + 1.5 * (n_used - n_kept))
    most = max(np.interp(route.strength, strengths, left), of_kept * (route.strength > 0))
    return float(1.0 - (1.0 - most) * min(1.0, share / _DRAWN_SHARE))


@dataclass(frozen=True)
class Sharing:
    """The numbers of slots, resident layers and streamed layers of a plan."""

    n_slots: Real = 0  # slots for experts
    n_resident: Real = 0  # layers whose experts are resident
    n_dense_streamed: Real = 0  # layers whose dense weights stream
    n_lent: Real = 0  # more slots in the compute buffer, which hold experts between prompts

    @property
    def n_cached(self) -> Real:
        """Number of slots in which small batches find experts."""
        return self.n_slots + self.n_lent

    def searched_by(self, n_tokens: Real) -> Sharing:
        """Return the slots in which a batch finds experts, all as own slots.

        A large batch takes the bytes of lent slots. Lent slots are never room: every batch is
        divided, and computed in passes, by the own slots.
        """
        is_small = np.asarray(n_tokens) <= SMALL_BATCH
        return replace(self, n_slots=self.n_slots + is_small * self.n_lent, n_lent=0)

    def with_slots(self, n_slots: int) -> Sharing:
        return replace(self, n_slots=n_slots)


def kept_hits(work: ModelWork, share: Real, n_pieces: Real) -> Real:
    """Return the share of uses that hit, if `share` of the experts are kept.

    A missing expert is kept only in place of one that is used less, as in split layers and in
    memory for experts. A batch uses `n_pieces` experts of each layer. One token has the counted
    hits. If none were counted, it has those that `hit_rate` guesses, and at least `share`: the hits
    of experts that are used equally often. Each token of a larger batch misses as many experts as
    a single token. Neighbouring tokens share those as they share all experts (`union`), and at most
    all experts are missed that are not kept. So two batches never miss fewer experts than one batch
    of all their tokens.
    """
    if not work.n_experts:
        return 1.0
    one = work.n_used / work.n_experts
    guess = np.maximum(share, hit_rate(share, one, work.n_experts))
    of_one = guess if work.hits is None else work.hits.at(share)
    if work.misses_left < 1.0:
        of_one = 1.0 - work.misses_left * (1.0 - of_one)
    n_even = np.log1p(-np.minimum(n_pieces / work.n_experts, 1 - 1e-12)) / math.log1p(
        -min(one, 1 - 1e-9)
    )
    n_tokens = np.maximum(n_even, (n_pieces / work.n_used) ** (1 / work.sharing_exponent))
    others = np.maximum(1.0 - share, 1e-12)  # share of the experts that are not kept
    # The part of them that a token uses. Rounded hits may exceed 1 by a little.
    chosen = np.clip(one * (1.0 - of_one) / others, 0.0, 1.0)
    missing = np.minimum(
        work.n_experts * others * (1.0 - (1.0 - chosen) ** n_tokens),
        work.n_used * (1.0 - of_one) * n_tokens**work.sharing_exponent,
    )
    hits = 1.0 - missing / np.maximum(n_pieces, 1e-12)
    return np.where(share < 1.0, np.clip(hits, 0.0, 1.0), 1.0)[()]


def expected_hits(work: ModelWork, sharing: Sharing, n_pieces: Real) -> Real:
    """Return the expected `kept_hits` of split layers if a batch uses `n_pieces` of each layer.

    All streamed layers share the slots, lent ones too, since only small batches are split.
    """
    n_streamed = work.n_expert_layers - sharing.n_resident
    hits = kept_hits(work, _slot_share(work, sharing.searched_by(1)), n_pieces)
    return np.where(n_streamed > 0, hits, 1.0)[()]


def streamed_hits(work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the share of a batch's experts that are in slots if all others are copied."""
    hits = copied_hits(work, sharing.searched_by(n_tokens), work.union(n_tokens))
    is_passing = streams_in_passes(work, sharing, n_tokens)
    share: Real = np.where(is_passing, passing_hits(work, sharing), hits)
    return share[()]


def _slot_share(work: ModelWork, sharing: Sharing) -> Real:
    """Return the share of the streamed layers' experts that have an own slot."""
    n_streamed = work.n_expert_layers - sharing.n_resident
    return sharing.n_slots / np.maximum(work.n_experts * n_streamed, 1)


def pass_sizes(work: ModelWork, sharing: Sharing) -> tuple[Real, Real]:
    """Return the experts of a pass, and the slots of the ring that they pass through."""
    n_slots = np.maximum(sharing.n_slots, 1)
    n_group = group_size(work.n_experts, n_slots, work.expert.size_bytes)
    return n_group, ring_slots(work.n_experts, n_slots, n_group)


def missing_in_passes(work: ModelWork, sharing: Sharing, n_tokens: Real) -> Real:
    """Return the number of experts of a layer that a batch in passes finds in no slot."""
    return (1.0 - passing_hits(work, sharing)) * work.union(n_tokens)


def passing_hits(work: ModelWork, sharing: Sharing) -> Real:
    """Return the share of a layer's experts that a batch in passes finds in slots."""
    kept = np.maximum(sharing.n_slots - pass_sizes(work, sharing)[1], 0)
    return np.minimum(_slot_share(work, replace(sharing, n_slots=kept)), 1.0)


def streams_in_passes(work: ModelWork, sharing: Sharing, n_tokens: Real) -> Any:
    """True if a batch that is streamed is computed in passes."""
    n_slots = sharing.n_slots
    in_passes = is_in_passes(n_tokens, work.n_used, work.n_experts, n_slots)
    return in_passes & (n_slots < work.n_experts * (work.n_expert_layers - sharing.n_resident))


def copied_hits(work: ModelWork, sharing: Sharing, pieces: Real) -> Real:
    """Return the share of uses that hit if all missing experts are copied."""
    hits = _kept_between_batches(work, sharing)
    n_streamed = work.n_expert_layers - sharing.n_resident
    # Slots that hold no more experts than a decode uses lose each expert before its next use,
    # unless every expert has a slot.
    holds = sharing.n_slots > pieces * n_streamed
    holds |= sharing.n_slots >= work.n_experts * n_streamed
    if np.any(holds):
        share = _slot_share(work, sharing)
        if work.hits is None:
            guess = hit_rate(share, pieces / max(1, work.n_experts), work.n_experts)
            held_hits = np.maximum(share, guess)
            held_hits = 1.0 - work.misses_left * (1.0 - held_hits)
        else:
            held_hits = kept_hits(work, share, pieces)
        hits = np.maximum(hits, holds * held_hits)
    return hits


def _kept_between_batches(work: ModelWork, sharing: Sharing) -> Real:
    """Return the share of experts that stay in slots while all others pass through the rest.

    If batches copy whole layers, the schedule keeps the same layers for the next batch. The other
    layers share the slots of `LAYER_RING` layers. Smaller batches are assumed to keep equally many.
    The ring's slots are subtracted even if all layers fit, because a plan's number of slots is only
    known within a few per cent.
    """
    n_streamed = np.maximum(work.n_expert_layers - sharing.n_resident, 1)
    n_kept = np.maximum(0, sharing.n_slots // max(1, work.n_experts) - LAYER_RING)
    return np.minimum(n_kept / n_streamed, 1.0)
