"""What decodes teach is bounded: no order of sizes, ways, disturbances and restarts runs away."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from machines import N_EXPERTS, N_USED, Simulated

from offload.decode import SMALL_BATCH
from offload.times import corrections
from offload.times.learner import Learner
from offload.times.table import CostTable, DecodeTime, Way

SIZES = (1, 2, 4, 8, 16, 32, 64)
_WAYS = (Way.IN_PLACE, Way.STREAMED, Way.SPLIT)
_SLOWER = 20.0  # ratio of a disturbed decode's time to an undisturbed one's
_QUIET = 200  # decodes after which prices are right again
_OFTEN = 24  # decodes among them after which a size counts as used
_LONGEST = 128  # most decodes of one disturbance
_WRONG = 1.1  # ratio by which a table may be wrong from the start
# The most that a price may be off. Recent decodes add the surplus. In a disturbance, a level rises
# by the band, then by the fast creep until the last calm decodes are gone, then by the slow creep.
_MOST_OFF = _WRONG * math.exp(
    corrections.MOST_SURPLUS
    + corrections._BAND
    + corrections._N_LAST * corrections._SURE_CREEP
    + _LONGEST * corrections._CREEP
)


@dataclass(frozen=True)
class Case:
    """How a machine is used."""

    seed: int
    ways: tuple[Way, ...]
    sizes: tuple[int, ...]  # batch sizes, drawn equally often
    longest: int  # most decodes of one disturbance; the time between lasts twice as long
    is_even: bool  # True: all disturbed decodes take `_SLOWER` times as long; else up to that
    between_restarts: int
    imported: float  # ratio of the table's time of 64 tokens to the true one


CASES = st.builds(
    Case,
    seed=st.integers(0, 1 << 30),
    ways=st.sampled_from([(Way.IN_PLACE,), (Way.IN_PLACE, Way.STREAMED), _WAYS]),
    sizes=st.lists(st.integers(1, 64), min_size=1, max_size=8, unique=True).map(tuple),
    longest=st.integers(1, _LONGEST),
    is_even=st.booleans(),
    between_restarts=st.integers(100, 5000),
    imported=st.sampled_from([1.0, 1.0, 1 / _WRONG, _WRONG]),
)


def table_of(machine: Simulated, case: Case) -> CostTable:
    def entry(way: Way, n: int) -> DecodeTime:
        wrong = case.imported ** ((n - 1) / 63)
        return DecodeTime(wrong * machine.seconds(way, n), n_timed=4)

    return CostTable(N_EXPERTS, N_USED, {w: {n: entry(w, n) for n in SIZES} for w in case.ways})


@dataclass
class Seen:
    """The worst ratios of a price to the true time, or of the true time to the price."""

    worst: float = 1.0
    after_quiet: float = 1.0


def play(case: Case, n_decodes: int) -> Seen:
    """Serve, with disturbances for a third of the decodes, and compare prices with true times."""
    rng, seen = random.Random(case.seed), Seen()
    machine = Simulated(rng=np.random.default_rng(case.seed))
    true_s = {w: [machine.seconds(w, n) for n in range(1, SMALL_BATCH + 1)] for w in case.ways}
    table, is_busy, left = table_of(machine, case), False, 0
    learner, n_served = Learner(table, SMALL_BATCH, lambda n: case.ways), 0
    quiet: deque[tuple[Way, int]] = deque(maxlen=_QUIET)
    for i in range(n_decodes):
        if not left:
            is_busy = not is_busy
            left = rng.randint(1, case.longest * (1 if is_busy else 4))
        left -= 1
        n = rng.choice(case.sizes)
        way = learner.way(n)
        slower = 1.0 if not is_busy else _SLOWER if case.is_even else rng.uniform(1.0, _SLOWER)
        learner.took(n, machine.decode_s(way, n) * slower)
        if is_busy:
            quiet.clear()
        else:
            quiet.append((way, n))
        if i % 97 == 0:
            for w in case.ways:
                for m, s in enumerate(true_s[w], 1):
                    ratio = learner.expected_s(m, w) / s
                    seen.worst = max(seen.worst, ratio, 1.0 / ratio)
        if len(quiet) == _QUIET:
            for (w, m), n_used in Counter(quiet).items():
                if n_used >= _OFTEN:
                    ratio = learner.expected_s(m, w) / true_s[w][m - 1]
                    seen.after_quiet = max(seen.after_quiet, ratio, 1.0 / ratio)
            quiet.clear()
        n_served += 1
        if n_served >= case.between_restarts:
            table, n_served = learner.table("2026-01-02"), 0
            assert not table.absurd
            learner = Learner(table, SMALL_BATCH, lambda n: case.ways)
    assert not learner.table("2026-01-02").absurd
    return seen


# Shrinking a case that takes seconds would take an hour.
_SLOW: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": list(HealthCheck),
    "phases": [Phase.explicit, Phase.reuse, Phase.generate],
}


def check(case: Case, n_decodes: int) -> None:
    seen = play(case, n_decodes)
    assert seen.worst <= _MOST_OFF, f"a price was {seen.worst:.2f} x off"
    assert seen.after_quiet <= 1.1, f"after quiet decodes a price was {seen.after_quiet:.3f} x off"


_TWO_WAYS = (Way.IN_PLACE, Way.STREAMED)
# Cases that once went wrong: a disturbed decode of a doubted size became its base time, and all
# decodes of a size from the start on were disturbed, so that its least time was.
_DOUBTED = Case(734124079, _TWO_WAYS, (53,), 124, False, 1977, 0.9)
_FROM_THE_START = Case(126288541, _TWO_WAYS, (43,), 128, True, 721, 1.1)


@settings(max_examples=12, **_SLOW)
@given(CASES)
@example(_DOUBTED)
@example(_FROM_THE_START)
def test_prices_stay_near_the_true_times_whatever_disturbs_them(case: Case) -> None:
    check(case, 1500)


def test_the_bound_of_prices_is_what_the_page_says() -> None:
    assert round(_MOST_OFF, 1) == 3.7


# Errors of many sessions once added up in the sizes that were not decoded.
_MANY_SESSIONS = Case(46535189, _TWO_WAYS, (12,), 64, False, 100, 0.9)


@pytest.mark.timeout(1800)
@settings(max_examples=6, **_SLOW)
@given(CASES)
@example(_MANY_SESSIONS)
def test_prices_stay_near_the_true_times_for_100_000_decodes(case: Case) -> None:
    check(case, 100_000)


_SECONDS = st.floats(1e-6, 1e3)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([1, 2, 3, 8, 33, 64]), _SECONDS), max_size=300),
    st.lists(_SECONDS, min_size=len(SIZES), max_size=len(SIZES)),
    st.booleans(),
)
def test_no_times_at_all_end_in_an_error_or_leave_what_was_seen(
    decodes: list[tuple[int, float]], measured: list[float], relative: bool
) -> None:
    """A table and decodes of any times: a price stays within twice what table and decodes span."""
    entries = {n: DecodeTime(s, n_timed=1) for n, s in zip(SIZES, measured, strict=True)}
    learner = Learner(
        CostTable(ways={Way.FIXED: entries}), 64, lambda n: (Way.FIXED,), relative=relative
    )
    for n, seconds in decodes:
        learner.took(n, seconds)
    kept = learner.table("2026-01-02").measured(Way.FIXED)
    if relative:
        assert all(0.0 < e.seconds < 1e12 for e in kept.values())
        return
    every = [*measured, *(s for _, s in decodes)]
    for n in range(1, 65):
        # A size above all decoded ones may take as long as several batches.
        assert min(every) / 2 / 64 <= learner.expected_s(n, Way.FIXED) <= 2 * 64 * max(every)
    for n in SIZES:
        own = [measured[SIZES.index(n)], *(s for m, s in decodes if m == n)]
        assert min(own) / 2.01 <= learner.expected_s(n, Way.FIXED) <= 2.01 * max(own)


def test_a_disturbed_time_in_place_does_not_make_every_size_free() -> None:
    """Dense weights seemed to save more than a decode took, so all sizes were priced at 0.00 ms."""
    ways = {
        Way.IN_PLACE: {n: DecodeTime(0.06, n_timed=1) for n in SIZES},  # disturbed
        Way.DENSE: {n: DecodeTime(0.01, n_timed=1) for n in SIZES},
        Way.STREAMED: {n: DecodeTime(0.014, n_timed=1) for n in SIZES},
    }
    table = CostTable(N_EXPERTS, N_USED, ways)
    allowed = (Way.IN_PLACE, Way.STREAMED)
    learner = Learner(table, 64, lambda n: allowed)
    assert min(learner.times) >= 0.014 / 20
    for _ in range(1000):
        learner.took(1, 0.014)
    kept = learner.table("2026-01-02")
    assert max(e.seconds for of in kept.ways.values() for e in of.values()) <= 2 * 0.06
    assert learner.times[0] == pytest.approx(0.014, rel=0.1)


@pytest.mark.parametrize("seconds", [900_000.0, 1e-9])
def test_times_that_no_decode_takes_are_absurd(seconds: float) -> None:
    table = CostTable(ways={Way.IN_PLACE: {1: DecodeTime(seconds, n_timed=3)}})
    assert table.absurd.startswith("1 tokens in place would take")


def test_a_time_far_beyond_its_neighbours_is_absurd_and_a_disturbed_one_is_not() -> None:
    for ratio, is_absurd in ((40.0, False), (5000.0, True)):
        entries = {1: DecodeTime(0.01, n_timed=3), 2: DecodeTime(0.02 * ratio, n_timed=3)}
        assert bool(CostTable(ways={Way.IN_PLACE: entries}).absurd) is is_absurd
