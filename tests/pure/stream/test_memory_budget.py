"""The capacity for experts on a simulated machine, where other programs and prompts take memory."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from offload.store.memory_budget import MemoryBudget, MemoryLimits

MIB = 1 << 20
LIMIT_MIB, MARGIN_MIB, LAYER_MIB, ALL_MIB = 1700, 100, 340, 4200
OWN_MIB, BATCH_MIB, LARGE_BATCH_MIB = 60, 110, 400
STEP_S, WATCH_S, READ_MIB_PER_S = 0.001, 0.1, 10_000


@dataclass
class Machine:
    """A control group with this process and others. Experts are read in the background."""

    counts_unread: bool = True
    others_mib: float = 140.0
    buffers_mib: float = 0.0  # memory of this process besides experts, without OWN_MIB
    used_mib: float = 0.0  # experts that are in memory or being read
    unread_mib: float = 0.0
    peak_mib: float = 0.0
    clock_s: float = 0.0
    budget: MemoryBudget = field(init=False)

    def __post_init__(self) -> None:
        limits = MemoryLimits(
            ALL_MIB * MIB,
            free_bytes=MARGIN_MIB * MIB,
            later_bytes=lambda n: {"batches": (BATCH_MIB if n <= 512 else LARGE_BATCH_MIB) * MIB},
            available=lambda: int((LIMIT_MIB - self.kept_mib) * MIB),
            own=self.own_bytes if self.counts_unread else None,
        )
        sizes = LAYER_MIB * MIB, ALL_MIB * MIB
        self.budget = MemoryBudget(limits, 512, *sizes, now=lambda: self.clock_s)

    def own_bytes(self) -> int:
        return int((OWN_MIB + self.buffers_mib + self.in_memory_mib) * MIB)

    @property
    def in_memory_mib(self) -> float:
        return self.used_mib - self.unread_mib

    @property
    def kept_mib(self) -> float:
        return self.others_mib + OWN_MIB + self.buffers_mib + self.in_memory_mib

    def take(self, purpose: str, buffers_mib: float) -> None:
        """Let this process have this much memory besides experts, for a purpose if it grows."""
        before_mib, self.buffers_mib = OWN_MIB + self.buffers_mib, buffers_mib
        self.budget.took([purpose], int(before_mib * MIB), int((OWN_MIB + buffers_mib) * MIB))

    def look(self, *, grow: bool = False) -> None:
        unread_mib = self.unread_mib if self.counts_unread else 0.0
        if self.budget.look(int(self.used_mib * MIB), int(unread_mib * MIB), grow=grow):
            self.evict(0)

    def evict(self, needed_mib: float) -> None:
        """Let experts leave that have been read, until `needed_mib` more fit."""
        excess_mib = self.used_mib + needed_mib - self.budget.capacity_bytes / MIB
        self.used_mib -= min(max(0.0, excess_mib), self.in_memory_mib)

    def read(self, mib: float) -> None:
        """Begin to read experts, as ExpertMemory does."""
        self.evict(mib)
        if (self.used_mib + mib) * MIB > self.budget.checked_bytes:
            self.look()
            self.evict(mib)
        if (self.used_mib + mib) * MIB <= self.budget.capacity_bytes:
            self.used_mib += mib
            self.unread_mib += mib

    def advance(self, mib_per_s: float) -> None:
        self.unread_mib -= min(self.unread_mib, mib_per_s * STEP_S)
        self.peak_mib = max(self.peak_mib, self.kept_mib)


def played(machine: Machine, seed: int, mib_per_s: float, seconds: float = 8.0) -> Machine:
    """Play prompts and decodes, while others take up to a quarter of the margin between looks."""
    chance = random.Random(seed)
    is_prompt, until_s, grown_mib, tokens = True, 0.0, 0.0, 512
    for step in range(int(seconds / STEP_S)):
        now_s = step * STEP_S
        if step % round(WATCH_S / STEP_S) == 0:
            machine.look(grow=True)
            grown_mib = 0.0
        if now_s >= until_s:
            is_prompt, until_s = not is_prompt, now_s + chance.uniform(0.05, 1.0)
            if is_prompt:  # buffers appear at once, after memory was left for them
                tokens = max(tokens, chance.choice([512, 2048]))
                machine.budget.reserve(
                    "batches", (BATCH_MIB if tokens <= 512 else LARGE_BATCH_MIB) * MIB
                )
                machine.look()
                most_mib = BATCH_MIB if tokens <= 512 else LARGE_BATCH_MIB
                machine.take("batches", max(machine.buffers_mib, chance.uniform(0, most_mib)))
        if machine.unread_mib < (LAYER_MIB if is_prompt else 1):
            machine.read(LAYER_MIB / 4 if is_prompt else chance.uniform(1, 20))
        if chance.random() < 0.05 and grown_mib < MARGIN_MIB / 4 - 10:
            more_mib = chance.uniform(0, 10)
            if machine.others_mib + more_mib < 600:
                machine.others_mib += more_mib
                grown_mib += more_mib
        if chance.random() < 0.002:
            machine.others_mib = 140.0
        machine.advance(mib_per_s)
    return machine


@pytest.mark.parametrize("mib_per_s", [READ_MIB_PER_S, 1300, 200])
def test_the_limit_is_never_exceeded_however_fast_reads_are(mib_per_s: float) -> None:
    peaks = [played(Machine(), seed, mib_per_s).peak_mib for seed in range(6)]
    assert max(peaks) <= LIMIT_MIB
    assert max(peaks) > LIMIT_MIB - 3 * MARGIN_MIB, "the memory is used"


def test_the_limit_is_exceeded_if_reads_under_way_do_not_count() -> None:
    """The machine can fail: its reads take memory later than they were admitted."""
    peaks = [
        played(Machine(counts_unread=False), seed, READ_MIB_PER_S).peak_mib for seed in range(6)
    ]
    assert max(peaks) > LIMIT_MIB


def test_memory_that_will_be_needed_stays_free_until_it_is_taken() -> None:
    machine = Machine()
    room_mib = LIMIT_MIB - 140 - OWN_MIB - MARGIN_MIB
    assert machine.budget.capacity_bytes == (room_mib - BATCH_MIB) * MIB

    def settled() -> float:
        """The capacity when experts have filled it."""
        for _ in range(200):
            machine.read(4)
            machine.unread_mib = 0.0
            machine.look(grow=True)
        return machine.budget.capacity_bytes / MIB

    assert settled() == pytest.approx(room_mib - BATCH_MIB, abs=1)
    machine.budget.reserve("batches", LARGE_BATCH_MIB * MIB)
    machine.budget.reserve("prompts", 50 * MIB)
    assert settled() == pytest.approx(room_mib - LARGE_BATCH_MIB - 50, abs=1)
    machine.take("batches", LARGE_BATCH_MIB)
    assert settled() == pytest.approx(room_mib - LARGE_BATCH_MIB - 50, abs=1)
    machine.buffers_mib = LARGE_BATCH_MIB + 120  # more than was known
    assert settled() == pytest.approx(room_mib - LARGE_BATCH_MIB - 120 - 50, abs=1)
    machine.buffers_mib = 10.0  # it may be taken again
    assert settled() == pytest.approx(room_mib - LARGE_BATCH_MIB - 120 - 50, abs=1)
    machine.clock_s += 601
    assert settled() == pytest.approx(room_mib - LARGE_BATCH_MIB - 120 - 50, abs=1)
    machine.clock_s += 601
    assert settled() == pytest.approx(room_mib - LARGE_BATCH_MIB - 50, abs=1), "it was not"


def test_growth_that_nobody_planned_takes_nothing_from_what_is_left_for_a_purpose() -> None:
    """Python's heap and rows of logits grow. The batch still finds the memory left for it."""
    machine = Machine()
    machine.budget.reserve("prompts", 50 * MIB)
    machine.buffers_mib = 60.0  # the heap
    for _ in range(400):
        machine.read(4)
        machine.unread_mib = 0.0
        machine.look(grow=True)
    free_mib = LIMIT_MIB - machine.kept_mib
    assert free_mib == pytest.approx(MARGIN_MIB + BATCH_MIB + 50, abs=1)
    machine.take("batches", 60.0 + BATCH_MIB)
    machine.look()
    assert machine.budget.untaken_bytes("batches") == 0
    assert machine.budget.untaken_bytes("prompts") == 50 * MIB
    assert LIMIT_MIB - machine.kept_mib == pytest.approx(MARGIN_MIB + 50, abs=1)


def test_only_memory_above_the_highest_so_far_is_taken_for_a_purpose() -> None:
    """Buffers that come and go with each batch do not use up what is left for larger ones."""
    budget = Machine().budget
    for _ in range(10):
        budget.took(["batches"], 100 * MIB, 130 * MIB)
    assert budget.untaken_bytes("batches") == (BATCH_MIB - 30) * MIB
    budget.took(["batches", "prompts"], 100 * MIB, 900 * MIB)
    assert budget.untaken_bytes("batches") == 0 == budget.untaken_bytes("prompts")


def test_a_refusal_names_each_purpose_and_what_is_free() -> None:
    limits = MemoryLimits(
        8 << 30, free_bytes=1 << 30, later_bytes=lambda n: {"the context": n << 20, "slots": 0},
        available=lambda: 3 << 30,
    )  # fmt: skip
    assert limits.too_little(512, 2 << 30) == (
        "3.50 GiB of memory are needed (2.00 GiB for the experts of one layer, 0.50 GiB for the "
        "context, 1.00 GiB for other programs and mapped weights), but 3.00 GiB are free; free "
        "memory, raise the control group's limit, or lower --ctx-size, --ubatch-size or --parallel"
    )
    ram = MemoryLimits(1 << 30, others_bytes=1 << 29)
    assert "may take 1.00 GiB" in ram.too_little(512, 2 << 30)
    assert "2.50 GiB are needed" in ram.too_little(512, 2 << 30)


def test_the_capacity_grows_by_a_part_of_the_margin_and_falls_at_once() -> None:
    machine = Machine(others_mib=900.0)
    machine.used_mib = machine.budget.capacity_bytes / MIB
    low = machine.budget.capacity_bytes
    machine.others_mib = 140.0
    machine.look()
    assert machine.budget.capacity_bytes == low, "only the watch lets it grow"
    for n in (1, 2, 3):
        machine.look(grow=True)
        assert machine.budget.capacity_bytes == low + n * MARGIN_MIB * MIB // 4
        machine.used_mib = machine.budget.capacity_bytes / MIB
    machine.others_mib = 900.0
    machine.look(grow=True)
    assert machine.budget.capacity_bytes == low
    assert machine.used_mib == low / MIB


def test_experts_may_fill_the_capacity_only_as_far_as_others_leave_it() -> None:
    machine = Machine()
    before = machine.budget.capacity_bytes
    machine.look()
    assert machine.budget.checked_bytes == MARGIN_MIB * MIB // 4, "no further without a look"
    machine.others_mib += 500
    while machine.used_mib < before / MIB - 500:
        used_mib = machine.used_mib
        machine.read(10)
        machine.unread_mib = 0.0
        if machine.used_mib == used_mib or machine.used_mib * MIB >= machine.budget.capacity_bytes:
            break
    assert machine.budget.capacity_bytes / MIB == pytest.approx(before / MIB - 500, abs=1)
    assert machine.kept_mib <= LIMIT_MIB - MARGIN_MIB
