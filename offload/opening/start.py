"""Decides how a model is opened: its options, its devices, and the place of each weight.

This is done once, from the model's header and one look at the machine. `Engine` executes the
decision and makes none (docs/flow.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from offload.device import DeviceChoice
from offload.errors import DoesNotFit
from offload.ggml.native_build import may_repack
from offload.mla import ChosenCrossover, chosen_crossover
from offload.model import ModelFacts, is_experts
from offload.model_file import check_writes
from offload.notes import Note, NoteKind
from offload.options import EngineOptions
from offload.plan.decision import decide
from offload.plan.layout import Layout
from offload.plan.placement import workload_of
from offload.plan.ranges import LayerRange
from offload.plan.repacking import Repacking, choose_layouts
from offload.plan.warm_up import WarmedUp
from offload.probe import Here, probe
from offload.remote.watch import watching
from offload.store.store import StoreOptions, watched
from offload.times.context_memory import ContextOptions, pooling_of


@dataclass(frozen=True)
class Start:
    """A decision how a model is opened, which an engine executes.

    `options` are as they were asked for, and `layout` has what was decided. `crossovers` are MLA's,
    one for each streaming device in the order of their layers.
    """

    facts: ModelFacts
    options: EngineOptions
    here: Here
    layout: Layout
    pooling: str | None = None  # kind of embeddings; None: no embeddings
    repacking: Repacking = Repacking(True)  # of weights that ggml's CPU backend loads
    crossovers: tuple[ChosenCrossover, ...] = ()
    is_second: bool = False  # True: planned again after the warm-up of the first

    def after(self, warmed: Sequence[WarmedUp]) -> Start | None:
        """Return the start that leaves devices what a warm-up of this one took beyond its plan.

        Returns None if this start is not the first, or if no plan fits.
        """
        if self.is_second:
            return None
        for left in (
            {device.name: device.to_leave_bytes for device in warmed},
            {device.name: device.unplanned_bytes for device in warmed},
        ):
            here = self.here.leaving(left)
            with suppress(DoesNotFit):
                layout = decide(self.facts, here.found, self.options.wanted)
                return self._again(here, layout, warmed)
        return None

    def _again(self, here: Here, layout: Layout, warmed: Sequence[WarmedUp]) -> Start:
        took = ", ".join(
            f"{device.name} {device.unplanned_bytes / 2**20:,.0f} MiB" for device in warmed
        )
        words = (
            "the model was opened twice, the second time with fewer weights on GPUs: drivers and "
            f"kernels take memory that a header cannot tell ({took})"
        )
        layout = replace(layout, notes=(*layout.notes, Note(NoteKind.DEVICE, words)))
        return replace(start_of(self.facts, self.options, here, layout), is_second=True)

    @property
    def choices(self) -> tuple[tuple[DeviceChoice, LayerRange], ...]:
        """The local devices with their layers."""
        return tuple((self.here.choice(device.name), device.layers) for device in self.layout.local)

    @property
    def choice(self) -> DeviceChoice:
        """The first device."""
        return self.choices[0][0]

    @property
    def draft_choice(self) -> DeviceChoice | None:
        """The device for the draft model, or None if --device does not name it."""
        on = self.layout.draft_on
        return None if on is None else self.here.choice(on)

    @property
    def streams(self) -> bool:
        """True if weights may stream to the devices of this machine."""
        return self.choice.wrapped and self.options.wanted.wrapped

    @property
    def context(self) -> ContextOptions:
        """The options of the context, as they were decided."""
        return self.layout.context

    @cached_property
    def store(self) -> StoreOptions:
        """The options of the store, with what was decided of memory and disk."""
        layout = self.layout
        return replace(
            self.options.store,
            keep_page_cache=self.options.wanted.keep_page_cache,
            expert_limits=None if layout.experts is None else watched(layout.experts),
            on_disk=layout.on_disk,
        )


def decide_start(facts: ModelFacts, options: EngineOptions) -> Start:
    """Look at this machine and its workers, and decide how the model is opened.

    Raises BadModel, DoesNotFit, DeviceUnavailable, LibraryMismatch, WorkerUnavailable, or
    BadRequest for options that the model cannot have.
    """
    with watching(options.remote):
        here = probe(facts, options)
    return start_of(facts, options, here, decide(facts, here.found, options.wanted))


def start_of(facts: ModelFacts, options: EngineOptions, here: Here, layout: Layout) -> Start:
    """Return the start with this layout, after what only the library or the device can tell.

    These are whether weights are repacked for the CPU, and MLA's crossover on each device. Raises
    BadModel for a model that cannot continue a text.
    """
    wraps = options.wanted.wrapped
    if wraps:  # a draft model need not be causal, as it may draft a block at once
        check_writes(facts)
    pooling = pooling_of(facts, options.pooling)
    start = Start(facts, options, here, layout, pooling)
    if not start.choice.wrapped:
        return replace(start, repacking=_repacking(start))
    return replace(start, crossovers=_crossovers(start)) if wraps else start


def _repacking(start: Start) -> Repacking:
    o, layout, repack = start.options, start.layout, start.layout.repack
    if repack is False:
        return Repacking(False)
    verdict = may_repack(start.facts.weights, o.trial_folder)
    if not verdict.works:
        return Repacking(False, notes=(verdict.sentence,))
    if repack or o.measure_layouts is None:
        return Repacking(True)
    facts = layout.local_facts
    weights = [e for e in facts.loaded if not (layout.reads_disk and is_experts(e))]
    work = workload_of(start.context.n_ctx_each, o.wanted.mix)
    return choose_layouts(weights, o.measure_layouts, work)


def _crossovers(start: Start) -> tuple[ChosenCrossover, ...]:
    token_major, is_on = start.context.flash_attn != "off", start.options.streaming.mla
    return tuple(
        chosen_crossover(start.facts, choice.device, token_major=token_major, is_on=is_on)
        for choice, _ in start.choices
    )
