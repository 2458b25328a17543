"""Decides which weights ggml repacks for products on the CPU. Pure.

Repacked weights make batches of few tokens faster. They can make prompts slower: ggml computes
prompts with k-quants in the file's layout by tiles, which repacked weights cannot use, and it
computes repacked experts token by token (docs/hybrid.md, repacked weights). The difference depends
on type and processor, so both layouts are measured.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from offload.model import TensorEntry, is_experts
from offload.plan.placement import name_patterns
from offload.plan.workload import PlannedWork

_LEAST_BYTES = 64 << 20  # bytes of a kind below which its layout matters too little to measure it


class WeightKind(NamedTuple):
    """Weights that are computed alike."""

    experts: bool
    type: str  # ggml's name, e.g. q4_K

    @property
    def words(self) -> str:
        return f"{'experts' if self.experts else 'dense weights'} in {self.type}"


@dataclass(frozen=True)
class LayoutTimes:
    """Seconds of products with a weight in the file's layout, and with the repacked weight."""

    plain_one_s: float  # a product with one token
    repacked_one_s: float
    plain_prompt_s: float  # each token of a prompt
    repacked_prompt_s: float

    def prefers_plain(self, work: PlannedWork) -> bool:
        """True if the file's layout takes less time for `work`."""
        plain_s = work.n_prompt * self.plain_prompt_s + work.n_generated * self.plain_one_s
        repacked_s = work.n_prompt * self.repacked_prompt_s + work.n_generated * self.repacked_one_s
        return plain_s < repacked_s

    @property
    def words(self) -> str:
        prompts = self.repacked_prompt_s / self.plain_prompt_s
        decodes = self.repacked_one_s / self.plain_one_s
        return f"measured speed ÷ repacked: prompts {prompts:.2f}, decodes {decodes:.2f}"


@dataclass(frozen=True)
class Repacking:
    """The choice of layouts."""

    is_on: bool  # ggml repacks the weights that it can, except `plain`
    plain: tuple[str, ...] = ()  # patterns of the names of weights that keep the file's layout
    notes: tuple[str, ...] = ()  # sentences for the user on each kind of weight

    @property
    def setting(self) -> str:
        """The choice as decode times depend on it; "" if ggml repacks all that it can."""
        if not self.is_on:
            return "not repacked"
        return f"not repacked: {' '.join(self.plain)}" if self.plain else ""


MeasureLayouts = Callable[[WeightKind], LayoutTimes | None]


def choose_layouts(
    weights: Iterable[TensorEntry], measured: MeasureLayouts, work: PlannedWork
) -> Repacking:
    """Choose the faster layout for each kind of weight that ggml can repack.

    `measured` returns a kind's times, or None if ggml cannot repack it. Small kinds are not
    measured. They are repacked unless a measured kind keeps the file's layout and none is repacked,
    because libllama maps a file's weights only in the file's layout.
    """
    kinds: dict[WeightKind, list[TensorEntry]] = defaultdict(list)
    for entry in weights:
        kinds[WeightKind(is_experts(entry), entry.type)].append(entry)
    plain: list[str] = []
    notes: list[str] = []
    n_repacked = 0
    for kind, entries in kinds.items():
        if sum(entry.size_bytes for entry in entries) < _LEAST_BYTES:
            continue
        times = measured(kind)
        if times is None:
            continue
        keeps = times.prefers_plain(work)
        plain += [entry.name for entry in entries] if keeps else []
        n_repacked += not keeps
        layout = "keep the file's layout" if keeps else "are repacked"
        notes.append(f"--repack auto: {kind.words} {layout} ({times.words})")
    if plain and not n_repacked:
        return Repacking(False, notes=tuple(notes))
    return Repacking(True, name_patterns(plain), tuple(notes))
