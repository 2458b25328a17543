"""`specoffload plan`: shows the plan of a model, from its header alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from offload.plan.devices import DevicePlan
from offload.plan.layout import Layout
from offload.plan.placement import Plan
from offload.plan.weights import ring_slots
from offload.routing.routing import UNION_SIZES
from offload.schedule.cached_choice import RouteOptions
from offload.times.hits import expected_hits
from offload.times.min_batch import NEVER
from specoffload import report
from specoffload.commands.plan_lines import Others
from specoffload.commands.plan_screen import show_plan, streamed_layers
from specoffload.config.options import PlanOptions, ServeOptions
from specoffload.config.resolution import Config, usual_parallel
from specoffload.opening.cards import CardCount, card_counts, layers_and_slots
from specoffload.opening.context_size import ContextCost, planned_contexts, planner_of
from specoffload.opening.flag_costs import flag_cost
from specoffload.opening.own_cells import OwnCellsPrice, own_cells_price
from specoffload.opening.planning import Planned, PlannedDevice


def plan_config(
    config: Config,
    own: PlanOptions,
    start: Sequence[str] = (),
    *,
    cache_ram_mib: int = ServeOptions.cache_ram_mib,
    parallel: int | None = None,
    details: bool = False,
) -> None:
    """Print the plan of a command line that `serve` would take, without opening anything.

    `start` are the arguments of `specoffload` that begin what is planned; (): the model alone.
    `cache_ram_mib` and `parallel` are the values of --cache-ram and --parallel. With `details`, all
    reasons are printed, too. Raises BadModel or DoesNotFit.
    """
    planner = planner_of(config, own)
    planned, contexts = planned_contexts(config, planner)
    cost = flag_cost(config, planner, planned.context.n_ctx)
    begin = start or ("serve", str(config.model))
    cards = card_counts(planner, planned)
    idle = planned.idle_cost(parallel or usual_parallel(planned.context.n_ctx))
    route = config.streaming.route
    own_cells = _own_cells(planned, parallel or usual_parallel(planned.context.n_ctx))
    show_plan(
        planned, contexts, begin, cost, cards, idle, own_cells,
        cache_ram_mib=cache_ram_mib, route=route, details=details,
    )  # fmt: skip
    report.data(
        as_dict(planned, Others(cache_ram_mib))
        | {
            "idle_slots": idle and asdict(idle),
            "own_cells": own_cells and asdict(own_cells) | {"helps": own_cells.helps},
            "cached_routing": _routed(planned, route),
            "contexts": [_context(its) for its in contexts.costs],
            "cards": [_cards(its) for its in cards],
            "slow_flags": cost
            and {"flags": list(cost.flags), "expected_without": _speeds(cost.planned)},
        }
    )


def _own_cells(planned: Planned, n_parallel: int) -> OwnCellsPrice | None:
    """Price cells of its own for each slot. None with one slot, or if the CPU computes alone."""
    if n_parallel < 2 or planned.on_cpu:
        return None
    return own_cells_price(planned, n_parallel, planned.context.n_ctx // n_parallel)


DEFAULT_OTHERS = Others()


def as_dict(planned: Planned, others: Others = DEFAULT_OTHERS) -> dict[str, Any]:
    """The plan as data for scripts, with sizes in bytes.

    `min_batch` is null if streaming never saves time.
    """
    plan, facts, request, room = planned.plan, planned.facts, planned.request, planned.room
    layout = planned.layout
    return {
        "model": facts.path.name,
        "architecture": facts.architecture,
        "kv_overrides": {override.key: override.value for override in facts.overrides},
        "ctx_size": planned.context.n_ctx,
        "ubatch": plan.n_ubatch,
        **_of_device(planned),
        "devices": [
            {
                "name": part.name,
                "layers": [part.facts.layers.start, part.facts.layers.stop - 1],
                "link_bytes_per_s": part.machine.link_bytes_per_s,
                **_device_properties(part.device_plan),
                **_of_device(part if planned.is_divided else planned),
            }
            for part in planned.parts
        ],
        "layout": _layout(layout),
        "expected": _speeds(planned),
        "llama_cpp": None if planned.llama is None else asdict(planned.llama),
        "ends": {} if plan.decode_end is None else {"decode": asdict(plan.decode_end)},
        "cache": _cache(planned),
        "hits": _hits(planned),
        "unions": _unions(planned),
        "host": room
        and {
            "available_bytes": room.available_bytes,
            "limited_by": room.limited_by,
            "fits": plan.streamed_bytes <= room.available_bytes,
            "others_bytes": others.needed_bytes,
        },
        "disk": _disk(planned),
        "tables": _tables(planned),
        "hardware": planned.hardware,
        "machine": asdict(request.machine),
        "ways": {
            way: {n: entry.seconds for n, entry in sorted(entries.items())}
            for way, entries in planned.costs.ways.items()
        },
    }


def _routed(planned: Planned, route: RouteOptions) -> dict[str, float] | None:
    """The expected speeds if routers prefer cached experts; None without --route-cached."""
    if not route.is_on:
        return None
    routed = planned.preferring_cached(route)
    return {
        **asdict(route),
        "misses_left": routed.use.misses_left,
        "decode_tps": routed.expected["decode_tps"],
        "least_decode_tps": routed.least_decode_tps,
    }


def _speeds(planned: Planned) -> dict[str, float]:
    return planned.expected | {
        "least_decode_tps": planned.least_decode_tps,
        "least_full_context_decode_tps": planned.least_full_context_decode_tps,
    }


def _context(cost: ContextCost) -> dict[str, Any]:
    planned = cost.planned
    if planned is None:
        return {"ctx_size": cost.n_ctx, "fits": False}
    keys = ("prefill_tps", "decode_tps", "full_context_decode_tps")
    return {"ctx_size": cost.n_ctx, "fits": True} | {key: planned.expected[key] for key in keys}


def _cards(count: CardCount) -> dict[str, Any]:
    planned = count.planned
    if planned is None:
        return {"n_cards": count.n_cards, "fits": False}
    n_layers, n_slots = layers_and_slots(planned)
    card = {"n_cards": count.n_cards, "fits": True, "layers": n_layers, "slots": n_slots}
    return card | {key: planned.expected[key] for key in ("prefill_tps", "decode_tps")}


def _layout(layout: Layout) -> dict[str, Any]:
    """The choices of a start that are not those of one device."""
    limits, least = layout.experts, layout.min_batch
    return {
        "divided": list(layout.reasons),
        "notes": list(layout.notes),
        "context": asdict(layout.context),
        "min_batch": asdict(least) | {"swapped": sorted(least.swapped)},
        "draft_device": layout.draft_on,
        "loads_mtp": layout.loads_mtp,
        "why_not_mtp": layout.no_rows_reason,
        "splits": layout.splits,
        "repack": layout.repack,
        "limits": limits
        and {
            "most_bytes": limits.most_bytes,
            "others_bytes": limits.others_bytes,
            "free_bytes": limits.free_bytes,
            "later_bytes": limits.later_bytes(layout.context.n_ubatch),
        },
    }


def _device_properties(device_plan: DevicePlan) -> dict[str, Any]:
    """Return a device's properties, its limits, and the time of its layers, for JSON."""
    plan, device = device_plan.plan, device_plan.device
    return {
        "kind": device.kind,
        "free_bytes": device.free_bytes,
        "asked_bytes": device_plan.room.asked_bytes,
        "machine": asdict(device.machine),
        "measured": device.measured,
        "prompt_s": device_plan.prompt_s,
        "decode_s": device_plan.decode_s,
        "resident_layers": plan.n_resident,
        "passes": plan.passes,
        "attention_batch": plan.attention_batch,
        "working": asdict(plan.working),
        "compute_buffer": plan.buffer and asdict(plan.buffer),
        "why_not_lent": plan.lending()[1],
        "mtp": plan.mtp
        and {
            "layers": plan.mtp.what,
            "weight_bytes": plan.mtp.weight_bytes,
            "context_bytes": plan.mtp.context_bytes,
            "why": plan.mtp.reason,
        },
    }


def _of_device(planned: Planned | PlannedDevice) -> dict[str, Any]:
    """Return the contents of a device's memory, or of all devices' together, for JSON."""
    plan, request = planned.plan, planned.request
    return {
        "vram_bytes": planned.vram_bytes,
        "resident_bytes": plan.resident_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "reserve": {n: size for n, size in asdict(planned.memory).items() if "host" not in n}
        | {
            "draft_bytes": request.reserve_bytes - request.projector_bytes,
            "projector_bytes": request.projector_bytes,
            "working_bytes": plan.working.device_bytes,
            "mtp_bytes": 0 if plan.mtp is None else plan.mtp.device_bytes,
        },
        "host_projector_bytes": request.host_projector_bytes,
        "host_working_bytes": plan.working.host_bytes,
        "slot_bytes": plan.slot_bytes,
        "slots": _slots(plan),
        "lent_slots": plan.n_lent,
        "streamed_layers": streamed_layers(plan),
        "min_batch": None if plan.min_batch == NEVER else plan.min_batch,
        "pass_experts": plan.pass_experts,
        "declined": list(plan.declined),
        "reasons": list(plan.reasons),
    }


def _slots(plan: Plan) -> dict[str, dict[str, int]]:
    """Number of slots by kind of weight. If a kind has slots in several pools, by pool too."""
    kinds = Counter(kind.name for pool in plan.layout.pools for kind in pool.kinds)
    return {
        kind.name if kinds[kind.name] == 1 else f"{kind.name} ({pool.name})": {
            "n_slots": pool.n_slots,
            "n_ring": ring_slots(pool) if pool.n_experts else 0,
            "n_experts": pool.n_experts,
            "stride_bytes": kind.stride_bytes,
        }
        for pool in plan.layout.pools
        for kind in pool.kinds
    }


def _unions(planned: Planned) -> dict[str, Any] | None:
    """The experts of a layer that batches of neighbouring tokens use, by number of tokens.

    "least" and "most" are the ends of what is likely. None if the model has no experts.
    """
    work, unions = planned.work, planned.request.unions
    if not work.n_experts:
        return None
    ends = planned.ends_of_sharing or (planned, planned)
    works = {"most": ends[0].work, "experts": work, "least": ends[1].work}
    return {
        "source": "guess" if unions is None else "counted",
        "n_tokens": 0 if unions is None else unions.n_tokens,
        "counted_on": None if unions is None else unions.counted_on.isoformat(),
    } | {key: {n: float(end.union(n)) for n in UNION_SIZES} for key, end in works.items()}


def _cache(planned: Planned) -> dict[str, Any] | None:
    """The KV cache in RAM; None if it is in GPU memory.

    "attention_batch": fewest tokens of a batch whose attention the GPU computes, null if the CPU
    computes all. Several devices have a number each, of which this is the least.
    """
    layout = planned.layout
    if not layout.cache_reason:
        return None
    batches = [part.plan.attention_batch for part in planned.parts]
    return {
        "size_bytes": planned.memory.host_kv_bytes,
        "attention_batch": min((n for n in batches if n is not None), default=None),
        "why": layout.cache_reason,
    }


def _hits(planned: Planned) -> dict[str, Any] | None:
    """The hits that a decode with split layers is expected to have.

    None if no layer may be split or there are no slots.
    """
    if not planned.splits or not planned.plan.sharing.n_slots:
        return None
    work, hits = planned.work, planned.request.hits
    return {
        "rate": float(expected_hits(work, planned.plan.sharing, work.union(1))),
        "source": "guess" if hits is None else "counted",
        "n_tokens": 0 if hits is None else hits.n_tokens,
        "counted_on": None if hits is None else hits.counted_on.isoformat(),
    }


def _disk(planned: Planned) -> dict[str, float] | None:
    """Return the expected reads from the disk, or None if all weights fit host memory."""
    disk = planned.disk
    if disk is None:
        return None
    return {
        "bytes_per_s": disk.bytes_per_s,
        "bytes_per_token": disk.disk_bytes(1),
        "bytes_per_ubatch": disk.disk_bytes(planned.plan.n_ubatch),
        "most_decode_tps": 1 / disk.disk_s() if disk.disk_s() else 0.0,
    }


def _tables(planned: Planned) -> dict[str, Any] | None:
    """Return the tables that are looked up, or None if the model has none."""
    tables = planned.tables
    if tables is None:
        return None
    return {
        "names": list(tables.names),
        "size_bytes": tables.size_bytes,
        "bytes_per_token": tables.bytes_per_token,
        "on_disk": tables.on_disk,
        "why": tables.reason,
        "disk_s_per_token": planned.table_token_s,
    }
