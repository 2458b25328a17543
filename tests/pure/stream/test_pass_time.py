"""A prompt's passes in virtual time: the link and the device are busy at the same time."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offload.schedule.cache import Lrfu
from offload.schedule.passes import ring_slots
from offload.schedule.schedule import Schedule
from offload.schedule.slots import Copy, CutNeed, Piece

N_LAYERS, N_EXPERTS, N_GROUP = 8, 64, 4
N_PASSES = N_EXPERTS // N_GROUP
COPY_S = 1.0  # of an expert
GUESSES = 20  # experts under way before their router has run


@dataclass(frozen=True)
class Took:
    """Virtual seconds of a prompt, and of its copies and its computation alone."""

    whole_s: float
    copies_s: float
    computing_s: float

    @property
    def ratio(self) -> float:
        return self.whole_s / max(self.copies_s, self.computing_s)


class Sides:
    """A link and a device, each of which does its work in order."""

    def __init__(self) -> None:
        self.link_s = self.device_s = self.host_s = 0.0  # until when each of them is busy
        self.n_copies = 0
        self.computing_s = 0.0
        self._arrives_s: dict[Piece, float] = {}
        self._ends_s: dict[int, float] = {}  # by number of a use

    def enqueue(self, copies: list[Copy]) -> None:
        for copy in copies:
            free_s = self._ends_s.get(copy.after, 0.0) if copy.after is not None else 0.0
            self.link_s = max(self.link_s, self.host_s, free_s) + COPY_S
            self._arrives_s[copy.piece] = self.link_s
            self.n_copies += 1

    def compute(
        self, seconds: float, waits: tuple[Piece, ...] = (), use: int | None = None
    ) -> None:
        there_s = max([self._arrives_s[piece] for piece in waits], default=0.0)
        self.device_s = max(self.device_s, self.host_s, there_s) + seconds
        self.computing_s += seconds
        if use is not None:
            self._ends_s[use] = self.device_s


def prompt(n_slots: int, ring: int, pass_s: float, attention_s: float) -> Took:
    """Compute a prompt that uses all experts of each layer, as `PassRunner.compute` does."""
    schedule = Schedule(
        {0: n_slots}, Lrfu.for_model(N_LAYERS * N_PASSES, 4, N_EXPERTS), 3, GUESSES,
        n_experts=N_EXPERTS,
    )  # fmt: skip
    sides = Sides()
    schedule.begin(N_LAYERS * N_PASSES)
    for layer in range(N_LAYERS):
        pieces = tuple((layer, expert) for expert in range(N_EXPERTS))
        schedule.predict(CutNeed(layer * N_PASSES, 0, pieces, ring=ring))
    for layer in range(N_LAYERS):
        first = layer * N_PASSES
        sides.enqueue(schedule.issue(first))
        sides.compute(attention_s)
        sides.host_s = sides.device_s  # the host reads the router's choice
        groups = [
            tuple((layer, first_expert + i) for i in range(N_GROUP))
            for first_expert in range(0, N_EXPERTS, N_GROUP)
        ]
        for cut, pieces in enumerate(groups, first):
            schedule.need(CutNeed(cut, 0, pieces, ring=ring))
        for cut in range(first, first + N_PASSES):
            issued = schedule.issue(cut)
            entered = schedule.enter(cut)
            sides.enqueue([*issued, *entered.issued])
            sides.compute(pass_s, entered.waits, entered.use)
            schedule.leave(cut)
        schedule.scanned([(layer, expert) for expert in range(N_EXPERTS)])
        sides.enqueue(schedule.issue(first + N_PASSES - 1))
    return Took(sides.device_s, sides.n_copies * COPY_S, sides.computing_s)


@pytest.mark.parametrize("n_slots", [16, 64, 256])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("attention_s", [0.0, 4.0])
def test_a_prompt_in_passes_takes_as_long_as_its_copies_or_its_computation(
    n_slots: int, share: float, attention_s: float
) -> None:
    """A pass takes `share` times as long as its copies."""
    ring = int(ring_slots(N_EXPERTS, n_slots, N_GROUP))
    took = prompt(n_slots, ring, share * N_GROUP * COPY_S, attention_s)
    assert 1.0 <= took.ratio <= 1.02
    assert took.copies_s >= (N_LAYERS * N_EXPERTS - n_slots) * COPY_S


def test_a_ring_with_room_for_one_group_copies_and_computes_by_turns() -> None:
    took = prompt(64, N_GROUP, N_GROUP * COPY_S, 0.0)
    assert took.ratio > 1.8
