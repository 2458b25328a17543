"""From how many tokens streaming pays, decided from measurements and on modelled machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.plan.min_batch import (
    NEVER,
    MinBatch,
    Regime,
    Share,
    Side,
    Times,
    by_rule,
    choose,
    dense_share,
    expert_share,
    regimes,
    rule,
    threshold,
)
from offload.plan.min_batch_search import Streaming, contradicting, next_time, search

VERIFY = Regime(1, 64)
SMALL = expert_share(8, 2)


def times_of(*rows: tuple[int, float, float]) -> Times:
    return Times({n: cpu for n, cpu, _ in rows}, {n: streamed for n, _, streamed in rows})


def of(*rows: tuple[int, float, float]) -> int:
    return threshold(times_of(*rows), Regime(1, 16), SMALL, 32)


# -- thresholds ------------------------------------------------------------------------------------


def test_the_threshold_is_where_streaming_pays_from_there_on() -> None:
    assert of((1, 1.0, 5.0), (4, 2.0, 5.0), (7, 4.0, 5.0), (8, 6.0, 5.0), (16, 12.0, 6.0)) == 8
    assert 4 < of((1, 1.0, 5.0), (4, 2.0, 5.0), (16, 12.0, 5.0)) < 16, "between what was timed"


def test_a_lucky_small_size_does_not_count() -> None:
    assert of((1, 1.0, 0.5), (4, 2.0, 5.0), (8, 6.0, 5.0), (16, 12.0, 5.0)) > 4


def test_a_tie_goes_to_the_cpu() -> None:
    assert of((1, 1.0, 1.0), (16, 2.0, 1.99)) == NEVER


def test_where_streaming_always_pays_it_begins_with_the_regime() -> None:
    assert of((1, 2.0, 1.0), (16, 9.0, 1.0)) == 1
    prefill = threshold(times_of((1, 2.0, 1.0), (64, 90.0, 2.0)), Regime(65, 512), SMALL, 32)
    assert prefill == 65


def test_without_a_measurement_ik_llamas_rule_holds() -> None:
    assert rule(256, 8) == 1024
    assert rule(160, 8) == 640
    assert rule(0, 0) == 32
    assert by_rule(256, 8) == MinBatch(1024, 32)
    assert choose({}, 4096, 256, 8) == MinBatch(NEVER, 32, 1024, 65)
    assert choose({}, 512, 256, 8) == MinBatch(NEVER, 32, NEVER, 65)
    assert choose({}, 48, 8, 2) == MinBatch(NEVER, 32)


def test_verification_and_prefill_have_thresholds_of_their_own() -> None:
    only_prefill = MinBatch(NEVER, 8, prefill_experts=300)
    assert [only_prefill.streams(n, experts=True) for n in (1, 64, 65, 299, 300, 4096)] == [
        False, False, False, False, True, True,
    ]  # fmt: skip
    assert [only_prefill.streams(n, experts=False) for n in (7, 8, 4096)] == [False, True, True]
    only_verify = MinBatch(4, 4, prefill_experts=NEVER)
    assert [only_verify.streams(n, experts=True) for n in (3, 4, 64, 65)] == [
        False, True, True, False,
    ]  # fmt: skip


def test_times_of_a_side_that_contradict_each_other_are_found() -> None:
    assert contradicting({1: 1.0, 4: 1.5, 16: 3.0, 64: 9.0}) == []
    assert contradicting({1: 1.0, 4: 15.0, 16: 3.0}) == [4], "16 tokens are faster"
    assert contradicting({1: 1.0, 4: 1.5, 16: 30.0}) == [16], "four batches of 4 are faster"
    assert contradicting({8: 1.0}) == []


def test_thresholds_are_put_into_words() -> None:
    assert MinBatch(24, 8).words() == "experts from 24 tokens on, dense from 8 tokens on"
    both = MinBatch(NEVER, 4, 300, 65).words()
    assert "experts from 300 tokens on (verification by the CPU)" in both
    assert both.endswith("dense from 4 tokens on")
    assert "dense from 4 tokens on up to 64, in prefill never" in MinBatch(1, 4, 65, NEVER).words()


# -- modelled machines -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Times of whole decodes by a model: what is read or copied, and what is computed."""

    share: Callable[[int], float]
    stream_gb: float  # of all weights that stream
    link_gb_s: float
    ram_gb_s: float
    cpu_token_s: float  # computing one more token on the CPU
    device_token_s: float = 1e-4
    base_s: float = 0.02

    def cpu_s(self, n: int) -> float:
        read_s = self.share(n) * self.stream_gb / self.ram_gb_s
        return self.base_s + max(read_s, n * self.cpu_token_s)

    def streamed_s(self, n: int) -> float:
        copy_s = self.share(n) * self.stream_gb / self.link_gb_s
        return self.base_s + max(copy_s, n * self.device_token_s)

    def pays_from(self, regime: Regime) -> int:
        found = NEVER
        for n in range(regime.last, regime.first - 1, -1):
            if self.streamed_s(n) > self.cpu_s(n):
                break
            found = n
        return found

    def searched(self, n_most: int, guess: int, budget_s: float) -> tuple[list[int], float, int]:
        """Thresholds of verification and prefill, the seconds they took, and how many decodes."""
        timed, spent_s, n_timed = Times(), 0.0, 0
        for regime in regimes(n_most):
            while asked := next_time(timed, regime, self.share, guess, budget_s - spent_s):
                n, side = asked
                assert n not in timed.of(side)
                took_s = self.cpu_s(n) if side == "cpu" else self.streamed_s(n)
                timed.of(side)[n] = took_s
                spent_s, n_timed = spent_s + took_s, n_timed + 1
        found = [threshold(timed, regime, self.share, guess) for regime in regimes(n_most)]
        return found, spent_s, n_timed


MACHINES = {
    # DeepSeek-R1 Q4: 367 GiB of experts, PCIe 4.0 x16, 12 channels of DDR5, 64 cores
    "r1": (Machine(expert_share(256, 8), 394, 25, 350, 0.03, 1e-3, 0.1), 4096, rule(256, 8)),
    "r1, slow cpu": (
        Machine(expert_share(256, 8), 394, 25, 80, 0.08, 1e-3, 0.1), 4096, rule(256, 8),
    ),
    "qwen3-30b": (Machine(expert_share(128, 8), 17, 25, 60, 0.004), 2048, rule(128, 8)),
    "gpt-oss-120b": (Machine(expert_share(128, 4), 60, 50, 80, 0.004), 2048, rule(128, 4)),
    "mixtral": (Machine(expert_share(8, 2), 24, 12, 50, 0.02), 512, rule(8, 2)),
    "dense": (Machine(dense_share, 10, 25, 50, 0.03), 512, rule(0, 0)),
    "slow link": (Machine(expert_share(128, 8), 17, 1.1, 60, 0.004), 2048, rule(128, 8)),
    "fast link": (Machine(expert_share(128, 8), 17, 200, 60, 0.004), 2048, rule(128, 8)),
}  # fmt: skip


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("budget_s", "near"), [(7.0, 0.4), (60.0, 0.2), (1e9, 0.1)])
def test_the_search_finds_a_modelled_machines_crossover(
    name: str, budget_s: float, near: float
) -> None:
    """With 7 s one decode of what streams is too long for R1: both sides are extended."""
    machine, n_most, guess = MACHINES[name]
    found, spent_s, n_timed = machine.searched(n_most, guess, budget_s)
    assert n_timed <= 32
    # The first size is timed whatever it takes.
    assert spent_s <= budget_s + machine.cpu_s(1) + machine.streamed_s(1)
    for regime, first in zip(regimes(n_most), found, strict=True):
        true = machine.pays_from(regime)
        assert (first == NEVER) == (true == NEVER), f"{regime}: {first}, modelled {true}"
        if true != NEVER:
            assert first == pytest.approx(true, rel=near, abs=1.0)


@dataclass(frozen=True)
class Modelled(Streaming):
    machine: Machine = MACHINES["mixtral"][0]

    def share(self, kind: str) -> Share:
        return self.machine.share


def chosen_s(machine: Machine, found: MinBatch, n: int) -> float:
    """Seconds of a batch of n tokens in the way that was chosen for it."""
    return machine.streamed_s(n) if found.streams(n, experts=True) else machine.cpu_s(n)


@given(
    name=st.sampled_from([name for name, (_, n_most, _) in MACHINES.items() if n_most >= 64]),
    disturbed=st.sets(st.integers(0, 24), max_size=2),
)
@settings(deadline=None, max_examples=80)
def test_the_chosen_ways_never_make_a_larger_batch_faster_than_a_smaller_one(
    name: str, disturbed: set[int]
) -> None:
    """A way open to n + 1 tokens is open to n. Of all decodes some take ten times their time."""
    machine, n_most, guess = MACHINES[name]
    timed: list[tuple[Side, int]] = []

    def decode_s(kind: str, side: Side, n: int, n_layers: int) -> float:
        timed.append((side, n))
        disturbs = len(timed) - 1 in disturbed and (side, n) not in timed[:-1]
        return (machine.cpu_s(n) if side == "cpu" else machine.streamed_s(n)) * (
            10.0 if disturbs else 1.0
        )

    streaming = Modelled(("experts",), n_most, 1, min_batch=guess, machine=machine)
    times = search(streaming, decode_s, lambda: 0.0, 1e9)["experts"]
    first, *more = [threshold(times, r, machine.share, guess) for r in regimes(n_most)]
    found = MinBatch(first, first, *more)
    for n in range(1, 64):  # verification: prefill has a threshold of its own
        assert chosen_s(machine, found, n) <= 1.15 * chosen_s(machine, found, n + 1)


def test_batches_that_slots_decline_leave_the_smaller_ones_with_the_cpu() -> None:
    """Measured: 1 to 3 tokens streamed in 12, 23, 25 ms; those of 4 had too few slots, so that the
    CPU computed them, in 7.4 ms."""
    cpu_s = {n: 0.002 + 0.00135 * n for n in (1, 2, 3, 4, 8, 64)}
    streamed_s = {**cpu_s, 1: 0.012, 2: 0.023, 3: 0.025}
    found = choose({"experts": Times(cpu_s, streamed_s)}, 64, 8, 2)
    assert not any(found.streams(n, experts=True) for n in range(1, 65))


@given(
    n_experts=st.integers(2, 512),
    used=st.floats(0.005, 1.0),
    link=st.floats(0.5, 500.0),
    ram=st.floats(5.0, 1000.0),
    token_s=st.floats(Machine.device_token_s, 0.1),
    n_most=st.sampled_from([32, 64, 512, 4096]),
    budget_s=st.sampled_from([0.1, 5.0, 1e9]),
)
@settings(deadline=None, max_examples=150)
def test_the_search_ends_on_any_machine(
    n_experts: int,
    used: float,
    link: float,
    ram: float,
    token_s: float,
    n_most: int,
    budget_s: float,
) -> None:
    """The CPU computes no faster than the device. Otherwise streaming could pay for medium batches
    and not for large ones, which no threshold can express."""
    n_used = max(1, int(used * n_experts))
    share = expert_share(n_experts, n_used)
    machine = Machine(share, 20.0, link, ram, token_s)
    found, _, n_timed = machine.searched(n_most, rule(n_experts, n_used), budget_s)
    assert 2 <= n_timed <= 33
    for regime, first in zip(regimes(n_most), found, strict=True):
        assert first == NEVER or regime.first <= first <= regime.last
        for n in regime.sizes() if budget_s == 1e9 else ():
            both = machine.cpu_s(n), machine.streamed_s(n)
            assert both[n >= first] <= 1.3 * min(both), f"{n} tokens, from {first}"
