"""Decides whether tables that are only looked up are kept in memory or on the disk. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from offload.model import ModelFacts
from offload.plan.found import Found, Kind
from offload.plan.host import LaterBytes, mapped_bytes, with_slots
from offload.plan.placement import Plan
from offload.plan.tables import LookupTable, lookup_tables
from offload.plan.wanted import Wanted
from offload.times.context import DEFAULT_UBATCH
from offload.units import size_words


@dataclass(frozen=True)
class HostTables:
    """The tables that are looked up, all in memory or all on the disk. Never on a device."""

    names: tuple[str, ...]
    size_bytes: int
    bytes_per_token: float  # bytes of the pages that hold one token's rows
    on_disk: bool
    why: str = field(default="", compare=False)  # why they stay on the disk

    @property
    def words(self) -> str:
        """One sentence for the plan and for start-up messages."""
        what = f"{size_words(self.size_bytes)} of embeddings that are looked up"
        if not self.on_disk:
            return f"{what} stay in RAM, and never on the GPU"
        return (
            f"{what} stay on the disk ({self.why}); each token reads "
            f"{size_words(self.bytes_per_token)} of them, in advance if the token is known"
        )


def host_tables(
    facts: ModelFacts, plan: Plan, found: Found, wanted: Wanted, later: LaterBytes
) -> HostTables | None:
    """Return where the model's tables are kept, None if it has none.

    They leave memory before any expert does, because a token reads so little of them.
    """
    tables = lookup_tables(facts)
    if not tables:
        return None
    why = _why_on_disk(tables, plan, found, wanted, later)
    return HostTables(
        tuple(table.place.entry.name for table in tables),
        sum(table.size_bytes for table in tables),
        sum(table.bytes_per_token for table in tables),
        on_disk=bool(why),
        why=why,
    )


def _why_on_disk(
    tables: tuple[LookupTable, ...], plan: Plan, found: Found, wanted: Wanted, later: LaterBytes
) -> str:
    kind: Kind = found.devices[0].kind
    table_bytes = sum(table.size_bytes for table in tables)
    weight_bytes = plan.streamed_bytes + table_bytes
    if wanted.ram_bytes is not None and weight_bytes > wanted.ram_bytes:
        return (
            f"with them weights would take {size_words(weight_bytes)} of RAM, and --ram is "
            f"{size_words(wanted.ram_bytes)}"
        )
    others_bytes = sum(with_slots(later, plan, kind)(DEFAULT_UBATCH).values())
    needed_bytes = weight_bytes + mapped_bytes(plan, kind) + others_bytes
    if needed_bytes > found.ram_bytes:
        return (
            f"with them {size_words(needed_bytes)} of RAM would be needed, and "
            f"{size_words(found.ram_bytes)} are free"
        )
    return ""
