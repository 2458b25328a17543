"""Decides how much device memory slots get after a warm-up. Pure.

A header tells how much memory weights and a context take. A driver, its kernels and its libraries
take more, which is known only after the first computation. If the rest of the limit has no room for
the least slots, a start plans again with what is known then. Slots exceed the limit if no plan fits
it, because a smaller model or context would take as much more.
"""

from __future__ import annotations

from dataclasses import dataclass

from offload.errors import DoesNotFit
from offload.plan.placement import LEAST_FREE_BYTES, MARGIN_BYTES, Plan
from offload.plan.weights import least_slots

_MIB = 1 << 20
_SPARE_PART = 8  # a second plan leaves an eighth more to drivers than the first one's took


@dataclass(frozen=True)
class WarmedUp:
    """The memory of a device after a warm-up, while no slots are allocated, in bytes."""

    name: str
    plan: Plan
    used_bytes: int  # what the model, its context and the warm-up took
    to_come_bytes: int  # what is allocated later: working memory of layers, and a draft model
    free_bytes: int
    asked_bytes: int | None  # --vram; None: all but a margin

    @property
    def is_reported(self) -> bool:
        """False if the driver does not report memory in use, such as software Vulkan."""
        return self.used_bytes >= self.plan.resident_bytes // 2

    @property
    def room_bytes(self) -> int:
        """The room for slots within the limit, negative if the limit is exceeded without slots."""
        if not self.is_reported:
            return self.plan.slot_bytes
        if self.asked_bytes is None:
            return self.free_bytes - MARGIN_BYTES - self.to_come_bytes
        left_bytes = min(self.asked_bytes - self.used_bytes, self.free_bytes - LEAST_FREE_BYTES)
        return left_bytes - self.to_come_bytes

    @property
    def least_bytes(self) -> int:
        """The size of the least slots with which the plan can run."""
        layout = self.plan.layout
        return layout.with_slots(least_slots(layout)).size_bytes

    @property
    def fits(self) -> bool:
        return self.room_bytes >= self.least_bytes

    @property
    def unplanned_bytes(self) -> int:
        """Bytes that were taken beyond the plan, by the driver and its kernels."""
        planned_bytes = self.plan.resident_bytes + self.plan.reserve_bytes
        return max(0, self.used_bytes + self.to_come_bytes - planned_bytes)

    @property
    def to_leave_bytes(self) -> int:
        """Bytes to leave to the driver: some more than it took, as another plan may take more."""
        return self.unplanned_bytes + self.unplanned_bytes // _SPARE_PART

    def exceeding_bytes(self) -> int:
        """Return the room for slots if no plan fits the limit.

        It is as large as planned, if the device has it. The limit is exceeded by at most
        `LEAST_FREE_BYTES`. Raises DoesNotFit if the least slots do not fit.
        """
        free_bytes = self.free_bytes - LEAST_FREE_BYTES - self.to_come_bytes
        most_bytes = min(self.room_bytes + LEAST_FREE_BYTES, free_bytes)
        if most_bytes < self.least_bytes:
            raise self._refusal(is_full=free_bytes < self.least_bytes)
        return min(self.plan.slot_bytes, most_bytes)

    def _refusal(self, *, is_full: bool) -> DoesNotFit:
        """The error with the memory that this plan needs. `is_full`: no flag can give it that."""
        spare_bytes = self.to_leave_bytes - self.unplanned_bytes
        needed_bytes = self.used_bytes + self.to_come_bytes + self.least_bytes + spare_bytes
        mib = -(-needed_bytes // _MIB)
        words = (
            f"{self.name}: at least {mib:,} MiB of GPU memory are needed, since a warm-up took "
            f"{self.unplanned_bytes / _MIB:,.1f} MiB more than the header promised"
        )
        if is_full:
            free = (self.free_bytes + self.used_bytes - LEAST_FREE_BYTES) / _MIB
            return DoesNotFit(
                f"{words}, and only {free:,.1f} MiB may be used: lower --ctx-size or "
                "--ubatch-size, or end other programs that use this GPU"
            )
        return DoesNotFit(f"{words}; pass --vram {mib}MiB", least_bytes=mib * _MIB)

    def exceeded_words(self, room_bytes: int) -> str:
        """Return a sentence for the user on slots of `room_bytes` that exceed the limit."""
        total = (self.used_bytes + self.to_come_bytes + room_bytes) / _MIB
        limit = (
            "all but 1 GiB"
            if self.asked_bytes is None
            else f"--vram {self.asked_bytes / _MIB:,.1f} MiB"
        )
        return (
            f"{self.name} uses {total:,.1f} MiB, more than {limit}: its driver and kernels took "
            f"{self.unplanned_bytes / _MIB:,.1f} MiB, and no other plan fits what they leave"
        )
