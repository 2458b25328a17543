"""The measurements that a kept file has of a machine: of disks, links, reads and layouts.

Each value was measured by several starts (`offload.times.repeated`). Files of earlier versions have
one number instead, which counts as one measurement. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BeforeValidator

from offload.plan.repacking import LayoutTimes
from offload.times.mapped_reads import MappedReads
from offload.times.repeated import (
    LEAST_SETTLED,
    MOST_FROM_STARTS,
    MOST_VALUES,
    RepeatedRate,
    RepeatedTime,
)

if TYPE_CHECKING:
    from offload.stream.link_speed import LinkSpeeds

_MOST_LAYOUT_TIMES = 3  # starts that measure, as many as tell one disturbed time from the others
_AGREES = (0.8, 1.25)  # factors on a disk's kept speed within which a session confirms it


def of_one(value: Any) -> Any:
    """Return JSON of repeated measurements. A number is one measurement."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return {"values": [value]} if is_number else value


KeptRate = Annotated[RepeatedRate, BeforeValidator(of_one)]
KeptTime = Annotated[RepeatedTime, BeforeValidator(of_one)]


@dataclass
class KeptDisk:
    """The measured speed of a disk, with several numbers of large reads under way at once."""

    rates: dict[int, KeptRate]  # bytes/s by number of reads
    date: str  # day of the first measurement
    complaints: list[str] = field(default_factory=list)  # reasons why it is slow, by the file's key

    @property
    def bytes_per_s(self) -> float:
        """The highest speed."""
        return max((rate.value for rate in self.rates.values()), default=0.0)

    @property
    def is_settled(self) -> bool:
        """True if no start needs to measure again."""
        return bool(self.rates) and all(rate.is_settled() for rate in self.rates.values())

    def is_due(self, day: str) -> bool:
        """True if a start of this day measures."""
        return not self.rates or any(rate.is_due(day) for rate in self.rates.values())

    def with_seen(self, depth: int, rate: float) -> Self:
        """Return these speeds with one that a session saw, with `depth` reads at once.

        The plan reads the highest speed, and a session sees one number of reads. So a rate that
        differs much stands for a disk whose other speeds differ by the same factor.
        """
        known = self.rates.get(depth, RepeatedRate()).value
        if not known:
            return self
        low, high = _AGREES
        factor = 1.0 if low <= rate / known <= high else rate / known
        return replace(
            self, rates={n: one.with_seen(factor * one.value) for n, one in self.rates.items()}
        )

    def with_measured(self, rates: Mapping[int, float], *, is_doubted: bool, day: str) -> Self:
        """Return these speeds with another measurement of each number of reads."""
        known = {depth: self.rates.get(depth, RepeatedRate()) for depth in rates}
        new = {
            depth: known[depth].with_value(rate, is_doubted=is_doubted, day=day)
            for depth, rate in rates.items()
        }
        return replace(self, rates=self.rates | new)


@dataclass
class KeptLayouts:
    """The measured times of both layouts of a kind of weight, as `LayoutTimes` has them."""

    plain_one_s: KeptTime
    repacked_one_s: KeptTime
    plain_prompt_s: KeptTime
    repacked_prompt_s: KeptTime
    date: str = ""  # day of the first measurement

    @classmethod
    def of(cls, date: str) -> Self:
        """Return no measurement, of this day."""
        return cls(RepeatedTime(), RepeatedTime(), RepeatedTime(), RepeatedTime(), date)

    @property
    def each(self) -> dict[str, RepeatedTime]:
        """The measurements by the names of `LayoutTimes`."""
        return {one.name: getattr(self, one.name) for one in fields(LayoutTimes)}

    @property
    def times(self) -> LayoutTimes:
        """The times that count."""
        return LayoutTimes(**{name: one.value for name, one in self.each.items()})

    @property
    def is_settled(self) -> bool:
        """True if no start needs to measure again. A measurement takes a second."""
        return all(one.is_settled(_MOST_LAYOUT_TIMES) for one in self.each.values())

    def is_due(self, day: str) -> bool:
        """True if a start of this day measures."""
        return any(one.is_due(day, _MOST_LAYOUT_TIMES) for one in self.each.values())

    def with_measured(self, times: LayoutTimes, *, is_doubted: bool, day: str) -> Self:
        """Return these times with another measurement of each."""
        more = {
            name: one.with_value(getattr(times, name), is_doubted=is_doubted, day=day)
            for name, one in self.each.items()
        }
        return type(self)(**more, date=self.date)


@dataclass
class KeptLinks:
    """The measured speeds of several devices' links from RAM, in the devices' order."""

    alone: list[KeptRate]  # bytes/s while no other link copies
    together: list[KeptRate]  # bytes/s while all of them copy
    date: str  # day of the first measurement

    @classmethod
    def of(cls, n_devices: int, date: str) -> Self:
        """Return an entry of this day for `n_devices` links, without measurements."""
        return cls([RepeatedRate()] * n_devices, [RepeatedRate()] * n_devices, date)

    @property
    def rates(self) -> tuple[float, ...]:
        """The bytes/s to plan with. No link is faster together with others than alone."""
        pairs = zip(self.alone, self.together, strict=True)
        return tuple(min(alone.value, together.value) for alone, together in pairs)

    @property
    def is_settled(self) -> bool:
        """True if no start needs to measure again."""
        return all(rate.is_settled() for rate in (*self.alone, *self.together))

    def is_due(self, day: str) -> bool:
        """True if a start of this day measures."""
        return any(rate.is_due(day) for rate in (*self.alone, *self.together))

    def with_measured(self, speeds: LinkSpeeds, *, is_doubted: bool, day: str) -> Self:
        """Return these speeds with another measurement of each link."""
        alone, together = (
            [
                one.with_value(rate, is_doubted=is_doubted, day=day)
                for one, rate in zip(kept, rates, strict=True)
            ]
            for kept, rates in ((self.alone, speeds.alone), (self.together, speeds.together))
        )
        return replace(self, alone=alone, together=together)


@dataclass
class KeptReads:
    """Measurements of a device's reads of pinned memory, and the day of the first."""

    measured: list[MappedReads]
    date: str
    is_doubted: bool = False  # other programs took much of the CPUs whenever they were measured
    n_tried: int = 0  # starts that measured, also without one that counts; 0: an earlier file
    tried_on: str = ""  # day of the last of them

    @property
    def is_settled(self) -> bool:
        """True if no start needs to measure again. A measurement takes milliseconds."""
        return bool(self.measured) and self._n_tried >= MOST_FROM_STARTS

    def is_due(self, day: str) -> bool:
        """True if a start of this day measures, as `RepeatedValue.is_due`."""
        is_weak = self.is_doubted or len(self.measured) < LEAST_SETTLED
        return not self.is_settled or (is_weak and self.tried_on != day)

    def with_measured(self, reads: MappedReads, *, is_doubted: bool, day: str) -> Self:
        """Return these measurements with another one, as `RepeatedValue.with_value` does."""
        tried = replace(self, n_tried=self._n_tried + 1, tried_on=day)
        if is_doubted and self.measured and not self.is_doubted:
            return tried
        if self.is_doubted and not is_doubted:
            return replace(tried, measured=[reads], is_doubted=False, n_tried=1)
        return replace(
            tried, measured=[*self.measured, reads][-MOST_VALUES:], is_doubted=is_doubted
        )

    @property
    def _n_tried(self) -> int:
        return max(self.n_tried, len(self.measured))
