"""Joint decisions of several sequences, synthetic acceptance and statistics."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
from fake_target import FakeTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import generated, member_of

from specdec.costs.profile import CostProfile
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.drafters.model import ModelDrafter
from specdec.drafters.synthetic import (
    SyntheticAcceptance,
    SyntheticDrafter,
    check_rates,
    rates_of_length,
)
from specdec.errors import BadOption
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.policies.value import allocate, best_count, level
from specdec.types import Decision, Draft, Round
from specoffload.generation.statistics import GenerationStats, Tally, reason_kind


@given(
    chains=st.lists(st.lists(st.floats(0.01, 1), max_size=3), min_size=1, max_size=3),
    steps=st.lists(st.floats(0.01, 1), min_size=12, max_size=12),
    rate=st.floats(0.1, 3),
)
@settings(deadline=None)
def test_the_joint_choice_is_the_best_of_all_choices(
    chains: list[list[float]], steps: list[float], rate: float
) -> None:
    times = list(itertools.accumulate(steps))
    falling = [list(itertools.accumulate(c, lambda a, b: a * b)) for c in chains]

    def value(counts: tuple[int, ...]) -> float:
        won = sum(sum(c[:n]) for c, n in zip(falling, counts, strict=True))
        n_rows = len(falling) + sum(counts)
        return won - rate * (times[n_rows - 1] - times[len(falling) - 1])

    best = max(value(c) for c in itertools.product(*[range(len(c) + 1) for c in falling]))
    assert value(allocate(falling, times, rate)) == pytest.approx(best, abs=1e-9)
    same = [(n,) * len(falling) for n in range(min(map(len, falling)) + 1)]
    best = max(value(counts) for counts in same if len(falling) + sum(counts) <= len(times))
    n = level(falling, times, rate)
    assert value((n,) * len(falling)) == pytest.approx(best, abs=1e-9)


def test_the_joint_choice_looks_past_a_bump() -> None:
    times = [1.0, 2.1, 2.2, 2.3, 2.4]
    assert best_count([0.9, 0.8, 0.7, 0.6], times, 1, 1.0) == 4
    assert best_count([0.9], times, 1, 1.0) == 0


def counted(rounds: Iterable[Round]) -> GenerationStats:
    tally = Tally()
    for round_ in rounds:
        tally.count(round_, len(round_.emitted))
    return tally.stats()


def test_synthetic_rates_are_met_whatever_the_models_say() -> None:
    rates = (0.9, 0.6, 0.2)
    acceptance = SyntheticAcceptance(rates, np.random.default_rng(1))
    target, drafter = FakeTarget(n_ctx=20_000), SyntheticDrafter(rates)
    stats = counted(generated(target, [1, 2], 4000, drafter, Fixed(3), acceptance=acceptance))
    assert stats.acceptance_per_position == pytest.approx(rates, abs=0.03)
    assert stats.n_tokens / stats.n_rounds == pytest.approx(2.7, abs=0.05)


def test_a_synthetic_length_is_the_mean_of_its_rates() -> None:
    rates = rates_of_length(3.2, 8)
    assert 1 + sum(rates) == pytest.approx(3.2)
    assert rates_of_length(9, 8) == pytest.approx((1.0,) * 8)
    with pytest.raises(BadOption, match="must lie in"):
        rates_of_length(9.5, 8)
    for rates in ((0.5, 0.6), (1.2,), ()):
        with pytest.raises(BadOption, match="rates"):
            check_rates(rates)


def test_statistics_count_what_happened() -> None:
    target, draft = FakeTarget(), FakeTarget(agreement=0.7)
    stats = counted(generated(target, [1], 200, ModelDrafter(draft), Fixed(4)))
    assert stats.n_tokens == 200
    assert stats.n_accepted == dict(stats.accepted_by_source)["draft"]
    assert stats.n_tokens == stats.n_accepted + stats.n_rounds
    assert dict(stats.decisions) == {"fixed length of #": stats.n_rounds}
    falling = stats.acceptance_per_position
    assert list(falling) == sorted(falling, reverse=True)


def test_reasons_are_grouped_without_their_numbers() -> None:
    assert reason_kind("P 0.12 against 0.5") == "P # against #"
    assert reason_kind("12 of 40 drafted") == "# of # drafted"


def played_together(
    n_sequences: int, profile: CostProfile, n_max: int | None, agreement: float
) -> tuple[float, int, int]:
    """Returns the speed relative to plain decoding of the same batch, the number of rounds and the
    number of draft decodes."""
    target = FakeTarget(n_ctx=4096)
    draft = ModelDrafter(FakeTarget(n_ctx=4096, agreement=agreement, peak=0.7))
    policy = Throughput(profile, n_max=n_max)
    loop = DecodingLoop(target, ChainDrafting(target, draft, policy))
    for s in range(n_sequences):
        loop.add(member_of(s, [1 + s, 2, 3], 300))
    time, n_tokens, n_rounds, n_steps = 0.0, 0, 0, 0
    while not loop.is_idle:
        rounds = loop.step().rounds
        if not rounds:
            continue
        n_drafts = max(r.draft.n_steps for _, r in rounds)
        time += profile.time(sum(1 + r.n_drafted for _, r in rounds))
        time += n_drafts * profile.draft_step_s
        n_tokens += sum(len(r.emitted) for _, r in rounds)
        n_rounds, n_steps = n_rounds + 1, n_steps + n_drafts
    return n_tokens / time * profile.time(n_sequences) / n_sequences, n_rounds, n_steps


@pytest.mark.parametrize("n_sequences", [1, 4])
def test_a_hopeless_draft_is_hardly_asked_by_several_sequences(n_sequences: int) -> None:
    dear = CostProfile(tuple(1.0 + 0.5 * n for n in range(64)), 0.5)
    rate, n_rounds, n_steps = played_together(n_sequences, dear, None, 0.02)
    assert n_steps < 0.1 * n_rounds
    assert rate > 0.97


def test_more_sequences_than_the_profile_has_batch_sizes_are_decoded() -> None:
    short = CostProfile(tuple(1.0 + 0.1 * n for n in range(4)), 0.01)
    assert played_together(5, short, None, 1.0)[0] > 0.95
    long = CostProfile(tuple(1.0 + 0.1 * n for n in range(64)), 0.01)
    assert played_together(6, long, 4, 1.0)[0] > 1.2


def test_what_a_longer_draft_would_have_got_is_counted_as_the_text_goes_on() -> None:
    def round_of(kept: list[int], dropped: list[int], n_accepted: int, emitted: list[int]) -> Round:
        draft = Draft(
            tuple(kept),
            (0.5,) * len(kept),
            "draft",
            Decision(len(kept), ""),
            tuple((token, 0.5) for token in dropped),
        )
        return Round(draft, n_accepted, tuple(emitted), 0.0, 0.0)

    tally = Tally()

    def after(*parts: object) -> GenerationStats:
        round_ = round_of(*parts)  # type: ignore[arg-type]
        tally.count(round_, len(round_.emitted))
        return tally.stats()

    assert after([1], [2, 3, 4, 9], 1, [1, 2]).n_could_accept == 1
    after([], [], 0, [3])
    assert after([], [], 0, [4]).n_could_accept == 3
    after([], [], 0, [5])  # not the drafted 9, so the comparison ends
    assert after([], [], 0, [9]).n_could_accept == 3
    after([7, 8], [9, 9], 1, [7, 9])  # 8 was rejected, and so were all later tokens
    stats = after([], [], 0, [9])
    assert (stats.n_could_accept, stats.n_accepted) == (3, 2)
