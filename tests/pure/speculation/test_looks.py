"""Tests the price of looks and of reading a prompt, which come before a drafter's first token."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_target import FakeTarget
from hypothesis import given
from hypothesis import strategies as st
from parts import member_of

from specdec.costs.calibration import Calibration
from specdec.costs.profile import CostProfile, KnownCosts
from specdec.decoding.drafting import ChainDrafting
from specdec.decoding.loop import DecodingLoop
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.memory import BATCHED_TAIL, DraftMemory
from specdec.drafters.ngrams import NgramMod
from specdec.drafters.suffix import SuffixDrafter
from specdec.policies.after_prompt import N_ROUNDS, AfterPrompt
from specdec.policies.lately import Lately
from specdec.policies.looks import Looks, ReadingTimes
from specdec.policies.rules import DraftBounds, Fixed, bounded
from specdec.policies.throughput import Throughput
from specdec.policies.walk import ThroughputWalk
from specdec.types import Decision, Draft, DraftRequest, Round

NO_TOKENS = Decision(0, "nothing")
PROBED = CostProfile((1.0, 2.0, 2.4, 2.8, 3.2, 3.6, 4.0, 4.4, 4.8), 0.3)  # pays if all are right
DEAR = CostProfile((1.0, 2.8, 3.0, 3.6, 4.7, 5.5, 6.2, 6.9, 7.5), 1.0)  # no draft of a model pays
GENTLE = CostProfile(tuple(1.0 + 0.1 * n for n in range(9)), 0.01)
FLAT = CostProfile((1.0, 1.02, 1.04, 1.06, 1.08, 1.1, 1.12, 1.14, 1.16), 0.01)


def played(looks: Looks, n_tokens: int, cost: float, gain_every: int = 0) -> int:
    """Number of looks while `n_tokens` are written one by one. Some looks gain 3 tokens."""
    n_looks = rest = 0
    for n in range(n_tokens):
        looks.emitted(1)
        if rest:
            rest -= 1
            continue
        n_looks += 1
        looks.looked(cost)
        if gain_every and n % gain_every == 0:
            looks.gained(3.0)
        else:
            rest = looks.rest
    return n_looks


@given(st.floats(0.001, 5.0), st.integers(100, 3000))
def test_looks_that_gain_nothing_cost_a_share_of_the_time(cost: float, n_tokens: int) -> None:
    n_looks = played(Looks(), n_tokens, cost)
    # A rest has at most 32 rounds, so that a text that begins to repeat itself is seen.
    assert n_looks * cost <= 0.5 + 0.003 * n_tokens + cost * (1 + n_tokens / 32)
    assert n_looks >= n_tokens // 33


def test_looks_of_a_slow_model_never_rest() -> None:
    assert played(Looks(), 2000, 0.003) == 2000


def test_looks_that_gain_more_than_they_cost_go_on() -> None:
    assert played(Looks(), 2000, 0.1, gain_every=10) >= 1900
    assert played(Looks(), 2000, 0.1) <= 150


def test_drafts_that_gain_nothing_on_average_do_not_pay_for_looks() -> None:
    gaining, even = Looks(), Looks()
    for i in range(40):
        for looks in (gaining, even):
            looks.looked(0.1)
        gaining.gained(1.0 if i % 2 else 0.0)
        even.gained(1.0 if i % 2 else -1.0)
    even.gained(-50.0)
    assert gaining.rest == 0
    assert even.rest == 32
    even.gained(1.0)
    assert even.rest == 0, "one large loss does not end looks for long"


def test_one_slow_look_does_not_end_the_others() -> None:
    looks = Looks()
    for cost in (0.01, 0.01, 20.0, 0.01):
        looks.looked(cost)
    assert looks.rest == 0


def test_reading_is_priced_by_a_step_and_then_as_it_took() -> None:
    times = ReadingTimes()
    assert times.expected_s("draft", 160, 1.0) == pytest.approx(11.0)
    times.took("draft", 1.6)
    times.took("draft", 99.0)  # nothing was asked for
    assert times.expected_s("draft", 1000, 1.0) == pytest.approx(11.0)
    assert times.expected_s("mtp", 160, 1.0) == pytest.approx(11.0)


# -- the policy ------------------------------------------------------------------------------------


def asked(policy: Throughput, n_unread: int, **bounds: Any) -> Any:
    request = DraftRequest(0, [1] * 9, bounded(policy, DraftBounds(**bounds)), 8)
    return request.begin(8, "draft", lambda: n_unread)


def wrote(policy: Throughput, n_tokens: int) -> None:
    for _ in range(n_tokens):
        policy.learn(Round(Draft((), (), "draft", NO_TOKENS), 0, (1,), 0.0, 1.0))


def test_a_probe_waits_until_reading_the_prompt_is_affordable() -> None:
    policy = Throughput(PROBED)
    walk = asked(policy, 512)
    assert not walk.wants
    assert walk.rest == 31
    assert "reading 512 tokens of the text first takes the time of 9.9 tokens" in walk.reason
    wrote(policy, 1000)
    assert not asked(policy, 512).wants
    wrote(policy, 3100)
    assert asked(policy, 512).wants  # the way back


def test_a_short_text_is_read_for_a_probe_at_once() -> None:
    walk = asked(Throughput(PROBED), 5)
    assert isinstance(walk, ThroughputWalk)
    assert walk.is_probe


def test_a_known_drafter_is_not_probed_at_a_loss() -> None:
    """Earlier texts have shown how good it is, so no loss is needed to find out."""
    known = Calibration()
    for _ in range(60):
        known.observe("draft", 0.5, accepted=False)
    assert asked(Throughput(PROBED), 60).wants
    policy = Throughput(PROBED, known)
    assert not asked(policy, 60).wants
    wrote(policy, 600)
    assert asked(policy, 60).wants, "the share of time that drafts may lose has grown"


def test_what_cannot_pay_is_probed_after_a_share_of_the_time() -> None:
    """Only its step may become faster than was measured, so there is a way back."""
    policy = Throughput(DEAR)
    walk = asked(policy, 0)
    assert not walk.wants
    assert "even if all their tokens were right" in walk.reason
    assert not policy.may_ask("draft")
    n_waits = policy._sources["draft"].until
    assert n_waits == pytest.approx(1.0 / 0.004, abs=2), "a step takes the time of one token"
    wrote(policy, n_waits - 1)
    assert not policy.may_ask("draft"), "its rows are not taken until then"
    assert not asked(policy, 0).wants
    wrote(policy, 1)
    assert policy.may_ask("draft")
    assert asked(policy, 0).is_probe


@pytest.mark.parametrize("step", [1.0, 2.0, 3.0])
def test_own_layers_that_cannot_pay_take_hardly_any_rows(step: float) -> None:
    """They have as many tokens to read as rounds passed while rows were taken."""
    policy = Throughput(CostProfile(DEAR.step_s, step))
    n_rows = n_unread = n_probes = 0
    for _ in range(3000):
        takes = policy.may_ask("draft")
        n_rows += takes
        walk = asked(policy, n_unread if n_unread > BATCHED_TAIL else 0)
        n_unread = n_unread + 1 if takes and not walk.wants else 0
        if not walk.wants:
            wrote(policy, 1)
            continue
        walk.feed(0.5)
        n_probes += 1
        draft = Draft((), (), "draft", NO_TOKENS, ((7, 0.5),), n_steps=1)
        policy.learn(Round(draft, 0, (1,), step, 1.0))
    assert n_rows <= 0.02 * 3000
    assert n_probes > 1


def test_what_cannot_pay_is_asked_as_soon_as_times_change() -> None:
    costs = KnownCosts(DEAR, 9)
    policy = Throughput(DEAR, costs=costs)
    assert not asked(policy, 0).wants
    costs.times = costs.planned = FLAT.step_s
    costs.draft_step_s, costs.n_plans = FLAT.draft_step_s, 1
    assert asked(policy, 0).wants
    assert policy.may_ask("draft")
    assert policy.may_ask("another")


@pytest.mark.parametrize("step", [1.0, 3.0, 8.0])
@pytest.mark.parametrize("n_text", [600, 12_000])
def test_probes_of_what_cannot_pay_take_a_bounded_share_of_the_time(
    step: float, n_text: int
) -> None:
    """Texts of `n_text` tokens. Reading a token takes a sixteenth of a step."""
    policy = Throughput(CostProfile(DEAR.step_s, step))
    n_tokens, n_unread, probing_s, n_probes = 12_000, 5, 0.0, 0
    for n in range(n_tokens):
        n_unread = 5 if n % n_text == 0 else n_unread + 1
        unread = n_unread if n_unread > BATCHED_TAIL else 0
        walk = asked(policy, unread)
        if not walk.wants:
            wrote(policy, 1)
            continue
        walk.feed(0.5)
        catch_up_s, n_unread, n_probes = unread * step / 16, 0, n_probes + 1
        probing_s += step + catch_up_s
        draft = Draft((), (), "draft", NO_TOKENS, ((7, 0.5),), n_steps=1, catch_up_s=catch_up_s)
        policy.learn(Round(draft, 0, (1,), step, 1.0))
    print(f"{n_probes} probes take {probing_s / n_tokens:.2%} of the time")
    assert probing_s <= 0.01 * n_tokens + 2 * step
    assert n_probes or n_text > 600


def test_changes_of_plan_do_not_put_off_a_probe_for_ever() -> None:
    costs = KnownCosts(DEAR, 9)
    policy = Throughput(DEAR, costs=costs)
    n_probes = 0
    for n in range(2000):
        costs.n_plans = n // 200
        if (walk := asked(policy, 0)).wants:
            walk.feed(0.5)
            n_probes += 1
            draft = Draft((), (), "draft", NO_TOKENS, ((7, 0.5),), n_steps=1)
            policy.learn(Round(draft, 0, (1,), 1.0, 1.0))
        else:
            wrote(policy, 1)
    assert n_probes > 1


def test_the_same_policy_goes_on_with_what_it_learnt() -> None:
    target, policy = FakeTarget(), Throughput(FLAT)
    drafter = ChainDrafter([Silent("suffix")])
    drafting = ChainDrafting(target, drafter, policy)
    policy._sources["suffix"].n_judged = 77
    policy.share_batch(2)
    drafting.use(drafter, policy)
    assert policy._sources["suffix"].n_judged == 77
    assert policy._beside == 0, "the next text is alone again"


def test_a_policy_plans_for_its_drafters_before_the_first_draft() -> None:
    target = FakeTarget()
    drafter = ChainDrafter([Silent("suffix"), Silent("ngram-mod")])
    policy = Throughput(FLAT)
    ChainDrafting(target, drafter, policy)
    assert {name: known.age for name, known in policy._sources.items()} == {
        "suffix": 0, "ngram-mod": 0,
    }  # fmt: skip
    assert all(known.onwards for known in policy._sources.values())


def test_a_limit_of_the_request_does_not_hide_the_price() -> None:
    assert not asked(Throughput(DEAR), 160, p_min=0.5).wants


def test_a_draft_that_should_pay_reads_the_longest_prompt() -> None:
    assert asked(Throughput(FLAT), 100_000).wants


def probed(profile: CostProfile, catch_up_s: float) -> Throughput:
    """A policy after a draft of one wrong token, before which 5 tokens were read."""
    policy = Throughput(profile)
    assert asked(policy, 5).wants
    draft = Draft((), (), "draft", NO_TOKENS, ((7, 0.5),), n_steps=1, catch_up_s=catch_up_s)
    policy.learn(Round(draft, 0, (1,), 1.0, 1.0))
    return policy


def test_the_time_of_reading_for_a_probe_is_a_loss() -> None:
    quick, slow, free = (probed(PROBED, seconds) for seconds in (0.5, 50.0, 0.0))
    assert free._won - quick._won == pytest.approx(0.5)
    assert slow._budget == pytest.approx(-2.0), "it is not behind for ever"
    wrote(quick, 700)
    assert asked(quick, 10).wants, "tokens written in a gap are read at once"
    wrote(quick, 1)
    assert not asked(quick, 1000).wants


def test_a_draft_that_pays_is_not_charged_for_reading() -> None:
    policy = probed(FLAT, 50.0)
    wrote(policy, 20)
    walk = asked(policy, 5000)
    assert walk.wants
    assert not walk.is_probe


def test_a_lone_draft_of_n_grams_is_charged_for_two_changes_of_size() -> None:
    policy = Throughput(FLAT)
    for n_drafted in (0, 3, 0, 0, 3, 3, 0, 0, 3, 3, 0, 0, 3, 3, 0, 0):
        tokens = (7,) * n_drafted
        draft = Draft(tokens, (0.9,) * n_drafted, "suffix", Decision(n_drafted, ""))
        is_same = n_drafted + 1 == policy._same.n_rows
        policy.learn(Round(draft, n_drafted, (*tokens, 1), 0.01, 1.0 if is_same else 1.5))
    for source in ("suffix", "draft"):
        policy.begin(8, source)
        policy._sources[source].age = 1 << 20  # plan with what is known now
    n_grams, model = (policy.begin(8, source) for source in ("suffix", "draft"))
    assert policy._saved_tokens > 0.0
    assert n_grams._price[0] == pytest.approx(-2 * policy._saved_tokens)
    assert model._price[0] == pytest.approx(-policy._saved_tokens)


def test_a_model_that_was_emptied_has_read_nothing() -> None:
    model = FakeTarget()
    memory = DraftMemory(model)
    history = [*range(1, 40)]
    model.extend(0, memory.tail(0, history)[0], 1)
    memory.fed(0, history[-1:])
    memory.mark(0)
    assert memory.n_unread(0, [*history, 5]) == 0
    model.rewind(0, 0)
    assert memory.n_unread(0, [*history, 5]) == 39
    assert len(memory.tail(0, [*history, 5])[0]) == 1, "the others were read"
    assert model.length(0) == 39


# -- after a prompt --------------------------------------------------------------------------------


def n_best(policy: Throughput) -> int:
    """Tokens that are worth verifying if each of 8 is right with a probability of 0.8."""
    walk = policy.begin(8, "suffix")
    for _ in range(8):
        walk.feed(0.8)
    return walk.n_best


def after_prompts(*ratios: Sequence[float]) -> AfterPrompt:
    """An `AfterPrompt` that saw an answer for each of `ratios`: decode times over the usual one."""
    learnt = AfterPrompt()
    for of_answer in ratios:
        learnt.begins()
        for ratio in of_answer:
            learnt.observe(ratio, 1.0)
    learnt.begins()
    return learnt


def test_the_first_decodes_after_a_prompt_are_learnt_round_by_round() -> None:
    learnt = after_prompts((5.0, 2.0, 1.5, 0.5, 9.0), (7.0, 3.0), (6.0, 1.0))
    factors = []
    for _ in range(6):
        factors.append(learnt.factor)
        learnt.observe(1.0, 0.0)  # says nothing: the usual time is not known
    assert factors == [6.0, 2.0, 1.5, 1.0, 1.0, 1.0]
    assert learnt.is_over


def test_one_disturbed_decode_after_a_prompt_changes_nothing() -> None:
    assert after_prompts((1.0,), (500.0,), (1.0,)).factor == 1.0
    assert after_prompts((500.0,), (1.0,)).factor == 1.0, "disturbances only make decodes longer"
    assert after_prompts((500.0,)).factor == 16.0


def test_a_shared_batch_is_no_first_decode_of_an_answer() -> None:
    policy = Throughput(FLAT)
    policy.prompt_read()
    policy.share_batch(2)
    policy.share_batch(1)
    assert policy._after_prompt.is_over
    assert policy._after_prompt.factor == 1.0


def test_a_round_that_was_never_seen_is_as_long_as_the_one_before() -> None:
    learnt = AfterPrompt()
    assert learnt.is_over
    assert learnt.factor == 1.0, "no prompt was read"
    learnt.begins()
    assert learnt.factor == 16.0
    learnt.observe(3.0, 1.0)
    assert learnt.factor == 3.0


@pytest.mark.parametrize(("first_s", "drafts"), [(1.0, True), (12.0, False)])
def test_drafts_are_dearer_while_a_prompts_experts_are_in_the_slots(
    first_s: float, drafts: bool
) -> None:
    """The very first round shows what plain decoding takes there, and later ones are priced."""
    policy = Throughput(GENTLE)
    assert n_best(policy) > 0
    policy.prompt_read()
    assert n_best(policy) == 0
    policy.learn(Round(Draft((), (), "suffix", NO_TOKENS), 0, (1,), 0.0, first_s))
    assert (n_best(policy) > 0) == drafts
    for _ in range(N_ROUNDS):
        policy.learn(Round(Draft((), (), "suffix", NO_TOKENS), 0, (1,), 0.0, 1.0))
    assert n_best(policy) > 0


# -- what drafts took lately -----------------------------------------------------------------------


def test_batches_that_take_longer_than_usual_make_drafts_dearer() -> None:
    """One or two disturbed ones do not, and all is forgotten if nothing is drafted for long."""
    lately = Lately()
    factors = []
    for at, ratio in enumerate((1.5, 90.0, 1.6, 1.7, 0.2, 1.0)):
        lately.observe(ratio, 1.0, at)
        factors.append(lately.factor(at + 1))
    assert factors == [1.0, 1.0, 1.6, 1.6, 1.6, 1.6]
    assert lately.factor(100) == 1.6
    third = Lately()
    for at, ratio in enumerate((1.5, 1.6, 0.9)):
        third.observe(ratio, 1.0, at)
    assert third.factor(3) == 1.5
    assert lately.factor(300) == 1.0, "fewer than three are left"
    for at in range(300, 305):
        lately.observe(90.0, 1.0, at)
    lately.observe(1.0, 0.0, 305)
    assert lately.factor(305) == 3.0


def test_drafts_are_priced_by_what_their_batches_took_lately() -> None:
    """In a text whose tokens use the same experts, wrong drafts use others."""
    policy = Throughput(GENTLE)
    before = n_best(policy)
    draft = Draft((7, 7), (0.8, 0.8), "suffix", Decision(2, ""))
    for _ in range(3):
        policy.learn(Round(draft, 2, (7, 7, 1), 0.0, 3.0))
    assert policy._lately.factor(policy._n_rounds) == pytest.approx(2.5)
    assert n_best(policy) < before
    wrote(policy, 400)
    assert n_best(policy) >= before, "there is a way back"


def test_the_loop_says_when_a_prompt_was_read() -> None:
    target, policy = FakeTarget(), Throughput(FLAT)
    loop = DecodingLoop(target, ChainDrafting(target, Silent("suffix"), policy))
    assert policy._after_prompt.is_over
    loop.add(member_of(0, [1, 2, 3], 12))
    loop.step()
    assert not policy._after_prompt.is_over
    while loop.members:
        loop.step()
    assert policy._after_prompt.is_over


@pytest.mark.parametrize("forgets", [False, True])
def test_what_a_cut_drops_is_unread(forgets: bool) -> None:
    model = FakeTarget(recurrent=forgets)
    memory = DraftMemory(model)
    history = [*range(1, 40)]
    model.extend(0, memory.tail(0, history)[0], 1)
    memory.fed(0, history[-1:])
    memory.mark(0)
    memory.forget(0)
    assert memory.n_unread(0, [*history[:30], *[60] * 20]) == (49 if forgets else 19)


class Noticing:
    """A drafter whose tokens the policy drops. Counts how often it is asked."""

    name = "suffix"

    def __init__(self) -> None:
        self.n_asked = 0

    def propose(self, requests: Any) -> list[Draft]:
        self.n_asked += 1
        dropped = ((1, 0.5),)
        return [Draft((), (), self.name, Decision(0, "too dear"), dropped) for _ in requests]

    def learn(self, sequence: int, round_: Round) -> None: ...
    def heard(self, *args: Any) -> None: ...
    def forget(self, sequence: int) -> None: ...


class RestingAndLearning(Fixed):
    rest_of_looks = 5

    def __init__(self) -> None:
        super().__init__(4)
        self.n_others = 0

    def learn(self, round_: Round) -> None:
        self.n_others += len(round_.draft.others)


def test_a_round_of_rest_asks_nobody_and_learns_nothing_again() -> None:
    drafter, policy, target = Noticing(), RestingAndLearning(), FakeTarget()
    chain = ChainDrafter([drafter, Silent("ngram")])
    loop = DecodingLoop(target, ChainDrafting(target, chain, policy))
    member = member_of(0, [1, 2, 3], 24)
    loop.add(member)
    while loop.members:
        loop.step()
    assert drafter.n_asked == 4
    assert policy.n_others == 4


def indexed(drafter: Any, history: list[int], salt: int, reads: list[int]) -> Draft:
    for n_read in reads:
        drafter.heard(0, history, n_read, salt)
    (draft,) = drafter.propose([DraftRequest(0, history, Fixed(8), 8, salt=salt)])
    return draft


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(0, 60), max_size=4),
    st.integers(0, 2),
)
def test_a_text_that_was_heard_gives_the_same_drafts(
    history: list[int], reads: list[int], salt: int
) -> None:
    reads = [min(n, len(history)) for n in sorted(reads)]
    for make in (SuffixDrafter, lambda: NgramMod(n_match=3, n_slots=1 << 10)):
        heard, not_heard = make(), make()
        assert indexed(heard, history, salt, reads) == indexed(not_heard, history, salt, [])
        longer = [*history, 1, *history]
        for drafter in (heard, not_heard):
            drafter.forget(0)
        assert indexed(heard, longer, salt, reads) == indexed(not_heard, longer, salt, [])


@pytest.mark.parametrize("n_max", [None, 0])
def test_a_prompt_is_indexed_as_it_is_read(n_max: int | None) -> None:
    drafter = SuffixDrafter()
    target = FakeTarget()
    loop = DecodingLoop(target, ChainDrafting(target, drafter, Fixed(4)))
    member = member_of(0, [*range(1, 30)], 4)
    member.bounds = DraftBounds(n_max=n_max)
    loop.add(member)
    loop.step(10)
    match = drafter._matches.get(0)
    assert match is not None
    assert match.n_fed == (10 if n_max is None else 0), "nothing is drafted if the limit is 0"


# -- chain and loop --------------------------------------------------------------------------------


class Silent:
    """A drafter that never has a proposal. `rest`: rounds in which it need not be asked."""

    def __init__(self, name: str, rest: int = 0) -> None:
        self.name, self.rest = name, rest

    def propose(self, requests: Any) -> list[Draft]:
        return [Draft((), (), self.name, Decision(0, "nothing", self.rest)) for _ in requests]

    def learn(self, sequence: int, round_: Round) -> None: ...
    def heard(self, *args: Any) -> None: ...
    def forget(self, sequence: int) -> None: ...


class Resting(Fixed):
    def __init__(self, rest: int) -> None:
        super().__init__(4)
        self._rest = rest

    @property
    def rest_of_looks(self) -> int:
        return self._rest


@pytest.mark.parametrize(
    ("looks", "paid", "expected"), [(0, 31, 0), (20, 31, 20), (20, 5, 5), (20, 0, 0)]
)
def test_a_chain_rests_as_long_as_nobody_wants_to_be_asked(
    looks: int, paid: int, expected: int
) -> None:
    chain = ChainDrafter([Silent("suffix")], Silent("draft", paid))
    (draft,) = chain.propose([DraftRequest(0, [1, 2], Resting(looks), 4)])
    assert draft.decision.rest == expected
    (free,) = ChainDrafter([Silent("suffix"), Silent("ngram")]).propose(
        [DraftRequest(0, [1, 2], Resting(looks), 4)]
    )
    assert free.decision.rest == looks


@pytest.mark.parametrize("n_tokens", [1, 7, 150])
def test_rounds_of_rest_are_learnt_from_together_as_if_one_by_one(
    monkeypatch: pytest.MonkeyPatch, n_tokens: int
) -> None:
    def written(most_rested: int) -> tuple[list[int], Throughput, ChainDrafting, int]:
        clock = itertools.count()
        monkeypatch.setattr("specdec.decoding.drafting._MOST_RESTED", most_rested)
        monkeypatch.setattr("specdec.decoding.loop.perf_counter", lambda: next(clock))
        target, policy = FakeTarget(), Throughput(DEAR)
        drafting = ChainDrafting(target, ChainDrafter([SuffixDrafter()]), policy)
        loop, member = DecodingLoop(target, drafting), member_of(0, [1, 2, 3], n_tokens)
        n_late = 0
        loop.add(member)
        while loop.members:
            loop.step()
            n_late = max(n_late, len(drafting._rested))
        return member.history, policy, drafting, n_late

    one_by_one, together = written(1), written(32)
    assert one_by_one[0] == together[0]
    assert one_by_one[2].counters == together[2].counters
    for name in ("_won", "_n_tokens", "_n_rounds", "rate", "rest_of_looks", "times"):
        assert getattr(one_by_one[1], name) == pytest.approx(getattr(together[1], name))
    assert one_by_one[3] == 0
    assert together[2]._rested == [], "all is learnt at the end of a text"
    if n_tokens == 150:
        assert together[3] > 1


class Losing(Silent):
    """A drafter that spends steps, and gains `gain` tokens with each draft."""

    def __init__(self, name: str, gain: float) -> None:
        super().__init__(name)
        self.gain, self.n_asked, self.spent = gain, 0, 0.75
        self.tokens: tuple[int, ...] = ()

    def propose(self, requests: Any) -> list[Draft]:
        self.n_asked += 1
        walk = SimpleNamespace(gain=self.gain, spent=self.spent, price=0.0)
        requests[0].walks[self.name] = walk
        return [Draft(self.tokens, (0.9,) * len(self.tokens), self.name, NO_TOKENS, n_steps=1)]


@pytest.mark.parametrize(("gain", "least", "most"), [(0.0, 60, 190), (1.0, 1000, 2000)])
def test_a_leader_that_gains_nothing_is_asked_as_rarely_as_a_trial(
    gain: float, least: int, most: int
) -> None:
    paid = Losing("mtp", gain)
    chain = ChainDrafter([Silent("ngram-mod")], paid)
    for _ in range(2000):
        (draft,) = chain.propose([DraftRequest(0, [1, 2], Fixed(4), 4)])
        chain.learn(0, Round(draft, 0, (1,) * 10, 0.0, 1.0))  # it has to catch up each time
    # Trials and the leader's own share: 0.3 % of 20,000 tokens each, and 10 tokens in advance.
    assert least <= paid.n_asked <= most


def test_a_leader_that_gains_nothing_does_not_keep_a_better_one_waiting() -> None:
    leader, better = Losing("mtp", 0.0), Losing("draft", 3.0)
    leader.spent, better.spent, better.tokens = 9.0, 0.3, (1, 1, 1)
    chain = ChainDrafter([Silent("ngram-mod")], leader, better)
    n_tokens = 0
    while chain._paid[0].drafter is leader:
        (draft,) = chain.propose([DraftRequest(0, [1, 2], Fixed(4), 4)])
        chain.learn(0, Round(draft, 0, (1,) * 10, 0.0, 1.0))
        n_tokens += 10
        assert n_tokens < 2000


def test_a_drafter_that_the_policy_did_not_let_draft_was_not_asked() -> None:
    paid = Losing("mtp", 0.0)
    chain = ChainDrafter([Silent("ngram-mod")], paid)
    chain.propose([DraftRequest(0, [1, 2], Fixed(4), 4)])
    chain._n_tokens = 50
    paid.spent = 0.0
    chain.propose([DraftRequest(0, [1, 2], Fixed(4), 4)])
    assert chain._paid[0].asked_at == 0


def test_rounds_of_rest_have_nothing_to_learn_from() -> None:
    seen = Draft((), (), "suffix", Decision(0, "too dear", 9), ((4, 0.5),), n_steps=1)
    assert seen.resting == Draft((), (), "suffix", Decision(0, "too dear", 9))
    empty = Draft((), (), "suffix", Decision(0, "nothing", 9))
    assert empty.resting is empty


def test_a_draft_model_knows_how_much_it_has_not_read() -> None:
    memory = DraftMemory(FakeTarget())
    history = [*range(1, 40)]
    assert memory.n_unread(0, history) == 38
    memory.tail(0, history)
    assert memory.n_unread(0, history) == 0
    memory.forget(0)  # the next request compares
    assert memory.n_unread(0, [*history, *range(BATCHED_TAIL)]) == BATCHED_TAIL
    assert memory.n_unread(0, [9] * 39) == 38
