"""Slots of the size that the device has left, once everything else has its memory.

What a context takes is known from the header within a few per cent, but what a driver and its
kernels take besides is not. So one ubatch is computed with few slots and nothing copied, what is
free then is read, and the slots get that.
"""

from __future__ import annotations

from collections.abc import Callable

from offload.errors import DoesNotFit
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES, Plan
from offload.plan.sharing import ring_slots

_FEWER = 0.9  # of the bytes that were refused


def for_warm_up(plan: Plan) -> Plan:
    """The plan with the slots that a ubatch needs at once, and no more."""
    pools = plan.layout.pools
    counts = [min(p.n_slots, ring_slots(p)) if p.n_experts else p.n_slots for p in pools]
    return plan.with_slots(counts)


def room_left(
    plan: Plan, *, free_before: int, free_now: int, device_bytes: int | None, others_bytes: int
) -> int:
    """Bytes for slots, now that everything else has its memory but `others_bytes`.

    `device_bytes` is the most that may be used, less where `LEAST_FREE_BYTES` would not stay free;
    None: all but a margin. Where the driver does not tell what is in use, the plan's own estimate
    stands.
    """
    used = free_before - free_now
    if used < plan.resident_bytes // 2:
        return plan.slot_bytes
    if device_bytes is None:
        return free_now - MARGIN_BYTES - others_bytes
    return min(device_bytes - used, free_now - LEAST_FREE_BYTES) - others_bytes


def fitted(plan: Plan, room_bytes: int, use: Callable[[Plan], None]) -> Plan:
    """The plan with slots for `room_bytes`, as `use` took it; fewer where the device refuses.

    Raises DoesNotFit where not even the least can be had.
    """
    while True:
        sized = plan.with_room(room_bytes)
        try:
            use(sized)
        except DoesNotFit as refused:
            room_bytes = int(sized.slot_bytes * _FEWER)
            try:
                plan.with_room(room_bytes)
            except DoesNotFit:
                raise refused from None
        else:
            return sized
