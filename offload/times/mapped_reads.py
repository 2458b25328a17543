"""Decides whether kernels read rows of prompts from pinned host memory, or copies bring them. Pure.

Pinned host memory is mapped into a device's address space, so kernels can read it over the link. A
card's one engine for copies to it is then free for experts. Cards differ in how fast their kernels
read, so both ways are measured (offload/stream/read_speed.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_high, median_low

from offload.schedule.passes import MOST_HOST_PAIRS, MOST_PAIRS

# Bytes that a prompt reads at once: the four tables of a launch, and the most results of a layer
# whose rows have 4,096 numbers.
PROMPT_BYTES = (4 * 4 * MOST_PAIRS, 4 * 4096 * MOST_HOST_PAIRS)
# A kernel's read may take this many times as long as a copy. Measured times spread by about as
# much, and rows that are copied also delay the experts behind them.
MOST_LONGER = 1.1
_MOST_BYTES_PER_S = 1e12  # no link is faster; a measurement may find no difference between sizes


@dataclass(frozen=True)
class MappedReads:
    """The times in which pinned host memory reaches a device, by its kernels and by copies.

    Either way takes a first time, and then its bytes ÷ its rate. A kernel's own time is in neither.
    """

    first_s: float  # of a kernel's first access to pinned memory
    bytes_per_s: float  # that kernels read
    beside_bytes_per_s: float  # that kernels read while copies to the device run
    copy_first_s: float  # of a copy, from the call until the stream goes on
    copy_bytes_per_s: float

    def read_s(self, n_bytes: float) -> float:
        """Return the seconds in which a kernel reads `n_bytes` while nothing is copied."""
        return self.first_s + n_bytes / self.bytes_per_s

    def beside_s(self, n_bytes: float) -> float:
        """Return the seconds in which a kernel reads `n_bytes` while copies run."""
        return self.first_s + n_bytes / self.beside_bytes_per_s

    def copy_s(self, n_bytes: float) -> float:
        """Return the seconds in which a copy brings `n_bytes` while nothing else is copied."""
        return self.copy_first_s + n_bytes / self.copy_bytes_per_s

    def pay_for(self, n_bytes: float) -> bool:
        """True if a kernel's read of `n_bytes` takes at most `MOST_LONGER` times a copy's time.

        Beside other copies, a read that gets half of the link moves as many bytes as they do. A
        copy would wait for these bytes instead.
        """
        return (
            self.read_s(n_bytes) <= MOST_LONGER * self.copy_s(n_bytes)
            and self.beside_s(n_bytes) <= MOST_LONGER * self.copy_s(2 * n_bytes)
        )  # fmt: skip

    @property
    def words(self) -> str:
        """The measured times as text."""
        return (
            f"a kernel's first read takes {1e6 * self.first_s:.1f} us and a copy "
            f"{1e6 * self.copy_first_s:.1f} us; kernels read {self.bytes_per_s / 1e9:.1f} GB/s, "
            f"{self.beside_bytes_per_s / 1e9:.1f} beside copies, and copies bring "
            f"{self.copy_bytes_per_s / 1e9:.1f}"
        )


def reads_pay(reads: MappedReads) -> bool:
    """True if kernels should read what prompts need, whatever the size of their rows.

    Times are lines over the number of bytes, so both ends stand for all sizes between them.
    """
    return all(reads.pay_for(n_bytes) for n_bytes in PROMPT_BYTES)


def usual_reads(measured: Sequence[MappedReads]) -> MappedReads:
    """Return the median of each value over one measurement or more.

    Of two values in the middle, the faster one counts, because other programs only slow a
    measurement down. Beside copies they may also hold the read up until the copies are done, which
    makes it too fast, so there the slower one counts. Fewer than half of the measurements decide
    nothing if they are disturbed.
    """
    return MappedReads(
        first_s=median_low(one.first_s for one in measured),
        bytes_per_s=median_high(one.bytes_per_s for one in measured),
        beside_bytes_per_s=median_low(one.beside_bytes_per_s for one in measured),
        copy_first_s=median_low(one.copy_first_s for one in measured),
        copy_bytes_per_s=median_high(one.copy_bytes_per_s for one in measured),
    )


@dataclass(frozen=True)
class ReadTimings:
    """Seconds until a kernel has placed rows of two sizes, by where the rows were before."""

    sizes_bytes: tuple[int, int]  # few, and many
    device_s: tuple[float, float]  # in device memory
    pinned_s: tuple[float, float]  # in pinned memory, which the kernel reads
    copied_s: tuple[float, float]  # in pinned memory, from which they are copied first
    beside_s: float  # many in pinned memory, which the kernel reads while another stream copies

    def reads(self) -> MappedReads:
        """Return what is left of these times without the kernel's own."""
        first_s, rate = self._line(self.pinned_s)
        copy_first_s, copy_rate = self._line(self.copied_s)
        beside_s = self.beside_s - self.device_s[1] - first_s
        most_bytes = self.sizes_bytes[1]
        beside = most_bytes / max(beside_s, most_bytes / _MOST_BYTES_PER_S)
        return MappedReads(first_s, rate, beside, copy_first_s, copy_rate)

    def _line(self, took_s: tuple[float, float]) -> tuple[float, float]:
        """Return the first seconds and the bytes/s of a way with these two times."""
        few, many = self.sizes_bytes
        few_s, many_s = (
            max(0.0, s - own_s) for s, own_s in zip(took_s, self.device_s, strict=True)
        )
        rate = (many - few) / max(many_s - few_s, (many - few) / _MOST_BYTES_PER_S)
        return max(0.0, few_s - few / rate), rate
