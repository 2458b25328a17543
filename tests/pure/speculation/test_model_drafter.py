"""Drafts by a draft model, in blocks or token by token, for one sequence or several."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from fake_target import FakeTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from parts import FakeBlockModel, OwnDraws, generated, member_of, plain
from speculation_parts import proposed
from wide import examples

from specdec.costs.profile import CostProfile
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.memory import DraftMemory
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngrams import NgramSimple
from specdec.drafters.translate import TranslatedDrafter
from specdec.drafters.vocabulary import Vocabulary
from specdec.policies.rules import DraftBounds, Fixed, PMin, bounded
from specdec.policies.throughput import Throughput
from specdec.types import Draft, Drafter, DraftRequest, Policy, Round

CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(64)), 0.01)
POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(6),
    "p-min": lambda: PMin(n_max=9, p_min=0.25),
    "throughput": lambda: Throughput(CHEAP),
}
LETTERS = Vocabulary(
    lambda text: [ord(c) % 16 for c in text], lambda tokens: "".join(chr(64 + t) for t in tokens)
)


def assert_same(ours: Sequence[Draft], theirs: Sequence[Draft]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a.tokens, a.source, a.decision.n_tokens) == (
            b.tokens,
            b.source,
            b.decision.n_tokens,
        )
        assert [token for token, _ in a.dropped] == [token for token, _ in b.dropped]
        assert a.probs == pytest.approx(b.probs, rel=1e-5)
        assert np.allclose(a.rows, b.rows, atol=1e-5)
        assert_same(a.others, b.others)


# -- in blocks -------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 300),
    policy=st.sampled_from(["fixed", "p-min"]),
    draws=st.booleans(),
    n_steps_max=st.sampled_from([1, 2, 5, 16]),
    agreement=st.floats(0.2, 1),
    n_ctx=st.integers(8, 60),
)
def test_drafts_in_blocks_are_those_of_a_step_per_token(
    seed: int, policy: str, draws: bool, n_steps_max: int, agreement: float, n_ctx: int
) -> None:
    sizes = {"n_vocab": 16, "seed": seed, "agreement": agreement, "n_ctx": n_ctx}
    sizes["logits_seed"] = seed
    models = (FakeTarget(**sizes), FakeBlockModel(n_steps_max, **sizes))  # type: ignore[arg-type]
    single, blocks = (
        ModelDrafter(model, sampling=OwnDraws(seed) if draws else None) for model in models
    )
    target = FakeTarget(n_vocab=16, seed=seed, logits_seed=seed)
    one, other = POLICIES[policy](), POLICIES[policy]()
    text = [1, 2, 3]
    for _ in range(12):
        limit = seed % 11
        a, b = proposed(single, 0, text, one, limit), proposed(blocks, 0, text, other, limit)
        assert_same([a], [b])
        assert b.n_steps >= a.n_steps
        text += [*a.tokens[: seed % 3], target.next_token(text)]


def test_a_draft_of_the_usual_length_is_one_block() -> None:
    model = FakeBlockModel(n_vocab=16, agreement=0.9)
    drafter, target = ModelDrafter(model), FakeTarget(n_vocab=16)
    list(generated(target, [1, 2, 3], 600, drafter, Fixed(12)))
    model.blocks.clear()
    rounds = list(generated(FakeTarget(n_vocab=16), [1, 2, 3], 300, drafter, Fixed(12)))
    assert len(model.blocks) == sum(r.draft.n_steps > 0 for r in rounds)


@pytest.mark.parametrize("agreement", [0.5, 1.0])
@pytest.mark.parametrize("kind", [FakeTarget, FakeBlockModel])
def test_the_draft_holds_the_text_and_evaluates_nothing_twice(
    kind: type[FakeTarget], agreement: float
) -> None:
    """This also holds for several texts in turn in the same sequence."""
    model = kind(n_vocab=16, agreement=agreement)
    drafter = ModelDrafter(model)
    n_text = n_rejected = 0
    for prompt in ([1, 2, 3], [1, 2, 9, 9], [7]):
        history = list(prompt)
        for round_ in generated(FakeTarget(n_vocab=16), prompt, 60, drafter, Fixed(5)):
            held = model.tokens(0)[: len(history)]
            assert held == history[: len(held)]
            history += round_.emitted
            n_rejected += round_.draft.n_steps - round_.n_accepted
            assert round_.n_accepted == round_.n_drafted or agreement < 1
        n_text += len(history)
    assert drafter.n_rows <= n_text + n_rejected


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_draft_with_rejected_tokens_reads_no_text_anew(recurrent: bool) -> None:
    """A recurrent draft goes back to a checkpoint, and so reads only what came after it."""
    draft = FakeTarget(seed=3, agreement=0.5, recurrent=recurrent)
    rounds = list(generated(FakeTarget(seed=3), [1] * 300, 60, ModelDrafter(draft), Fixed(4)))
    assert sum(r.n_drafted - r.n_accepted for r in rounds) > 30, "many drafts were rejected"
    # Each round reads at most its emitted tokens and then all drafted ones but the last.
    read = sum(len(r.emitted) + r.n_drafted for r in rounds)
    assert sum(draft.calls) <= 300 + read


def test_drawn_drafts_carry_the_rows_they_were_drawn_from() -> None:
    model = FakeBlockModel(n_vocab=16, logits_seed=3)
    draft = proposed(ModelDrafter(model, sampling=OwnDraws(5)), 1, [1, 2], Fixed(6), 6)
    text = [1, 2]
    for token, p, row in zip(draft.tokens, draft.probs, draft.rows, strict=True):
        logits = model.logits_after(text).astype(np.float64) / 0.7
        expected = np.exp(logits - logits.max())
        assert row == pytest.approx(expected / expected.sum())
        assert p == pytest.approx(row.max())
        text.append(token)


@pytest.mark.parametrize("model", [FakeTarget(peak=0.6), FakeBlockModel(peak=0.6)], ids=type)
def test_p_min_is_fed_llama_cpps_p_and_other_policies_the_models(model: FakeTarget) -> None:
    # One of 64 tokens has p 0.6, and the others are equal. Among the best ten alone its p is 0.913.
    drafter = ModelDrafter(model)
    for policy, wanted in ((PMin(4, 0.75), 0.6 / (0.6 + 9 * 0.4 / 63)), (Fixed(4), 0.6)):
        draft = proposed(drafter, 0, [1, 2, 3], policy, 4)
        assert draft.probs == pytest.approx([wanted] * 4, rel=1e-4)


# -- several sequences in one batch ----------------------------------------------------------------


class OneByOne:
    """Asks a drafter for one draft at a time."""

    def __init__(self, inner: Drafter) -> None:
        self.name, self._inner = inner.name, inner
        self.learn, self.forget = inner.learn, inner.forget

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return [self._inner.propose([request])[0] for request in requests]


def drafter_of(kind: str, seed: int, draws: bool, recurrent: bool, single: bool) -> Drafter:
    sampling = OwnDraws(seed) if draws else None
    sizes = {"n_vocab": 16, "seed": seed, "agreement": 0.7, "n_ctx": 60, "logits_seed": seed}
    model = FakeBlockModel(**sizes) if kind == "blocks" else FakeTarget(**sizes)  # type: ignore[arg-type]
    model.can_rewind = not recurrent or kind == "blocks"
    drafter: Drafter = ModelDrafter(model, sampling=sampling)
    drafter = OneByOne(drafter) if single else drafter
    if kind == "chain":
        return ChainDrafter([NgramSimple(1, 4)], drafter)
    return TranslatedDrafter(drafter, LETTERS, LETTERS) if kind == "translated" else drafter


@pytest.mark.parametrize("kind", ["model", "blocks", "chain", "translated"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=examples(10), deadline=None)
@given(
    seed=st.integers(0, 300),
    draws=st.booleans(),
    recurrent=st.booleans(),
    limits=st.lists(st.integers(0, 10), min_size=1, max_size=4),
)
def test_a_batch_of_drafts_is_one_draft_after_the_other(
    kind: str, policy: str, seed: int, draws: bool, recurrent: bool, limits: list[int]
) -> None:
    many, single = (drafter_of(kind, seed, draws, recurrent, s) for s in (False, True))
    target = FakeTarget(n_vocab=16, seed=seed, logits_seed=seed, order=2)
    texts = [[1 + s, 2, 3, 2, 3] * (1 + 3 * s) for s in range(len(limits))]
    for _ in range(6):
        one, other = POLICIES[policy](), POLICIES[policy]()
        asked = [(s, text, limits[s]) for s, text in enumerate(texts)]
        a = single.propose([DraftRequest(s, text, one, limit) for s, text, limit in asked])
        b = many.propose([DraftRequest(s, text, other, limit) for s, text, limit in asked])
        assert_same(a, b)
        for text, draft in zip(texts, b, strict=True):
            text += [*draft.tokens[: seed % 3], target.next_token(text)]


@pytest.mark.parametrize("draws", [False, True], ids=["likeliest", "drawn"])
@pytest.mark.parametrize("kind", ["model", "chain", "translated"])
def test_one_decode_per_drafted_token_serves_all_sequences(kind: str, draws: bool) -> None:
    model = FakeTarget(n_vocab=16, logits_seed=3)
    drafter: Drafter = ModelDrafter(model, sampling=OwnDraws(3) if draws else None)
    if kind == "chain":
        drafter = ChainDrafter([NgramSimple(12, 4)], drafter)
    if kind == "translated":
        drafter = TranslatedDrafter(drafter, LETTERS, LETTERS)
    drafts = drafter.propose([DraftRequest(s, [1, s], Fixed(5), 9) for s in range(4)])
    assert [len(draft.tokens) for draft in drafts] == [5] * 4
    assert model.calls == [8, 4, 4, 4, 4]
    assert {draft.n_steps for draft in drafts} == {5}


def test_a_prompt_longer_than_the_drafts_batch_is_read_in_several_decodes() -> None:
    roomy, tight = (FakeTarget(n_vocab=16, logits_seed=3, n_batch=n) for n in (1 << 30, 64))
    prompt = [i % 16 for i in range(5 * 64 + 3)]
    wanted, draft = (proposed(ModelDrafter(m), 0, prompt, Fixed(4), 4) for m in (roomy, tight))
    assert_same([draft], [wanted])
    assert max(tight.calls) <= 64


@pytest.mark.parametrize(("n_batch", "n_outputs"), [(64, 1 << 30), (1 << 30, 7), (95, 95)])
def test_drafts_that_do_not_fit_one_decode_of_the_draft_are_made_in_several(
    n_batch: int, n_outputs: int
) -> None:
    """32 requests of 8 new tokens each are 256 tokens."""
    requests = [DraftRequest(s, [s % 16, 1, 2, 3, 4, 5, 6, 7], Fixed(5), 9) for s in range(32)]
    roomy = FakeTarget(n_vocab=16, logits_seed=3)
    tight = FakeTarget(n_vocab=16, logits_seed=3, n_batch=n_batch, n_outputs=n_outputs)
    wanted, drafts = ModelDrafter(roomy).propose(requests), ModelDrafter(tight).propose(requests)
    assert_same(drafts, wanted)
    assert sum(tight.calls) == sum(roomy.calls) == 256 + 4 * 32
    assert max(tight.calls) <= n_batch


def members_of(bounds: Sequence[DraftBounds]) -> list[BatchMember]:
    return [member_of(s, [s, 2, 3], 60, bounds=its) for s, its in enumerate(bounds)]


def test_a_draft_that_was_drawn_stays_as_it_was_decided_before_the_draw() -> None:
    """Tokens after a drawn token must not decide whether it is verified."""
    # Only the first extra row is expensive, so whether a draft pays depends on its later tokens.
    bump = CostProfile((1.0, 3.0, 3.1, *(3.2 + 0.01 * n for n in range(40))), 0.01)
    model = FakeTarget(n_vocab=16, logits_seed=2)
    drafting = ChainDrafting(
        FakeTarget(n_vocab=16, logits_seed=2),
        ModelDrafter(model, sampling=OwnDraws(1)),
        Throughput(bump),
        draws=True,
    )
    members = members_of([DraftBounds()] * 3)
    n_drawn = 0
    for _ in range(20):
        for draft in drafting.propose(members):
            assert len(draft.rows) == len(draft.tokens)
            assert not draft.dropped
            n_drawn += len(draft.rows)
    assert n_drawn > 0
    assert drafting.counters.joint_changed == 0


def test_drawn_drafts_of_all_members_fit_a_decode_without_being_cut() -> None:
    target = FakeTarget(n_vocab=16, n_outputs=12)
    drafter = ModelDrafter(FakeTarget(n_vocab=16), sampling=OwnDraws(1))
    drafting = ChainDrafting(target, drafter, Fixed(8), draws=True)
    drafts = drafting.propose(members_of([DraftBounds()] * 3))
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 3]


# -- the limits of one request ---------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_each_requests_bounds_hold_for_its_own_drafts_and_change_no_text(policy: str) -> None:
    bounds = [DraftBounds(n_max=2), DraftBounds(n_min=3), DraftBounds(p_min=0.5), DraftBounds()]
    # The probability of drafted tokens differs from context to context, and is 0.2 at least.
    draft = FakeTarget(n_vocab=16, seed=5, logits_seed=5, order=2)
    target = FakeTarget(n_vocab=16, seed=5)
    drafting = ChainDrafting(target, ModelDrafter(draft), POLICIES[policy]())
    loop, members = DecodingLoop(target, drafting), members_of(bounds)
    for member in members:
        loop.add(member)
    rounds: list[list[Round]] = [[] for _ in bounds]
    while not loop.is_idle:
        for member, round_ in loop.step().rounds:
            rounds[member.sequence].append(round_)
    assert [m.history for m in members] == [plain(target, [s, 2, 3], 60) for s in range(4)]
    assert max(r.n_drafted for r in rounds[0]) <= 2
    assert all(r.n_drafted == 0 or r.n_drafted >= 3 for r in rounds[1])
    assert all(p >= 0.5 for r in rounds[2] for p in r.draft.probs)
    assert any(r.n_drafted > 2 or min(r.draft.probs, default=1.0) < 0.5 for r in rounds[3])
    assert drafting.counters.draft_batches > 0
    assert (drafting.counters.joint_steps > 0) == (policy == "throughput")


def test_bounds_replace_the_rules_of_a_policy_that_has_them() -> None:
    loose = bounded(PMin(9, 0.75, 4), DraftBounds(n_min=0, p_min=0.1))
    assert isinstance(loose, PMin)
    assert (loose.n_max, loose.p_min, loose.n_min) == (9, 0.1, 0)
    policy = Fixed(4)
    assert bounded(policy, DraftBounds(n_max=3)) is policy


@given(probs=st.lists(st.floats(0, 1), max_size=8), n_min=st.integers(0, 5), p_min=st.floats(0, 1))
def test_a_bounded_walk_keeps_what_its_bounds_allow(
    probs: list[float], n_min: int, p_min: float
) -> None:
    bounds = DraftBounds(n_min=n_min, p_min=p_min)
    walk = bounded(Fixed(8), bounds).begin(8, "draft")
    for p in probs:
        if not walk.feed(p):
            break
    n = next((i for i, p in enumerate(probs) if p < p_min), len(probs))
    assert walk.n_best == (n if n >= n_min else 0)
    assert (walk.gain > 0) <= (walk.n_best > 0)
    assert bounds.n_allowed(tuple(probs)) == n


# -- what moves with a conversation ----------------------------------------------------------------


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_saved_text_goes_on_in_another_sequence(recurrent: bool) -> None:
    model = FakeTarget(recurrent=recurrent)
    memory, history, drafted = DraftMemory(model), [1, 2, 3, 4, 5, 6], [9, 8]
    new, _ = memory.tail(0, history)
    model.extend(0, new, 0)
    memory.fed(0, new)
    memory.mark(0)
    model.extend(0, drafted, 0)
    memory.fed(0, drafted)
    tokens = memory.settled(0)
    assert tokens == tuple(history)
    assert model.tokens(0) == history, "drafted tokens are not saved"
    model.rewind(0, 0)
    assert memory.settled(0) == (), "what was emptied is not known"
    model.extend(1, tokens, 0)
    memory.loaded(1, tokens)
    assert memory.tail(1, [*history, 7])[0] == [7]
    memory.loaded(1, tokens)
    other = memory.tail(1, [1, 2, 7, 8])[0]
    assert other == ([1, 2, 7, 8] if recurrent else [7, 8])


def test_windows_that_have_passed_an_edited_place_read_the_text_again() -> None:
    class Windows(FakeTarget):
        """Can drop two tokens, or all."""

        def can_drop(self, sequence: int, n_tokens: int) -> bool:
            return n_tokens <= 2 or n_tokens == self.length(sequence)

        def rewind(self, sequence: int, length: int) -> None:
            assert self.can_drop(sequence, self.length(sequence) - length)
            super().rewind(sequence, length)

    model = Windows()
    memory = DraftMemory(model)
    new, _ = memory.tail(0, [1, 2, 3, 4, 5, 6])
    model.extend(0, new, 0)
    memory.fed(0, new)
    assert memory.tail(0, [1, 2, 3, 4, 5, 9])[0] == [9]
    assert model.tokens(0) == [1, 2, 3, 4, 5]
    assert memory.tail(0, [1, 7, 8])[0] == [1, 7, 8]
    assert model.tokens(0) == []
