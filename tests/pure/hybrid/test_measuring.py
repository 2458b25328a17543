"""Times of a split layer's sides, on made-up ones whose times are known."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from offload.hybrid.measuring import Measured, costs_of, on_device, on_host


@dataclass
class MadeUp:
    n_pairs: int = 32
    n_slots: int = 16
    n_experts: int = 64

    def device_s(self, n_experts: int) -> float:
        assert n_experts <= self.n_slots
        return 5.0 + 2.0 * n_experts

    def host_s(self, n_experts: int, n_rows: int) -> float:
        assert n_experts <= self.n_experts
        return 1.0 + n_experts * (3.0 + 0.5 * n_rows)

    def copy_s(self) -> float | None:
        return 7.0


def test_the_costs_of_known_times_are_those_times() -> None:
    device: Measured = {}
    on_device(MadeUp(n_pairs=4), device)
    on_device(MadeUp(n_pairs=8), device)
    costs = costs_of(device, on_host(MadeUp()), [7.0]).costs()
    assert costs.copy_s == 7.0
    assert costs.host_s[1] == pytest.approx(3.5)
    assert costs.host_s[16] == pytest.approx(11.0)
    assert costs.host_fixed_s == pytest.approx(1.0)
    assert costs.device_s[1] == pytest.approx(2.0)
    assert costs.device_fixed_s == pytest.approx(5.0)


def test_the_device_is_asked_for_no_more_experts_than_have_slots() -> None:
    device: Measured = {}
    on_device(MadeUp(n_pairs=64, n_slots=4, n_experts=2), device)
    assert {n for points in device.values() for n, _ in points} <= {1, 2}


def test_a_model_of_one_expert_has_times_too() -> None:
    assert all(n == 1 for points in on_host(MadeUp(n_experts=1)).values() for n, _ in points)


def test_without_a_copy_there_are_no_costs() -> None:
    device: Measured = {}
    on_device(MadeUp(), device)
    with pytest.raises(ValueError, match="no copy"):
        costs_of(device, on_host(MadeUp()), [])
