"""Measuring a profile on a running target: T(n) for n = 1..N, and the draft's step.

Every decode that is timed gets tokens that follow in the text: on tokens that were just decoded
each expert would still lie where it is fast to reach, and a batch would seem to cost what it never
costs again. Decodes of the same size lead it, since a cache of experts is left by a batch of 64 as
none of 1 would find it. The text is real, because the experts that a batch uses depend on it.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from specdec.costs.estimate import Estimate, Wanted, estimate, next_size
from specdec.costs.profile import CostProfile, ProfileKey, Timed, today
from specdec.errors import BadProfile
from specdec.types import BlockModel, Target

Clock = Callable[[], float]
Progress = Callable[[float], None]

# Below this T(1) a graph that is built anew, for another batch size than before, would show.
_BLOCK = 8  # tokens of a block whose model drafts by itself
_N_BLOCKS = 3  # that are timed, after as many that are not
_LEAD_BELOW_S = 0.05
_SPAN = 512  # tokens behind a depth before the memory is cut back to it: text without its own
# context is another text


@dataclass(frozen=True)
class MeasureOptions:
    """`sizes` in the order in which they are timed, all of 1..n_max when empty; the others are
    interpolated, or beyond the largest extrapolated. Each is timed `n_repeats` times, then up to
    `n_most` times where its repetitions do not agree, while `budget_s` lasts, which the depths
    share. A first set of all is dropped where there is no budget. `lead_tokens` go before a timed
    decode in batches of its size: as many as a cache of experts takes to be what that size makes
    of it."""

    n_max: int = 64
    n_repeats: int = 4
    depths: tuple[int, ...] = (0, 512)
    sizes: tuple[int, ...] = ()
    n_most: int = 0  # 0: n_repeats
    budget_s: float = float("inf")
    lead_tokens: int = 0

    def leads(self, n: int) -> int:
        """Decodes of n tokens that go before those timed."""
        return -(-self.lead_tokens // n)

    def run(self, n: int) -> int:
        """Decodes of n tokens that are timed one after the other, behind the same lead: what an
        expert cache has of single tokens differs too much from one to the next."""
        return max(1, self.leads(n) // 2)


def timed_extend(
    target: Target,
    sequence: int,
    tokens: Sequence[int],
    clock: Clock = perf_counter,
    n_logits: int | None = None,
) -> float:
    """Seconds of one decode of these tokens, which are appended."""
    began = clock()
    target.extend(sequence, tokens, n_logits)
    return clock() - began


class TextWalk:
    """Goes on through a text, at about `depth` tokens of context, batch by batch.

    The memory is cut back to `depth` when it holds `span` tokens more; the text is not: it begins
    anew only at its end.
    """

    def __init__(
        self, target: Target, sequence: int, text: Sequence[int], depth: int, span: int
    ) -> None:
        self._target, self._sequence, self._text = target, sequence, text
        self._depth, self._end = depth, min(depth + span, target.n_ctx)
        target.rewind(sequence, 0)
        if depth:
            target.extend(sequence, text[:depth], 0)
        # More is taken back here than the snapshots of a last decode reach.
        recurrent = depth and not target.can_rewind
        self._checkpoint = target.checkpoint(sequence) if recurrent else None
        self._at = depth if depth + span <= len(text) else 0

    def time_s(
        self,
        n: int,
        clock: Clock = perf_counter,
        n_logits: int | None = None,
    ) -> float:
        """Seconds of a decode of the next `n` tokens."""
        if self._target.length(self._sequence) + n > self._end:
            self._cut_back()
        return timed_extend(self._target, self._sequence, self._next(n), clock, n_logits)

    def lead(self, n: int, n_decodes: int, n_logits: int | None = None) -> None:
        """Decodes of the next tokens, `n` each, that nobody times."""
        for _ in range(n_decodes):
            self.time_s(n, n_logits=n_logits)

    def _next(self, n: int) -> list[int]:
        taken = list(self._text[self._at : self._at + n])
        while len(taken) < n:
            taken += self._text[: n - len(taken)]
        self._at = (self._at + n) % len(self._text)
        return taken

    def _cut_back(self) -> None:
        if self._checkpoint is None:
            self._target.rewind(self._sequence, self._depth)
        else:
            self._target.restore(self._sequence, self._checkpoint)


def measure(
    target: Target,
    text: Sequence[int],
    options: MeasureOptions,
    *,
    draft: Target | None = None,
    draft_text: Sequence[int] | None = None,
    key: ProfileKey | None = None,
    sequence: int = 0,
    clock: Clock = perf_counter,
    on_progress: Progress | None = None,
) -> CostProfile:
    """The profile of `target` on `text`, whose sequence is left empty.

    `draft_text` is for a draft of another vocabulary. Raises BadProfile when the text or the
    context is too short for depth + n_max tokens.
    """
    sizes = options.sizes or tuple(range(1, options.n_max + 1))
    deepest = max(options.depths) + options.n_max
    if len(text) < deepest or target.n_ctx < deepest:
        raise BadProfile(
            f"measuring needs {deepest} tokens of text and context; there are {len(text)} and "
            f"{target.n_ctx}: lower the depth or the largest batch"
        )
    if sizes[0] != 1 or len(set(sizes)) < len(sizes) or max(sizes) > options.n_max:
        raise BadProfile(f"batch sizes must begin with 1 and differ, not {sizes}")
    found: list[tuple[int, Estimate]] = []
    for i, depth in enumerate(options.depths):
        report = None
        if on_progress is not None:
            report = _part(on_progress, i, len(options.depths))
        found.append((depth, _at_depth(target, sequence, text, depth, options, clock, report)))
    step_s = tuple(
        sum(column) / len(found) for column in zip(*(e.step_s for _, e in found), strict=True)
    )
    uncertain = sorted({n for _, e in found for n in e.uncertain})
    steps: dict[int, float] = {}
    if draft is not None:
        theirs, n_steps = text if draft_text is None else draft_text, min(16, options.n_max)
        room = min(len(theirs), draft.n_ctx) - 2 * n_steps
        for depth in sorted({max(0, min(depth, room)) for depth in options.depths}):
            steps[depth] = measure_step(draft, sequence, theirs, n_steps, clock, depth)
    return CostProfile(
        step_s,
        statistics.fmean(steps.values()) if steps else 0.0,
        key or ProfileKey(),
        depths=tuple((depth, e.step_s) for depth, e in found),
        uncertain=tuple(uncertain),
        timed=_timed([e.timed for _, e in found]),
        repetitions=options.n_repeats,
        draft_depths=tuple(steps.items()),
    )


def _timed(of_depths: Sequence[Sequence[Timed]]) -> tuple[Timed, ...]:
    """Sizes that were timed at every depth; the fewest repetitions, and the mean spread."""
    by_size: defaultdict[int, list[Timed]] = defaultdict(list)
    for timed in itertools.chain.from_iterable(of_depths):
        by_size[timed.n].append(timed)
    date = today()
    return tuple(
        Timed(n, min(t.n_repeats for t in each), statistics.fmean(t.spread for t in each), date)
        for n, each in sorted(by_size.items())
        if len(each) == len(of_depths)
    )


def _part(on_progress: Progress, i: int, n: int) -> Progress:
    return lambda share: on_progress((i + min(1.0, share)) / n)


def _at_depth(
    target: Target,
    sequence: int,
    text: Sequence[int],
    depth: int,
    options: MeasureOptions,
    clock: Clock,
    on_progress: Progress | None,
) -> Estimate:
    sizes = options.sizes or tuple(range(1, options.n_max + 1))
    began = clock()
    walk = TextWalk(target, sequence, text, depth, max(_SPAN, options.n_max))
    walk.time_s(1, clock)
    one_s = walk.time_s(1, clock)
    least_leads = int(one_s < _LEAD_BELOW_S)
    samples: dict[int, list[float]] = {n: [] for n in sizes}
    budget_s = options.budget_s / len(options.depths)
    if budget_s < float("inf"):
        samples[1].append(one_s)
    else:
        for n in sizes:  # the first results of a machine are too slow
            walk.time_s(n, clock)
    wanted = Wanted(sizes, options.n_repeats, max(options.n_most, options.n_repeats), budget_s)
    n_timed, n_least = 0, len(sizes) * options.n_repeats
    while True:
        spent_s = clock() - began
        size = next_size(samples, wanted, spent_s)
        if size is None:
            break
        walk.lead(size, max(least_leads, options.leads(size)))
        # One place of the text is one repetition: another has other experts. Its mean counts, since
        # a text's cheap tokens, whose experts are there, are as much a part of it.
        run = [walk.time_s(size, clock) for _ in range(options.run(size))]
        samples[size].append(statistics.fmean(run))
        n_timed += 1
        if on_progress is not None:
            on_progress(n_timed / n_least if budget_s == float("inf") else spent_s / budget_s)
    target.rewind(sequence, 0)
    return estimate(samples, options.n_max)


def measure_step(
    draft: Target,
    sequence: int,
    text: Sequence[int],
    n_steps: int,
    clock: Clock = perf_counter,
    depth: int = 0,
) -> float:
    """The mean time of one token of the draft behind `depth` tokens; as many steps are warm-up and
    dropped."""
    n = max(1, min(n_steps, draft.n_ctx // 2, len(text) // 2))
    draft.rewind(sequence, 0)
    if depth:
        draft.extend(sequence, text[:depth], 0)
    if isinstance(draft, BlockModel):
        return _measure_block(draft, sequence, text, min(n, _BLOCK, draft.n_steps_max), clock)
    took = 0.0
    for i in range(2 * n):
        token_s = timed_extend(draft, sequence, [text[(depth + i) % len(text)]], clock)
        if i >= n:
            took += token_s
    draft.rewind(sequence, 0)
    return took / n


def _measure_block(
    draft: BlockModel, sequence: int, text: Sequence[int], n_steps: int, clock: Clock
) -> float:
    """The mean time of one token of blocks of `n_steps`, their way to the host included."""
    took, depth = 0.0, draft.length(sequence)
    for i in range(2 * _N_BLOCKS):
        began = clock()
        draft.draft([(sequence, [text[(depth + i) % len(text)]])], n_steps)
        if i >= _N_BLOCKS:
            took += clock() - began
        draft.rewind(sequence, depth)
    draft.rewind(sequence, 0)
    return took / (_N_BLOCKS * n_steps)
