"""Drafts in blocks are the drafts that a step per token makes, whatever the blocks' lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from block_model import FakeBlockModel
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.fake import FakeTarget
from specdec.build import build_policy
from specdec.costs.profile import CostProfile
from specdec.costs.profile_io import published_curves
from specdec.decoding.accept import Greedy, MatchAcceptance
from specdec.decoding.decode import decode
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.block import BlockDrafter, Pace
from specdec.drafters.model import ModelDrafter
from specdec.options import PolicyName, SpecOptions
from specdec.policies.rules import Fixed
from specdec.policies.rules import PMin
from specdec.policies.throughput import Throughput
from specdec.types import Draft, Policy, Round

CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(32)), 0.01)
R1 = published_curves()["deepseek-r1-0528-q4_x"]
POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(7),
    "p-min": lambda: PMin(n_max=9, p_min=0.4),
    "throughput": lambda: Throughput(CHEAP, refresh=False),
}


def never(_: int) -> bool:
    return False


def content(draft: Draft) -> tuple[object, ...]:
    return (draft.tokens, [token for token, _ in draft.dropped], draft.decision.n_tokens)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 300),
    policy=st.sampled_from(["fixed", "p-min"]),
    block=st.sampled_from([None, 1, 2, 5, 16]),
    agreement=st.floats(0.2, 1),
    n_ctx=st.integers(8, 60),
)
def test_every_draft_is_the_one_of_a_step_per_token(
    seed: int, policy: str, block: int | None, agreement: float, n_ctx: int
) -> None:
    sizes = {"n_vocab": 16, "seed": seed, "agreement": agreement, "n_ctx": n_ctx}
    single = ModelDrafter(FakeTarget(**sizes, logits_seed=seed))  # type: ignore[arg-type]
    blocks = BlockDrafter(FakeBlockModel(**sizes, logits_seed=seed), block=block)
    target = FakeTarget(n_vocab=16, seed=seed, logits_seed=seed)
    one, other = POLICIES[policy](), POLICIES[policy]()
    text = [1, 2, 3]
    for _ in range(12):
        limit = seed % 11
        a, b = single.propose(0, text, one, limit), blocks.propose(0, text, other, limit)
        assert content(a) == content(b)
        assert b.probs == pytest.approx(a.probs, rel=1e-5)
        assert b.n_steps >= a.n_steps
        assert len(b.gaps) == len(b.tokens) + len(b.dropped)
        text += [*a.tokens[: seed % 3], target.next_token(text)]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("block", [None, 1, 3])
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 200), agreement=st.floats(0, 1), n=st.integers(1, 50))
def test_the_text_is_plain_decodings(
    policy: str, block: int | None, seed: int, agreement: float, n: int
) -> None:
    target = FakeTarget(n_vocab=16, seed=seed)
    draft = FakeBlockModel(n_vocab=16, seed=seed, agreement=agreement, n_ctx=40)
    drafter = BlockDrafter(draft, block=block)
    text = [1, 2, 3]
    for round_ in decode(
        target, 0, text.copy(), drafter=drafter, policy=POLICIES[policy](), chooser=Greedy(),
        n_predict=n, is_end=never,
    ):  # fmt: skip
        text += round_.emitted
    expected = [1, 2, 3]
    while len(expected) < n + 3:
        expected.append(target.next_token(expected))
    assert text == expected


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 100),
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    agreement=st.floats(0.3, 1),
    block=st.sampled_from([None, 1, 4]),
)
def test_sequences_drafted_together_have_their_own_plain_texts(
    seed: int, lengths: list[int], agreement: float, block: int | None
) -> None:
    target = FakeTarget(n_vocab=16, seed=seed, n_ctx=60)
    draft = FakeBlockModel(n_vocab=16, seed=seed, agreement=agreement, n_ctx=50)
    greedy = Greedy()
    members = [
        BatchMember(s, [s, s + 1, 3] * (1 + 4 * s), greedy, MatchAcceptance(greedy), n, never)
        for s, n in enumerate(lengths)
    ]
    prompts = [list(member.history) for member in members]
    policy = Throughput(CHEAP, refresh=False)
    drafter = BlockDrafter(draft, block=block)
    loop = DecodingLoop(target, ChainDrafting(target, drafter, policy))
    for member in members:
        loop.add(member)
    while not loop.is_idle:
        for member, _ in loop.step().rounds:
            assert target.tokens(member.sequence) == member.history[:-1]
    for member, prompt, n in zip(members, prompts, lengths, strict=True):
        expected = prompt
        while len(expected) < len(prompt) + n and len(expected) <= target.n_ctx:
            expected.append(target.next_token(expected))
            n -= 1
            if not n:
                break
        assert member.history == expected


def rounds_of(drafter: BlockDrafter, policy: Policy, n: int) -> list[Round]:
    target = FakeTarget(n_vocab=16)
    return list(
        decode(
            target,
            0,
            [1, 2, 3],
            drafter=drafter,
            policy=policy,
            chooser=Greedy(),
            n_predict=n,
            is_end=never,
        )  # fmt: skip
    )


def test_where_lengths_do_not_change_a_draft_is_one_block() -> None:
    model = FakeBlockModel(n_vocab=16, agreement=0.9)
    drafter = BlockDrafter(model)
    rounds_of(drafter, Fixed(12), 600)
    model.blocks.clear()
    rounds = rounds_of(drafter, Fixed(12), 300)
    assert len(model.blocks) == sum(r.draft.n_steps > 0 for r in rounds)


def test_nothing_is_evaluated_twice_but_what_was_rejected() -> None:
    model = FakeBlockModel(n_vocab=16)
    drafter = BlockDrafter(model)
    rounds = rounds_of(drafter, Fixed(5), 300)
    n_text = 3 + sum(len(r.emitted) for r in rounds)
    # All drafts are right here; steps beyond the last round's wishes are all that is too much.
    assert drafter.n_rows <= n_text + sum(model.blocks) - sum(r.n_drafted for r in rounds)


class Seeded:
    """Draws at one temperature, from a seed."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def temperature(self, sequence: int) -> float:
        return 0.8

    def rng(self, sequence: int) -> np.random.Generator:
        return self._rng


def test_a_seed_repeats_drawn_drafts_whatever_the_blocks() -> None:
    def drafts(block: int | None) -> list[tuple[int, ...]]:
        model = FakeBlockModel(n_vocab=16, logits_seed=3)
        drafter = BlockDrafter(model, sampling=Seeded(5), block=block)
        return [drafter.propose(0, [1, 2, i], PMin(8, 0.2), 8).tokens for i in range(12)]

    assert drafts(None) == drafts(1) == drafts(3)


def test_drawn_drafts_carry_the_rows_they_were_drawn_from() -> None:
    model = FakeBlockModel(n_vocab=16, logits_seed=3)
    drafter = BlockDrafter(model, sampling=Seeded(5))
    draft = drafter.propose(0, [1, 2], Fixed(6), 6)
    text = [1, 2]
    for token, p, row in zip(draft.tokens, draft.probs, draft.rows, strict=True):
        logits = model.logits_after(text).astype(np.float64) / 0.8
        expected = np.exp(logits - logits.max())
        assert row == pytest.approx(expected / expected.sum())
        assert p == pytest.approx(row.max())
        text.append(token)


@given(st.lists(st.integers(0, 30), max_size=40))
def test_blocks_have_a_length_and_approach_what_is_wanted(wanted: list[int]) -> None:
    pace = Pace()
    for n in wanted:
        pace.wanted(n, 31)
        assert pace.length(0) >= 1
        assert 1 <= pace.length(5) <= max(1, pace.length(0))
    pace = Pace()
    for _ in range(30):
        pace.wanted(12, 12)
    assert pace.length(0) == 12
    pace.wanted(2, 2)
    assert pace.length(0) == 12
    assert Pace(3).length(0) == Pace(3).length(9) == 3


PUBLISHED = (PolicyName.P_MIN, PolicyName.P_MINS, PolicyName.RATIONAL, PolicyName.SPEED_A,
             PolicyName.SPEED_B, PolicyName.COSTS)  # fmt: skip


@pytest.mark.parametrize("in_blocks", [False, True], ids=["steps", "blocks"])
def test_published_rules_are_fed_llama_cpps_p(in_blocks: bool) -> None:
    # One token has 0.6 and each of 63 others as much as the next: of ten it has 0.913.
    model = FakeBlockModel(peak=0.6)
    drafter = BlockDrafter(model) if in_blocks else ModelDrafter(FakeTarget(peak=0.6))
    of_ten = 0.6 / (0.6 + 9 * 0.4 / 63)
    for name in PolicyName:
        policy = build_policy(SpecOptions(policy=name), R1)
        draft = drafter.propose(0, [1, 2, 3], policy, 4)
        drafted = [*draft.probs, *(p for _, p in draft.dropped)]
        wanted = of_ten if name in PUBLISHED else 0.6
        assert drafted == pytest.approx([wanted] * len(drafted), rel=1e-4), name
        assert drafted or name is PolicyName.BANDIT  # which begins by trying no draft
    strict = build_policy(SpecOptions(policy=PolicyName.P_MIN, p_top_k=0), R1)
    assert drafter.propose(0, [1, 2, 3], strict, 4).tokens == (), "0.6 is below 0.75"
    assert len(drafter.propose(0, [1, 2, 3], PMin(4, 0.75), 4).tokens) == 4
