"""`specoffload plan`: shows the plan of a model, from its header alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby, pairwise
from typing import Any

from offload.costs.table import PAYS, CostTable, Way
from offload.layout.tables import HostTables
from offload.model import is_experts, layer_of
from offload.plan.machine import even, expected_hits
from offload.plan.min_batch import NEVER
from offload.plan.placement import Plan
from offload.plan.units import size_words
from offload.plan.weights import ring_slots
from specoffload import report
from specoffload.config.hardware import hardware_of
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.context_size import planned_with_context
from specoffload.planning import ACCEPTED, Planned

_GIB = 1 << 30


def plan_config(config: Config, own: PlanOptions) -> None:
    """Print the plan of a command line that `serve` would take, without opening anything.

    Raises BadModel or DoesNotFit.
    """
    with_size, planned = planned_with_context(config, own)
    _show(planned)
    if config.ctx_size is None:
        report.paragraph(with_size.reasons[0])
    report.data(as_dict(planned))


def as_dict(planned: Planned) -> dict[str, Any]:
    """The plan as data for scripts, with sizes in bytes.

    `min_batch` is null if streaming never saves time.
    """
    plan, facts, request, room = planned.plan, planned.facts, planned.request, planned.room
    return {
        "model": facts.path.name,
        "architecture": facts.architecture,
        "ctx_size": planned.context.n_ctx,
        "ubatch": plan.n_ubatch,
        **_of_device(planned),
        "devices": [
            {
                "name": part.name,
                "layers": [part.facts.layers.start, part.facts.layers.stop - 1],
                "link_bytes_per_s": part.machine.link_bytes_per_s,
                **_of_device(part),
            }
            for part in planned.parts or (planned,)
        ],
        "expected": planned.expected
        | {
            "least_decode_tps": planned.least_decode_tps,
            "least_full_context_decode_tps": planned.least_full_context_decode_tps,
        },
        "ends": {} if plan.decode_end is None else {"decode": asdict(plan.decode_end)},
        "hits": _hits(planned),
        "host": room
        and {
            "available_bytes": room.available_bytes,
            "limited_by": room.limited_by,
            "fits": plan.streamed_bytes <= room.available_bytes,
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


def _of_device(planned: Planned) -> dict[str, Any]:
    """Return the contents of a device's memory, or of all devices' together, for JSON."""
    plan = planned.plan
    return {
        "vram_bytes": planned.vram_bytes,
        "resident_bytes": plan.resident_bytes,
        "streamed_bytes": plan.streamed_bytes,
        "reserve_bytes": plan.reserve_bytes,
        "reserve": asdict(planned.memory)
        | {
            "draft_bytes": planned.request.reserve_bytes,
            "mtp_bytes": 0 if plan.mtp is None else plan.mtp.device_bytes,
        },
        "slot_bytes": plan.slot_bytes,
        "slots": _slots(plan),
        "streamed_layers": _streamed_layers(plan),
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


def _streamed_layers(plan: Plan) -> dict[str, int]:
    return {
        "experts": len({layer_of(e.name) for e in plan.streamed if is_experts(e)}),
        "dense": len({layer_of(e.name) for e in plan.streamed if not is_experts(e)}),
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
        "why": tables.why,
        "disk_s_per_token": planned.table_token_s,
    }


def rounded(value: float, n_digits: int = 2) -> str:
    """An estimate as text with `n_digits` significant digits: 162.6 is 160 with two."""
    value = float(f"{value:.{n_digits - 1}e}")
    return f"{value:,g}" if value < 1e5 else f"{value:,.0f}"


def speed_words(planned: Planned, *, full_context: bool = False) -> str:
    """The expected tokens/s of decoding: a number, or a range such as "40 to 100".

    It is a range if hits are guessed. It then begins with the speed of experts used equally often.
    `full_context`: at the end of the context, where a token attends to all others; otherwise at
    its beginning.
    """
    if full_context:
        most_tps = planned.expected["full_context_decode_tps"]
        least_tps = planned.least_full_context_decode_tps
    else:
        most_tps, least_tps = planned.expected["decode_tps"], planned.least_decode_tps
    most, least = rounded(most_tps), rounded(least_tps)
    return most if least == most else f"{least} to {most}"


def _rate(speed: str) -> str:
    """A speed in tokens/s with its unit, such as "1 token/s"."""
    return f"{speed} token/s" if speed == "1" else f"{speed} tokens/s"


def _host_words(planned: Planned) -> str:
    """Sentences if host memory has no room for the streamed weights, else ""."""
    plan, room, disk = planned.plan, planned.room, planned.disk
    if room is None or disk is None:
        return ""
    missing = plan.streamed_bytes - room.available_bytes
    most = planned.vram_bytes - plan.reserve_bytes + room.available_bytes
    return (
        f"This does not fit memory: {size_words(plan.streamed_bytes)} of weights are not on the "
        f"GPU, and RAM has room for {size_words(room.available_bytes)} ({room.limited_by}). "
        "Experts that are not in RAM are read from the disk when a layer needs them. "
        f"{disk.words(plan.n_ubatch)} {plan.streamed_bytes / _GIB:.0f} GiB of free RAM (--ram "
        f"plans for another machine), about {missing / _GIB:.0f} GiB more GPU memory, or a file "
        f"of at most {most / _GIB:.0f} GiB would avoid it"
    )


def _table_words(planned: Planned, tables: HostTables) -> str:
    """Return where tables that are looked up are kept, and what that costs and saves."""
    if not tables.on_disk:
        return tables.words
    rate = planned.request.machine.disk_bytes_per_s
    return (
        f"{tables.words}. That takes {planned.table_token_s * 1e6:.2g} us a token at "
        f"{rate / 1e9:.2g} GB/s and saves {size_words(tables.size_bytes)} of RAM"
    )


def _show(planned: Planned) -> None:
    plan, facts, work = planned.plan, planned.facts, planned.work
    machine = planned.request.machine
    experts = f", {facts.n_experts} experts, {facts.n_experts_used} used" if facts.n_experts else ""
    report.line(
        f"{facts.path.name}: {facts.architecture}, {report.bytes_text(facts.size_bytes)}, "
        f"{facts.n_layers} layers{experts}"
    )
    if planned.parts:
        _show_devices(planned.parts)
    else:
        used = [
            (name, size_words(size), of)
            for name, size, of in _uses(planned)
            if size or name == "free"
        ]
        used.append(("GPU memory", size_words(planned.vram_bytes), planned.why_vram))
        report.table("GPU memory", ("", "size", ""), used)
    if plan.streamed:
        place = "in RAM" if planned.disk is None else "not on the GPU"
        report.line(f"weights {place}: {report.bytes_text(plan.streamed_bytes)}")
        if words := _host_words(planned):
            report.paragraph(words)
        report.paragraph(f"{where_words(planned)} (estimate; a start measures it)")
    if planned.tables is not None:
        report.paragraph(_table_words(planned, planned.tables))
    if planned.hardware is not None and hardware_of(planned.hardware).shares_ram:
        report.paragraph(
            f"specoffload is not for this machine ({planned.hardware}): its GPU shares the RAM, so "
            "copies to it bring nothing. llama.cpp alone is enough there; give the GPU as much "
            "memory as the model needs"
        )
    decode = speed_words(planned)
    prefill = rounded(planned.expected["prefill_tps"])
    full_tps = planned.expected["full_context_decode_tps"]
    at_end = ""
    if full_tps < 0.95 * planned.expected["decode_tps"]:
        at_end = f", {speed_words(planned, full_context=True)} at the end of the context"
    prefers = ", more if your texts prefer some experts" if " to " in decode else ""
    report.paragraph(
        f"Expected speed: prompts about {_rate(prefill)} (± 40 %), answers about "
        f"{_rate(decode)}{prefers}{at_end}"
        f"{'' if planned.is_guess else ' (± 25 %)'}"
    )
    if "mtp_decode_tps" in planned.expected:
        with_drafts = rounded(planned.expected["mtp_decode_tps"])
        report.line(
            f"With drafts by its own layers: answers about {_rate(with_drafts)}, if "
            f"{ACCEPTED:.0%} of the drafted tokens are right"
        )
    links = " and ".join(
        f"{p.machine.link_bytes_per_s / 1e9:.3g}"
        for p in planned.parts or (planned,)
        if not p.is_remote
    )
    to_gpu = f"{links} GB/s from RAM to the GPU{'s' if planned.parts else ''} and " if links else ""
    report.line(f"with {to_gpu}{machine.ram_bytes_per_s / 1e9:.3g} GB/s of RAM (--link, --ram)")
    if planned.hardware is not None and plan.streamed:
        show_modelled(planned.costs)
    assumed: tuple[str, ...] = ()
    if " to " in decode:
        share = expected_hits(even(work), plan.sharing, work.union(1))
        assumed = (
            f"The slower of both speeds assumes {share:.0%}, as if all experts were used "
            "equally often",
        )
    for words in (*plan.reasons, *assumed, *plan.declined, *planned.complaints):
        report.paragraph(words)


def _uses(planned: Planned) -> list[tuple[str, int, str]]:
    """Return (use, bytes, remark) for each use of a device's memory, and for the free rest."""
    plan, memory = planned.plan, planned.memory
    rows = [
        ("weights", plan.resident_bytes, ""),
        ("KV cache", memory.kv_bytes, f"{planned.context.n_ctx} tokens"),
        ("recurrent states", memory.recurrent_bytes, ""),
        (
            "compute buffers",
            memory.compute_bytes + memory.pool_bytes,
            f"{plan.n_ubatch} prompt tokens at once",
        ),
        ("draft model or EAGLE-3 file", planned.request.reserve_bytes, ""),
        *_mtp_rows(plan),
        *(
            (f"cache: {pool.name}", pool.size_bytes, f"{pool.n_slots} of {pool.n_pieces}")
            for pool in plan.layout.pools
            if pool.n_experts
        ),
        (
            "buffer: dense weights",
            sum(pool.size_bytes for pool in plan.layout.pools if not pool.n_experts),
            f"of {_streamed_layers(plan)['dense']} layers in RAM",
        ),
    ]
    used = plan.resident_bytes + plan.reserve_bytes + plan.slot_bytes
    return [*rows, ("free", planned.vram_bytes - used, "")]


def _show_devices(parts: Sequence[Planned]) -> None:
    """Print a table with a column for each device."""
    uses = [{name: size for name, size, _ in _uses(part)} for part in parts]
    names = [name for name in dict.fromkeys(n for use in uses for n in use) if name != "free"]
    sizes = [(name, [use.get(name, 0) for use in uses]) for name in (*names, "free")]
    sizes.append(("GPU memory", [part.vram_bytes for part in parts]))
    layers = [part.facts.layers for part in parts]
    pools = [[p for p in part.plan.layout.pools if p.n_experts] for part in parts]
    rows = [
        ("layers", *(f"{its.start}-{its.stop - 1}" for its in layers)),
        ("layers with experts in RAM", *(f"{_streamed_layers(p.plan)['experts']}" for p in parts)),
        ("cached experts", *(f"{sum(pool.n_slots for pool in its)}" for its in pools)),
        *(
            (f"GiB: {name}", *(f"{b / _GIB:.2f}" for b in each))
            for name, each in sizes
            if any(each)
        ),
        (
            "GB/s from RAM",
            *(
                "network" if part.is_remote else f"{part.machine.link_bytes_per_s / 1e9:.3g}"
                for part in parts
            ),
        ),
    ]
    report.table("Devices", ("", *(part.name for part in parts)), rows)


def _mtp_rows(plan: Plan) -> list[tuple[str, int, str]]:
    """Rows of the table on the layers for multi-token prediction, if they draft."""
    if plan.mtp is None:
        return []
    return [
        ("layers that draft", plan.mtp.weight_bytes, "for multi-token prediction (--spec-type)"),
        ("their KV cache and buffers", plan.mtp.context_bytes, ""),
    ]


_PLACES = {
    Way.IN_PLACE: "run on the CPU",
    Way.STREAMED: "go to the GPU",
    Way.SPLIT: "are shared by the GPU and the CPU",
}


def where_words(planned: Planned) -> str:
    """Say where batches of which size are computed, by the same times as `show_modelled`."""
    table, first = planned.costs, planned.plan.min_batch
    if len(table.ways) == 1:  # dense weights alone are copied, for which the table has no column
        if first is None or first >= NEVER:
            return "All batches run on the CPU"
        return f"Batches of {first} tokens or more go to the GPU; smaller ones run on the CPU"
    timed = {n for entries in table.ways.values() for n in entries}
    sizes = sorted(timed.union(_powers_of_two(table.n_most)))
    runs = [(way, next(group)) for way, group in groupby(sizes, lambda n: _fastest(table, n))]
    if len(runs) == 1:
        return f"All batches {_PLACES[runs[0][0]]}"
    way, first = runs[-1]
    timed_before = max(n for n in sizes if n < first)
    crossover = planned.plan.min_batch or NEVER
    if way is Way.STREAMED and runs[-2][0] is Way.IN_PLACE and timed_before < crossover < first:
        runs[-1] = (way, crossover)  # the table has no time between these sizes
    words: list[str] = []
    for (way, first), (_, after) in pairwise(runs):
        last = after - 1
        these = report.plural(last, "token") if first == last else f"{first} to {last} tokens"
        words.append(f"{'those' if words else 'Batches'} of {these} {_PLACES[way]}")
    way, first = runs[-1]
    return ", ".join([*words, f"those of {first} tokens or more {_PLACES[way]}"])


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _fastest(table: CostTable, n: int) -> Way:
    """Return the way that a start would choose of those whose times reach `n` tokens."""
    known = [way for way in Way if table.has(way) and n <= max(table.ways[way])]
    return table.best(n, known)[0]


def show_modelled(table: CostTable) -> None:
    """Print the expected decode times of every way at powers of two, the chosen one with a star."""
    ways = [way for way in Way if table.has(way)]
    rows = []
    for n in _powers_of_two(table.n_most):
        best = _fastest(table, n)
        cells = [
            f"{rounded(table.seconds(way, n) * 1e3, 3)}{' *' * (way is best and len(ways) > 1)}"
            if n <= max(table.ways[way])
            else ""
            for way in ways
        ]
        rows.append((str(n), *cells))
    title = "milliseconds of a decode of n tokens (estimate)"
    report.table(title, ("n", *(str(way) for way in ways)), rows)
    if len(ways) > 1:
        report.line(f"* the way taken: the fastest, if it saves more than {1 - PAYS:.0%}")
