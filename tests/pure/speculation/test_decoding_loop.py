"""The decoding loop with several members: they come, wait, fail and leave, and each writes the
text it would have written alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from drafting_parts import Silent, member_of, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from lab.simulation.fake import FakeTarget
from specdec.costs.profile import CostProfile, KnownCosts
from specdec.decoding.acceptance import Greedy, MatchAcceptance, Verdict
from specdec.decoding.drafting import ChainDrafting, cut
from specdec.decoding.loop import BatchMember, DecodingLoop
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngrams import NgramSimple
from specdec.drafters.suffix import SuffixDrafter
from specdec.errors import SpecDecError
from specdec.policies.rules import Fixed, PMin
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Drafter, IsEnd, Policy

CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(32)), 0.01)
POLICIES: dict[str, Callable[[], Policy]] = {
    "throughput": lambda: Throughput(CHEAP),
    "dear": lambda: Throughput(CostProfile(tuple(1.0 + n for n in range(32)), 0.5)),
    "fixed": lambda: Fixed(5),
    "p-min": lambda: PMin(6, 0.5, 0),
}


def drafter_of(name: str, draft: FakeTarget) -> Drafter:
    free = [NgramSimple(2, 4), SuffixDrafter(min_match=2)]
    return {
        "none": Silent(),
        "draft": ModelDrafter(draft),
        "free": ChainDrafter(free),
        "chain": ChainDrafter(free, ModelDrafter(draft)),
    }[name]


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 50),
    drafter=st.sampled_from(["none", "draft", "free", "chain"]),
    policy=st.sampled_from(sorted(POLICIES)),
    recurrent=st.booleans(),
    n_rs_seq=st.integers(0, 3),
    n_outputs=st.integers(4, 40),
    agreement=st.floats(0.2, 1),
)
def test_members_come_and_go_and_each_writes_its_own_plain_text(
    data: st.DataObject,
    seed: int,
    drafter: str,
    policy: str,
    recurrent: bool,
    n_rs_seq: int,
    n_outputs: int,
    agreement: float,
) -> None:
    target = FakeTarget(
        n_vocab=12, seed=seed, recurrent=recurrent, n_rs_seq=n_rs_seq, n_ctx=70,
        n_batch=48, n_outputs=n_outputs,
    )  # fmt: skip
    draft = FakeTarget(
        n_vocab=12, seed=seed, agreement=agreement, recurrent=recurrent, n_ctx=70, n_outputs=4
    )
    drafting = ChainDrafting(target, drafter_of(drafter, draft), POLICIES[policy]())
    loop = DecodingLoop(target, drafting)
    running: dict[BatchMember, list[int]] = {}
    free = [0, 1, 2, 3]
    for _ in range(40):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "cancel"]))
        if action == "add" and free:
            sequence = free.pop()
            target.rewind(sequence, 0)
            prompt = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=30))
            n = data.draw(st.integers(0, 20))
            member = member_of(sequence, prompt, n, end=3)
            running[member] = plain(target, prompt, n, 3)
            loop.add(member)
        elif action == "cancel" and running:
            member = data.draw(st.sampled_from(sorted(running, key=lambda m: m.sequence)))
            loop.remove(member)
            wanted = running.pop(member)
            assert wanted[: len(member.history)] == member.history
            free.append(member.sequence)
        else:
            step = loop.step(data.draw(st.integers(1, 20)))
            assert not step.failed
            for member, round_ in step.rounds:
                assert target.tokens(member.sequence) == member.history[:-1]
                assert round_.emitted
        for member in [m for m in running if m.end]:
            assert member.history == running.pop(member)
            free.append(member.sequence)
    while not loop.is_idle:
        loop.step()
    for member, wanted in running.items():
        assert member.history == wanted
        assert member.end


def test_one_decode_has_every_round_and_a_part_of_the_prompt_that_waits() -> None:
    target = FakeTarget(n_ctx=400)
    loop = DecodingLoop(target, ChainDrafting(target, Silent(), Fixed(0)))
    for sequence in (0, 1):
        loop.add(member_of(sequence, [sequence + 1], 50))
    assert not loop.step().read
    late = member_of(2, list(range(40)), 5)
    loop.add(late)
    target.calls.clear()
    step = loop.step(16)
    assert target.calls == [2 + 16]
    assert [m.sequence for m, _ in step.rounds] == [0, 1]
    assert step.read == [late]
    loop.step(16)
    assert loop.n_reading == 1
    loop.step(16)
    assert (loop.n_reading, loop.n_ready) == (0, 3)
    assert target.calls == [18, 18, 2 + 7], "the last token of the prompt is the first round's"
    loop.step(16)
    assert target.calls[-1] == 3


def test_prompts_are_read_in_the_order_of_their_arrival() -> None:
    target = FakeTarget(n_ctx=400)
    loop = DecodingLoop(target, ChainDrafting(target, Silent(), Fixed(0)))
    members = [member_of(s, list(range(1, 31)), 3) for s in (2, 0, 1)]
    for member in members:
        loop.add(member)
    seen = [[m.sequence for m in loop.step(20).read] for _ in range(4)]
    # 29 tokens of each are read ahead: 20, then 9 and 11 of the next, then 18 and 2, then 20.
    assert seen == [[2], [2, 0], [0, 1], [1]]


def test_without_a_limit_a_step_reads_what_a_decode_takes() -> None:
    target = FakeTarget(n_batch=32)
    loop = DecodingLoop(target, ChainDrafting(target, Silent(), Fixed(0)))
    loop.add(member_of(0, [5] * 70, 2))
    loop.add(member_of(1, [6] * 10, 2))
    loop.step()
    loop.step()
    loop.step()
    assert target.calls == [32, 32, 5 + 9]


def test_a_prompt_that_is_held_already_is_not_read_again() -> None:
    target = FakeTarget()
    target.extend(3, [1, 2, 3])
    loop = DecodingLoop(target, ChainDrafting(target, Silent(), Fixed(0)))
    member = member_of(3, [1, 2, 3, 4], 2, n_cached=3)
    loop.add(member)
    assert loop.n_ready == 1
    with pytest.raises(SpecDecError, match="holds 0 tokens where 2"):
        loop.add(member_of(0, [1, 2, 3], 2, n_cached=2))
    with pytest.raises(SpecDecError, match="empty"):
        loop.add(member_of(1, [], 2))


class Refusing:
    """An acceptance that raises at its second round, in the middle of its work."""

    def __init__(self) -> None:
        self._accept, self._n = MatchAcceptance(Greedy()), 0

    def __call__(
        self, draft: Draft, logits: NDArray[np.float32], history: list[int], is_end: IsEnd
    ) -> Verdict:
        self._n += 1
        verdict = self._accept(draft, logits, history, is_end)
        if self._n == 2:
            raise ValueError("the grammar leaves no token")
        return verdict


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft"])
def test_a_member_whose_sampler_fails_leaves_alone(recurrent: bool, drafter: str) -> None:
    target = FakeTarget(recurrent=recurrent)
    drafting = ChainDrafting(target, drafter_of(drafter, FakeTarget()), Fixed(3))
    loop = DecodingLoop(target, drafting)
    good, bad = member_of(0, [1, 2], 30), member_of(1, [3, 4], 30, accept=Refusing())
    wanted = plain(target, [1, 2], 30)
    loop.add(good)
    loop.add(bad)
    failed = []
    while not loop.is_idle:
        failed += loop.step().failed
    assert [(m, str(e)) for m, e in failed] == [(bad, "the grammar leaves no token")]
    assert good.history == wanted
    assert bad.history == plain(target, [3, 4], len(bad.history) - 2)
    held = target.tokens(1)
    assert held == bad.history[: len(held)]
    assert len(held) >= len(bad.history) - 1


class Fragile(FakeTarget):
    """Loses a decode now and then; what a recurrent one held of its sequences goes with it."""

    fails_at: frozenset[int] = frozenset()
    n_decodes = 0

    def extend_batch(
        self, parts: Sequence[tuple[int, Sequence[int], int]]
    ) -> list[NDArray[np.float32]]:
        self.n_decodes += 1
        if self.n_decodes in self.fails_at:
            for sequence, _, _ in parts:
                if not self.can_rewind:
                    self.rewind(sequence, 0)
            raise MemoryError("no room in the KV cache")
        return super().extend_batch(parts)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("drafter", ["none", "draft", "chain"])
def test_after_a_decode_that_fails_all_members_go_on_as_if_it_had_not_been(
    recurrent: bool, drafter: str
) -> None:
    target = Fragile(recurrent=recurrent, n_vocab=16)
    target.fails_at = frozenset({1, 4, 5, 9, 20})
    drafting = ChainDrafting(target, drafter_of(drafter, FakeTarget(n_vocab=16)), Fixed(3))
    loop = DecodingLoop(target, drafting)
    members = [member_of(s, [s, 1, 2, 3] * 3, 20) for s in range(3)]
    for member in members:
        loop.add(member)
    n_failures = 0
    while not loop.is_idle:
        try:
            loop.step(6)
        except MemoryError:
            n_failures += 1
    assert n_failures >= 3
    for s, member in enumerate(members):
        assert member.history == plain(target, [s, 1, 2, 3] * 3, 20)


def test_drafts_of_all_members_fit_the_rows_of_one_decode() -> None:
    target = FakeTarget(n_outputs=11)
    drafting = ChainDrafting(target, ModelDrafter(FakeTarget()), Fixed(8))
    members = [member_of(s, [s, 2, 3], 40) for s in range(3)]
    for member in members:
        target.extend(member.sequence, member.history[:-1])
    drafts = drafting.propose(members)
    assert sum(1 + len(draft.tokens) for draft in drafts) == 11
    assert max(len(d.tokens) for d in drafts) - min(len(d.tokens) for d in drafts) <= 1
    for draft in drafts:
        assert len(draft.tokens) == len(draft.probs) == draft.decision.n_tokens
        assert len(draft.tokens) + len(draft.dropped) == 8


def test_a_sampled_draft_is_cut_with_its_rows_and_what_goes_is_no_evidence() -> None:
    rows = tuple(np.eye(4)[i] for i in (1, 2, 3))
    draft = Draft((1, 2, 3), (0.9, 0.8, 0.7), "draft", Decision(3, "3"), rows=rows)
    short = cut(draft, 1)
    assert (short.tokens, short.probs, len(short.rows)) == ((1,), (0.9,), 1)
    assert short.dropped == ()


def test_members_without_drafts_are_decided_once_for_many_steps() -> None:
    target = FakeTarget(n_vocab=200, agreement=1.0)

    drafter = Silent()
    loop = DecodingLoop(target, ChainDrafting(target, drafter, Fixed(0)))
    for s in range(3):
        loop.add(member_of(s, [s + 1], 100))
    for _ in range(50):
        loop.step()
    assert drafter.n_asked == 3
    loop.add(member_of(3, [9], 100))
    loop.step()
    assert drafter.n_asked == 7, "another batch is decided anew"


def test_times_of_steps_that_read_prompts_are_not_taken_for_those_of_their_rounds() -> None:
    target = FakeTarget()
    observed: list[int] = []

    class Noted(KnownCosts):
        def observe(self, n: int, *_: float) -> None:
            observed.append(n)

    policy = Throughput(CHEAP, costs=Noted(CHEAP, CHEAP.n_max))
    loop = DecodingLoop(target, ChainDrafting(target, Silent(), policy))
    loop.add(member_of(0, [1], 200))
    loop.add(member_of(1, list(range(60)), 1))
    loop.step(1)
    for _ in range(20):
        assert loop.step(1).read
    assert observed == []


def test_a_step_says_the_size_and_the_time_of_its_decodes() -> None:
    """Of all members together; a batch with a part of a prompt is another one, and is left out."""
    target = FakeTarget(n_vocab=16, seed=3)
    loop = DecodingLoop(
        target, ChainDrafting(target, ModelDrafter(FakeTarget(n_vocab=16)), Fixed(3))
    )
    loop.add(member_of(0, [1], 50))
    target.calls.clear()
    one = loop.step()
    loop.add(member_of(1, [2], 50))
    both = loop.step()
    assert [n for step in (one, both) for n, _ in step.decodes] == target.calls == [4, 8]
    ((_, seconds),) = both.decodes
    assert {round_.verify_s for _, round_ in both.rounds} == {seconds}
    loop.add(member_of(2, list(range(9)), 50))
    read = loop.step(4)
    assert read.rounds
    assert not read.decodes

    plain = DecodingLoop(target)
    plain.add(member_of(3, [1], 50))
    assert [n for n, _ in plain.step().decodes] == [1]


def test_a_decode_of_whom_a_sampler_fails_is_told_too() -> None:
    target = FakeTarget()
    loop = DecodingLoop(target)
    loop.add(member_of(0, [1], 50, accept=Refusing()))
    loop.add(member_of(1, [2], 50))
    loop.step()
    step = loop.step()
    assert len(step.failed) == len(step.rounds) == 1
    assert [n for n, _ in step.decodes] == [2]


def test_drafts_chosen_together_fit_the_rows_of_one_decode() -> None:
    target = FakeTarget(n_outputs=7)
    policy = Throughput(CHEAP)
    drafting = ChainDrafting(target, ModelDrafter(FakeTarget(peak=0.99)), policy)
    members = [member_of(s, [s, 2, 3], 40) for s in range(3)]
    for member in members:
        target.extend(member.sequence, member.history[:-1])
    drafts = drafting.propose(members)
    assert sum(len(draft.tokens) + len(draft.dropped) for draft in drafts) > 4
    assert sum(len(draft.tokens) for draft in drafts) == 4


def test_a_chain_of_drafters_decides_and_learns_for_several_members() -> None:
    # A text of one token's memory runs in circles, which n-grams see, and see through.
    target = FakeTarget(n_vocab=16, seed=5, order=1)
    draft = ModelDrafter(FakeTarget(n_vocab=16, seed=5, order=1, agreement=0.5))
    policy = Throughput(CHEAP)
    drafting = ChainDrafting(target, ChainDrafter([NgramSimple(2, 4)], draft), policy)
    loop = DecodingLoop(target, drafting)
    for s in range(3):
        loop.add(member_of(s, [s, 1, 2] * 4, 60))
    sources = set()
    while not loop.is_idle:
        sources |= {round_.draft.source for _, round_ in loop.step().rounds if round_.n_drafted}
    assert sources == {"draft", "ngram-simple"}
    learnt = policy.calibration.sources
    assert set(learnt) >= sources


def test_parts_of_prompts_fit_the_batch_beside_the_rounds() -> None:
    """With as many prompt tokens as a decode takes, and rows that take their part of it."""
    target = FakeTarget(n_vocab=16, n_batch=8)
    loop = DecodingLoop(target)
    members = [member_of(sequence, [sequence + 1], 20) for sequence in range(3)]
    members.append(member_of(3, [5] * 40, 4))
    for member in members:
        loop.add(member)
    while not loop.is_idle:
        loop.step(8)
    assert max(target.calls) <= 8
    assert [len(member.history) for member in members] == [21, 21, 21, 44]
