"""Drops kept measurements that no machine can have made, so that they count as missing. Pure.

A measurement may have been disturbed by other programs, and a file may be damaged. The bounds are
far wider than any noise: at most, a measurement differs from a plausible machine by a factor of 20
in the slow direction. The bounds of a table of decode times also follow from its other sizes
(`CostTable.absurd` in offload/times/table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Protocol

from numa.tune import TuneResult
from offload.plan.workload import PlannedWork, TokenMix
from offload.schedule.division import MOST_SLOWDOWN, DeviceCosts, MeasuredCosts
from offload.times.hits import Sharing
from offload.times.mapped_reads import MappedReads
from offload.times.repeated import RepeatedValue
from offload.times.table import CostTable
from specdec.costs.profile import CostProfile
from specdec.errors import BadProfile

_TIMES_SLOWER = 20.0  # most times that a measurement may exceed what a slow machine takes
_SLOW_BYTES_PER_S = 1e9  # rate at which a slow machine reads weights, and a slow link copies them
_SLOW_CALL_S = 1e-3  # what a slow machine takes for a product or a copy, whatever its size
_MOST_DAYS = 30  # age in days from which a measurement is made again


def is_old(day: str, today: str) -> bool:
    """True if an ISO date lies so far before `today` that its measurement is made again.

    True also for a text that is no date, and for a day to come, when the clock was wrong. A machine
    in another time zone may be a day ahead.
    """
    try:
        n_days = (date.fromisoformat(today) - date.fromisoformat(day)).days
    except ValueError:
        return True
    return not -1 <= n_days < _MOST_DAYS


class MeasuredRun(Protocol):
    """The measurements of a run, as `specoffload.kept.KeptRun` has them."""

    table: CostTable
    sharing: Sharing
    n_verify: int
    n_least: int
    split: MeasuredCosts | None
    date: str
    drafts: dict[str, Any]
    splits: dict[str, MeasuredCosts]


class Profile(Protocol):
    """The measurements of a kept file, as `specoffload.kept.Kept` has them."""

    runs: list[Any]  # of `MeasuredRun`
    engines: dict[str, Any]
    numa: TuneResult | None
    disks: dict[str, Any]
    links: dict[str, Any]
    reads: dict[str, Any]
    layouts: dict[str, Any]
    workers: list[DeviceCosts]
    mix: TokenMix
    batch_costs: str
    batch_costs_date: str
    ubatches: list[Any]


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a kind of measurement can be."""

    least: float
    most: float
    unit: str

    def reason(self, values: Iterable[float]) -> str:
        """Return a clause on the first value out of bounds, or "" if there is none."""
        for value in values:
            if not self.least <= value <= self.most:  # also True for NaN
                possible = f"{self.least:.2g} to {self.most:.2g} {self.unit}"
                return f"{value:.3g} {self.unit}, where {possible} are possible"
        return ""


DISK_RATE = Bounds(1e6, 1e12, "bytes/s")
LINK_RATE = Bounds(1e7, 1e13, "bytes/s")
FIRST_READ = Bounds(0.0, _TIMES_SLOWER * _SLOW_CALL_S, "s")  # or copy, whatever its bytes
PRODUCT = Bounds(1e-9, 60.0, "s")  # a product of one weight
TOKEN = Bounds(1e-7, 600.0, "s")  # a token of a prompt, of a draft or of an answer
DECODE = Bounds(1e-6, 3600.0, "s")
TOKENS = Bounds(0.0, 1e12, "tokens")
SLOWDOWN = Bounds(1.0, MOST_SLOWDOWN, "times")  # of the link or the CPU while both work
SLOTS = Bounds(0.0, 1e9, "slots or layers")
EXPERTS = Bounds(0.0, 1e9, "experts")
BATCH = Bounds(0.0, 1e7, "tokens in a batch")
TIMINGS = Bounds(0.0, 1e6, "timings")
SPREAD = Bounds(0.0, 1e3, "times the median")
THREADS = Bounds(1.0, 1e5, "threads")


def expert_bounds(expert_bytes: float, n_rows: int = 1) -> Bounds:
    """Return bounds of the time in which one expert is copied, or computed with `n_rows` rows."""
    slow_s = max(1.0, n_rows / 4) * expert_bytes / _SLOW_BYTES_PER_S + _SLOW_CALL_S
    return Bounds(0.0, _TIMES_SLOWER * slow_s, "s")


def split_reason(costs: MeasuredCosts, expert_bytes: float) -> str:
    """Return a clause on a time of a split layer that is out of bounds, or ""."""
    whole = expert_bounds(expert_bytes)
    for side, times in (("the CPU", costs.host), ("the device", costs.device)):
        for n, s in sorted(times.by_rows_s.items()):
            if reason := expert_bounds(expert_bytes, n).reason([s]):
                return f"an expert of {n} rows takes {side} {reason}"
        if reason := whole.reason([times.fixed_s]):
            return f"a layer takes {side} {reason}, whatever its experts"
    if reason := whole.reason([costs.copy_s / costs.link_slowdown]):
        return f"an expert's copy takes {reason}"
    if reason := SLOWDOWN.reason([costs.host_slowdown, costs.link_slowdown]):
        return f"while CPU and link work, one is slowed down {reason}"
    reason = SPREAD.reason([costs.host_spread, costs.device_spread, costs.copy_spread])
    return reason and f"repeated timings differ by {reason}"


def drop_absurd(kept: Profile, expert_bytes: float | None = None) -> list[str]:
    """Drop measurements that are out of bounds. Return a clause for each.

    `expert_bytes`: size of one expert of the model. None: unknown, so times of experts stay.
    """
    return [
        *_drop_of_parts(kept),
        *_drop_of_tune(kept),
        *_drop_of_use(kept),
        *_drop_of_layers(kept, expert_bytes),
    ]


def _drop_of_parts(kept: Profile) -> Iterator[str]:
    """Drop what is out of bounds of disks, links, reads, layouts of weights and draft engines."""
    yield from _without(
        kept.disks, "the speed of disk", lambda one: disk_reason(one.rates.values())
    )
    yield from _without(
        kept.links, "the speed of links from RAM to",
        lambda one: links_reason([*one.alone, *one.together]),
    )  # fmt: skip
    yield from _without(
        kept.reads, "the reads of pinned memory by", lambda one: reads_reason(one.measured)
    )
    yield from _without(
        kept.layouts, "the times of layouts of",
        lambda one: layouts_reason(one.each.values()),
    )  # fmt: skip
    yield from _without(
        kept.engines, "the times of draft engines with",
        lambda one: _repeated_reason(TOKEN, one.seconds.values()),
    )  # fmt: skip


def _drop_of_tune(kept: Profile) -> Iterator[str]:
    """Drop what is out of bounds in the searches for threads and for a ubatch."""
    if kept.numa is not None and (reason := _numa_reason(kept.numa)):
        kept.numa = None
        yield f"the times of the NUMA choice: {reason}"
    for ubatch in [*kept.ubatches]:
        each = [*ubatch.trials.values()]
        reason = TOKEN.reason(one.prompt_token_s for one in each)
        reason = reason or DECODE.reason(one.decode_s for one in each)
        reason = reason or BATCH.reason([ubatch.n_ubatch, *ubatch.trials])
        reason = reason or SLOTS.reason(n for one in each for n in (one.n_slots, one.n_resident))
        spreads = [spread for one in each for spread in (one.prompt_spread, one.decode_spread)]
        reason = reason or SPREAD.reason(spreads) or _work_reason(ubatch.work)
        if reason:
            kept.ubatches.remove(ubatch)
            yield f"the times of ubatches of {ubatch.date}: {reason}"


def _drop_of_use(kept: Profile) -> Iterator[str]:
    """Drop a mix of tokens and an imported T(n) that are out of bounds."""
    if reason := TOKENS.reason([kept.mix.n_prompt, kept.mix.n_generated]):
        kept.mix = TokenMix(0, 0)
        yield f"the mix of tokens: {reason}"
    if kept.batch_costs and (reason := _curve_reason(kept.batch_costs)):
        kept.batch_costs = kept.batch_costs_date = ""
        yield f"the imported T(n): {reason}"


def _drop_of_layers(kept: Profile, expert_bytes: float | None) -> Iterator[str]:
    """Drop what is out of bounds in runs, and in workers' times of split layers."""
    for run in [*kept.runs]:
        if reason := _count_reason(run) or run.table.absurd:
            kept.runs.remove(run)
            yield f"the times of {run.date}: {reason}"
        else:
            yield from _drop_of_run(run, expert_bytes)
    if expert_bytes is None:
        return
    for worker in [*kept.workers]:
        if reason := split_reason(worker.costs, expert_bytes):
            kept.workers.remove(worker)
            yield f"the split costs of {worker.device}: {reason}"


def disk_reason(rates: Iterable[RepeatedValue]) -> str:
    """Return a clause on no measurement, or on a value that is out of bounds, or ""."""
    return _repeated_reason(DISK_RATE, rates)


def links_reason(rates: Iterable[RepeatedValue]) -> str:
    """Return a clause on no measurement, or on a value that is out of bounds, or ""."""
    return _repeated_reason(LINK_RATE, rates)


def layouts_reason(times: Iterable[RepeatedValue]) -> str:
    """Return a clause on no measurement, or on a value that is out of bounds, or ""."""
    return _repeated_reason(PRODUCT, times)


def reads_reason(measured: Sequence[MappedReads]) -> str:
    """Return a clause on no measurement, or on a value that is out of bounds, or ""."""
    if not measured:
        return "none was measured"
    rates = [
        rate
        for one in measured
        for rate in (one.bytes_per_s, one.beside_bytes_per_s, one.copy_bytes_per_s)
    ]
    first_s = [s for one in measured for s in (one.first_s, one.copy_first_s)]
    return LINK_RATE.reason(rates) or FIRST_READ.reason(first_s)


def _repeated_reason(bounds: Bounds, measured: Iterable[RepeatedValue]) -> str:
    """Return a clause on a value without a measurement, or on one out of bounds, or ""."""
    each = [*measured]
    if not each or not all(one.values for one in each):
        return "none was measured"
    return bounds.reason(value for one in each for value in (*one.values, *one.seen))


def _work_reason(work: PlannedWork | None) -> str:
    """Return a clause on numbers of tokens that are out of bounds, or ""."""
    if work is None:
        return ""
    return TOKENS.reason([work.n_prompt, work.n_generated]) or BATCH.reason([work.n_batch])


def _numa_reason(tuned: TuneResult) -> str:
    """Return a clause on what no search for threads and placement gives, or ""."""
    candidates = [trial.candidate for trial in tuned.trials]
    if tuned.best not in candidates:
        return f"{tuned.best} was chosen, and was not tried"
    reason = DECODE.reason(s for trial in tuned.trials for s in trial.seconds.values())
    reason = reason or SLOTS.reason([tuned.n_slots, tuned.n_resident])
    reason = reason or SPREAD.reason(s for trial in tuned.trials for s in trial.spreads.values())
    return reason or THREADS.reason(candidate.n_threads for candidate in candidates)


def _count_reason(run: MeasuredRun) -> str:
    """Return a clause on a run's first count that is out of bounds, or ""."""
    entries = [entry for of_way in run.table.ways.values() for entry in of_way.values()]
    reason = SLOTS.reason([*vars(run.sharing).values(), run.table.n_experts])
    reason = reason or BATCH.reason([run.n_verify])
    reason = reason or EXPERTS.reason([run.table.n_used, *run.table.unions.values()])
    counts = [n for entry in entries for n in (entry.n_timed, entry.n_retried)]
    return reason or TIMINGS.reason([run.n_least, *counts])


def _curve_reason(text: str) -> str:
    """Return a clause on an imported curve that is none, or ""."""
    try:
        CostProfile.from_normalised([float(cost) for cost in text.split(",")])
    except (BadProfile, ValueError) as e:
        return f"{str(e):.200}"
    return ""


def _without(kept: dict[str, Any], what: str, reason_of: Callable[[Any], str]) -> Iterator[str]:
    """Drop entries with a reason. Yield a clause for each."""
    for name, one in [*kept.items()]:
        if reason := reason_of(one):
            del kept[name]
            yield f"{what} {name}: {reason}"


def _drop_of_run(run: MeasuredRun, expert_bytes: float | None) -> Iterator[str]:
    """Drop what is out of bounds in a run. Yield a clause for each."""
    if expert_bytes is not None:
        if run.split is not None and (reason := split_reason(run.split, expert_bytes)):
            run.split = None
            yield f"the split costs of {run.date}: {reason}"
        yield from _without(
            run.splits, "the split costs of", lambda one: split_reason(one, expert_bytes)
        )
    ones_s = [one[1].seconds for way in run.table.ways if 1 in (one := run.table.measured(way))]
    most_s = min(TOKEN.most, _TIMES_SLOWER * min(ones_s)) if ones_s else TOKEN.most
    for name, draft in run.drafts.items():
        reason = SPREAD.reason([draft.step_spread])
        if draft.step_s:
            reason = reason or Bounds(TOKEN.least, most_s, "s").reason([draft.step_s])
        if reason:
            draft.step_s = draft.step_spread = 0.0
            yield f"the draft step of {run.date} ({name:.40}): {reason}"
