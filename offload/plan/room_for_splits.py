"""Room for split layers: slots that serve every batch, or resident layers. Pure.

Where layers are split, what lies in slots is computed there whatever the batch, so that a slot may
be worth more than its share of a resident layer: it holds what is used. How much more the hits say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.plan.machine import Machine, ModelWork, Sharing, best_s, expected_hits, prefill_s
from offload.plan.sharing import Workload

LEAST_SAVED = 0.05  # of the expected time: the model is no closer than that
_ALIKE = 0.1  # by so much the slots of a plan differ from start to start, as memory is free


@dataclass(frozen=True)
class MeasuredDecode:
    """Seconds of a decode of one token, as an earlier start measured it by such a sharing."""

    sharing: Sharing
    seconds: float


def measured_s(decodes: Sequence[MeasuredDecode], sharing: Sharing) -> float | None:
    """Seconds of a decode by that sharing, the last that was measured; None where none was."""
    for decode in reversed(decodes):
        of = decode.sharing
        same = (of.n_resident, of.n_dense_streamed) == (
            sharing.n_resident,
            sharing.n_dense_streamed,
        )
        if same and abs(of.n_slots - sharing.n_slots) <= _ALIKE * sharing.n_slots:
            return decode.seconds
    return None


@dataclass(frozen=True)
class SplitRoom:
    """An answer: with room for splits, or without, and why."""

    pays: bool
    saved: float  # of the expected time without, if layers are split either way
    why: str


def split_room(
    machine: Machine,
    work: ModelWork,
    workload: Workload,
    *,
    without: tuple[Sharing, int],
    with_room: tuple[Sharing, int],
    decodes: Sequence[MeasuredDecode] = (),
) -> SplitRoom:
    """Compares two plans, each a sharing and its ubatch.

    Layers may be split by either, and need not: what differs is what has a slot. Where decodes of
    both were measured these decide; else the machine model does.
    """
    assert work.hits is not None
    measured = _both_measured(decodes, without[0], with_room[0])
    before_s, after_s = (
        prefill_s(machine, work, sharing, workload.n_prompt, n_ubatch)
        + workload.n_generated / workload.n_batch * decode_s
        for (sharing, n_ubatch), decode_s in zip(
            (without, with_room),
            measured
            or [
                best_s(machine, work, sharing, workload.n_batch, hybrid=True)
                for sharing, _ in (without, with_room)
            ],
            strict=True,
        )
    )
    saved = 1.0 - after_s / before_s
    if measured is None:
        pays, asked = saved >= LEAST_SAVED, f"; at least {LEAST_SAVED:.0%} is required"
        why = f"this would save {max(0.0, saved):.0%} of the time (hits {work.hits.source})"
    else:
        pays, asked = saved > 0.0, ""
        without_ms, with_ms = (seconds * 1e3 for seconds in measured)
        why = (
            f"at earlier starts a decode took {with_ms:.1f} ms with it, {without_ms:.1f} ms without"
        )
    if not pays:
        return SplitRoom(
            False, saved, f"No layer gives up GPU memory for cached experts: {why}{asked}"
        )
    n = without[0].n_resident - with_room[0].n_resident
    room = f"{n} layers give up GPU memory for" if n > 0 else "More GPU memory goes to"
    return SplitRoom(True, saved, f"{room} cached experts: {why}")


def _both_measured(
    decodes: Sequence[MeasuredDecode], without: Sharing, with_room: Sharing
) -> tuple[float, float] | None:
    without_s, with_s = measured_s(decodes, without), measured_s(decodes, with_room)
    return None if without_s is None or with_s is None else (without_s, with_s)


def hit_words(work: ModelWork, sharing: Sharing) -> str:
    """The hits that a plan for split layers expects of decodes, and where they come from."""
    rate = expected_hits(work, sharing, work.union(1))
    if work.hits is not None:
        return f"Speed assumes {rate:.0%} of experts already on the GPU ({work.hits.source})"
    return (
        f"Speed assumes {round(rate, 2):.0%} of experts already on the GPU (estimate; a run will "
        "measure it)"
    )
