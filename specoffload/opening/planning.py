"""A plan as it is shown: what the machine model expects of each device's part of a model."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial

from offload.decode import SMALL_BATCH
from offload.model import ModelFacts, is_experts
from offload.plan.devices import joined
from offload.plan.found import Kind
from offload.plan.host_tables import HostTables
from offload.plan.layout import Layout
from offload.plan.llama_cpp import LlamaCpp, LlamaSpeeds, llama_speeds
from offload.plan.placement import (
    Plan,
    PlanRequest,
    workload_of,
)
from offload.plan.row_draft import MtpLayer
from offload.plan.row_draft import expected_tps as mtp_tps
from offload.plan.search import prompt_s
from offload.routing.routing import SHARING_LEAST, SHARING_MOST, SHARING_USUAL, HitCurve
from offload.store.store import Room
from offload.times.context import ContextMemory, ContextOptions, context_memory
from offload.times.decodes import LayerDivision, best_s, cpu_s, divided
from offload.times.disk import DiskUse
from offload.times.first_table import modelled, together
from offload.times.hits import streamed_hits
from offload.times.machine import Machine
from offload.times.prompts import in_ubatches_s, prefill_s, with_prompt
from offload.times.table import CostTable, Way
from offload.times.work import ModelWork, even, model_work, with_context

ACCEPTED = 0.75  # assumed share of right tokens among those that MTP layers draft


@dataclass(frozen=True)
class Planned:
    """A plan, and the conditions that it was made for."""

    facts: ModelFacts
    plan: Plan
    request: PlanRequest  # with the device memory and the ubatch of the plan
    why_vram: str
    complaints: tuple[str, ...] = ()  # why kept hits, or layers that should draft, are not used
    room: Room | None = None  # host memory for streamed weights; None: they stay in the page cache
    hardware: str | None = None  # the name given as --hardware
    name: str = "GPU"
    is_remote: bool = False  # True: activations cross its link, but no weights
    on_cpu: bool = False  # the CPU computes all, and reads all weights in place
    # The plan of each device's part of the model; () if one device computes the whole model.
    parts: tuple[Planned, ...] = ()
    layout: Layout | None = None  # what a start executes; None for one device's part
    sharing_exponent: float = SHARING_USUAL  # of neighbouring tokens, until unions are counted
    uses_equally: bool = False  # True: all experts are used equally often, whatever was counted

    @property
    def vram_bytes(self) -> int:
        return self.request.budget_bytes or 0

    @property
    def is_simulated(self) -> bool:
        """True if a simulated device computes, whose context and buffers are in RAM."""
        return self.layout is not None and self.layout.devices[0].kind is Kind.SIM

    @property
    def context(self) -> ContextOptions:
        assert self.request.context is not None
        return self.request.context

    @property
    def splits(self) -> bool:
        """True if layers may be split."""
        return self.request.plan_for_splits

    @cached_property
    def work(self) -> ModelWork:
        return self._work(self.request.hits if self.splits else None)

    def _work(self, hits: HitCurve | None) -> ModelWork:
        work = model_work(self.facts, hits, self.request.unions)
        work = even(work) if self.uses_equally else work
        return replace(work, sharing_exponent=self.sharing_exponent)

    def with_sharing(self, exponent: float) -> Planned:
        """Return the plan for n neighbours that use n^`exponent` times the experts of one token."""
        parts = tuple(part.with_sharing(exponent) for part in self.parts)
        return replace(self, sharing_exponent=exponent, parts=parts)

    @property
    def used_equally(self) -> Planned:
        """The plan for texts that use all experts equally often."""
        parts = tuple(part.used_equally for part in self.parts)
        return replace(self, uses_equally=True, parts=parts)

    @cached_property
    def ends_of_sharing(self) -> tuple[Planned, Planned] | None:
        """The plan for tokens that share the least experts, and for those that share the most.

        None if the experts of batches were counted, or if the model has no experts.
        """
        if self.request.unions is not None or not self.facts.n_experts:
            return None
        return self.with_sharing(SHARING_LEAST), self.with_sharing(SHARING_MOST)

    @cached_property
    def memory(self) -> ContextMemory:
        if not self.parts:
            return context_memory(self.facts, self.context)
        each = [astuple(part.memory) for part in self.parts]
        return ContextMemory(*map(sum, zip(*each, strict=True)))

    @property
    def machine(self) -> Machine:
        return self.request.machine

    @cached_property
    def expected(self) -> dict[str, float]:
        """Tokens/s that the machine model expects.

        "decode_tps" is that at the beginning of the context. Prompts attend to their own tokens.
        """
        n_prompt = workload_of(self.context.n_ctx).n_prompt
        parts = self.parts or (self,)
        each_s = [
            p._prompt_s(n_prompt, hybrid=self.request.plan_for_splits and len(parts) == 1)
            for p in parts
        ]
        n_ubatches = max(1, math.ceil(n_prompt / self.plan.n_ubatch))
        seconds = prompt_s(each_s, parts, n_ubatches, overlaps=parts[-1].plan.computes_ubatches)
        found = {
            "decode_tps": 1 / self._decode_s(1),
            "full_context_decode_tps": 1 / self._decode_s(1, with_full_context=True),
            "prefill_tps": n_prompt / seconds,
        }
        if self.disk is not None:
            seconds = self.disk.prompt_s(n_prompt, self.plan.n_ubatch)
            found["prefill_tps"] = min(found["prefill_tps"], n_prompt / max(seconds, 1e-9))
        if self.table_token_s:  # rows of the next tokens are read while these are computed
            found["prefill_tps"] = min(found["prefill_tps"], 1 / self.table_token_s)
        if self._mtp_tps is not None:
            ends = self.ends_of_sharing or (self, self)
            for name, its in zip(("", "least_", "most_"), (self, *ends), strict=True):
                found[f"{name}mtp_decode_tps"] = its._mtp_tps or 0.0
        return found

    @cached_property
    def _mtp_tps(self) -> float | None:
        """Tokens/s with drafts by the model's own layers; None if the plan loads none."""
        if self.plan.mtp is None:
            return None
        last = self.parts[-1] if self.parts else self
        layers = MtpLayer(last.machine, self.facts, self.plan.mtp)
        return mtp_tps(layers, self.work, self._decode_s, ACCEPTED)

    def _prompt_s(self, n_prompt: int, *, hybrid: bool) -> float:
        work = with_prompt(self.work, self.facts, self.context, n_prompt)
        machine, sharing, n_ubatch = self.machine, self.plan.sharing, self.plan.n_ubatch
        if not self.on_cpu:
            return float(prefill_s(machine, work, sharing, n_prompt, n_ubatch, hybrid=hybrid))
        return float(in_ubatches_s(partial(cpu_s, machine, work, sharing), n_prompt, n_ubatch))

    @cached_property
    def least_decode_tps(self) -> float:
        """Tokens/s of decoding if the hits are the fewest that are likely.

        These are the hits of experts that are used equally often. Equals `expected["decode_tps"]`
        if no hits are guessed.
        """
        return self._least_tps("decode_tps", with_full_context=False)

    @cached_property
    def least_full_context_decode_tps(self) -> float:
        """`least_decode_tps` at the end of the context."""
        return self._least_tps("full_context_decode_tps", with_full_context=True)

    def _least_tps(self, name: str, *, with_full_context: bool) -> float:
        most_tps = self.expected[name]
        if not self.is_guess:
            return most_tps
        seconds = self._decode_s(1, with_full_context=with_full_context, with_even_hits=True)
        return min(1 / seconds, most_tps)

    @property
    def _between_devices_s(self) -> float:
        """Seconds in which a decode goes from one device to the next."""
        return sum(
            p.machine.per_switch_s * (2 if p.is_remote else i > 0) for i, p in enumerate(self.parts)
        )

    def _decode_s(
        self, n_tokens: int, *, with_full_context: bool = False, with_even_hits: bool = False
    ) -> float:
        """Seconds of a decode, with those for which it waits for the disk."""
        seconds, disk = self._between_devices_s, self.disk
        for p in self.parts or (self,):
            work = p._work_at(with_full_context)
            work = even(work) if with_even_hits else work
            if self.on_cpu:
                seconds += float(cpu_s(p.machine, work, p.plan.sharing, n_tokens))
                continue
            seconds += float(best_s(p.machine, work, p.plan.sharing, n_tokens, hybrid=self.splits))
        seconds += n_tokens * self.table_token_s
        if disk is None:
            return seconds
        if with_even_hits:
            disk = replace(disk, work=even(disk.work))
        return float(disk.with_reads(seconds, n_tokens))

    def _work_at(self, with_full_context: bool) -> ModelWork:
        """The work of decodes at the end of the context, or at its beginning."""
        return with_context(self.work, self.facts, self.context) if with_full_context else self.work

    def division(self, way: Way, n_tokens: int) -> LayerDivision:
        """Return where a batch finds the experts of a streamed layer, and who computes them."""
        machine, work, sharing = self.machine, self.work, self.plan.sharing
        used = float(work.union(n_tokens))
        if way is Way.SPLIT:
            return divided(machine, work, sharing, n_tokens)
        if way is Way.IN_PLACE:
            return LayerDivision(0.0, 0.0, used)
        in_slots = used * float(streamed_hits(work, sharing, n_tokens))
        return LayerDivision(in_slots, used - in_slots, 0.0)

    @property
    def tables(self) -> HostTables | None:
        """The tables that are looked up, None if the model has none."""
        return None if self.layout is None else self.layout.tables

    @property
    def table_token_s(self) -> float:
        """Seconds in which the disk reads a token's rows of tables, 0 if these are in memory.

        The rows of a decode are read at once, so this is the disk's rate and not its latency.
        """
        if self.tables is None or not self.tables.on_disk:
            return 0.0
        return self.tables.bytes_per_token / self.request.machine.disk_bytes_per_s

    @property
    def is_guess(self) -> bool:
        """True if the expected decodes rest on guessed hits."""
        sharing = self.plan.sharing
        if self.disk is not None and self.disk.work.hits is None:
            return True
        if self.work.hits is not None or not sharing.n_slots:
            return False
        decode_s = best_s(self.machine, self.work, sharing, 1, hybrid=self.splits)
        return bool(decode_s < cpu_s(self.machine, self.work, sharing, 1))

    @property
    def missing_bytes(self) -> int:
        """Bytes of streamed weights that host memory has no room for."""
        if self.room is None:
            return 0
        return max(0, self.plan.streamed_bytes - self.room.available_bytes)

    @cached_property
    def disk(self) -> DiskUse | None:
        """Experts read from the disk, or None if the streamed weights fit host memory."""
        plan, room = self.plan, self.room
        if room is None or not self.missing_bytes:
            return None
        dense_bytes = sum(e.size_bytes for e in plan.streamed if not is_experts(e))
        memory_bytes = max(0, room.available_bytes - dense_bytes)
        work = self._work(self.request.hits)
        return DiskUse(work, plan.sharing, memory_bytes, self.request.machine.disk_bytes_per_s)

    @cached_property
    def llama(self) -> LlamaSpeeds | None:
        """Speeds of llama.cpp with this device memory and context, by the same machine model.

        None if these cannot be modelled: with several devices, and with weights on the disk.
        """
        budget_bytes, on_disk = self.request.budget_bytes, self.tables and self.tables.on_disk
        if self.on_cpu:  # it has the same backend
            return None
        if self.parts or self.is_remote or budget_bytes is None or self.disk is not None or on_disk:
            return None
        n_prompt = workload_of(self.context.n_ctx).n_prompt
        llama = LlamaCpp(self.facts, budget_bytes, self.context)
        return llama_speeds(llama, self.machine, n_prompt, self.work.hits)

    @cached_property
    def costs(self) -> CostTable:
        """Seconds of decodes by way and size, as the machine model expects them.

        Ways that a start does not take for a size are left out.
        """
        n_most = max(SMALL_BATCH, self.plan.n_ubatch)
        tables = [
            _without_declined(
                modelled(
                    p.machine,
                    p.work,
                    p.plan.sharing,
                    n_most,
                    splits=self.splits,
                    shares_prompts=not self.parts,
                ),
                p.plan,
            )  # fmt: skip
            for p in self.parts or (self,)
        ]
        table = together(tables)
        if self.disk is None:
            return table
        # Experts on the disk are read by our device, so no batch is left to libllama's CPU backend.
        if Way.STREAMED in table.ways:
            del table.ways[Way.IN_PLACE]
        return self.disk.table(table)


def _without_declined(table: CostTable, plan: Plan) -> CostTable:
    """Return the costs without streaming for sizes that the plan's device declines."""
    pools = [pool for pool in plan.layout.pools if pool.n_experts]
    entries = table.ways.get(Way.STREAMED)
    if not plan.declined or entries is None:
        return table
    taken = {n: entry for n, entry in entries.items() if all(pool.holds(n) for pool in pools)}
    ways = {way: its for way, its in table.ways.items() if way is not Way.STREAMED}
    return replace(table, ways=ways | ({Way.STREAMED: taken} if taken else {}))


def shown(
    layout: Layout, why_vram: str, complaints: tuple[str, ...], room: Room | None,
    hardware: str | None,
) -> Planned:  # fmt: skip
    """Return the layout as it is shown, with the machine model's view of each device's part."""
    division, context, reasons = layout.division, layout.context, layout.reasons
    if layout.remote:
        reasons = (f"{division.words}: layers are divided {', '.join(reasons)}",)
    parts = tuple(
        Planned(
            part.facts,
            part.plan,
            replace(part.request, context=context),
            why_vram,
            room=room,
            name=part.name,
            is_remote=part.room.is_remote,
        )
        for part in division.parts
    )
    if len(parts) == 1:
        plan = joined(division.parts, reasons)
        return replace(parts[0], plan=plan, complaints=complaints, hardware=hardware, layout=layout)
    request = replace(
        parts[-1].request,
        budget_bytes=sum(part.vram_bytes for part in parts),
        reserve_bytes=sum(part.request.reserve_bytes for part in parts),
        projector_bytes=sum(part.request.projector_bytes for part in parts),
    )
    plan = joined(division.parts, reasons)
    return Planned(
        layout.facts, plan, request, why_vram, complaints, room, hardware, parts=parts,
        layout=layout,
    )  # fmt: skip


def shown_on_cpu(
    layout: Layout, machine: Machine, complaints: tuple[str, ...], room: Room | None
) -> Planned:
    """Return a layout of libllama's CPU backend as it is shown: all weights are read in place."""
    (cpu,) = layout.devices
    machine = replace(
        machine,
        vram_bytes_per_s=machine.ram_bytes_per_s,
        gpu_flops=machine.cpu_flops,
        per_switch_s=0.0,
    )
    if room is not None:  # these come first
        left_bytes = room.available_bytes - cpu.plan.reserve_bytes - cpu.plan.resident_bytes
        room = replace(room, available_bytes=max(0, left_bytes))
    request = replace(cpu.request, machine=machine)
    return Planned(
        layout.facts, cpu.plan, request, "", complaints, room, name="CPU", on_cpu=True,
        layout=layout,
    )  # fmt: skip
