"""A plan as it is shown: what the machine model expects of each device, and of all together."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from functools import cached_property, partial

from offload.decode import SMALL_BATCH
from offload.model import ModelFacts, is_experts
from offload.plan.cell_times import CellTimes
from offload.plan.devices import DevicePlan
from offload.plan.found import Kind
from offload.plan.layout import Layout
from offload.plan.llama_cpp import LlamaCpp, LlamaSpeeds, llama_speeds
from offload.plan.placement import Plan, PlanRequest, workload_of
from offload.plan.row_draft import MtpLayer
from offload.plan.row_draft import expected_tps as mtp_tps
from offload.plan.search import prompt_s
from offload.plan.tables import HostTables
from offload.routing.routing import SHARING_LEAST, SHARING_MOST, HitCurve
from offload.schedule.cached_choice import RouteOptions
from offload.store.store import HostRoom
from offload.times.context_memory import ContextMemory, ContextOptions, context_memory
from offload.times.decodes import LayerDivision, best_s, cpu_s, divided
from offload.times.disk import DiskUse
from offload.times.first_table import modelled, together
from offload.times.hits import misses_left, streamed_hits
from offload.times.machine import CORE_FLOPS, Machine
from offload.times.prompts import in_ubatches_s, prefill_s, with_prompt
from offload.times.table import CostTable, Way
from offload.times.work import ModelWork, even, model_work, with_context

ACCEPTED = 0.75  # assumed share of right tokens among those that MTP layers draft


@dataclass(frozen=True)
class ExpertUse:
    """How texts are assumed to use experts, as far as that was not counted."""

    # n neighbours use n^this times the experts of one; None: as usual for the architecture
    sharing_exponent: float | None = None
    equally: bool = False  # True: all experts are used equally often, whatever was counted
    misses_left: float = 1.0  # share of misses that a preference for cached experts leaves

    def work(self, facts: ModelFacts, request: PlanRequest, hits: HitCurve | None) -> ModelWork:
        """Return the work of decodes for texts that use experts so."""
        work = model_work(facts, hits, request.unions)
        work = even(work) if self.equally else work
        work = replace(work, misses_left=self.misses_left)
        if self.sharing_exponent is None:
            return work
        return replace(work, sharing_exponent=self.sharing_exponent)


@dataclass(frozen=True)
class PlannedDevice:
    """One device's plan, and what the machine model expects of it."""

    device_plan: DevicePlan
    context: ContextOptions
    use: ExpertUse

    @property
    def name(self) -> str:
        return self.device_plan.name

    @property
    def facts(self) -> ModelFacts:
        return self.device_plan.facts

    @property
    def plan(self) -> Plan:
        return self.device_plan.plan

    @property
    def request(self) -> PlanRequest:
        return self.device_plan.request

    @property
    def machine(self) -> Machine:
        return self.device_plan.request.machine

    @property
    def vram_bytes(self) -> int:
        return self.device_plan.request.budget_bytes or 0

    @property
    def is_remote(self) -> bool:
        """True if activations cross its link, but no weights."""
        return self.device_plan.room.is_remote

    @property
    def on_cpu(self) -> bool:
        """True if the CPU computes all, and reads all weights in place."""
        return self.device_plan.kind is Kind.CPU and not self.is_remote

    @cached_property
    def memory(self) -> ContextMemory:
        return context_memory(self.facts, self.context)

    @cached_property
    def work(self) -> ModelWork:
        hits = self.request.hits if self.request.plan_for_splits else None
        return self.use.work(self.facts, self.request, hits)

    def prompt_s(self, n_prompt: int, *, hybrid: bool) -> float:
        """Return the expected seconds of a prompt."""
        work = with_prompt(self.work, self.facts, self.context, n_prompt)
        machine, sharing, n_ubatch = self.machine, self.plan.sharing, self.plan.n_ubatch
        if not self.on_cpu:
            return float(prefill_s(machine, work, sharing, n_prompt, n_ubatch, hybrid=hybrid))
        return float(in_ubatches_s(partial(cpu_s, machine, work, sharing), n_prompt, n_ubatch))

    def decode_s(self, n_tokens: int, *, with_full_context: bool, with_even_hits: bool) -> float:
        """Return the expected seconds of a decode at the beginning of the context, or at its end.

        `with_even_hits`: with the hits of experts that are used equally often.
        """
        work, sharing = self.work, self.plan.sharing
        if with_full_context:
            work = with_context(work, self.facts, self.context)
        work = even(work) if with_even_hits else work
        if self.on_cpu:
            return float(cpu_s(self.machine, work, sharing, n_tokens))
        hybrid = self.request.plan_for_splits
        return float(best_s(self.machine, work, sharing, n_tokens, hybrid=hybrid))

    def costs(self, n_most: int, *, shares_prompts: bool) -> CostTable:
        """Return the seconds of decodes of up to `n_most` tokens, by way and size.

        Sizes that the device declines to stream are left out.
        """
        plan, splits = self.plan, self.request.plan_for_splits
        table = modelled(
            self.machine, self.work, plan.sharing, n_most, splits=splits,
            shares_prompts=shares_prompts,
        )  # fmt: skip
        pools = [pool for pool in plan.layout.pools if pool.n_experts]
        entries = table.ways.get(Way.STREAMED)
        if not plan.declined or entries is None:
            return table
        taken = {n: entry for n, entry in entries.items() if all(pool.holds(n) for pool in pools)}
        ways = {way: by_size for way, by_size in table.ways.items() if way is not Way.STREAMED}
        return replace(table, ways=ways | ({Way.STREAMED: taken} if taken else {}))


@dataclass(frozen=True)
class IdleCost:
    """The cost of idle conversations to a request. All slots hold equal parts of a full context."""

    n_slots: int  # other slots than the request's
    n_cells: int  # cells that they hold together
    decode_s: float  # seconds that their cells add to a token
    n_prompt: int
    prompt_s: float  # seconds that their cells add to a prompt of `n_prompt` tokens
    size_bytes: int  # of their states
    move_s: float  # seconds of moving them to RAM and back


@dataclass(frozen=True)
class Planned:
    """The layout that a start executes, and the machine model's figures for it."""

    layout: Layout
    vram_reason: str
    reasons: tuple[str, ...] = ()  # why kept hits, or layers that should draft, are not used
    room: HostRoom | None = (
        None  # host memory for streamed weights; None: they stay in the page cache
    )
    hardware: str | None = None  # the name given as --hardware
    use: ExpertUse = ExpertUse()

    @property
    def facts(self) -> ModelFacts:
        return self.layout.facts

    @property
    def context(self) -> ContextOptions:
        return self.layout.context

    @property
    def plan(self) -> Plan:
        return self.layout.whole_plan

    @cached_property
    def parts(self) -> tuple[PlannedDevice, ...]:
        """The devices that compute layers."""
        used = self.layout.division.used
        return tuple(PlannedDevice(device_plan, self.context, self.use) for device_plan in used)

    def idle_cost(self, n_parallel: int) -> IdleCost | None:
        """Return the cost of idle conversations with `n_parallel` slots. None with one slot."""
        context, n_prompt = self.context, workload_of(self.context.n_ctx_each).n_prompt
        n_slots = n_parallel - 1
        if n_slots < 1:
            return None
        times = CellTimes(self.layout, round(self.request.machine.cpu_flops / CORE_FLOPS))
        n_cells = context.n_ctx // n_parallel
        one = context_memory(self.facts, replace(context, n_ctx=n_cells, n_sequences=1, n_ubatch=1))
        size_bytes = n_slots * (one.kv_bytes + one.host_kv_bytes + one.recurrent_bytes)
        return IdleCost(
            n_slots, n_slots * n_cells,
            n_slots * times.attention_s(n_cells, 1),
            n_prompt, n_slots * times.attention_s(n_cells, n_prompt),
            size_bytes, 2.0 * size_bytes / times.copy_bytes_per_s,
        )  # fmt: skip

    @property
    def is_divided(self) -> bool:
        """True if several devices compute layers."""
        return len(self.parts) > 1

    @cached_property
    def request(self) -> PlanRequest:
        """The last device's request, with the memory of all devices together."""
        requests = [part.request for part in self.parts]
        if len(requests) == 1:
            return requests[0]
        return replace(
            requests[-1],
            budget_bytes=sum(part.vram_bytes for part in self.parts),
            reserve_bytes=sum(request.reserve_bytes for request in requests),
            projector_bytes=sum(request.projector_bytes for request in requests),
        )

    @property
    def vram_bytes(self) -> int:
        return self.request.budget_bytes or 0

    @property
    def on_cpu(self) -> bool:
        """True if the CPU computes all, and reads all weights in place."""
        return self.parts[0].on_cpu

    @property
    def is_simulated(self) -> bool:
        """True if a simulated device computes, whose context and buffers are in RAM."""
        return self.layout.devices[0].kind is Kind.SIM

    @property
    def splits(self) -> bool:
        """True if layers may be split."""
        return self.request.plan_for_splits

    @cached_property
    def work(self) -> ModelWork:
        hits = self.request.hits if self.splits else None
        return self.use.work(self.facts, self.request, hits)

    def with_sharing(self, exponent: float) -> Planned:
        """Return the plan for n neighbours that use n^`exponent` times the experts of one token."""
        return replace(self, use=replace(self.use, sharing_exponent=exponent))

    def preferring_cached(self, route: RouteOptions) -> Planned:
        """Return the plan for routers that prefer cached experts, with a guess of what it saves."""
        sharing = self.plan.sharing
        n_streamed = self.work.n_experts * (self.work.n_expert_layers - sharing.n_resident)
        share = float(sharing.n_cached / max(1, n_streamed))
        left = misses_left(route, self.facts.n_experts_used, share)
        return replace(self, use=replace(self.use, misses_left=left))

    @property
    def used_equally(self) -> Planned:
        """The plan for texts that use all experts equally often."""
        return replace(self, use=replace(self.use, equally=True))

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
        speeds = {
            "decode_tps": 1 / self._decode_s(1),
            "full_context_decode_tps": 1 / self._decode_s(1, with_full_context=True),
            "prefill_tps": self.prompt_tps(workload_of(self.context.n_ctx_each).n_prompt),
        }
        if self._mtp_tps is not None:
            ends = self.ends_of_sharing or (self, self)
            for name, planned in zip(("", "least_", "most_"), (self, *ends), strict=True):
                speeds[f"{name}mtp_decode_tps"] = planned._mtp_tps or 0.0
        return speeds

    def prompt_tps(self, n_prompt: int) -> float:
        """Return the expected tokens/s of a prompt with `n_prompt` tokens."""
        parts, hybrid = self.parts, self.splits and not self.is_divided
        each_s = [part.prompt_s(n_prompt, hybrid=hybrid) for part in parts]
        n_ubatches = max(1, math.ceil(n_prompt / self.plan.n_ubatch))
        seconds = prompt_s(each_s, parts, n_ubatches, overlaps=parts[-1].plan.computes_ubatches)
        tps = n_prompt / seconds
        if self.disk is not None:
            seconds = self.disk.prompt_s(n_prompt, self.plan.n_ubatch)
            tps = min(tps, n_prompt / max(seconds, 1e-9))
        if self.table_token_s:  # rows of the next tokens are read while these are computed
            tps = min(tps, 1 / self.table_token_s)
        return tps

    @cached_property
    def _mtp_tps(self) -> float | None:
        """Tokens/s with drafts by the model's own layers; None if the plan loads none."""
        if self.plan.mtp is None:
            return None
        layers = MtpLayer(self.machine, self.facts, self.plan.mtp)
        return mtp_tps(layers, self.work, self._decode_s, ACCEPTED)

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
        if not self.is_divided:
            return 0.0
        return sum(
            p.machine.per_switch_s * (2 if p.is_remote else i > 0) for i, p in enumerate(self.parts)
        )

    def _decode_s(
        self, n_tokens: int, *, with_full_context: bool = False, with_even_hits: bool = False
    ) -> float:
        """Seconds of a decode, with those for which it waits for the disk."""
        disk = self.disk
        each_s = (
            part.decode_s(
                n_tokens, with_full_context=with_full_context, with_even_hits=with_even_hits
            )
            for part in self.parts
        )
        seconds = sum(each_s, start=self._between_devices_s)
        seconds += n_tokens * self.table_token_s
        if disk is None:
            return seconds
        if with_even_hits:
            disk = replace(disk, work=even(disk.work))
        return float(disk.with_reads(seconds, n_tokens))

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
        return self.layout.tables

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
        of_model = replace(self.use, misses_left=1.0)  # memory is not searched before the router
        work = of_model.work(self.facts, self.request, self.request.hits)
        return DiskUse(work, plan.sharing, memory_bytes, self.request.machine.disk_bytes_per_s)

    @cached_property
    def llama(self) -> LlamaSpeeds | None:
        """Speeds of llama.cpp with this device memory and context, by the same machine model.

        None if these cannot be modelled: with several devices, and with weights on the disk.
        """
        budget_bytes, on_disk = self.request.budget_bytes, self.tables and self.tables.on_disk
        if self.on_cpu:  # it has the same backend
            return None
        elsewhere = self.is_divided or self.parts[0].is_remote
        if elsewhere or budget_bytes is None or self.disk is not None or on_disk:
            return None
        n_prompt = workload_of(self.context.n_ctx_each).n_prompt
        llama = LlamaCpp(self.facts, budget_bytes, self.context)
        return llama_speeds(llama, self.machine, n_prompt, self.work.hits)

    @cached_property
    def costs(self) -> CostTable:
        """Seconds of decodes by way and size, as the machine model expects them.

        Ways that a start does not take for a size are left out.
        """
        n_most = max(SMALL_BATCH, self.plan.n_ubatch)
        shares_prompts = not self.is_divided
        table = together([p.costs(n_most, shares_prompts=shares_prompts) for p in self.parts])
        if self.disk is None:
            return table
        # Experts on the disk are read by our device, so no batch is left to libllama's CPU backend.
        if Way.STREAMED in table.ways:
            del table.ways[Way.IN_PLACE]
        return self.disk.table(table)
