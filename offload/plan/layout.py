"""The layout of an open model: which device holds and computes what, and why. Pure data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.model import ModelFacts
from offload.plan.devices import DevicePlan, Division, joined
from offload.plan.host import ExpertLimits
from offload.plan.placement import Plan
from offload.plan.tables import HostTables
from offload.times.context_memory import ContextOptions, cpu_attention
from offload.times.min_batch import MinBatch


@dataclass(frozen=True)
class Layout:
    """The devices in the order of their layers, and the other choices of a start.

    `Engine` executes a layout, and `specoffload plan` prints it. Two layouts are equal if they lead
    to the same placement, whatever their reasons.
    """

    facts: ModelFacts = field(compare=False, repr=False)
    division: Division  # the devices with their plans. A CPU comes first, even without layers.
    context: ContextOptions  # with the chosen n_ctx, n_ubatch and n_batch
    min_batch: MinBatch
    loads_mtp: bool = False
    experts: ExpertLimits | None = None  # limits if experts are read from the disk
    tables: HostTables | None = None  # tables that are looked up, None if there are none
    splits: bool = False  # layers of small batches may be split
    repack: bool | None = None
    notes: tuple[str, ...] = field(default=(), compare=False)  # sentences on flags without effect
    # Why the KV cache is in RAM; "": it is not.
    cache_reason: str = field(default="", compare=False)
    no_rows_reason: str = ""  # why own layers cannot draft although that was asked for

    @property
    def devices(self) -> tuple[DevicePlan, ...]:
        return self.division.parts

    @property
    def draft_on(self) -> str | None:
        """The draft model's device; None: the one of -devd, or none."""
        return self.division.draft_on

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the layers are divided so."""
        return self.division.reasons

    def with_devices(self, devices: Iterable[DevicePlan]) -> Layout:
        """Return the layout with these plans of its devices."""
        return replace(self, division=replace(self.division, parts=tuple(devices)))

    @property
    def local(self) -> tuple[DevicePlan, ...]:
        return tuple(device for device in self.devices if not device.kind.is_remote)

    @property
    def remote(self) -> tuple[DevicePlan, ...]:
        return tuple(device for device in self.devices if device.kind.is_remote)

    @property
    def local_facts(self) -> ModelFacts:
        """The header without the layers of remote devices."""
        local = self.local
        return self.facts.part(local[0].layers.first, local[-1].layers.end)

    @property
    def reads_disk(self) -> bool:
        """True if not all experts fit memory, so that some are read from the disk when needed."""
        return self.experts is not None

    @property
    def on_disk(self) -> frozenset[str]:
        """The names of the tables that are looked up on the disk."""
        tables = self.tables
        return frozenset(tables.names) if tables is not None and tables.on_disk else frozenset()

    @cached_property
    def plan(self) -> Plan:
        """The plan of all devices of this machine together, which a start executes."""
        return joined(self.local)

    @cached_property
    def whole_plan(self) -> Plan:
        """The plan of all devices with layers together, and why the layers are divided so."""
        reasons = self.reasons
        if self.remote:
            words = self.division.words
            reasons = (f"{words}: layers are divided {', '.join(reasons)}",)
        return joined(self.division.used, reasons)

    @property
    def cpu_attention_reason(self) -> str:
        """Why only the CPU attends to the KV cache in RAM; "" if it is elsewhere, or a GPU may."""
        return "" if self.context.kv_offload else cpu_attention(self.facts, self.context)

    @property
    def cache_words(self) -> str:
        """A sentence on a KV cache in RAM: why it is there, and who reads it; "" if it is not."""
        if not self.cache_reason:
            return ""
        if self.remote and self.context.flash_attn != "off":
            names = ", ".join(device.name for device in self.remote)
            return f"{self.cache_reason}; each batch sends the caches of their layers to {names}"
        if reason := self.cpu_attention_reason:
            return f"{self.cache_reason}; the CPU computes attention, because {reason}"
        sizes = [device.plan.attention_batch for device in self.devices]
        known = [n for n in sizes if n is not None]
        if not known:
            return f"{self.cache_reason}; the CPU computes attention"
        if max(known) == 1 and len(known) == len(sizes):
            return f"{self.cache_reason}; each batch copies it to the GPU, which computes attention"
        least = f"{min(known):,}"
        return (
            f"{self.cache_reason}; the CPU computes attention in batches of less than {least} "
            "tokens, and larger ones copy it to the GPU"
        )
