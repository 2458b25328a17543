"""Several sequences drafted in one batch: the drafts are those of one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from block_model import FakeBlockModel
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.fake import FakeTarget
from specdec.costs.profile import CostProfile
from specdec.decoding.accept import Greedy, MatchAcceptance
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.decoding.reject import Sampler
from specdec.drafters.block import BlockDrafter
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram_simple import NgramSimple
from specdec.drafters.together import one_by_one, propose_many_of
from specdec.drafters.translate import TranslatedDrafter, Vocabulary
from specdec.policies.rules import DraftBounds, bounded
from specdec.policies.rules import Fixed
from specdec.policies.rules import PMin
from specdec.policies.throughput import Throughput
from specdec.types import Draft, Drafter, DraftRequest, Policy, Round

CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(64)), 0.01)
POLICIES: dict[str, Callable[[], Policy]] = {
    "fixed": lambda: Fixed(6),
    "p-min": lambda: PMin(n_max=9, p_min=0.25),
    "throughput": lambda: Throughput(CHEAP, refresh=False),
}
LETTERS = Vocabulary(
    lambda text: [ord(c) % 16 for c in text], lambda tokens: "".join(chr(64 + t) for t in tokens)
)


class OwnDraws:
    """Each sequence draws from numbers of its own, at a temperature of its own."""

    def __init__(self, seed: int) -> None:
        self._rngs = [np.random.default_rng((seed, s)) for s in range(8)]

    def temperature(self, sequence: int) -> float:
        return 0.4 + 0.3 * sequence

    def rng(self, sequence: int) -> np.random.Generator:
        return self._rngs[sequence]

    def probabilities(self, sequence: int, logits: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return Sampler(self.temperature(sequence)).probabilities(logits)


class Single:
    """A drafter whose batches nobody sees."""

    def __init__(self, inner: Drafter) -> None:
        self.name, self._inner = inner.name, inner

    def propose(self, sequence: int, history: Sequence[int], policy: Policy, limit: int) -> Draft:
        return self._inner.propose(sequence, history, policy, limit)

    def learn(self, sequence: int, round_: Round) -> None:
        self._inner.learn(sequence, round_)

    def forget(self, sequence: int) -> None:
        self._inner.forget(sequence)


def model_of(kind: str, seed: int, draws: bool, recurrent: bool) -> Drafter:
    sampling = OwnDraws(seed) if draws else None
    sizes = {"n_vocab": 16, "seed": seed, "agreement": 0.7, "n_ctx": 60, "logits_seed": seed}
    if kind == "blocks":
        return BlockDrafter(FakeBlockModel(**sizes), sampling=sampling)  # type: ignore[arg-type]
    model = FakeTarget(**sizes, recurrent=recurrent)  # type: ignore[arg-type]
    return ModelDrafter(model, sampling=sampling)


def drafter_of(kind: str, seed: int, draws: bool, recurrent: bool, single: bool) -> Drafter:
    """With `single` no drafter of a chain, either, is asked for several sequences."""
    drafter = model_of(kind, seed, draws, recurrent)
    drafter = Single(drafter) if single else drafter
    if kind == "chain":
        return ChainDrafter([NgramSimple(1, 4)], drafter)
    return TranslatedDrafter(drafter, LETTERS, LETTERS) if kind == "translated" else drafter


def content(draft: Draft) -> tuple[object, ...]:
    rows = [np.round(row, 6).tolist() for row in draft.rows]
    probs = [round(p, 6) for p in draft.probs]
    others = [(d.tokens, [round(p, 6) for p in d.probs]) for d in draft.others]
    dropped = [token for token, _ in draft.dropped]
    n = draft.decision.n_tokens
    return draft.tokens, probs, dropped, draft.source, rows, others, n


@pytest.mark.parametrize("kind", ["model", "blocks", "chain", "translated"])
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 300),
    draws=st.booleans(),
    recurrent=st.booleans(),
    limits=st.lists(st.integers(0, 10), min_size=1, max_size=4),
)
def test_a_batch_of_drafts_is_one_draft_after_the_other(
    kind: str, policy: str, seed: int, draws: bool, recurrent: bool, limits: list[int]
) -> None:
    many = propose_many_of(drafter_of(kind, seed, draws, recurrent, single=False))
    slow = drafter_of(kind, seed, draws, recurrent, single=True)
    # A chain weighs its drafters once per batch: its twin hides the batches of the model in it.
    single = propose_many_of(slow) if kind == "chain" else one_by_one(slow)
    target = FakeTarget(n_vocab=16, seed=seed, logits_seed=seed, order=2)
    texts = [[1 + s, 2, 3, 2, 3] * (1 + 3 * s) for s in range(len(limits))]
    for _ in range(6):
        one, other = POLICIES[policy](), POLICIES[policy]()
        asked = [(s, text, limits[s]) for s, text in enumerate(texts)]
        a = single([DraftRequest(s, text, one, limit) for s, text, limit in asked])
        b = many([DraftRequest(s, text, other, limit) for s, text, limit in asked])
        for x, y in zip(a, b, strict=True):
            assert content(x) == content(y)
            assert len(y.tokens) == len(y.probs)
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
    policy = Fixed(5)
    requests = [DraftRequest(s, [1, s], policy, 9) for s in range(4)]
    drafts = propose_many_of(drafter)(requests)
    assert [len(draft.tokens) for draft in drafts] == [5] * 4
    assert model.calls == [8, 4, 4, 4, 4]
    assert {draft.n_steps for draft in drafts} == {5}


@pytest.mark.parametrize(("n_batch", "n_outputs"), [(64, 1 << 30), (1 << 30, 7), (95, 95)])
def test_drafts_that_do_not_fit_one_decode_of_the_draft_are_made_in_several(
    n_batch: int, n_outputs: int
) -> None:
    """32 requests of 8 new tokens each are 256 tokens."""
    policy = Fixed(5)
    requests = [DraftRequest(s, [s % 16, 1, 2, 3, 4, 5, 6, 7], policy, 9) for s in range(32)]
    roomy, tight = (
        FakeTarget(n_vocab=16, logits_seed=3),
        FakeTarget(n_vocab=16, logits_seed=3, n_batch=n_batch, n_outputs=n_outputs),
    )
    wanted = ModelDrafter(roomy).propose_many(requests)
    drafts = ModelDrafter(tight).propose_many(requests)
    assert list(map(content, drafts)) == list(map(content, wanted))
    assert sum(tight.calls) == sum(roomy.calls) == 256 + 4 * 32
    assert max(tight.calls) <= n_batch


def played(
    drafter: Drafter, policy: Policy, bounds: Sequence[DraftBounds], *, batched: bool, joint: bool
) -> tuple[list[list[int]], list[Round], ChainDrafting]:
    """The texts of members with these bounds, their rounds, and who drafted."""
    target = FakeTarget(n_vocab=16, seed=5)
    drafting = ChainDrafting(target, drafter, policy, batched=batched, joint=joint)
    loop = DecodingLoop(target, drafting)
    greedy = Greedy()
    members = [
        BatchMember(
            s, [s, 2, 3], greedy, MatchAcceptance(greedy), 60, lambda _: False, bounds=bound
        )
        for s, bound in enumerate(bounds)
    ]
    for member in members:
        loop.add(member)
    rounds: list[Round] = []
    while not loop.is_idle:
        rounds += [round_ for _, round_ in loop.step().rounds]
    return [member.history for member in members], rounds, drafting


@pytest.mark.parametrize("joint", [False, True], ids=["alone", "joint"])
@pytest.mark.parametrize("batched", [False, True], ids=["in turn", "in a batch"])
@pytest.mark.parametrize("policy", POLICIES)
def test_texts_are_the_targets_however_drafts_are_made_and_counters_say_how(
    policy: str, batched: bool, joint: bool
) -> None:
    draft = FakeTarget(n_vocab=16, seed=5, agreement=0.7)
    drafter = ModelDrafter(draft)
    found, rounds, drafting = played(
        drafter, POLICIES[policy](), [DraftBounds()] * 3, batched=batched, joint=joint
    )
    target = FakeTarget(n_vocab=16, seed=5)
    for s, text in enumerate(found):
        wanted = [s, 2, 3]
        while len(wanted) < len(text):
            wanted.append(target.next_token(wanted))
        assert text == wanted
    counters = drafting.counters
    assert (counters.draft_batches > 0) == batched
    assert (counters.joint_steps > 0) == (joint and policy == "throughput")
    assert sum(round_.n_drafted for round_ in rounds) > 30
    if not batched:
        assert max(draft.calls) <= 3, "no decode of the draft has another sequence's token"


def test_a_draft_that_was_drawn_stays_as_it_was_decided_before_the_draw() -> None:
    """What follows a drawn token must not decide on whether that is verified."""
    # Few rows are dear and many are not: whether the bump pays depends on the tokens behind it.
    bump = CostProfile((1.0, 3.0, 3.1, *(3.2 + 0.01 * n for n in range(40))), 0.01)
    target = FakeTarget(n_vocab=16, logits_seed=2)
    policy = Throughput(bump, refresh=False)
    drafter = ModelDrafter(FakeTarget(n_vocab=16, logits_seed=2), sampling=OwnDraws(1))
    drafting = ChainDrafting(target, drafter, policy, draws=True)
    greedy = Greedy()
    members = [
        BatchMember(s, [s, 2, 3], greedy, MatchAcceptance(greedy), 60, lambda _: False)
        for s in range(3)
    ]
    n_drawn = 0
    for _ in range(20):
        for draft in drafting.propose_many(members):
            assert len(draft.rows) == len(draft.tokens)
            assert not draft.dropped
            n_drawn += len(draft.rows)
    assert n_drawn > 0
    assert drafting.counters.joint_changed == 0


def test_drawn_drafts_of_all_members_fit_a_decode_without_being_cut() -> None:
    target = FakeTarget(n_vocab=16, n_outputs=12)
    drafter = ModelDrafter(FakeTarget(n_vocab=16), sampling=OwnDraws(1))
    drafting = ChainDrafting(target, drafter, Fixed(8), draws=True)
    greedy = Greedy()
    members = [
        BatchMember(s, [s, 2], greedy, MatchAcceptance(greedy), 60, lambda _: False)
        for s in range(3)
    ]
    assert [len(draft.tokens) for draft in drafting.propose_many(members)] == [3, 3, 3]


# -- a request's own bounds ------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batched", [False, True])
def test_each_requests_bounds_hold_for_its_own_drafts(policy: str, batched: bool) -> None:
    bounds = [DraftBounds(n_max=2), DraftBounds(n_min=3), DraftBounds(p_min=0.5), DraftBounds()]
    # The probability of what is drafted differs from context to context, and is never below 0.2.
    draft = FakeTarget(n_vocab=16, seed=5, logits_seed=5, order=2)
    rounds: list[list[Round]] = [[] for _ in bounds]

    class Listening(ModelDrafter):
        def learn(self, sequence: int, round_: Round) -> None:
            rounds[sequence].append(round_)

    found, _, _ = played(Listening(draft), POLICIES[policy](), bounds, batched=batched, joint=True)
    target = FakeTarget(n_vocab=16, seed=5)
    for s, text in enumerate(found):
        wanted = [s, 2, 3]
        while len(wanted) < len(text):
            wanted.append(target.next_token(wanted))
        assert text == wanted, "bounds change no text"
    assert max(r.n_drafted for r in rounds[0]) <= 2
    assert all(r.n_drafted == 0 or r.n_drafted >= 3 for r in rounds[1])
    assert all(p >= 0.5 for r in rounds[2] for p in r.draft.probs)
    assert any(r.n_drafted > 2 or min(r.draft.probs, default=1.0) < 0.5 for r in rounds[3])


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
