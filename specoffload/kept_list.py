"""Lists kept measurements, each with its value, spread, age and state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date

from numa.tune import TuneResult
from offload.schedule.division import MeasuredCosts
from offload.times.mapped_reads import usual_reads
from offload.times.repeated import RepeatedValue, half_spread
from offload.times.table import CostTable
from specoffload.kept import Kept, KeptRun, KeptUbatch
from specoffload.kept_bounds import is_old
from specoffload.kept_doubts import ubatch_doubt
from specoffload.kept_engines import KeptEngines
from specoffload.kept_values import KeptDisk, KeptLayouts, KeptLinks, KeptReads

_CORRECTED = "corrected in use"
_COUNTED = "counted in use"
_SIZES = (1, 2, 4, 8, 16, 32, 64)  # tokens of the decodes that are listed
USED = "used"
OLD = "old: run specoffload tune"
AGAIN = "old: measured again by the next start"
ONCE_MORE = "used: measured once more by the next start"
DOUBTED = "doubted, other programs ran: measured again by the next start"
BUSY = "used, but other programs ran at each measurement"
_BY_STARTS = (USED, ONCE_MORE, DOUBTED, BUSY)
TODAY = "today"


@dataclass(frozen=True)
class Measurement:
    """One kept measurement. `spread` is half the interquartile range over the median."""

    name: str
    value: str
    day: str = ""  # ISO date
    spread: float | None = None  # None: not known
    # What the next start does with it. A state of `_BY_STARTS` becomes OLD or AGAIN after 30 days.
    # Any other state says why the measurement is not used or doubted, or how it is corrected.
    state: str = USED
    by_tune: bool = False  # True if only `tune` measures it

    def cells(self, today: date) -> tuple[str, str, str, str, str]:
        """Return the name, value, spread, age and state as text."""
        spread = "" if self.spread is None else f"±{100 * self.spread:.0f} %"
        state = self.state
        if state in _BY_STARTS and is_old(self.day, today.isoformat()):
            state = OLD if self.by_tune else AGAIN
        return self.name, self.value, spread, age(self.day, today), state


def age(day: str, today: date) -> str:
    """Return how long ago an ISO date was, or "" if it is none."""
    try:
        n_days = (today - date.fromisoformat(day)).days
    except ValueError:
        return ""
    return TODAY if n_days <= 0 else "1 day" if n_days == 1 else f"{n_days} days"


def of_machine(kept: Kept, threads_doubt: str = "") -> list[Measurement]:
    """Return what is measured once for all models.

    `threads_doubt`: a clause if decodes contradict the tuned threads and placement.
    """
    measurements = []
    for name, disk in sorted(kept.disks.items()):
        measurements.append(_of_disk(name, disk))
    for name, links in sorted(kept.links.items()):
        measurements.append(_of_links(name, links))
    for name, reads in sorted(kept.reads.items()):
        measurements.append(_of_reads(name, reads))
    for name, times in sorted(kept.layouts.items()):
        measurements.append(_of_layouts(name, times))
    if kept.numa is not None:
        measurements.append(_of_threads(kept.numa, threads_doubt))
    return measurements


def of_model(kept: Kept, run: KeptRun | None) -> list[Measurement]:
    """Return what is kept of a model. `run`: the run whose costs are listed, if there is one."""
    measurements = [] if run is None else [*_of_run(run)]
    for name, engines in kept.engines.items():
        measurements.append(_of_engines(name, engines))
    if kept.hits is not None:
        words, day = f"of {kept.hits.n_tokens:,.0f} tokens", kept.hits.counted_on.isoformat()
        measurements.append(Measurement("hits and unions", words, day, None, _COUNTED))
    if kept.mix.n_prompt + kept.mix.n_generated:
        words = f"{kept.mix.n_prompt:,.0f} prompt, {kept.mix.n_generated:,.0f} generated"
        measurements.append(Measurement("mix of tokens", words, "", None, _COUNTED))
    if kept.batch_costs:
        sizes = f"{len(kept.batch_costs.split(','))} sizes"
        measurements.append(
            Measurement("imported T(n)", sizes, kept.batch_costs_date, by_tune=True)
        )
    measurements += [_of_ubatch(ubatch, kept.runs) for ubatch in kept.ubatches]
    for worker in kept.workers:
        measurements += _of_split(f" with {worker.device}", worker.costs, worker.date, USED)
    return measurements


def _of_threads(tuned: TuneResult, doubt: str) -> Measurement:
    spreads = next((t.spreads for t in tuned.trials if t.candidate == tuned.best), {})
    spread, state = max(spreads.values(), default=None), f"{USED}, but {doubt}" if doubt else USED
    value = str(tuned.best)
    return Measurement("threads and placement", value, tuned.date, spread, state, by_tune=True)


def _of_ubatch(ubatch: KeptUbatch, runs: Sequence[KeptRun]) -> Measurement:
    state = USED if ubatch.n_ubatch else "the search goes on"
    if doubt := ubatch_doubt(ubatch, runs):
        state = f"not used: {doubt}"
    value = f"{ubatch.n_ubatch or 'not found yet'}, of {len(ubatch.trials)} tried"
    chosen = ubatch.trials.get(ubatch.n_ubatch)
    spread = None if chosen is None else chosen.spread or None
    return Measurement("ubatch", value, ubatch.date, spread, state, by_tune=True)


def _of_disk(name: str, disk: KeptDisk) -> Measurement:
    fastest = max(disk.rates.values(), key=lambda rate: rate.value)
    value = _rate(fastest.value)
    state = _state(disk.rates.values(), is_settled=disk.is_settled)
    return Measurement(f"disk {name}", value, disk.date, fastest.spread, state)


def _of_links(name: str, links: KeptLinks) -> Measurement:
    alone, together = (min(rate.value for rate in of) for of in (links.alone, links.together))
    value = f"{_rate(alone)} alone, {_rate(together)} together"
    each = [*links.alone, *links.together]
    state = _state(each, is_settled=links.is_settled)
    return Measurement(f"links to {name}", value, links.date, _largest_spread(each), state)


def _of_layouts(name: str, times: KeptLayouts) -> Measurement:
    each = times.each.values()
    value, state = times.times.words, _state(each, is_settled=times.is_settled)
    return Measurement(f"layouts of {name}", value, times.date, _largest_spread(each), state)


def _largest_spread(values: Iterable[RepeatedValue]) -> float | None:
    return max((one.spread for one in values if one.spread is not None), default=None)


def _state(values: Iterable[RepeatedValue], *, is_settled: bool) -> str:
    """Return what the next start does with measurements that several starts make."""
    return _state_of(is_settled, any(one.is_doubted for one in values))


def _state_of(is_settled: bool, is_doubted: bool) -> str:
    if is_settled:
        return BUSY if is_doubted else USED
    return DOUBTED if is_doubted else ONCE_MORE


def _of_engines(name: str, engines: KeptEngines) -> Measurement:
    each = sorted(engines.seconds.items())
    value = ", ".join(f"{engine} {_time(times.value)}" for engine, times in each)
    spread = _largest_spread(engines.seconds.values())
    state = _state(engines.seconds.values(), is_settled=not engines.unsettled)
    return Measurement(f"draft engines ({name:.30})", value, engines.date, spread, state)


def _of_reads(name: str, reads: KeptReads) -> Measurement:
    usual = usual_reads(reads.measured)
    value = (
        f"{_rate(usual.bytes_per_s)}, {_rate(usual.beside_bytes_per_s)} beside copies, "
        f"first {_time(usual.first_s)}"
    )
    rates = [one.bytes_per_s for one in reads.measured]
    state = _state_of(reads.is_settled, reads.is_doubted)
    name = f"reads of pinned memory by {name}"
    return Measurement(name, value, reads.date, half_spread(rates), state)


def refused(clauses: Sequence[str]) -> list[Measurement]:
    """Return what is out of bounds, from the clauses of `kept_bounds.drop_absurd`."""
    measurements = []
    for clause in clauses:
        name, _, reason = clause.removeprefix("the ").partition(": ")
        measurements.append(Measurement(name, "out of bounds", state=f"made again: {reason}"))
    return measurements


def _of_run(run: KeptRun) -> Iterator[Measurement]:
    yield from _of_table(run.table)
    if run.split is not None:
        yield from _of_split("", run.split, run.split_date or run.date, _CORRECTED)
    for name, costs in run.splits.items():
        yield from _of_split(f" of {name}", costs, run.split_date or run.date, _CORRECTED)
    for name, draft in run.drafts.items():
        if draft.step_s:
            of = name if name == "own layers" else name[:8]  # of the file's hash
            value, spread = _time(draft.step_s), draft.step_spread or None
            yield Measurement(f"draft step ({of})", value, run.date, spread, _CORRECTED)
        for drafter, bins in draft.calibration.items():
            words = f"{sum(bins.accepted):,.0f} of {sum(bins.total):,.0f} tokens accepted"
            yield Measurement(f"calibration of {drafter}", words, run.date, None, _COUNTED)


def _of_table(table: CostTable) -> Iterator[Measurement]:
    for way in table.ways:
        for n, entry in sorted(table.measured(way).items()):
            if n not in _SIZES:
                continue
            state = _CORRECTED
            if entry.measured_s and abs(entry.seconds / entry.measured_s - 1.0) > 0.01:
                state = f"{_CORRECTED}, first {_time(entry.measured_s)}"
            spread = entry.spread if entry.n_timed > 1 else None
            yield Measurement(f"T({n}) {way}", _time(entry.seconds), entry.date, spread, state)


def _of_split(of: str, costs: MeasuredCosts, day: str, usual: str) -> Iterator[Measurement]:
    state = "doubted: timed again" if costs.is_doubtful else usual
    for side, times, spread in (
        ("CPU", costs.host, costs.host_spread),
        ("device", costs.device, costs.device_spread),
    ):
        name, value = f"an expert on the {side}{of}", _time(times.array()[1])
        yield Measurement(name, value, day, spread or None, state)
    yield Measurement(
        f"an expert's copy{of}", _time(costs.copy_s), day, costs.copy_spread or None, state
    )


def _time(seconds: float) -> str:
    if seconds >= 1.0:
        return f"{seconds:.3g} s"
    return f"{1e6 * seconds:.3g} us" if seconds < 1e-3 else f"{1e3 * seconds:.3g} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"
