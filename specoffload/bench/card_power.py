"""Samples a card's power and clocks while something is measured, and sums them up.

A card that waits for copies or for the CPU takes little power. So the power beside the speed shows
whether the work overlaps, also where no counter of ours looks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specoffload.bench.card_meters import CardMeter, CardReading, NoReading, open_meter

if TYPE_CHECKING:
    from offload.device import DeviceChoice

PERIOD_S = 0.05
_PATIENCE_S = 1.0  # most seconds that the end of a measurement waits for a reading


@dataclass(frozen=True)
class CardUse:
    """A card's power and clocks during a measurement. None: the card does not tell it.

    `watts` is the mean: of the card's energy counter if it has one, else of the readings.
    """

    watts: float
    least_watts: float
    most_watts: float
    limit_watts: float | None
    core_hz: float | None  # means
    memory_hz: float | None
    n_readings: int


class _KnownMean:
    """The mean of the values that are known."""

    def __init__(self) -> None:
        self.n = 0
        self._sum = 0.0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.n, self._sum = self.n + 1, self._sum + value

    @property
    def value(self) -> float | None:
        """The mean, or None if no value is known."""
        return self._sum / self.n if self.n else None


class CardSums:
    """Sums of readings, over any number of stretches of time. Pure."""

    def __init__(self, limit_watts: float | None = None) -> None:
        self._limit_watts = limit_watts
        self._watts, self._core_hz, self._memory_hz = _KnownMean(), _KnownMean(), _KnownMean()
        self._least, self._most = float("inf"), 0.0
        self._joules = self._seconds = 0.0
        self._last: CardReading | None = None

    def add(self, reading: CardReading) -> None:
        """Count a reading. If one of the same stretch came before, energy counts since then."""
        self._watts.add(reading.watts)
        self._core_hz.add(reading.core_hz)
        self._memory_hz.add(reading.memory_hz)
        self._least, self._most = min(self._least, reading.watts), max(self._most, reading.watts)
        last, self._last = self._last, reading
        # A counter that went back was reset, so this piece of time has no energy.
        if last is not None and last.joules is not None and reading.joules is not None:
            joules, seconds = reading.joules - last.joules, reading.at_s - last.at_s
            if joules >= 0 < seconds:
                self._joules, self._seconds = self._joules + joules, self._seconds + seconds

    def end_stretch(self) -> None:
        """The next reading begins a new stretch: what the card took in between does not count."""
        self._last = None

    @property
    def use(self) -> CardUse | None:
        """The sums as means. None without a reading."""
        watts = self._watts.value
        if watts is None:
            return None
        return CardUse(
            self._joules / self._seconds if self._joules else watts,
            self._least, self._most, self._limit_watts,
            self._core_hz.value, self._memory_hz.value, self._watts.n,
        )  # fmt: skip


class CardWatch:
    """Reads a card's sensors in a thread of its own while a block runs.

    `why_not` is empty as long as they can be read. A card that stops answering is read no more.
    """

    def __init__(
        self, meter: CardMeter | None, why_not: str = "", period_s: float = PERIOD_S
    ) -> None:
        self._meter, self.why_not, self._period_s = meter, why_not, period_s

    def sums(self) -> CardSums:
        """New sums for one of the things that are measured."""
        return CardSums(None if self._meter is None else self._meter.limit_watts)

    @contextmanager
    def watching(self, sums: CardSums) -> Iterator[None]:
        """Add readings to `sums` while the block runs. Its end waits for one more reading."""
        if self._meter is None or self.why_not:
            yield
            return
        end = threading.Event()
        reader = threading.Thread(
            target=self._read, args=(self._meter, sums, end), name="card power", daemon=True
        )
        reader.start()
        try:
            yield
        finally:
            end.set()
            reader.join(_PATIENCE_S)
            if reader.is_alive():
                self.why_not = f"its sensors gave no answer for {_PATIENCE_S:g} s"

    def _read(self, meter: CardMeter, sums: CardSums, end: threading.Event) -> None:
        is_last = False
        while True:
            try:
                reading = meter.read()
            except NoReading as e:
                self.why_not = str(e)
                break
            if self.why_not:  # it was given up while this reading was under way
                return
            sums.add(reading)
            if is_last:
                break
            is_last = end.wait(self._period_s)  # one more reading at the end, for its energy
        sums.end_stretch()


def watch_of(choice: DeviceChoice, root: Path = Path("/")) -> CardWatch:
    """A watch of the card that a device is. Its `why_not` says why there are no readings."""
    if not choice.on_gpu:
        return CardWatch(None, f"{choice.name} is no graphics card")
    try:
        return CardWatch(open_meter(choice.device.pci_address, root))
    except NoReading as e:
        return CardWatch(None, f"the power of {choice.name} cannot be read: {e}")


def use_words(use: CardUse | None) -> tuple[str, str, str]:
    """Cells of a table: mean power and its limit, clock of the cores, clock of the memory."""
    if use is None:
        return "-", "-", "-"
    limit = "" if use.limit_watts is None else f" of {use.limit_watts:.0f}"
    return f"{use.watts:.0f}{limit} W", _clock_words(use.core_hz), _clock_words(use.memory_hz)


def _clock_words(hz: float | None) -> str:
    return "-" if hz is None else f"{hz / 1e6:.0f} MHz"
