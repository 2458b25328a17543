"""Decides if slots for split layers take device memory from resident layers. Pure.

If layers are split, the device computes an expert in a slot in every batch. So a slot may save more
time than resident weights of the same size. Measured decodes of both plans decide. If a plan has no
measured decode, the machine model decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from offload.plan.machine import Machine, ModelWork, Sharing, best_s, expected_hits, prefill_s
from offload.plan.sharing import PlannedWork

LEAST_SAVED = 0.05  # least share of time saved; the machine model is no more accurate than that
_ALIKE = 0.1  # share by which the number of slots of one plan differs from start to start


@dataclass(frozen=True)
class MeasuredDecode:
    """The seconds of a decode of one token, measured by an earlier start with this sharing."""

    sharing: Sharing
    seconds: float


@dataclass(frozen=True)
class SplitRoom:
    """The decision whether slots take memory from resident layers, and its reason."""

    pays: bool
    saved: float  # share of time that more slots save, if layers are split with either plan
    why: str


def measured_s(decodes: Sequence[MeasuredDecode], sharing: Sharing) -> float | None:
    """Return the last measured seconds of a decode with about this sharing, or None."""
    for decode in reversed(decodes):
        its = decode.sharing
        same = replace(its, n_slots=0) == replace(sharing, n_slots=0)
        if same and abs(its.n_slots - sharing.n_slots) <= _ALIKE * sharing.n_slots:
            return decode.seconds
    return None


def split_room(
    machine: Machine,
    work: ModelWork,
    workload: PlannedWork,
    *,
    without: tuple[Sharing, int],
    with_room: tuple[Sharing, int],
    decodes: Sequence[MeasuredDecode] = (),
) -> SplitRoom:
    """Decide between two plans, `without` and `with_room` for more slots.

    Each plan is (sharing, ubatch).
    """
    assert work.hits is not None
    shares = without[0], with_room[0]
    measured = [s for s in (measured_s(decodes, sharing) for sharing in shares) if s is not None]
    is_measured = len(measured) == 2
    decodes_s = measured if is_measured else [
        best_s(machine, work, sharing, workload.n_batch, hybrid=True) for sharing in shares
    ]  # fmt: skip
    n_decodes = workload.n_generated / workload.n_batch
    before_s, after_s = (
        prefill_s(machine, work, sharing, workload.n_prompt, n_ubatch) + n_decodes * decode_s
        for (sharing, n_ubatch), decode_s in zip((without, with_room), decodes_s, strict=True)
    )
    saved = 1.0 - after_s / before_s
    if is_measured:
        pays, asked = saved > 0.0, ""
        without_ms, with_ms = (seconds * 1e3 for seconds in measured)
        why = (
            f"at earlier starts a decode took {with_ms:.1f} ms with it, {without_ms:.1f} ms without"
        )
    else:
        pays, asked = saved >= LEAST_SAVED, f"; at least {LEAST_SAVED:.0%} is required"
        why = f"this would save {max(0.0, saved):.0%} of the time (hits {work.hits.source})"
    if not pays:
        return SplitRoom(
            False, saved, f"No layer gives up GPU memory for cached experts: {why}{asked}"
        )
    n = without[0].n_resident - with_room[0].n_resident
    room = f"{n} layers give up GPU memory for" if n > 0 else "More GPU memory goes to"
    return SplitRoom(True, saved, f"{room} cached experts: {why}")


def hit_words(work: ModelWork, sharing: Sharing) -> str:
    """Return a sentence on the hits that a plan for split layers assumes, and their source."""
    rate = expected_hits(work, sharing, work.union(1))
    if work.hits is not None:
        return f"Speed assumes {rate:.0%} of experts already on the GPU ({work.hits.source})"
    return (
        f"Speed assumes {round(rate, 2):.0%} of experts already on the GPU "
        "(estimate; a run will measure it)"
    )
