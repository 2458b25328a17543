"""Costs of split layers that were kept wrong lose little speed, because serving corrects them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import pytest

from offload.errors import DeviceFailed
from offload.schedule.division import MeasuredCosts, SideTimes, SplitCosts, expected, split_pairs
from offload.stream.split_measuring import Beside, SplitSides
from offload.times.split_corrections import (
    SplitCorrections,
    SplitTiming,
    TimedSide,
    largest_ratio,
)
from specdec.decoding.loop import StepReport
from specoffload.speculation.split_retiming import SplitRetiming

N_LAYERS, N_EXPERTS, N_USED, N_SLOTS = 8, 64, 8, 20
SIZES = (1, 8)  # tokens of decodes, by turns
N_LIKELY = 20  # experts from which the tokens of a batch choose
_SAMPLE = 40  # decodes by which a speed is found
REST_S = 0.003  # seconds of a decode besides its layers
ROWS = (1, 2, 4, 8, 16)
TRUE = MeasuredCosts(
    SideTimes({n: 250e-6 * (1 + n / 8) for n in ROWS}, 20e-6),
    SideTimes({n: 30e-6 * (1 + n / 50) for n in ROWS}, 40e-6),
    450e-6,
    1.25,
    1.1,
    (1 / 3, 1 / 3, 1 / 3),
)


@dataclass
class Machine:
    """A simulated machine with a clock. Its sides take the times of `TRUE`."""

    now_s: float = 0.0
    n_tokens: int = 1
    n_slots: int = N_SLOTS
    n_experts: int = N_EXPERTS
    can_copy: bool = True
    busy: float = 1.0  # factor on all times, if another program runs
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))

    @property
    def n_pairs(self) -> int:
        return N_USED * self.n_tokens

    def _takes(self, seconds: float) -> float:
        seconds *= self.busy * float(self.random.uniform(1.0, 1.05))
        self.now_s += seconds
        return seconds

    def device_s(self, n_experts: int) -> float:
        each_s = float(TRUE.device.array()[self.n_pairs // n_experts])
        return self._takes(TRUE.device.fixed_s + n_experts * each_s)

    def host_s(self, n_experts: int, n_rows: int) -> float:
        each_s = float(TRUE.host.array()[n_rows])
        return self._takes(TRUE.host.fixed_s + n_experts * each_s)

    def copies_s(self, n: int) -> float:
        return self._takes(n * TRUE.copy_s / TRUE.link_slowdown)

    def beside_copies(self, n: int, until_s: float, n_experts: int, n_rows: int) -> Beside:
        host_s: list[float] = []
        while not host_s or sum(host_s) + host_s[-1] <= until_s:
            host_s.append(TRUE.host_slowdown * self.host_s(n_experts, n_rows))
        busy_s = sum(host_s)
        return Beside(host_s, busy_s, max(0.0, n * TRUE.copy_s - busy_s) / TRUE.link_slowdown)

    def decode_s(self, used: SplitCosts, true: SplitCosts) -> float:
        """Seconds of a decode whose layers are divided by `used` costs."""
        seconds = REST_S
        for _ in range(N_LAYERS):
            likely = self.random.permutation(N_EXPERTS)[:N_LIKELY]
            drawn = [self.random.permutation(likely)[:N_USED] for _ in range(self.n_tokens)]
            ids = np.array(drawn, np.int32)
            resident = np.zeros(N_EXPERTS, np.bool_)
            resident[self.random.permutation(N_EXPERTS)[:N_SLOTS]] = True
            found = expected(ids, split_pairs(ids, resident, used).kind, true)
            seconds += max(found.cpu_s, found.device_s)
        return seconds


@dataclass(frozen=True)
class Served:
    """What serving with kept costs came to."""

    rates: tuple[float, ...]  # tokens per second after each number of decodes, without timings
    timed: tuple[float, ...]  # share of the time until then that timings took
    n_large: int  # number of large changes


def serve(kept: MeasuredCosts, after: Sequence[int]) -> Served:
    """Decode batches of `SIZES` by turns in virtual time, beginning with `kept` costs."""
    machine, true = Machine(), TRUE.costs()
    used, n_large = kept.costs(), 0

    def use(costs: Mapping[str, MeasuredCosts]) -> None:
        nonlocal used
        used = costs["sim"].costs()

    def large() -> None:
        nonlocal n_large
        n_large += 1

    retiming = SplitRetiming(
        {"sim": kept}, lambda: [("sim", cast(SplitSides, machine))], use, large,
        clock=lambda: machine.now_s,
    )  # fmt: skip
    rates, shares, timed_s = [], [], 0.0
    for i in range(after[-1] + 1):
        if i in after:
            other = Machine()
            took_s = 0.0
            for j in range(_SAMPLE):
                other.n_tokens = SIZES[j % 2]
                took_s += other.decode_s(used, true)
            rates.append(_SAMPLE / took_s)
            shares.append(timed_s / max(machine.now_s, 1e-9))
        machine.n_tokens = SIZES[i % 2]
        decode_s = machine.decode_s(used, true)
        machine.now_s += decode_s
        began_s = machine.now_s
        retiming.on_step(StepReport(0.0, 0.0, decodes=[(machine.n_tokens, decode_s)]))
        timed_s += machine.now_s - began_s
    return Served(tuple(rates), tuple(shares), n_large)


AFTER = (0, 100, 1000)


@functools.cache
def clean() -> Served:
    return serve(TRUE, AFTER)


def scaled(side: SideTimes, factor: float, rows: Sequence[int] | None = None) -> SideTimes:
    """The side with times of these `rows`, or all of them, multiplied by `factor`."""
    by_rows_s = {
        n: s * (factor if rows is None or n in rows else 1) for n, s in side.by_rows_s.items()
    }
    return SideTimes(by_rows_s, side.fixed_s * (factor if rows is None else 1.0))


def spoilt(what: str, factor: float) -> MeasuredCosts:
    changes: dict[str, dict[str, Any]] = {
        "host": {"host": scaled(TRUE.host, factor)},
        "device": {"device": scaled(TRUE.device, factor)},
        "copy": {"copy_s": factor * TRUE.copy_s},
        "few rows": {"host": scaled(TRUE.host, factor, (1, 2))},
        "many rows": {"host": scaled(TRUE.host, factor, (8, 16))},
        "slowdowns": {"host_slowdown": max(1.0, factor), "link_slowdown": max(1.0, factor)},
    }
    return replace(TRUE, **changes[what])


@pytest.mark.parametrize("factor", [50.0, 1 / 50])
@pytest.mark.parametrize("what", ["host", "device", "copy", "few rows", "many rows", "slowdowns"])
def test_kept_costs_that_are_wrong_lose_little_after_some_decodes(what: str, factor: float) -> None:
    found = serve(spoilt(what, factor), AFTER)
    shares = [rate / its for rate, its in zip(found.rates, clean().rates, strict=True)]
    print(f"{what} x {factor:g}: {shares} of the speed, {found.timed} for timings")
    assert shares[1] >= 0.95
    assert shares[2] >= 0.99
    assert found.timed[1] <= 0.06
    assert found.timed[2] <= 0.025


def retiming_of(
    machine: Machine, costs: MeasuredCosts = TRUE, **settings: Any
) -> tuple[SplitRetiming, list[str]]:
    """A retiming of `machine`, and a list that gets the names of its calls."""
    said: list[str] = []
    found = SplitRetiming(
        {"sim": costs}, lambda: [("sim", cast(SplitSides, machine))],
        lambda costs: said.append("costs"), lambda: said.append("large"),
        clock=lambda: machine.now_s, **settings,
    )  # fmt: skip
    return found, said


def decode(retiming: SplitRetiming, machine: Machine, n_decodes: int, seconds: float) -> float:
    """Let decodes of `seconds` be followed by timings. Return the share of the timings."""
    began_s = machine.now_s
    for _ in range(n_decodes):
        retiming.on_step(StepReport(0.0, 0.0, decodes=[(machine.n_tokens, seconds)]))
    return (machine.now_s - began_s) / (n_decodes * seconds)


def test_timings_take_a_tenth_of_the_first_share_once_all_were_repeated() -> None:
    machine = Machine()
    retiming, _ = retiming_of(machine)
    assert 0.015 <= decode(retiming, machine, 1000, 0.005) <= 0.025
    decode(retiming, machine, 1000, 0.05)
    assert not retiming.is_first
    assert 0.0 < decode(retiming, machine, 4000, 0.05) <= 0.003


def test_costs_that_were_confirmed_get_the_small_share_from_the_start() -> None:
    machine = Machine()
    retiming, _ = retiming_of(machine, is_confirmed=True)
    assert 0.0 < decode(retiming, machine, 1000, 0.05) <= 0.004


def test_clean_costs_stay_as_they_are_and_one_busy_minute_changes_nothing() -> None:
    machine = Machine()
    retiming, said = retiming_of(machine)
    decode(retiming, machine, 200, 0.05)
    machine.busy = 30.0
    while machine.now_s < 60.0 and retiming.n_timings < 40:
        decode(retiming, machine, 10, 0.05)
    machine.busy = 1.0
    decode(retiming, machine, 400, 0.05)
    assert "large" not in said
    assert largest_ratio(retiming.costs["sim"], TRUE) <= 1.2


def test_the_spread_of_repeated_timings_is_kept_with_the_costs() -> None:
    corrections = SplitCorrections(TRUE)
    first = corrections.costs_to_keep()
    assert first.host_spread == first.device_spread == first.copy_spread == 0.0
    host_s = TRUE.host.fixed_s + 2 * TRUE.host.by_rows_s[1]
    device_s = TRUE.device.fixed_s + 8 * TRUE.device.by_rows_s[1]
    for factor in (1.0, 1.2, 1.4):
        corrections.see(SplitTiming(TimedSide.HOST, 1, 2), factor * host_s)
        corrections.see(SplitTiming(TimedSide.DEVICE, 1, 8), device_s)
        corrections.see_link(factor * TRUE.copy_s / TRUE.link_slowdown, 1.2, 1.1)
    kept = corrections.costs_to_keep()
    of_four = 0.125 / 1.1  # 1, 1, 1.2 and 1.4: half of 1.25 - 1, over 1.1
    assert kept.host_spread == pytest.approx(of_four)
    assert kept.copy_spread == pytest.approx(of_four)
    assert kept.device_spread == pytest.approx(0.0)
    assert SplitCorrections(kept).costs_to_keep().host_spread == kept.host_spread


def test_a_large_correction_is_told_and_a_small_one_is_not() -> None:
    for factor, is_large in ((1.2, False), (5.0, True)):
        machine = Machine()
        retiming, said = retiming_of(machine, spoilt("host", factor))
        decode(retiming, machine, 400, 0.05)
        assert "costs" in said
        assert ("large" in said) is is_large


def test_only_the_graph_of_a_whole_decode_is_timed() -> None:
    """libllama may have freed other graphs."""
    machine = Machine(n_tokens=4)
    retiming, _ = retiming_of(machine)
    for step in (
        StepReport(0.0, 0.0, decodes=[(8, 1.0)]),
        StepReport(0.0, 0.0, decodes=[(4, 1.0), (4, 1.0)]),
        StepReport(0.0, 0.0, decodes=[(4, 1.0)], read=[cast(Any, object())]),
        StepReport(0.0, 0.0),
    ):
        retiming.on_step(step)
    assert machine.now_s == 0.0
    retiming.on_step(StepReport(0.0, 0.0, decodes=[(4, 1.0)]))
    assert machine.now_s > 0.0


def test_a_device_that_fails_is_not_timed_again(caplog: pytest.LogCaptureFixture) -> None:
    machine, n_calls = Machine(), 0

    def fail(n_experts: int) -> float:
        nonlocal n_calls
        n_calls += 1
        raise DeviceFailed("the card is gone")

    machine.device_s = fail  # type: ignore[method-assign]
    retiming, said = retiming_of(machine)
    decode(retiming, machine, 5, 0.05)
    assert (n_calls, said) == (1, [])
    assert caplog.messages == ["split layers are not timed again in this session: the card is gone"]


def test_every_timing_of_a_split_layer_comes_in_turn() -> None:
    corrections = SplitCorrections(TRUE)
    seen = []
    for _ in range(40):
        timing = corrections.next(4, 4 * N_USED, N_SLOTS)
        seen.append(timing)
        if len(seen) % 3:
            corrections.skip(timing)
        elif timing.n_rows:
            corrections.see(timing, 1e-3)
        else:
            corrections.see_link(1e-3, 1.0, 1.0)
    every = set(seen)
    counts = [seen.count(timing) for timing in every]
    assert len(every) == 13  # 2 of the device, as 1 row needs 32 slots; 10 of the CPU; the link
    assert max(counts) - min(counts) <= 1


def test_a_timing_that_was_not_possible_leaves_its_turn_to_another() -> None:
    corrections = SplitCorrections(TRUE)
    seen = []
    for _ in range(13):
        seen.append(corrections.next(4, 4 * N_USED, N_SLOTS))
        corrections.skip(seen[-1])
    assert len(set(seen)) == 13


def test_device_times_that_were_not_repeated_stay_between_those_that_were() -> None:
    corrections = SplitCorrections(replace(TRUE, device=scaled(TRUE.device, 50.0, (4, 16))))
    for n_rows in (2, 8):
        for n_experts in (2, 4):
            seconds = TRUE.device.fixed_s + n_experts * TRUE.device.by_rows_s[n_rows]
            corrections.see(SplitTiming(TimedSide.DEVICE, n_rows, n_experts), seconds)
    found = corrections.costs().device.by_rows_s
    assert found[2] <= found[4] <= found[8]
    assert found[8] <= found[16] <= 4.001 * found[8]


def test_a_copys_own_time_is_that_of_the_timings_alone() -> None:
    """The kept time does not count, and a timing that was not possible is none."""
    corrections = SplitCorrections(replace(TRUE, copy_s=5.0))
    for _ in range(5):
        corrections.skip(SplitTiming(TimedSide.LINK))
    seen = []
    for copy_s in (4e-4, 8e-3, 4e-4, 5e-4):
        corrections.see_link(copy_s, 1.2, 1.1)
        seen.append(corrections.seen_copy_s)
    assert seen == [None, None, 4e-4, 4e-4]
