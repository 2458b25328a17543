"""Measures what a batch of each size does: by the CPU, streamed or split, as counters show it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from time import perf_counter

from offload.engine import Engine
from offload.model import is_experts
from specoffload.opening.draft_model import real_text
from specoffload.report import bytes_text, plural
from specoffload.session.session import SEQUENCE

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)  # tokens
_N_DECODES = 3  # timed decodes of each size
_DEPTH, _SPAN = 16, 320  # tokens of context of the first decode, and at which it is cut back


@dataclass(frozen=True)
class SizeSeen:
    """Decodes of `n` tokens: the median time, and what one of them did."""

    n: int
    decode_s: float
    way: str  # "CPU", "device", "streamed", "streamed in part" or "split"
    words: str
    counters: Mapping[str, float]  # of one decode; those that are 0 are left out

    def as_data(self) -> dict[str, object]:
        return asdict(self)


def sizes_seen(engine: Engine, sizes: Sequence[int] = SIZES) -> Iterator[SizeSeen]:
    """Time decodes of each size that fits. Sequence 0 must be empty, and is left empty.

    All decodes go through one running text, because the experts that are in slots depend on the
    text before. Each follows a decode of a single token, as a draft follows plain rounds.
    """
    walk = _RunningText(engine)
    n_experts, n_dense = _n_streamed(engine)
    for n in (n for n in sizes if n <= walk.most):
        walk.took_s(n)  # builds the graph
        before, seconds = asdict(engine.counters()), []
        singles = dict.fromkeys(before, 0.0)
        for _ in range(_N_DECODES):
            at_single = asdict(engine.counters())
            walk.took_s(1)
            for name, count in asdict(engine.counters()).items():
                singles[name] += count - at_single[name]
            seconds.append(walk.took_s(n))
        after = asdict(engine.counters())
        each = {k: (after[k] - before[k] - singles[k]) / _N_DECODES for k in after}
        each = {name: count for name, count in each.items() if count}
        way, words = way_of(each, n_experts, n_dense, on_cpu=not engine.start.choice.wrapped)
        yield SizeSeen(n, statistics.median(seconds), way, words, each)
    engine.sequences.rewind(SEQUENCE, 0)


class _RunningText:
    """Decodes a running text, in batches of any size."""

    def __init__(self, engine: Engine) -> None:
        self._sequences, self._text = engine.sequences, itertools.cycle(real_text(engine))
        self._span = min(_SPAN, engine.n_ctx)
        self.most = min(self._span - _DEPTH, engine.layout.context.n_outputs)  # tokens of a batch
        self._begin()

    def _begin(self) -> None:
        self._sequences.rewind(SEQUENCE, 0)
        self._sequences.extend(SEQUENCE, list(itertools.islice(self._text, _DEPTH)), 0)

    def took_s(self, n: int) -> float:
        """Seconds of decoding the next `n` tokens."""
        if self._sequences.length(SEQUENCE) + n > self._span:
            self._begin()
        batch = list(itertools.islice(self._text, n))
        began = perf_counter()
        self._sequences.extend(SEQUENCE, batch)
        return perf_counter() - began


def _n_streamed(engine: Engine) -> tuple[int, int]:
    """Numbers of matrices in RAM that may be copied: of experts, and dense ones."""
    streamed = () if engine.opened.plan is None else engine.opened.plan.streamed
    n_experts = sum(map(is_experts, streamed))
    return n_experts, len(streamed) - n_experts


def way_of(
    counts: Mapping[str, float], n_experts: int, n_dense: int, *, on_cpu: bool = False
) -> tuple[str, str]:
    """The way of a decode by the counters of one decode, and a sentence on it. Pure.

    `n_experts` and `n_dense` are the matrices that may be copied. `on_cpu`: there is no device.
    """
    n_all = n_experts + n_dense
    if not n_all:
        return ("CPU", "the CPU computes") if on_cpu else ("device", "nothing is copied")
    copied = f"{bytes_text(counts.get('streamed_bytes', 0.0))} copied"
    if n_split := round(counts.get("split_layers", 0)):
        by_cpu = counts.get("n_pairs_host", 0.0)
        by_device = counts.get("n_pairs_hit", 0.0) + counts.get("n_pairs_streamed", 0.0)
        share = by_cpu / (by_cpu + by_device) if by_cpu + by_device else 0.0
        layers = plural(n_split, "layer")
        return "split", f"{layers} split, {share:.0%} of their experts by the CPU, {copied}"
    n_passes, n_cuts = counts.get("passes", 0.0), counts.get("cuts", 0.0)
    if not n_cuts:
        return "CPU", f"the CPU computes {plural(n_all, 'matrix')}".replace("matrixs", "matrices")
    if n_passes:
        return "streamed", f"experts in {n_passes:.1f} passes over groups of them, {copied}"
    n_left = n_all - round(n_cuts)
    if n_left <= 0:
        return "streamed", copied
    return "streamed in part", f"the CPU computes {n_left} of {n_all} matrices, {copied}"
