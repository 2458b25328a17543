"""Carry out a thread plan: bind thread ids to processors, read back, report. Holds no policy.

`sched_setaffinity` of a thread id needs no privilege for threads of this process. The kernel
silently intersects the mask with the cpuset and resets it when the cpuset changes, so every binding
is read back, and `check_team` can be called again while running.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from numa.errors import PlacementRefused
from numa.pinning import Team
from numa.sysfs import read
from numa.topology import format_list

_TASKS = "proc/self/task"
# In /proc/.../stat, counted behind the parenthesised name: field 22 of proc(5).
_START_TIME_FIELD = 19


@dataclass(frozen=True)
class BoundThread:
    """`actual` is what the kernel answers after binding."""

    tid: int
    wanted: tuple[int, ...]
    actual: tuple[int, ...]

    @property
    def is_right(self) -> bool:
        return self.actual == self.wanted


@dataclass(frozen=True)
class BindReport:
    """A team's binding as it came out; `notes` has a sentence for each thing that did not come."""

    team: str
    threads: tuple[BoundThread, ...]
    notes: tuple[str, ...] = ()

    @property
    def is_right(self) -> bool:
        return not self.notes and all(t.is_right for t in self.threads)


def thread_ids() -> tuple[int, ...]:
    """Every thread of this process, oldest first (start time, then id)."""
    root = Path("/")
    tids = [int(p.name) for p in (root / _TASKS).iterdir()]
    return tuple(sorted(tids, key=lambda tid: (_start_time(root, tid), tid)))


def new_thread_ids(before: Sequence[int]) -> tuple[int, ...]:
    """Threads started since `before = thread_ids()`, oldest first.

    libgomp and ggml's own pool start their workers in index order, and the calling thread is
    worker 0. So the team is `(calling thread, *new_thread_ids(before))`, when nothing else started
    threads in between.
    """
    return tuple(tid for tid in thread_ids() if tid not in set(before))


def bind_team(team: Team, tids: Sequence[int]) -> BindReport:
    """Bind thread `tids[i]` to processor `team.cpus[i]` and verify.

    A refused or changed binding is a note, never silent; threads beyond the team stay as they are.
    ggml resets the calling thread to all processors after each graph where it knows several nodes
    (ggml-cpu.c:clear_numa_thread_affinity), so bind worker 0 again before each, or use the mask.
    """
    notes: list[str] = []
    if len(tids) != team.n_threads:
        n_bound = min(len(tids), team.n_threads)
        notes.append(
            f"{team.name}: the plan has {team.n_threads} threads and {len(tids)} were found;"
            f" the first {n_bound} were bound"
        )
    for tid, cpu in zip(tids, team.cpus, strict=False):
        refusal = _bind(tid, (cpu,))
        if refusal:
            notes.append(f"{team.name}: {refusal}")
    report = check_team(team, tids)
    return BindReport(team.name, report.threads, (*notes, *report.notes))


def check_team(team: Team, tids: Sequence[int]) -> BindReport:
    """Read every thread's affinity back. Changes nothing."""
    threads: list[BoundThread] = []
    notes: list[str] = []
    for tid, cpu in zip(tids, team.cpus, strict=False):
        bound = BoundThread(tid, (cpu,), _affinity(tid))
        threads.append(bound)
        if bound.actual and not bound.is_right:
            notes.append(
                f"{team.name}: thread {tid} should run on processor {cpu} but may run on"
                f" {format_list(bound.actual)}; it was left there (did the cpuset change?)"
            )
        elif not bound.actual:
            notes.append(f"{team.name}: thread {tid} has ended; processor {cpu} was left free")
    return BindReport(team.name, tuple(threads), tuple(notes))


@contextmanager
def pinned(cpus: Sequence[int]) -> Iterator[None]:
    """Run the calling thread on `cpus`, then where it ran before. Raises PlacementRefused."""
    before = os.sched_getaffinity(0)
    refusal = _bind(0, tuple(cpus))
    if refusal:
        raise PlacementRefused(refusal)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _bind(tid: int, cpus: tuple[int, ...]) -> str | None:
    try:
        os.sched_setaffinity(tid, cpus)
    except OSError as error:
        return (
            f"the kernel refused processor {format_list(cpus)} ({error.strerror});"
            " the thread runs where it ran before"
        )
    return None


def _affinity(tid: int) -> tuple[int, ...]:
    try:
        return tuple(sorted(os.sched_getaffinity(tid)))
    except ProcessLookupError:
        return ()


def _start_time(root: Path, tid: int) -> int:
    # The name may hold blanks and brackets: fields are counted behind its last bracket.
    stat = read(root, f"{_TASKS}/{tid}/stat") or ""
    fields = stat.rpartition(")")[2].split()
    return int(fields[_START_TIME_FIELD]) if len(fields) > _START_TIME_FIELD else 0
