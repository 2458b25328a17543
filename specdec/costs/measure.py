"""Measuring a profile on a running target: T(n) for n = 1..N, and the draft's step.

As the scripts of llama.cpp #17034 ended up, with two differences on purpose: times are
averaged, not speeds, and the tokens are real text, because the experts a batch uses depend on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from specdec.costs.profile import CostProfile, ProfileKey
from specdec.errors import BadProfile
from specdec.types import Target

Progress = Callable[[float], None]


@dataclass(frozen=True)
class MeasureOptions:
    n_max: int = 64
    n_repeats: int = 4
    depths: tuple[int, ...] = (0, 512)
    sizes: tuple[int, ...] = ()  # empty: all of 1..n_max; the others are interpolated


def measure(
    target: Target,
    text: Sequence[int],
    options: MeasureOptions,
    *,
    draft: Target | None = None,
    draft_text: Sequence[int] | None = None,
    key: ProfileKey | None = None,
    sequence: int = 0,
    clock: Callable[[], float] = perf_counter,
    on_progress: Progress | None = None,
) -> CostProfile:
    """The profile of `target` on `text`, whose sequence is left empty.

    Each depth runs one whole set of sizes as warm-up, which is dropped, and then `n_repeats`
    sets. `draft_text` is for a draft of another vocabulary.

    Raises BadProfile when the text or the context is too short for depth + n_max tokens.
    """
    sizes = options.sizes or tuple(range(1, options.n_max + 1))
    deepest = max(options.depths) + options.n_max
    if len(text) < deepest or target.n_ctx < deepest:
        raise BadProfile(
            f"measuring needs {deepest} tokens of text and context; there are {len(text)} and "
            f"{target.n_ctx}: lower the depth or the largest batch"
        )
    if sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
        raise BadProfile(f"batch sizes must rise from 1, not {sizes}")
    depths = []
    for i, depth in enumerate(options.depths):
        means = _measure_depth(target, sequence, text, depth, sizes, options.n_repeats, clock)
        depths.append((depth, _fill(sizes, means, options.n_max)))
        if on_progress is not None:
            on_progress((i + 1) / len(options.depths))
    step_s = tuple(
        sum(column) / len(depths) for column in zip(*(s for _, s in depths), strict=True)
    )
    n_steps = min(16, options.n_max)
    theirs = text if draft_text is None else draft_text
    draft_s = 0.0 if draft is None else measure_step(draft, sequence, theirs, n_steps, clock)
    return CostProfile(step_s, draft_s, key or ProfileKey(), depths=tuple(depths))


def _measure_depth(
    target: Target,
    sequence: int,
    text: Sequence[int],
    depth: int,
    sizes: Sequence[int],
    n_repeats: int,
    clock: Callable[[], float],
) -> list[float]:
    target.rewind(sequence, 0)
    if depth:
        target.extend(sequence, text[:depth], 0)
    # More than a verification is taken back here: snapshots of the last decode do not reach.
    recurrent = depth and not target.can_rewind
    checkpoint = target.checkpoint(sequence) if recurrent else None
    sums = [0.0] * len(sizes)
    for repeat in range(n_repeats + 1):
        for i, n in enumerate(sizes):
            at = depth + (repeat * 7) % max(1, len(text) - depth - n + 1)
            lead, fed = text[at : at + n], text[at + n : at + 2 * n]
            if len(fed) < n or depth + 2 * n > target.n_ctx:
                lead, fed = text[:0], lead
            if len(lead):
                # A decode of another size than the one before rebuilds the library's graph, and
                # finds its caches as that size left them. Plain decoding, the yardstick, does not.
                target.extend(sequence, lead)
            began = clock()
            target.extend(sequence, fed)
            took = clock() - began
            if checkpoint is None:
                target.rewind(sequence, depth)
            else:
                target.restore(sequence, checkpoint)
            if repeat:
                sums[i] += took
    target.rewind(sequence, 0)
    return [s / n_repeats for s in sums]


def measure_step(
    draft: Target,
    sequence: int,
    text: Sequence[int],
    n_steps: int,
    clock: Callable[[], float] = perf_counter,
) -> float:
    """The mean time of one token of the draft; as many steps are warm-up and dropped."""
    n = max(1, min(n_steps, draft.n_ctx // 2, len(text) // 2))
    draft.rewind(sequence, 0)
    took = 0.0
    for i in range(2 * n):
        began = clock()
        draft.extend(sequence, [text[i % len(text)]], 1)
        if i >= n:
            took += clock() - began
    draft.rewind(sequence, 0)
    return took / n


def _fill(sizes: Sequence[int], means: Sequence[float], n_max: int) -> tuple[float, ...]:
    """Times of 1..n_max, sizes between measured ones interpolated linearly."""
    out: list[float] = []
    for (n0, t0), (n1, t1) in zip(
        zip(sizes, means, strict=True), list(zip(sizes, means, strict=True))[1:], strict=False
    ):
        out += [t0 + (t1 - t0) * (n - n0) / (n1 - n0) for n in range(n0, n1)]
    out.append(means[-1])
    out += [means[-1]] * (n_max - len(out))
    return tuple(out)
