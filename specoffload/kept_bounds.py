"""Drops kept measurements that no machine can have made, so that they count as missing. Pure.

A measurement may have been disturbed by other programs, and a file may be damaged. The bounds are
far wider than any noise: at most, a measurement differs from a plausible machine by a factor of 20
in the slow direction. Times of decodes have bounds of their own (offload/times/table.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from numa.tune import TuneResult
from offload.schedule.division import DeviceCosts, MeasuredCosts
from offload.times.table import CostTable

_TIMES_SLOWER = 20.0  # most times that a measurement may exceed what a slow machine takes
_SLOW_BYTES_PER_S = 1e9  # rate at which a slow machine reads weights, and a slow link copies them
_SLOW_CALL_S = 1e-3  # what a slow machine takes for a product or a copy, whatever its size


class Run(Protocol):
    """The measurements of a run, as `specoffload.kept.KeptRun` has them."""

    table: CostTable
    split: MeasuredCosts | None
    date: str
    drafts: dict[str, Any]
    splits: dict[str, MeasuredCosts]


class Profile(Protocol):
    """The measurements of a kept file, as `specoffload.kept.Kept` has them."""

    runs: list[Any]  # of `Run`
    engines: dict[str, dict[str, float]]
    numa: TuneResult | None
    disks: dict[str, Any]
    links: dict[str, Any]
    layouts: dict[str, Any]
    workers: list[DeviceCosts]
    ubatches: list[Any]


@dataclass(frozen=True)
class Bounds:
    """The least and the most that a kind of measurement can be."""

    least: float
    most: float
    unit: str

    def complaint(self, values: Iterable[float]) -> str:
        """Return a clause on the first value out of bounds, or "" if there is none."""
        for value in values:
            if not self.least <= value <= self.most:  # also True for NaN
                possible = f"{self.least:.2g} to {self.most:.2g} {self.unit}"
                return f"{value:.3g} {self.unit}, where {possible} are possible"
        return ""


DISK_RATE = Bounds(1e6, 1e12, "bytes/s")
LINK_RATE = Bounds(1e7, 1e13, "bytes/s")
PRODUCT = Bounds(1e-9, 60.0, "s")  # a product of one weight
TOKEN = Bounds(1e-7, 600.0, "s")  # a token of a prompt, of a draft or of an answer
DECODE = Bounds(1e-6, 3600.0, "s")


def expert_bounds(expert_bytes: float, n_rows: int = 1) -> Bounds:
    """Return bounds of the time in which one expert is copied, or computed with `n_rows` rows."""
    slow_s = max(1.0, n_rows / 4) * expert_bytes / _SLOW_BYTES_PER_S + _SLOW_CALL_S
    return Bounds(0.0, _TIMES_SLOWER * slow_s, "s")


def split_complaint(costs: MeasuredCosts, expert_bytes: float) -> str:
    """Return a clause on a time of a split layer that is out of bounds, or ""."""
    whole = expert_bounds(expert_bytes)
    for side, times in (("the CPU", costs.host), ("the device", costs.device)):
        for n, s in sorted(times.by_rows_s.items()):
            if why := expert_bounds(expert_bytes, n).complaint([s]):
                return f"an expert of {n} rows takes {side} {why}"
        if why := whole.complaint([times.fixed_s]):
            return f"a layer takes {side} {why}, whatever its experts"
    why = whole.complaint([costs.copy_s / costs.link_slowdown])
    return why and f"an expert's copy takes {why}"


def drop_absurd(kept: Profile, expert_bytes: float | None = None) -> list[str]:
    """Drop measurements that are out of bounds. Return a clause for each.

    `expert_bytes`: size of one expert of the model. None: unknown, so times of experts stay.
    """
    said = [
        *_without(
            kept.disks, "the speed of disk", lambda its: DISK_RATE.complaint(its.rates.values())
        ),
        *_without(
            kept.links, "the speed of links from RAM to",
            lambda its: LINK_RATE.complaint([*its.alone, *its.together]),
        ),
        *_without(
            kept.layouts, "the times of layouts of",
            lambda its: PRODUCT.complaint(vars(its).values()),
        ),
        *_without(
            kept.engines, "the times of draft engines with",
            lambda its: TOKEN.complaint(its.values()),
        ),
    ]  # fmt: skip
    if kept.numa is not None:
        seconds = [s for trial in kept.numa.trials for s in trial.seconds.values()]
        if why := DECODE.complaint(seconds):
            kept.numa = None
            said.append(f"the times of the NUMA choice: {why}")
    for ubatch in [*kept.ubatches]:
        each = [*ubatch.trials.values()]
        why = TOKEN.complaint(its.prompt_token_s for its in each)
        if why := why or DECODE.complaint(its.decode_s for its in each):
            kept.ubatches.remove(ubatch)
            said.append(f"the times of ubatches of {ubatch.date}: {why}")
    for run in kept.runs:
        said += _drop_of_run(run, expert_bytes)
    for worker in [*kept.workers] if expert_bytes is not None else ():
        if why := split_complaint(worker.costs, expert_bytes or 0.0):
            kept.workers.remove(worker)
            said.append(f"the split costs of {worker.device}: {why}")
    return said


def _without(kept: dict[str, Any], what: str, complaint: Callable[[Any], str]) -> Iterator[str]:
    """Drop entries with a complaint. Yield a clause for each."""
    for name, one in [*kept.items()]:
        if why := complaint(one):
            del kept[name]
            yield f"{what} {name}: {why}"


def _drop_of_run(run: Run, expert_bytes: float | None) -> Iterator[str]:
    """Drop what is out of bounds in a run. Yield a clause for each."""
    if expert_bytes is not None:
        if run.split is not None and (why := split_complaint(run.split, expert_bytes)):
            run.split = None
            yield f"the split costs of {run.date}: {why}"
        yield from _without(
            run.splits, "the split costs of", lambda its: split_complaint(its, expert_bytes)
        )
    ones_s = [its[1].seconds for way in run.table.ways if 1 in (its := run.table.measured(way))]
    most_s = min(TOKEN.most, _TIMES_SLOWER * min(ones_s)) if ones_s else TOKEN.most
    for name, draft in run.drafts.items():
        steps_s = [s for s in (draft.step_s, *draft.step_by_depth_s.values()) if s != 0.0]
        if why := Bounds(TOKEN.least, most_s, "s").complaint(steps_s):
            draft.step_s, draft.step_by_depth_s = 0.0, {}
            yield f"the draft step of {run.date} ({name:.40}): {why}"
