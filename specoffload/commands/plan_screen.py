"""Prints the plan of `specoffload plan`: lines, then tables. With -v, all reasons follow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from offload.model import is_experts, layer_of
from offload.plan.placement import Plan
from offload.plan.tables import HostTables
from offload.schedule.cached_choice import RouteOptions
from offload.times.hits import expected_hits
from offload.times.min_batch import NEVER
from offload.times.table import PAYS, CostTable, Way
from offload.times.work import even
from offload.units import milliseconds, rate_words, size_words
from specoffload import report
from specoffload.commands.plan_lines import context_lines, first_lines
from specoffload.config.hardware import PRESETS, hardware_of
from specoffload.config.options import ServeOptions
from specoffload.opening.cards import CardCount, layers_and_slots
from specoffload.opening.context_size import Contexts
from specoffload.opening.flag_costs import FlagCost
from specoffload.opening.own_cells import OwnCellsPrice
from specoffload.opening.planning import ACCEPTED, IdleCost, Planned, PlannedDevice
from specoffload.opening.speeds import mtp_speed, prompt_words, rounded, speed_words

_GIB = 1 << 30
NO_PREFERENCE = RouteOptions()
PLACES = {
    Way.IN_PLACE: "CPU",
    Way.STREAMED: "GPU",
    Way.SPLIT: "GPU and CPU",
}


def show_plan(
    planned: Planned,
    contexts: Contexts,
    start: Sequence[str],
    cost: FlagCost | None = None,
    cards: Sequence[CardCount] = (),
    idle: IdleCost | None = None,
    own_cells: OwnCellsPrice | None = None,
    *,
    cache_ram_mib: int = ServeOptions.cache_ram_mib,
    route: RouteOptions = NO_PREFERENCE,
    details: bool,
) -> None:
    """Print the plan. `contexts`: what other contexts cost, if the context was chosen.

    `cache_ram_mib` is the value of --cache-ram, and `route` that of --route-cached. `cost` has the
    given flags without which the machine would be faster. `cards` are plans with other numbers of
    GPUs. `idle` is the cost of idle conversations. `own_cells` is what cells of its own for each
    would change, which is named where it helps. `start` are the arguments of the command to start.
    With `details`, all reasons are printed, too.
    """
    report.named(first_lines(planned, start, cache_ram_mib, route))
    if cost is not None:
        report.paragraph(cost.note)
    if planned.hardware is not None and hardware_of(planned.hardware).shares_ram:
        report.paragraph(
            f"specoffload is not for this machine ({planned.hardware}): its GPU shares the RAM, so "
            "copies to it bring nothing. llama.cpp alone is enough there; give the GPU as much "
            "memory as the model needs"
        )
    if planned.on_cpu:
        report.paragraph(
            "This is the plan for the CPU of this machine. For a card, name a machine "
            f"(--hardware {next(iter(PRESETS))}; --help has all names), or describe one "
            "(--vram 24GiB --link 25GB/s --ram 128GiB)"
        )
    if contexts.costs:
        _show_contexts(planned, contexts)
    if idle is not None:
        report.paragraph(_idle_words(idle))
    if own_cells is not None and own_cells.helps:
        report.paragraph(_own_cells_words(own_cells))
    _show_memory(planned, details=details)
    if planned.plan.streamed:
        _show_batches(planned)
    if any(count.planned is None or count.planned.plan.streamed for count in cards):
        _show_cards(planned, cards)
    for words in planned.reasons:
        report.paragraph(words)
    if details:
        _show_rest(planned)
    else:
        report.paragraph("Reasons, rates and the times of each way: -v")


def _idle_words(cost: IdleCost) -> str:
    """Return a sentence on what the conversations of other slots cost a request."""
    many = cost.n_slots > 1
    others = f"{cost.n_slots} idle conversations" if many else "an idle conversation"
    return (
        f"With -np {cost.n_slots + 1}, {others} with {cost.n_cells:,} cells of a full context "
        f"would add {_duration(cost.decode_s)} to each token of a request and "
        f"{_duration(cost.prompt_s)} to a prompt of {cost.n_prompt:,} tokens (estimate). They move "
        f"to RAM before they have cost more than that takes: {_duration(cost.move_s)} out and back "
        f"for {size_words(cost.size_bytes)} (--cache-idle-slots)"
    )


def _own_cells_words(price: OwnCellsPrice) -> str:
    """Return a sentence on what cells of its own for each conversation would change."""
    n = price.n_conversations
    others = f"{n - 1} others" if n > 2 else "another"
    prompt, decode = price.own_beside_s / price.prompt_s, price.own_decode_s / price.decode_s
    return (
        f"With --no-kv-unified, each of {n} conversations has {price.depth:,} tokens of its own. "
        f"With all of them full and at work, a prompt of {price.n_prompt:,} tokens beside {others} "
        f"would take {prompt:.2f} × as long as with shared cells, and a token of each "
        f"{decode:.2f} × (estimate)"
    )


def _duration(seconds: float) -> str:
    return milliseconds(seconds) if seconds < 1 else f"{rounded(seconds, 3)} s"


# -- tables ----------------------------------------------------------------------------------------


def _show_contexts(planned: Planned, contexts: Contexts) -> None:
    rows = []
    for cost in contexts.costs:
        shown = cost.planned
        mark = " *" if cost.n_ctx == planned.context.n_ctx else ""
        cells = ("does not fit", "", "")
        if shown is not None:
            cells = prompt_words(shown), speed_words(shown), speed_words(shown, full_context=True)
        rows.append((f"{cost.n_ctx:,}{mark}", *cells))
    heads = ("context", "prompts, tokens/s", "answers", "at its end")
    report.table("What a context costs (--ctx-size; * is chosen)", heads, rows)
    report.paragraph(contexts.reason)
    for words in context_lines(planned, contexts):
        report.paragraph(words)


def _show_cards(planned: Planned, cards: Sequence[CardCount]) -> None:
    rows = []
    for count in cards:
        shown = count.planned
        cells = ("does not fit", "", "", "")
        if shown is not None:
            n_layers, n_slots = layers_and_slots(shown)
            cells = (f"{n_layers}", f"{n_slots:,}", prompt_words(shown), speed_words(shown))
        rows.append((f"{count.n_cards}{' *' * (shown is planned)}", *cells))
    heads = ("GPUs", "whole layers", "slots", "prompts, tokens/s", "answers")
    report.table("What a GPU more brings (estimate; * is this plan)", heads, rows)
    report.paragraph(
        "Each GPU computes whole layers. So a further one, like the last and with a link of its "
        "own, brings memory for layers and slots. llama.cpp's split modes tensor and graph divide "
        "layers: docs/devices.md"
    )


def _show_memory(planned: Planned, *, details: bool) -> None:
    plan = planned.plan
    if planned.on_cpu:
        rows = [(name, size_words(size), of) for name, size, of in _uses(planned) if size]
        layers = ("weights of layers", size_words(plan.streamed_bytes), "")
        report.table("RAM", ("", "size", ""), [layers, *rows])
        return
    if planned.is_divided:
        _show_devices(planned.parts)
    else:
        used = [
            (name, size_words(size), of)
            for name, size, of in _uses(planned)
            if size or name == "free"
        ]
        has_limit = planned.request.budget_bytes is not None
        total = size_words(planned.vram_bytes) if has_limit else "no limit"
        used.append(("GPU memory", total, planned.vram_reason))
        report.table("GPU memory", ("", "size", ""), used)
        if planned.is_simulated:
            size = size_words(planned.memory.total_bytes)
            report.line(f"KV cache and buffers: {size} of RAM, where the simulated device computes")
    if projector_bytes := planned.request.host_projector_bytes:
        report.line(f"projector of images: {size_words(projector_bytes)} of RAM (estimated)")
    if planned.layout.cache_words:
        report.paragraph(planned.layout.cache_words)
    if plan.streamed:
        place = "in RAM" if planned.disk is None else "not on the GPU"
        report.line(f"weights {place}: {size_words(plan.streamed_bytes)}")
        if not planned.is_divided and plan.n_lent:
            experts = report.plural(plan.n_lent, "more expert")
            report.line(f"between prompts, the compute buffers cache {experts}")
        if details and plan.working.host_bytes:
            report.paragraph(
                f"rows of pairs in RAM: {size_words(plan.working.host_prompt_bytes)} for the CPU's "
                f"part of prompts, {size_words(plan.working.host_small_bytes)} for that of small "
                "batches"
            )


def _uses(planned: Planned | PlannedDevice) -> list[tuple[str, int, str]]:
    """Return (use, bytes, note) for each use of a device's memory, and for the free rest."""
    plan, memory, request = planned.plan, planned.memory, planned.request
    weights = ("other weights" if planned.on_cpu else "weights", plan.resident_bytes, "")
    rows = [
        ("KV cache", memory.kv_bytes, f"{planned.context.n_ctx:,} tokens"),
        ("recurrent states", memory.recurrent_bytes, ""),
        (
            "compute buffers",
            memory.compute_bytes + memory.pool_bytes,
            f"{plan.n_ubatch:,} prompt tokens at once",
        ),
        (
            "rows of pairs",
            plan.working.device_bytes,
            "of layers that stream",
        ),
        ("draft model", request.reserve_bytes - request.projector_bytes, ""),
        ("projector of images", request.projector_bytes, "its file and buffers (estimated)"),
        *_mtp_rows(plan),
    ]
    if isinstance(planned, Planned) and planned.is_simulated:
        rows = _mtp_rows(plan)[:1]
    rows = [
        weights,
        *rows,
        *(
            (f"cache: {pool.name}", pool.size_bytes, f"{pool.n_slots} of {pool.n_pieces}")
            for pool in plan.layout.pools
            if pool.n_experts
        ),
        (
            "buffer: dense weights",
            sum(pool.size_bytes for pool in plan.layout.pools if not pool.n_experts),
            f"of {report.plural(streamed_layers(plan)['dense'], 'layer')} in RAM",
        ),
    ]
    if planned.on_cpu or planned.request.budget_bytes is None:
        return rows
    return [*rows, ("free", planned.vram_bytes - plan.used_bytes, "")]


def _show_devices(parts: Sequence[PlannedDevice]) -> None:
    """Print a table with a column for each device."""
    uses = [{name: size for name, size, _ in _uses(part)} for part in parts]
    names = [name for name in dict.fromkeys(n for use in uses for n in use) if name != "free"]
    sizes = [(name, [use.get(name, 0) for use in uses]) for name in (*names, "free")]
    sizes.append(("GPU memory", [part.vram_bytes for part in parts]))
    layers = [part.facts.layers for part in parts]
    pools = [[p for p in part.plan.layout.pools if p.n_experts] for part in parts]
    rows = [
        ("layers", *(f"{each.start}-{each.stop - 1}" for each in layers)),
        ("layers with experts in RAM", *(f"{streamed_layers(p.plan)['experts']}" for p in parts)),
        ("cached experts", *(f"{sum(pool.n_slots for pool in each)}" for each in pools)),
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


def streamed_layers(plan: Plan) -> dict[str, int]:
    """Number of layers whose experts stream, and of layers whose dense weights stream."""
    return {
        "experts": len({layer_of(e.name) for e in plan.streamed if is_experts(e)}),
        "dense": len({layer_of(e.name) for e in plan.streamed if not is_experts(e)}),
    }


@dataclass(frozen=True)
class BatchRun:
    """Batches of `first` to `last` tokens, which are computed in one way."""

    first: int
    last: int | None  # None: any larger number
    way: Way
    seconds: tuple[float, float] | None  # of the smallest and the largest batch; None: not timed

    @property
    def sizes(self) -> str:
        if self.last is None:
            return f"{self.first} or more"
        return f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"


def batch_runs(planned: Planned) -> list[BatchRun]:
    """Return which sizes of batches are computed in which way, by the times of `show_modelled`."""
    table, crossover = planned.costs, planned.plan.min_batch or NEVER
    if len(table.ways) == 1:
        (only,) = table.ways
        dense_alone = not planned.plan.sharing.n_slots and planned.plan.streamed
        if only is Way.IN_PLACE and dense_alone and crossover < NEVER:
            # Dense weights alone are copied, for which the table has no column.
            before = [BatchRun(1, crossover - 1, only, None)] if crossover > 1 else []
            return [*before, BatchRun(crossover, None, Way.STREAMED, None)]
    timed = {n for entries in table.ways.values() for n in entries}
    sizes = sorted(timed.union(_powers_of_two(table.n_most)))
    runs = [(way, next(group)) for way, group in groupby(sizes, lambda n: _fastest(table, n))]
    way, first = runs[-1]
    if len(runs) > 1 and way is Way.STREAMED and runs[-2][0] is Way.IN_PLACE:
        timed_before = max(n for n in sizes if n < first)
        if timed_before < crossover < first:
            runs[-1] = (way, crossover)  # the table has no time between these sizes
    ends = [*(after - 1 for _, (_, after) in pairwise(runs)), table.n_most]
    return [
        BatchRun(first, last, way, (table.seconds(way, first), table.seconds(way, last)))
        for (way, first), last in zip(runs, ends, strict=True)
    ]


def _show_batches(planned: Planned) -> None:
    ends = [planned.used_equally.costs, planned.costs] if planned.is_guess else [planned.costs]
    rows = []
    for run in batch_runs(planned):
        sizes = list(dict.fromkeys((run.first, run.last or run.first)))
        times = ""
        if run.seconds is not None:
            times = "\n".join(_durations(ends, run.way, n) for n in sizes)
        counts = "\n".join(_division_words(planned, run.way, n) for n in sizes)
        rows.append((run.sizes, PLACES[run.way], times, counts))
    title = "Batches (estimate; a start measures them)"
    heads = ["tokens", "computed by", "a decode takes", "slots + link + CPU"]
    n_heads = 3 if planned.is_divided or not planned.facts.n_experts else 4
    report.table(title, heads[:n_heads], [row[:n_heads] for row in rows])
    if any("\n" in row[2] for row in rows):
        report.line("first line: the smallest batch of the row; second line: the largest")
    if any(" to " in row[2] for row in rows):
        report.line("of two times, the longer one assumes experts that are used equally often")
    if n_heads == 4:
        report.line("slots + link + CPU: a layer's experts in slots, copied, and on the CPU")


def _durations(tables: Sequence[CostTable], way: Way, n: int) -> str:
    """A batch's time by each table that has its way: "12.6 ms to 28.6 ms", or one time."""
    known = [table.seconds(way, n) for table in tables if table.has(way)]
    return " to ".join(dict.fromkeys(map(_duration, sorted(known))))


def _division_words(planned: Planned, way: Way, n_tokens: int) -> str:
    """Return a streamed layer's experts by place, for a batch of `n_tokens`."""
    division = planned.division(way, n_tokens)
    counts = (division.in_slots, division.over_link, division.on_cpu)
    return "+".join(f"{float(count):.0f}" for count in counts)


def _powers_of_two(most: int) -> list[int]:
    return [1 << i for i in range(most.bit_length())]


def _fastest(table: CostTable, n: int) -> Way:
    """Return the way that a start would choose of those whose times reach `n` tokens."""
    known = [way for way in Way if table.has(way) and n <= max(table.ways[way])]
    return table.best(n, known)[0]


def show_modelled(planned: Planned) -> None:
    """Print the expected decode times of every way at powers of two, the chosen one with a star.

    Times are ranges if it was not counted how many experts neighbouring tokens share.
    """
    table = planned.costs
    ends = [end.costs for end in reversed(planned.ends_of_sharing or ())]
    ways = [way for way in Way if table.has(way)]
    rows = []
    for n in _powers_of_two(table.n_most):
        best = _fastest(table, n)
        cells = [
            f"{_time_range(ends or [table], way, n)}{' *' * (way is best and len(ways) > 1)}"
            if n <= max(table.ways[way])
            else ""
            for way in ways
        ]
        rows.append((str(n), *cells))
    title = "milliseconds of a decode of n tokens (estimate)"
    report.table(title, ("n", *(str(way) for way in ways)), rows)
    if len(ways) > 1:
        report.line(f"* the way taken: the fastest, if it saves more than {1 - PAYS:.0%}")
    if planned.facts.n_experts:
        report.paragraph(_sharing_words(planned))


def _time_range(tables: Sequence[CostTable], way: Way, n: int) -> str:
    """The milliseconds of a decode by each table as text, such as "12.1 to 15.3"."""
    return " to ".join(dict.fromkeys(rounded(t.seconds(way, n) * 1e3, 3) for t in tables))


def _sharing_words(planned: Planned) -> str:
    """A sentence on the experts that neighbouring tokens share, and where that is known from."""
    n, n_experts, counted = 8, planned.facts.n_experts, planned.request.unions
    if counted is not None:
        used = f"{planned.work.union(n):.0f}"
        source = f"counted on {counted.counted_on} over {counted.n_tokens} tokens"
    else:
        ends = reversed(planned.ends_of_sharing or ())
        used = " to ".join(f"{end.work.union(n):.0f}" for end in ends)
        source = "estimate; a run will count them"
    return f"Times assume that {n} tokens use {used} of a layer's {n_experts} experts ({source})"


# -- with -v ---------------------------------------------------------------------------------------


def _show_rest(planned: Planned) -> None:
    plan, facts, work = planned.plan, planned.facts, planned.work
    if plan.streamed:
        show_modelled(planned)
    experts = ""
    if facts.n_experts:
        number = report.plural(facts.n_experts, "expert")
        experts = f", {number}, {facts.n_experts_used} used"
    layers = report.plural(facts.n_layers, "layer")
    report.line(f"{facts.path.name}: {facts.architecture}, {layers}{experts}")
    if words := _host_words(planned):
        report.paragraph(words)
    if planned.tables is not None:
        report.paragraph(_table_words(planned, planned.tables))
    if "mtp_decode_tps" in planned.expected:
        report.line(
            f"With drafts by its own layers: answers about {rate_words(mtp_speed(planned))}, if "
            f"{ACCEPTED:.0%} of the drafted tokens are right"
        )
    links = " and ".join(
        f"{p.machine.link_bytes_per_s / 1e9:.3g}"
        for p in planned.parts
        if not (p.is_remote or p.on_cpu)
    )
    to_gpu = (
        f"{links} GB/s from RAM to the GPU{'s' if planned.is_divided else ''} and " if links else ""
    )
    ram = f"{planned.request.machine.ram_bytes_per_s / 1e9:.3g} GB/s of RAM"
    flags = "--ram SIZE,RATE" if planned.on_cpu else "--link, --ram"
    report.line(f"with {to_gpu}{ram} ({flags})")
    assumed: tuple[str, ...] = ()
    if rounded(planned.least_decode_tps) != rounded(planned.expected["decode_tps"]):
        share = expected_hits(even(work), plan.sharing, work.union(1))
        assumed = (
            f"The slower of both speeds assumes {share:.0%}, as if all experts were used "
            "equally often",
        )
    for words in (*plan.reasons, *assumed, *plan.declined):
        report.paragraph(words)


def _host_words(planned: Planned) -> str:
    """Sentences if host memory has no room for the streamed weights, else ""."""
    plan, room, disk = planned.plan, planned.room, planned.disk
    if room is None or disk is None:
        return ""
    most = planned.vram_bytes - plan.reserve_bytes + room.available_bytes
    return (
        f"This does not fit memory: {size_words(plan.streamed_bytes)} of weights are not on the "
        f"GPU, and RAM has room for {size_words(room.available_bytes)} ({room.limited_by}). "
        "Experts that are not in RAM are read from the disk when a layer needs them. "
        f"{disk.words(plan.n_ubatch)} {plan.streamed_bytes / _GIB:.0f} GiB of free RAM (--ram "
        f"plans for another machine), about {planned.missing_bytes / _GIB:.0f} GiB more GPU "
        f"memory, or a file of at most {most / _GIB:.0f} GiB would avoid it"
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
