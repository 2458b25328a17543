"""Several sequences at once, trees, joint decisions, synthetic acceptance and statistics."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.fake import FakeTarget
from specdec.costs.profile import CostProfile
from specdec.decoding.accept import Greedy, MatchAcceptance
from specdec.decoding.decode import decode
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop, Step
from specdec.decoding.member import BatchMember
from specdec.decoding.stats import SpecStats, reason_kind
from specdec.decoding.tree import DraftTree, TreeDrafter, decode_tree
from specdec.drafters.model import ModelDrafter
from specdec.drafters.synthetic import (
    SyntheticAcceptance,
    SyntheticDrafter,
    check_rates,
    rates_of_length,
)
from specdec.errors import BadOption, SpecDecError
from specdec.policies.fixed import Fixed
from specdec.policies.joint import allocate, best_count, level
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Drafter, Policy, Round

# Batches that cost almost nothing more, so that drafts are worth it.
CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(32)), 0.01)


def never(_: int) -> bool:
    return False


def plain(target: FakeTarget, prompt: list[int], n: int, end: int | None = None) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + n and len(text) <= target.n_ctx:
        text.append(target.next_token(text))
        if text[-1] == end:
            break
    return text


def member_of(
    sequence: int, prompt: list[int], n_predict: int, end: int | None = None
) -> BatchMember:
    greedy = Greedy()
    accept = MatchAcceptance(greedy)
    return BatchMember(sequence, list(prompt), greedy, accept, n_predict, lambda t: t == end)


def steps(
    target: FakeTarget, members: list[BatchMember], drafter: Drafter, policy: Policy
) -> Iterator[Step]:
    loop = DecodingLoop(target, ChainDrafting(target, drafter, policy))
    for member in members:
        loop.add(member)
    while not loop.is_idle:
        yield loop.step()


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 100),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    recurrent=st.booleans(),
    agreement=st.floats(0.3, 1),
    end=st.integers(0, 30),
)
def test_sequences_decoded_together_have_their_own_plain_texts(
    seed: int, lengths: list[int], recurrent: bool, agreement: float, end: int
) -> None:
    target = FakeTarget(n_vocab=16, seed=seed, recurrent=recurrent, n_ctx=60)
    draft = FakeTarget(n_vocab=16, seed=seed, agreement=agreement, recurrent=recurrent, n_ctx=50)
    prompts = [[s, s + 1, 3] * (1 + 4 * s) for s in range(len(lengths))]
    members = [member_of(s, prompts[s], n, end) for s, n in enumerate(lengths)]
    policy = Throughput(CHEAP, refresh=False)
    for step in steps(target, members, ModelDrafter(draft), policy):
        for member, _ in step.rounds:
            assert target.tokens(member.sequence) == member.history[:-1]
    for member, prompt, n in zip(members, prompts, lengths, strict=True):
        assert member.history == plain(target, prompt, n, end)


def test_one_decode_serves_all_sequences() -> None:
    target, draft = FakeTarget(peak=0.99), FakeTarget(peak=0.99)
    members = [member_of(s, [s], 24) for s in range(4)]
    policy = Throughput(CHEAP, refresh=False)
    rounds = [s.rounds for s in steps(target, members, ModelDrafter(draft), policy) if s.rounds]
    assert len(target.calls) == len(rounds)
    assert len(rounds) < 24 / 2
    assert len(draft.calls) < 4 * 24


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


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 200),
    n=st.integers(0, 40),
    agreement=st.floats(0, 1),
    n_ctx=st.integers(6, 60),
    end=st.integers(0, 40),
)
def test_a_tree_draft_gives_the_plain_text(
    seed: int, n: int, agreement: float, n_ctx: int, end: int
) -> None:
    target = FakeTarget(n_vocab=16, seed=seed, n_ctx=n_ctx)
    draft = FakeTarget(n_vocab=16, seed=seed, agreement=agreement, n_ctx=50, peak=0.4)
    policy = Throughput(CHEAP, refresh=False)
    text = [1, 2, 3]
    for round_ in decode_tree(
        target,
        0,
        text,
        drafter=TreeDrafter(draft, policy, p_split=0.01),
        policy=policy,
        chooser=Greedy(),
        n_predict=n,
        is_end=lambda t: t == end,
    ):
        text = [*text, *round_.emitted]
        assert target.tokens(0) == text[:-1]
    assert text == plain(target, [1, 2, 3], n, end)


def test_a_tree_accepts_what_one_branch_would_have_missed() -> None:
    target = FakeTarget(n_vocab=8, logits_seed=1, order=2)
    branching = _mean_length(target, n_branches=4)
    single = _mean_length(FakeTarget(n_vocab=8, logits_seed=1, order=2), n_branches=1)
    assert branching > single + 0.2


def _mean_length(target: FakeTarget, n_branches: int) -> float:
    class Noisy(FakeTarget):
        def logits_after(self, tokens):  # type: ignore[no-untyped-def]
            rng = np.random.default_rng(list(tokens[-2:]))
            return super().logits_after(tokens) + rng.normal(0, 2.5, 8).astype(np.float32)

    policy = Throughput(CHEAP, refresh=False)
    drafter = TreeDrafter(
        Noisy(n_vocab=8, logits_seed=1, order=2), policy, n_branches=n_branches, p_split=0.02
    )
    rounds = list(
        decode_tree(
            target,
            0,
            [1, 2],
            drafter=drafter,
            policy=policy,
            chooser=Greedy(),
            n_predict=300,
            is_end=never,
        )
    )
    return sum(len(r.emitted) for r in rounds) / len(rounds)


def test_a_tree_whose_judging_fails_leaves_target_draft_and_policy_usable() -> None:
    class Failing(Greedy):
        n_left = 5

        def choose(self, logits, history):  # type: ignore[no-untyped-def]
            self.n_left -= 1
            if not self.n_left:
                raise KeyboardInterrupt
            return super().choose(logits, history)

    target = FakeTarget(seed=4)
    policy = Throughput(CHEAP, refresh=False)
    drafter = TreeDrafter(FakeTarget(seed=4, peak=0.4), policy)
    text = [1, 2, 3]

    def go_on(chooser: Greedy, n: int) -> None:
        for round_ in decode_tree(
            target,
            0,
            list(text),
            drafter=drafter,
            policy=policy,
            chooser=chooser,
            n_predict=n,
            is_end=never,
            n_cached=target.length(0),
        ):
            text.extend(round_.emitted)

    with pytest.raises(KeyboardInterrupt):
        go_on(Failing(), 40)
    assert target.tokens(0) == text[:-1]
    go_on(Greedy(), 40)
    assert len(text) == 43
    assert text == plain(target, [1, 2, 3], 40)


def test_trees_that_do_not_pay_are_hardly_asked_for() -> None:
    dear = CostProfile((1.0, 2.0, 3.0, 4.0, 5.0), draft_step_s=0.1)
    policy = Throughput(dear, refresh=False)
    draft = FakeTarget(seed=9)  # writes another text than the target
    rounds = decode_tree(
        FakeTarget(seed=4),
        0,
        [1, 2, 3],
        drafter=TreeDrafter(draft, policy),
        policy=policy,
        chooser=Greedy(),
        n_predict=600,
        is_end=never,
    )
    idle = [r.draft.decision.reason for r in rounds if not r.draft.n_steps]
    assert len(idle) > 500
    assert any(reason.startswith("off: ") for reason in idle)


def test_a_tree_counts_positions_by_depth_and_is_no_evidence_of_a_chain() -> None:
    draft = Draft(
        (7, 8, 9, 5), (0.6, 0.3, 0.9, 0.4), "tree", Decision(4, "tree"), parents=(-1, -1, 1, 2)
    )
    round_ = Round(draft, 2, (8, 9, 3), 0.0, 0.0)
    assert round_.evidence == ()
    stats = SpecStats()
    stats.add(round_)
    assert stats.acceptance_per_position == (1.0, 1.0, 0.0)
    assert stats.n_drafted == 4


def test_the_prompt_that_a_draft_has_to_read_is_no_draft_step() -> None:
    class Slow(FakeTarget):
        def extend(self, sequence, tokens, n_logits=None):  # type: ignore[no-untyped-def]
            time.sleep(0.002 * len(tokens))
            return super().extend(sequence, tokens, n_logits)

    prompt = [1, 2, 3] * 20
    policy = Throughput(CHEAP, refresh=False)
    chain = decode(
        FakeTarget(),
        0,
        prompt,
        drafter=ModelDrafter(Slow()),
        policy=Fixed(2),
        chooser=Greedy(),
        n_predict=3,
        is_end=never,
    )
    tree = decode_tree(
        FakeTarget(),
        0,
        prompt,
        drafter=TreeDrafter(Slow(), policy),
        policy=policy,
        chooser=Greedy(),
        n_predict=3,
        is_end=never,
    )
    for first in (next(chain), next(tree)):
        assert first.draft.catch_up_s > 0.1
        assert first.draft_s < first.draft.catch_up_s / 2


def test_recurrent_memory_is_refused_trees() -> None:
    policy = Throughput(CHEAP)
    with pytest.raises(SpecDecError, match="recurrent"):
        TreeDrafter(FakeTarget(recurrent=True), policy)
    with pytest.raises(SpecDecError, match="recurrent"):
        decode_tree(
            FakeTarget(recurrent=True),
            0,
            [1],
            drafter=TreeDrafter(FakeTarget(), policy),
            policy=policy,
            chooser=Greedy(),
            n_predict=1,
            is_end=never,
        )


def test_synthetic_rates_are_met_whatever_the_models_say() -> None:
    rates = (0.9, 0.6, 0.2)
    acceptance = SyntheticAcceptance(rates, np.random.default_rng(1))
    stats = SpecStats()
    target = FakeTarget(n_ctx=20_000)
    for round_ in decode(
        target,
        0,
        [1, 2],
        drafter=SyntheticDrafter(rates),
        policy=Fixed(3),
        chooser=Greedy(),
        acceptance=acceptance,
        n_predict=6000,
        is_end=never,
    ):
        stats.add(round_)
    assert stats.acceptance_per_position == pytest.approx(rates, abs=0.03)
    assert stats.tokens_per_round == pytest.approx(2.7, abs=0.05)


def test_a_synthetic_length_is_the_mean_of_its_rates() -> None:
    rates = rates_of_length(3.2, 8)
    assert 1 + sum(rates) == pytest.approx(3.2)
    assert rates_of_length(9, 8) == pytest.approx((1.0,) * 8)
    for bad in (0.5, 9.5):
        with pytest.raises(BadOption, match="must lie in"):
            rates_of_length(bad, 8)
    for rates in ((0.5, 0.6), (1.2,), ()):
        with pytest.raises(BadOption, match="rates"):
            check_rates(rates)


def test_statistics_count_what_happened() -> None:
    stats = SpecStats()
    target, draft = FakeTarget(), FakeTarget(agreement=0.7)
    for round_ in decode(
        target,
        0,
        [1],
        drafter=ModelDrafter(draft),
        policy=Fixed(4),
        chooser=Greedy(),
        n_predict=200,
        is_end=never,
    ):
        stats.add(round_)
    assert stats.n_tokens == 200
    assert stats.n_accepted == stats.sources["draft"]
    assert stats.n_tokens == stats.n_accepted + stats.n_rounds
    assert dict(stats.reasons) == {"fixed block of #": stats.n_rounds}
    falling = stats.acceptance_per_position
    assert list(falling) == sorted(falling, reverse=True)


def test_reasons_are_grouped_without_their_numbers() -> None:
    assert reason_kind("P 0.12 against 0.5") == "P # against #"
    assert reason_kind("12 of 40 drafted") == "# of # drafted"


def test_a_tree_that_lost_its_likeliest_child_knows_the_rank_of_the_next() -> None:
    tree = DraftTree((7, 8, 9), (-1, -1, 1), (0.6, 0.3, 0.5), (0.2, 0.4, 0.3), (0, 1, 0))
    assert tree.cut([1, 2]).ranks == (1, 0)
    assert tree.cut([1, 2]).parents == (-1, 0)


def played_together(
    n_sequences: int, profile: CostProfile, n_max: int | None, agreement: float
) -> tuple[float, int, int]:
    """Tokens per time over plain decoding of the same batch; rounds; draft decodes."""
    target = FakeTarget(n_ctx=4096)
    draft = ModelDrafter(FakeTarget(n_ctx=4096, agreement=agreement, peak=0.7))
    policy = Throughput(profile, n_max=n_max, refresh=False)
    members = [member_of(s, [1 + s, 2, 3], 300) for s in range(n_sequences)]
    time, n_tokens, n_rounds, n_steps = 0.0, 0, 0, 0
    for step in steps(target, members, draft, policy):
        rounds = step.rounds
        if not rounds:
            continue
        n_drafts = max(r.draft.n_steps for _, r in rounds)
        time += profile.time(sum(1 + r.n_drafted for _, r in rounds))
        time += n_drafts * profile.draft_step_s
        n_tokens += sum(len(r.emitted) for _, r in rounds)
        n_rounds, n_steps = n_rounds + 1, n_steps + n_drafts
    return n_tokens / time * profile.time(n_sequences) / n_sequences, n_rounds, n_steps


@pytest.mark.parametrize("n_sequences", [1, 2, 4])
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

    stats = SpecStats()
    stats.add(round_of([1], [2, 3, 4, 9], 1, [1, 2]))
    assert stats.n_could_accept == 1
    stats.add(round_of([], [], 0, [3]))
    stats.add(round_of([], [], 0, [4]))
    assert stats.n_could_accept == 3
    stats.add(round_of([], [], 0, [5]))  # not 9: what follows says nothing of that draft
    stats.add(round_of([], [], 0, [9]))
    assert stats.n_could_accept == 3
    stats.add(round_of([7, 8], [9, 9], 1, [7, 9]))  # 8 was rejected, and with it all behind
    stats.add(round_of([], [], 0, [9]))
    assert (stats.n_could_accept, stats.n_accepted) == (3, 2)
