"""Measuring T(n): on text that moves on, on busy machines, on slow ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lab.simulation.fake import FakeTarget
from lab.simulation.simulate import simulate, synthetic_trace
from specdec.costs.estimate import TOLERANCE, Wanted, estimate, next_size, relative_error
from specdec.costs.measure import MeasureOptions, TextWalk, measure
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import load, published_curves, save
from specdec.costs.refresh import RefreshedCosts
from specdec.policies.throughput import Throughput
from specoffload.speculation.profiling import quick_plan

CURVES = published_curves()
ONE_S = 0.15  # T(1) of the machines that the curves were published from
KINDS = {
    "code": ("code",),
    "prose": ("prose",),
    "noise": ("noise",),
    "switching": ("code", "prose"),
}


class Timed(FakeTarget):
    """A target whose clock a decode of these tokens moves by `seconds(tokens)`."""

    def __init__(self, seconds: Callable[[Sequence[int]], float], n_ctx: int = 4096) -> None:
        super().__init__(n_ctx=n_ctx)
        self.now = 0.0
        self._seconds = seconds
        self._held = 0

    def clock(self) -> float:
        return self.now

    def length(self, sequence: int) -> int:
        return self._held

    def extend(
        self, sequence: int, tokens: Sequence[int], n_logits: int | None = None
    ) -> NDArray[np.float32]:
        assert self._held + len(tokens) <= self.n_ctx
        self._held += len(tokens)
        self.now += self._seconds(tokens)
        return np.empty((0, self.n_vocab), np.float32)

    def rewind(self, sequence: int, length: int) -> None:
        assert 0 <= length <= self._held
        self._held = length


# -- what is timed next, and what is made of the times ---------------------------------------------


def test_every_size_is_timed_once_before_any_is_timed_again() -> None:
    wanted = Wanted((1, 8, 2), n_least=1, n_most=3)
    samples: dict[int, list[float]] = {}
    order = []
    while (n := next_size(samples, wanted, 0.0)) is not None:
        order.append(n)
        # Size 8 never agrees, the others do.
        samples.setdefault(n, []).append(1.0 + (0.1 * len(order) if n == 8 else 0))
    assert order == [1, 8, 2, 1, 8, 2, 8]


def test_what_would_not_fit_the_time_is_left_out() -> None:
    wanted = Wanted((1, 64, 2), n_most=1, budget_s=4.0)
    assert next_size({}, wanted, 100.0) == 1  # without T(1) nothing is known
    assert next_size({1: [1.0]}, wanted, 1.0) == 2
    assert next_size({1: [0.01]}, wanted, 1.0) == 64
    assert next_size({1: [1.0], 2: [1.5]}, wanted, 3.5) is None


@given(
    times=st.lists(st.floats(1e-4, 10.0), min_size=8, max_size=8),
    sizes=st.sets(st.integers(2, 63), max_size=6),
)
@settings(deadline=None)
def test_times_that_agree_are_kept_and_the_rest_lies_between_them(
    times: list[float], sizes: set[int]
) -> None:
    measured = dict(zip(sorted({1, 64, *sizes}), times, strict=False))
    found = estimate({n: [t, t, t] for n, t in measured.items()}, 64)
    for n, t in measured.items():
        assert found.step_s[n - 1] == pytest.approx(t)
    assert min(measured.values()) <= min(found.step_s) * (1 + 1e-9)
    assert max(found.step_s) <= max(measured.values()) * (1 + 1e-9)
    assert set(found.uncertain) == set(range(1, 65)) - set(measured)


def test_beyond_the_last_measured_size_costs_go_on_and_never_fall() -> None:
    rising = estimate({1: [1.0, 1.0], 9: [1.8, 1.8]}, 64)
    assert rising.step_s[63] == pytest.approx(1.8 + 55 * 0.1)
    falling = estimate({1: [1.0, 1.0], 2: [1.5, 1.5], 3: [0.9, 0.9]}, 64)
    assert falling.step_s[63] == pytest.approx(0.9)
    steep = estimate({1: [1.0, 1.0], 2: [9.0, 9.0]}, 4)
    assert steep.step_s[3] == pytest.approx(11.0), "a token in a batch costs no more than alone"
    assert estimate({1: [0.5]}, 4).step_s == pytest.approx((0.5, 1.0, 1.5, 2.0))


def test_a_size_whose_repetitions_disagree_is_drawn_to_its_neighbours_and_marked() -> None:
    smooth = {n: [1.0 + 0.1 * n] * 4 for n in range(1, 9)}
    disturbed = {**smooth, 5: [1.5, 6.0, 1.6, 9.0, 7.0, 8.0]}
    found = estimate(disturbed, 8)
    assert found.uncertain == (5,)
    assert found.step_s[4] == pytest.approx(1.5, rel=0.2)
    jump = {**smooth, 5: [3.0, 3.0]}  # what agrees is a jump of the kernels
    assert estimate(jump, 8).step_s[4] == 3.0


@pytest.mark.parametrize("seed", range(5))
def test_a_busy_machine_gives_the_profile_of_an_idle_one(seed: int) -> None:
    """A quarter of all decodes takes 1.5 to 5 times as long as it should."""
    rng = np.random.default_rng(seed)

    def seconds(tokens: Sequence[int]) -> float:
        disturbed = rng.random() < 0.25
        return (0.001 + 0.0002 * len(tokens)) * (rng.uniform(1.5, 5.0) if disturbed else 1.0)

    target = Timed(seconds)
    options = MeasureOptions(32, 4, (16,), n_most=12)
    found = measure(target, [1] * 600, options, clock=target.clock)
    true = [0.001 + 0.0002 * n for n in range(1, 33)]
    errors = [abs(a / b - 1) for a, b in zip(found.step_s, true, strict=True)]
    firm = [e for n, e in enumerate(errors, 1) if n not in found.uncertain]
    assert len(firm) >= 16
    assert sum(e > TOLERANCE for e in firm) <= 2
    assert sum(e > 0.25 for e in errors) <= 1


def test_repetitions_that_agree_end_early() -> None:
    target = Timed(lambda tokens: 0.1)
    options = MeasureOptions(4, 2, (0,), n_most=50)
    measure(target, [1] * 100, options, clock=target.clock)
    assert relative_error([0.1, 0.1]) == 0.0
    assert target.now == pytest.approx(0.1 * (2 + 4 + 8))  # T(1), the warm-up, and twice each


# -- text that moves on ----------------------------------------------------------------------------


class Cached(Timed):
    """Experts in an LRU cache of 30 %: a token needs 4 of 64, and those not there are copied."""

    def __init__(self) -> None:
        super().__init__(self._decode_s)
        rng = np.random.default_rng(1)
        self._experts = [rng.choice(64, 4, replace=False).tolist() for _ in range(500)]
        self._cache: OrderedDict[int, None] = OrderedDict()

    def _decode_s(self, tokens: Sequence[int]) -> float:
        needed = dict.fromkeys(e for t in tokens for e in self._experts[t])
        missing = [e for e in needed if e not in self._cache]
        for expert in needed:
            self._cache[expert] = None
            self._cache.move_to_end(expert)
        while len(self._cache) > 19:
            self._cache.popitem(last=False)
        return 0.1 + 0.01 * len(tokens) + 0.02 * len(missing)


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64])
def test_a_measured_size_takes_what_running_text_takes(n: int) -> None:
    text = np.random.default_rng(2).integers(0, 500, 2000).tolist()
    target = Cached()
    options = MeasureOptions(64, 6, (16,), n_most=6)
    measured = measure(target, text, options, clock=target.clock).step_s[n - 1]
    running = Cached()
    later = np.random.default_rng(3).integers(0, 500, 600).tolist()
    running.extend(0, later[:100])
    began = running.now
    for at in range(100, 100 + 500 // n * n, n):
        running.extend(0, later[at : at + n])
    assert measured == pytest.approx((running.now - began) / (500 // n), rel=0.1)


def test_no_token_is_decoded_twice_before_the_text_ends() -> None:
    fed: list[int] = []

    def seconds(tokens: Sequence[int]) -> float:
        fed.extend(tokens)
        return 0.1

    target = Timed(seconds)
    walk = TextWalk(target, 0, list(range(1000)), 16, 192)
    for n in (1, 64, 8, 64, 64, 64, 3, 64):
        walk.time_s(n, target.clock)
        assert 16 <= target.length(0) <= 16 + 192
    walk.lead(32, 2)
    assert fed == list(range(len(fed)))
    short = TextWalk(target, 0, [1, 2, 3], 0, 64)
    assert short.time_s(8, target.clock) == pytest.approx(0.1)


@pytest.mark.parametrize("depth", [0, 20])
def test_a_recurrent_memory_walks_through_the_text_as_well(depth: int) -> None:
    target = FakeTarget(n_ctx=256, recurrent=True)
    text = [i % 60 for i in range(200)]
    profile = measure(target, text, MeasureOptions(8, 2, (depth,)))
    assert profile.n_max == 8
    assert target.length(0) == 0


def test_the_drafts_own_step_is_kept_for_each_depth(tmp_path: Path) -> None:
    target = Timed(lambda tokens: 0.1)
    draft = Timed(lambda tokens: 0.001 * len(tokens) + 1e-5 * draft.length(0))
    clock = lambda: target.now + draft.now  # noqa: E731
    text = [i % 60 for i in range(900)]
    found = measure(target, text, MeasureOptions(8, 1, (16, 512)), draft=draft, clock=clock)
    # Behind the depth come 8 steps that warm up, and 8 that are timed.
    times = {depth: 0.001 + 1e-5 * (depth + 12.5) for depth in (16, 512)}
    assert dict(found.draft_depths) == pytest.approx(times)
    assert found.draft_step_s == pytest.approx(sum(times.values()) / 2)
    assert draft.length(0) == 0
    save(tmp_path / "profile.json", found)
    assert load(tmp_path / "profile.json").costs.draft_depths == found.draft_depths


# -- slow machines ---------------------------------------------------------------------------------


@pytest.mark.parametrize("curve", CURVES)
def test_a_slow_machines_first_start_leaves_the_policy_what_the_full_profile_would(
    curve: str,
) -> None:
    scale = ONE_S / CURVES[curve].step_s[0]
    true = CostProfile(tuple(t * scale for t in CURVES[curve].step_s), 0.05 * ONE_S)
    target = Timed(lambda tokens: true.time(len(tokens)))
    options = quick_plan(ONE_S, (), 2000)
    if true.n_max < options.n_max:  # some were published up to 32
        sizes = tuple(dict.fromkeys(min(n, true.n_max) for n in options.sizes))
        options = replace(options, n_max=true.n_max, sizes=sizes)
    found = measure(target, list(range(2000)), options, clock=target.clock)
    assert target.now <= 20.0
    assert found.n_max == true.n_max >= 32
    quick = replace(found, draft_step_s=true.draft_step_s)
    for kind, kinds in KINDS.items():
        text = synthetic_trace(4000, seed=77, kinds=kinds)
        full = simulate(text, true, Throughput(true)).rate
        rate = simulate(text, true, Throughput(quick)).rate
        assert rate >= 0.97 * full, f"{kind}: {rate / full:.3f} of the full profile's"


def test_a_slow_machine_drafts_long_where_it_pays() -> None:
    true = CostProfile(tuple(ONE_S * (1.0 + 0.01 * n) for n in range(64)))
    target = Timed(lambda tokens: true.time(len(tokens)))
    found = measure(target, list(range(2000)), quick_plan(ONE_S, (), 2000), clock=target.clock)
    policy = Throughput(replace(found, draft_step_s=1e-4))
    text = synthetic_trace(1, seed=1)
    trace = replace(text, p=(0.999,) * 2000, accepted=(True,) * 2000)
    run = simulate(trace, replace(true, draft_step_s=1e-4), policy)
    assert run.n_drafted / run.n_rounds >= 32


@pytest.mark.parametrize("one_s", [1e-4, 0.15, 10.0])
def test_a_first_start_leaves_room_for_the_longest_draft_whatever_it_could_measure(
    one_s: float,
) -> None:
    target = Timed(lambda tokens: one_s * (1 + 0.5 * (len(tokens) - 1)))
    options = quick_plan(one_s, (24, 32), 1000)
    assert options.n_max == 64
    assert {23, 24, 31, 32} <= set(options.sizes)
    found = measure(target, list(range(1000)), options, clock=target.clock)
    assert found.n_max == 64
    if one_s < 1.0:
        true = [one_s * (1 + 0.5 * n) for n in range(64)]
        assert found.step_s == pytest.approx(true)


def test_a_short_context_is_measured_as_far_as_it_goes() -> None:
    options = quick_plan(0.01, (), 20)
    assert options.n_max == max(options.sizes) == 20
    assert options.depths == (0,)


def test_rounds_refine_what_was_guessed_first_and_unmark_it() -> None:
    guessed = CostProfile((1.0, 1.5, 2.0, 2.5), uncertain=(3,))
    costs = RefreshedCosts(guessed, 4)
    for _ in range(4):
        costs.observe(3, 4.0, 0, 0.0)
    assert costs.times[2] == pytest.approx(4.0, rel=0.2)
    assert costs.profile().uncertain == (3,)
    for _ in range(20):
        costs.observe(3, 4.0, 0, 0.0)
    assert costs.profile().uncertain == ()
    firm = RefreshedCosts(replace(guessed, uncertain=()), 4)
    for _ in range(4):
        firm.observe(3, 4.0, 0, 0.0)
    assert firm.times[2] < 3.0
