"""Tree drafts: several continuations verified in one decode."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from drafting_parts import generated, member_of, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.fake import FakeTarget
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.stats import SpecStats
from specdec.decoding.tree import TreeDrafter, TreeDrafting
from specdec.drafters.model import ModelDrafter
from specdec.errors import SpecDecError
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Chooser, Decision, Draft, Round

CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(32)), 0.01)


def tree_rounds(
    target: FakeTarget,
    prompt: Sequence[int],
    n_predict: int,
    drafter: TreeDrafter,
    policy: Throughput,
    *,
    chooser: Chooser | None = None,
    end: int | None = None,
    n_cached: int = 0,
) -> Iterator[Round]:
    drafting = TreeDrafting(target, drafter, policy)
    member = member_of(0, prompt, n_predict, chooser=chooser, end=end, n_cached=n_cached)
    return DecodingLoop(target, drafting, drafting.play).rounds_of(member)


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
    policy = Throughput(CHEAP)
    text = [1, 2, 3]
    for round_ in tree_rounds(
        target, text, n, TreeDrafter(draft, policy, p_split=0.01), policy, end=end
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

    policy = Throughput(CHEAP)
    drafter = TreeDrafter(
        Noisy(n_vocab=8, logits_seed=1, order=2), policy, n_branches=n_branches, p_split=0.02
    )
    rounds = list(tree_rounds(target, [1, 2], 300, drafter, policy))
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
    policy = Throughput(CHEAP)
    drafter = TreeDrafter(FakeTarget(seed=4, peak=0.4), policy)
    text = [1, 2, 3]

    def go_on(chooser: Greedy, n: int) -> None:
        for round_ in tree_rounds(
            target, list(text), n, drafter, policy, chooser=chooser, n_cached=target.length(0)
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
    policy = Throughput(dear)
    draft = FakeTarget(seed=9)  # writes another text than the target
    rounds = tree_rounds(FakeTarget(seed=4), [1, 2, 3], 600, TreeDrafter(draft, policy), policy)
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
    policy = Throughput(CHEAP)
    chain = generated(FakeTarget(), prompt, 3, ModelDrafter(Slow()), Fixed(2))
    tree = tree_rounds(FakeTarget(), prompt, 3, TreeDrafter(Slow(), policy), policy)
    for first in (next(chain), next(tree)):
        assert first.draft.catch_up_s > 0.1
        assert first.draft_s < first.draft.catch_up_s / 2


def test_recurrent_memory_is_refused_trees() -> None:
    policy = Throughput(CHEAP)
    with pytest.raises(SpecDecError, match="recurrent"):
        TreeDrafter(FakeTarget(recurrent=True), policy)
    with pytest.raises(SpecDecError, match="recurrent"):
        tree_rounds(FakeTarget(recurrent=True), [1], 1, TreeDrafter(FakeTarget(), policy), policy)


def test_trees_are_verified_in_turn_and_beside_prompts_nothing_is_drafted() -> None:
    target = FakeTarget(n_vocab=16, seed=3)
    draft = FakeTarget(n_vocab=16, seed=3, agreement=0.8, peak=0.5)
    policy = Throughput(CHEAP)
    drafting = TreeDrafting(target, TreeDrafter(draft, policy, p_split=0.01), policy)
    loop = DecodingLoop(target, drafting, drafting.play)
    prompts = [[1, 2], [3], [4, 5, 6] * 5]
    members = [member_of(s, prompt, 24) for s, prompt in enumerate(prompts)]
    for member in members:
        loop.add(member)
    n_drafted = 0
    while not loop.is_idle:
        step = loop.step(4)
        n_here = sum(round_.n_drafted for _, round_ in step.rounds)
        if not step.read:
            assert sum(n for n, _ in step.decodes) == len(step.rounds) + n_here
            assert step.decodes or not step.rounds
        assert not (step.read and n_here)
        n_drafted += n_here
    assert n_drafted > 10
    for member, prompt in zip(members, prompts, strict=True):
        assert member.history == plain(target, prompt, 24)
