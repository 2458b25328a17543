"""Measured times of a split layer's sides equal the known times of simulated sides."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.schedule.division import MeasuredCosts
from offload.stream.split_measuring import (
    Beside,
    LinkTimes,
    SecondsByRows,
    costs_of,
    on_device,
    on_host,
    on_link,
)

THIRDS = (1 / 3, 1 / 3, 1 / 3)


@dataclass
class MadeUp:
    n_pairs: int = 32
    n_tokens: int = 8
    n_slots: int = 16
    n_experts: int = 64
    one_copy_s: float = 7.0
    host_slowdown: float = 1.0
    link_slowdown: float = 1.0
    can_copy: bool = True
    most_copies: int = 0  # largest number of copies asked for at once
    kinds: tuple[float, ...] = THIRDS

    def device_s(self, n_experts: int) -> float:
        assert n_experts <= self.n_slots
        return 5.0 + 2.0 * n_experts

    def host_s(self, n_experts: int, n_rows: int) -> float:
        assert n_experts <= self.n_experts
        return 1.0 + n_experts * (3.0 + 0.5 * n_rows)

    def copies_s(self, n: int) -> float:
        assert self.can_copy
        self.most_copies = max(n, self.most_copies)
        return n * self.one_copy_s

    def beside_copies(self, n: int, until_s: float, n_experts: int, n_rows: int) -> Beside:
        """Times of both sides together. Each slows the other down while both are busy."""
        left_s = self.copies_s(n) * self.link_slowdown
        busy_s, host_s = 0.0, []
        while not host_s or busy_s + host_s[-1] <= until_s:
            alone_s = self.host_s(n_experts, n_rows)
            slow_s = alone_s * self.host_slowdown
            host_s.append(
                slow_s if slow_s <= left_s else left_s + alone_s - left_s / self.host_slowdown
            )
            left_s = max(0.0, left_s - host_s[-1])
            busy_s += host_s[-1]
        return Beside(host_s, busy_s, left_s / self.link_slowdown)


def test_the_costs_of_known_times_are_those_times() -> None:
    device: SecondsByRows = {}
    on_device(MadeUp(n_pairs=4), device)
    on_device(MadeUp(n_pairs=8), device)
    link = LinkTimes(7.0, 1.25, 1.5)
    costs = costs_of(device, on_host(MadeUp()), link, THIRDS).costs()
    assert costs.copy_s == 7.0 * 1.5, "beside the CPU"
    assert (costs.host_slowdown, costs.link_slowdown, costs.kinds) == (1.25, 1.5, THIRDS)
    assert costs.host_s[1] == pytest.approx(3.5)
    assert costs.host_s[16] == pytest.approx(11.0)
    assert costs.host_fixed_s == pytest.approx(1.0)
    assert costs.device_s[1] == pytest.approx(2.0)
    assert costs.device_fixed_s == pytest.approx(5.0)


@given(
    st.floats(0.6, 100.0),
    st.floats(1.0, 3.0),
    st.floats(1.0, 4.0),
    st.integers(1, 64),
)
def test_known_slowdowns_are_found(
    copy_s: float, host_slowdown: float, link_slowdown: float, n_experts: int
) -> None:
    sides = MadeUp(
        n_experts=n_experts,
        one_copy_s=copy_s,
        host_slowdown=host_slowdown,
        link_slowdown=link_slowdown,
    )
    found = on_link(sides)
    assert found is not None
    assert found.copy_s == pytest.approx(copy_s)
    assert found.host_slowdown == pytest.approx(host_slowdown)
    assert found.link_slowdown == pytest.approx(link_slowdown)


def test_copies_outlast_the_cpu_but_there_is_an_end_to_them() -> None:
    slow, fast = MadeUp(one_copy_s=1.0), MadeUp(one_copy_s=1e-6, host_slowdown=3.0)
    on_link(slow)
    assert slow.most_copies == 4 * 8, "four times the 8 s of two experts"
    assert on_link(fast) == LinkTimes(1e-6), "over at once, whatever they slow"
    assert fast.most_copies <= 64


@given(st.integers(1, 16), st.integers(1, 9))
def test_no_token_of_what_is_timed_uses_an_expert_twice(n_tokens: int, n_used: int) -> None:
    device: SecondsByRows = {}
    n_pairs = n_tokens * n_used
    on_device(MadeUp(n_pairs=n_pairs, n_tokens=n_tokens, n_slots=256, n_experts=256), device)
    assert device[1][0][0] == n_pairs
    assert all(n >= n_used for points in device.values() for n, _ in points)


@dataclass
class Interrupted(MadeUp):
    """Sides of which every fourth time is 50 times as long, because another program runs.

    Each time is a warm-up and three repetitions, so one of these is long.
    """

    period: int = 4
    n_timed: int = 0

    def _seen(self, seconds: float) -> float:
        self.n_timed += 1
        return seconds * (50.0 if self.n_timed % self.period == 0 else 1.0)

    def device_s(self, n_experts: int) -> float:
        return self._seen(super().device_s(n_experts))

    def host_s(self, n_experts: int, n_rows: int) -> float:
        return self._seen(super().host_s(n_experts, n_rows))


def test_an_interruption_of_each_time_changes_no_cost() -> None:
    def costs(of: type[MadeUp]) -> MeasuredCosts:
        device: SecondsByRows = {}
        on_device(of(n_pairs=4), device)
        on_device(of(n_pairs=8), device)
        return costs_of(device, on_host(of()), LinkTimes(7.0), THIRDS)

    assert costs(Interrupted) == costs(MadeUp)


@dataclass
class BusyLink(MadeUp):
    """Sides of which every seventh copy or computation takes three times as long."""

    n_timed: int = 0

    def _seen(self, seconds: float) -> float:
        self.n_timed += 1
        return seconds * (3.0 if self.n_timed % 7 == 0 else 1.0)

    def copies_s(self, n: int) -> float:
        return self._seen(super().copies_s(n))


def test_interrupted_copies_change_no_speed_of_the_link() -> None:
    found = on_link(BusyLink(host_slowdown=1.25, link_slowdown=1.5))
    assert found == on_link(MadeUp(host_slowdown=1.25, link_slowdown=1.5))
