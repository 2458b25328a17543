"""Keeps a machine's measurements for all models: NUMA, disks, links, reads and layouts.

They are measured once and kept in `machine.json` (`specoffload.kept`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, Self, TypeVar

from numa.topology import Topology
from numa.tune import TuneResult
from offload.device import DeviceChoice
from offload.errors import BadModel
from offload.ggml.layout_speed import layout_times
from offload.ggml.native_build import library_build
from offload.notes import Note, NoteKind
from offload.plan.repacking import LayoutTimes, WeightKind
from offload.store.disk_speed import DEPTHS, disk_of, disk_speed, seen_rate
from offload.store.reading import ReadCounters
from offload.stream.link_speed import link_speeds
from offload.stream.read_speed import measure_reads
from offload.times.mapped_reads import MappedReads, usual_reads
from specdec.whole_file import is_folder
from specoffload.cpu_load import Watch
from specoffload.kept import Kept, KeptFile, today
from specoffload.kept_bounds import (
    disk_reason,
    is_old,
    layouts_reason,
    links_reason,
    reads_reason,
)
from specoffload.kept_values import KeptDisk, KeptLayouts, KeptLinks, KeptReads

log = logging.getLogger("specoffload.kept")

TUNE = "`specoffload tune numa`"

# -- threads and placement ------------------------------------------------------------------------


@dataclass(frozen=True)
class Tuned:
    """The NUMA choice measured on this machine, or None and the reason, which may be empty."""

    result: TuneResult | None = None
    reason: str = ""


def load_tuned(folder: Path, topology: Topology) -> Tuned:
    """The kept NUMA choice, if it was measured on this machine in its present form."""
    kept, reason = KeptFile(folder).load()
    if kept.numa is None:
        return Tuned(None, reason and f"{reason}; run {TUNE} again")
    if not kept.numa.is_for(topology):
        return Tuned(
            None,
            f"the tuned NUMA choice is for {kept.numa.machine}, which this machine no longer is:"
            f" not used, run {TUNE} again",
        )
    return Tuned(kept.numa)


def save_tuned(folder: Path, result: TuneResult) -> str:
    """Keep the choice for later starts. Returns a sentence if it cannot be written, else ""."""
    return KeptFile(folder).update(lambda kept: setattr(kept, "numa", result))


def tuned_sentence(result: TuneResult) -> str:
    """The start-up line of a tuned NUMA choice, with the times of its decodes."""
    trial = next(t for t in result.trials if t.candidate == result.best)
    times = ", ".join(f"T({n}) {s * 1e3:.1f} ms" for n, s in sorted(trial.seconds.items()))
    return f"measured by {TUNE}: {times}"


# -- measurements of several starts ---------------------------------------------------------------


class _Remeasured(Protocol):
    """Measurements that starts repeat until they are settled."""

    date: str  # day of the first measurement

    def is_due(self, day: str) -> bool: ...

    def with_measured(self, measured: Any, *, is_doubted: bool, day: str) -> Self: ...


_T = TypeVar("_T", bound=_Remeasured)


@dataclass(frozen=True)
class _KeptKind(Generic[_T]):
    """A kind of measurement of the machine, and its key in the kept file."""

    of: Callable[[Kept], dict[str, _T]]
    key: str
    empty: Callable[[], _T]
    reason_of: Callable[[_T], str]  # a clause on values that are missing or out of bounds, or ""

    def young(self, file: Kept) -> _T:
        """Return the kept measurements. Return none if nothing is kept, or if they are old."""
        kept = self.of(file).get(self.key)
        return self.empty() if kept is None or is_old(kept.date, today()) else kept

    def added(self, kept: _T, measured: Any, *, is_doubted: bool) -> _T:
        """Return `kept` with another measurement.

        If this is out of bounds, and `kept` has others, it is counted as tried, and has no value.
        """
        more = kept.with_measured(measured, is_doubted=is_doubted, day=today())
        reason = self.reason_of(more)
        if reason and not self.reason_of(kept):
            log.info("a measurement is not kept: %s", reason)
            more = kept.with_measured(measured, is_doubted=True, day=today())
            return kept if self.reason_of(more) else more
        return more


def _measured_again(
    kind: _KeptKind[_T], folder: Path | None, measure: Callable[[], Any],
    *, finish: Callable[[_T], object] = lambda _: None, uses_kernel: bool = False,
) -> _T:  # fmt: skip
    """Return what `folder` keeps of a kind, with another measurement if one is due.

    `measure` returns None if there is nothing to measure. `finish` completes what is kept.

    A measurement is doubted if other programs took much of the CPUs meanwhile. That is not asked
    with `uses_kernel`, when it keeps threads of the kernel busy, which count as other programs.
    """
    kept = kind.empty() if folder is None else kind.young(KeptFile(folder).load()[0])
    if not kept.is_due(today()):
        return kept
    watch = Watch()
    measured = measure()
    if measured is None:
        return kept
    is_doubted = not uses_kernel and watch.others().is_busy

    def added(to: _T) -> _T:
        more = kind.added(to, measured, is_doubted=is_doubted)
        finish(more)
        return more

    def change(file: Kept) -> None:  # other processes may have kept theirs while this one measured
        kind.of(file)[kind.key] = added(kind.young(file))

    if folder is not None:
        KeptFile(folder).update(change)
    return added(kept)


# -- disks ----------------------------------------------------------------------------------------


def load_disk(folder: Path, model: Path) -> KeptDisk | None:
    """The kept speed of the disk with the model, or None."""
    with suppress(OSError):
        return KeptFile(folder).load()[0].disks.get(disk_of(model).name)
    return None


def measure_disk(folder: Path | None, model: Path) -> list[str]:
    """Lines on the disk with the model, whose speed is kept in `folder` until it is old.

    Each start measures once more until the measurements agree, or five starts made some.
    """
    disk = disk_of(model)

    def complain(kept: KeptDisk) -> None:
        kept.complaints = disk.reasons(kept.bytes_per_s)

    try:
        kept = _measured_again(
            _KeptKind(
                lambda file: file.disks,
                disk.name,
                lambda: KeptDisk({}, today()),
                lambda one: disk_reason(one.rates.values()),
            ),
            folder,
            lambda: {depth: disk_speed(model, depth) for depth in DEPTHS},
            finish=complain,
            uses_kernel=disk.is_encrypted,
        )
    except BadModel as e:
        return [f"the disk is not measured: {e}"]
    return disk_lines(disk.name, kept)


def keep_seen_disk(folder: Path, model: Path, counters: ReadCounters) -> None:
    """Keep what serving saw of the disk with the model beside its kept speed.

    If sessions contradict it, the next start measures once more.
    Nothing is added if serving saw no speed (`seen_rate`), or one that no disk has.
    """
    seen = seen_rate(counters)
    if seen is None:
        return
    depth, rate = seen
    name = disk_of(model).name

    def change(file: Kept) -> None:
        disk = file.disks.get(name)
        if disk is not None:
            more = disk.with_seen(depth, rate)
            if not disk_reason(more.rates.values()):
                file.disks[name] = more

    KeptFile(folder).update(change)


def lines_of_disks(
    disks: Mapping[str, KeptDisk], models: Path, root: Path = Path("/")
) -> list[str]:
    """Lines on measured disks, and on what slows the disk of folder `models` if not measured."""
    lines = [line for name in sorted(disks) for line in disk_lines(name, disks[name])]
    there = next((folder for folder in (models, *models.parents) if is_folder(folder)), None)
    disk = None if there is None else disk_of(there, root)
    if disk is not None and disk.name not in disks:
        lines += [Note(NoteKind.DISK, words) for words in disk.reasons()]
    return lines


def disk_lines(name: str, kept: KeptDisk) -> list[str]:
    """Lines on the speed of a disk, and on what makes it slow."""
    rates = ", ".join(
        f"{rate.value / 1e9:.1f} with {depth}" for depth, rate in sorted(kept.rates.items())
    )
    line = (
        f"disk {name}: GB/s by number of reads at once: {rates} (measured on {kept.date}); models "
        "are only read, so they do not wear it out"
    )
    return [Note(NoteKind.DISK, words) for words in (line, *kept.complaints)]


# -- links ----------------------------------------------------------------------------------------


def links_of(choices: Sequence[DeviceChoice], folder: Path | None, *, keep: bool) -> KeptLinks:
    """Return the speeds of these devices' links as kept in `folder`, or measure them.

    With `keep`, a new measurement is kept in `folder`. Speeds are then measured once more until
    measurements agree or five starts made some, and those that are old are measured again. Raises
    DoesNotFit or DeviceFailed.
    """
    kept = kept_links(choices, folder)
    if kept is not None and not keep:
        return kept
    return _measured_again(
        _KeptKind(
            lambda file: file.links,
            link_key(choices),
            lambda: KeptLinks.of(len(choices), today()),
            lambda one: links_reason([*one.alone, *one.together]),
        ),
        folder if keep else None,
        lambda: link_speeds(choices),
    )


def keep_seen_links(
    folder: Path, choices: Sequence[DeviceChoice], rates: Mapping[str, float]
) -> None:
    """Keep the bytes/s that serving saw of links alone, by the name of the device.

    They stand beside the measured ones, and make the next start measure if they contradict them.
    Nothing is added to links that no start measured, nor a rate that no link has.
    """

    def change(file: Kept) -> None:
        links = file.links.get(link_key(choices))
        if links is None:
            return
        for at, choice in enumerate(choices):
            if choice.name in rates:
                more = links.alone[at].with_seen(rates[choice.name])
                if not links_reason([more]):
                    links.alone[at] = more

    if rates:
        KeptFile(folder).update(change)


def kept_links(choices: Sequence[DeviceChoice], folder: Path | None) -> KeptLinks | None:
    """Return the speeds of these devices' links as kept in `folder`, or None if none are kept."""
    return None if folder is None else KeptFile(folder).load()[0].links.get(link_key(choices))


def link_key(choices: Sequence[DeviceChoice]) -> str:
    """Return the name of these devices among the kept links."""
    return ", ".join(f"{c.name}: {c.description}{c.sim or ''}" for c in choices)


def link_lines(choices: Sequence[DeviceChoice], links: KeptLinks) -> list[str]:
    """Return a line for each device with the speed of its link."""
    others = " while the others copy, too" if len(choices) > 2 else " while the other copies, too"
    lines = []
    for choice, alone, together in zip(choices, links.alone, links.together, strict=True):
        line = f"link to {choice.name}: {alone.value / 1e9:.1f} GB/s from RAM"
        if len(choices) > 1:
            line += f", {together.value / 1e9:.1f} GB/s{others}"
        lines.append(f"{line} (measured on {links.date})")
    return lines


# -- reads of pinned memory ------------------------------------------------------------------------


def reads_of(folder: Path | None, choice: DeviceChoice) -> MappedReads:
    """Return how fast a device's kernels read pinned memory: medians over several starts.

    Each of the first starts measures once more, and all measurements are replaced when they are
    old. One that is out of bounds leaves the kept ones as they are, and does not count beside them.
    None: nothing is kept. Raises DoesNotFit or DeviceFailed.
    """
    kept = _measured_again(
        _KeptKind(
            lambda file: file.reads,
            choice.words,
            lambda: KeptReads([], today()),
            lambda one: reads_reason(one.measured),
        ),
        folder,
        lambda: measure_reads(choice),
    )
    return usual_reads(kept.measured)


# -- layouts of weights on the CPU --------------------------------------------------------------


def layouts_of(folder: Path, kind: WeightKind) -> LayoutTimes | None:
    """Return the times of a kind's layouts as kept in `folder`, or measure and keep them.

    Each of the first three starts measures once more, and all are measured again when they are old.
    Returns None if ggml cannot repack the kind. Raises DoesNotFit or DeviceFailed.
    """
    kept = _measured_again(
        _KeptKind(
            lambda file: file.layouts,
            f"{kind.words}, {library_build()}",
            lambda: KeptLayouts.of(today()),
            lambda one: layouts_reason(one.each.values()),
        ),
        folder,
        partial(layout_times, kind),
    )
    return kept.times if any(one.values for one in kept.each.values()) else None
