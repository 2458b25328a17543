"""The decoding loop on fakes: members are added, wait, fail and leave.

Each member writes the text that it would have written alone, however its text ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

import numpy as np
import pytest
from fake_target import FakeTarget
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from parts import FakeBlockModel, Silent, emitted, generated, member_of, plain
from wide import examples

from specdec.costs.profile import CostProfile, KnownCosts
from specdec.decoding.acceptance import Greedy, MatchAcceptance, Verdict
from specdec.decoding.drafting import ChainDrafting, cut
from specdec.decoding.loop import DecodingLoop
from specdec.decoding.member import BatchMember
from specdec.drafters.chain import ChainDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram_cache import NgramCache
from specdec.drafters.ngrams import NgramMapK, NgramMapK4V, NgramMod, NgramSimple
from specdec.drafters.suffix import SuffixDrafter
from specdec.drafters.translate import TranslatedDrafter
from specdec.drafters.vocabulary import Vocabulary
from specdec.errors import SpecDecError
from specdec.policies.rules import Fixed, PMin
from specdec.policies.throughput import Throughput
from specdec.types import Decision, Draft, Drafter, IsEnd, Policy, Round

# Larger batches cost almost nothing more, so drafts pay.
CHEAP = CostProfile(tuple(1.0 + 0.01 * n for n in range(32)), 0.01)
POLICIES: dict[str, Callable[[], Policy]] = {
    "throughput": lambda: Throughput(CHEAP),
    "dear": lambda: Throughput(CostProfile(tuple(1.0 + n for n in range(32)), 0.5)),
    "fixed": lambda: Fixed(5),
    "p-min": lambda: PMin(6, 0.5, 0),
}


def words(n: int) -> Vocabulary:
    """A vocabulary of single characters. Their token ids are shifted by `n`."""
    return Vocabulary(
        lambda text: [(ord(c) - 65 + n) % 12 for c in text],
        lambda tokens: "".join(chr(65 + (t - n) % 12) for t in tokens),
    )


def free() -> list[Drafter]:
    return [NgramSimple(2, 4), SuffixDrafter(min_match=2)]


DRAFTERS: dict[str, Callable[[FakeTarget], Drafter]] = {
    "draft": ModelDrafter,
    "ngram-simple": lambda _: NgramSimple(2, 6),
    "ngram-map-k": lambda _: NgramMapK(2, 6),
    "ngram-map-k4v": lambda _: NgramMapK4V(2, 3, 1),
    "ngram-mod": lambda _: NgramMod(2, 1, 8, 1 << 10),
    "ngram-cache": lambda _: NgramCache(6),
    "suffix": lambda _: SuffixDrafter(6, 1, corpus=[[1, 2, 3, 4, 5]]),
    "n-grams": lambda _: ChainDrafter(free()),
    "chain": lambda draft: ChainDrafter(free(), ModelDrafter(draft)),
    "translated": lambda draft: TranslatedDrafter(ModelDrafter(draft), words(0), words(3)),
}


@pytest.mark.parametrize("drafter", [None, *DRAFTERS])
@settings(max_examples=examples(10), deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 1000),
    policy=st.sampled_from(sorted(POLICIES)),
    recurrent=st.booleans(),
    draft_recurrent=st.booleans(),
    n_steps_max=st.sampled_from([0, 1, 3, 16]),
    n_rs_seq=st.integers(0, 6),
    n_outputs=st.integers(4, 40),
    n_ctx=st.integers(26, 70),
    draft_ctx=st.integers(2, 70),
    order=st.sampled_from([1, 3]),
    agreement=st.floats(0, 1),
)
def test_members_come_and_go_and_each_writes_its_own_plain_text(
    drafter: str | None, data: st.DataObject, seed: int, policy: str, recurrent: bool,
    draft_recurrent: bool, n_steps_max: int, n_rs_seq: int, n_outputs: int, n_ctx: int,
    draft_ctx: int, order: int, agreement: float,
) -> None:  # fmt: skip
    """With `n_steps_max` 0 the draft model is asked token by token, otherwise for blocks."""
    both = {"n_vocab": 12, "seed": seed, "order": order}
    target = FakeTarget(
        **both, recurrent=recurrent, n_rs_seq=n_rs_seq, n_ctx=n_ctx, n_batch=48,
        n_outputs=n_outputs,
    )  # type: ignore[arg-type]  # fmt: skip
    sizes = {**both, "agreement": agreement, "n_ctx": draft_ctx}
    if n_steps_max:
        draft: FakeTarget = FakeBlockModel(n_steps_max, **sizes)
    else:
        draft = FakeTarget(**sizes, recurrent=draft_recurrent, n_outputs=4)  # type: ignore[arg-type]
    drafting = None
    if drafter is not None:
        drafting = ChainDrafting(target, DRAFTERS[drafter](draft), POLICIES[policy]())
    loop = DecodingLoop(target, drafting)
    running: dict[BatchMember, list[int]] = {}
    told: dict[BatchMember, list[int]] = {}  # the prompt and all that rounds emitted
    sequences = [0, 1, 2, 3]
    for _ in range(40):
        action = data.draw(st.sampled_from(["add", "step", "step", "step", "cancel"]))
        if action == "add" and sequences:
            sequence = sequences.pop()
            target.rewind(sequence, 0)
            prompt = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=25))
            n = data.draw(st.integers(0, 50))
            member = member_of(sequence, prompt, n, end=3)
            running[member], told[member] = plain(target, prompt, n, 3), list(prompt)
            loop.add(member)
        elif action == "cancel" and running:
            member = data.draw(st.sampled_from(sorted(running, key=lambda m: m.sequence)))
            loop.remove(member)
            wanted = running.pop(member)
            assert wanted[: len(member.history)] == member.history
            sequences.append(member.sequence)
        else:
            step = loop.step(data.draw(st.integers(1, 20)))
            assert not step.failed
            for member, round_ in step.rounds:
                assert target.tokens(member.sequence) == member.history[:-1]
                assert len(round_.emitted) > 0
                assert (
                    round_.emitted[: round_.n_accepted]
                    == (round_.draft.tokens[: round_.n_accepted])
                )
        for member in [m for m in running if m.end]:
            assert member.history == running.pop(member)
            sequences.append(member.sequence)
    while not loop.is_idle:
        loop.step()
    for member, wanted in running.items():
        assert member.history == wanted
        assert member.end


# -- prompts ---------------------------------------------------------------------------------------


def silent_loop(target: FakeTarget) -> DecodingLoop:
    return DecodingLoop(target, ChainDrafting(target, Silent(), Fixed(0)))


def test_one_decode_has_every_round_and_a_part_of_the_prompt_that_waits() -> None:
    target = FakeTarget(n_ctx=400)
    loop = silent_loop(target)
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
    assert len(loop.reading) == 1
    loop.step(16)
    assert (len(loop.reading), loop.n_ready) == (0, 3)
    assert target.calls == [18, 18, 2 + 7], "the last token of the prompt is the first round's"
    loop.step(16)
    assert target.calls[-1] == 3


def test_prompts_are_read_in_the_order_of_their_arrival() -> None:
    loop = silent_loop(FakeTarget(n_ctx=400))
    for member in [member_of(s, list(range(1, 31)), 3) for s in (2, 0, 1)]:
        loop.add(member)
    seen = [[m.sequence for m in loop.step(20).read] for _ in range(4)]
    # 29 tokens of each prompt are read, 20 per step. The parts are 20, 9 + 11, 18 + 2 and 20.
    assert seen == [[2], [2, 0], [0, 1], [1]]


def test_without_a_limit_a_step_reads_what_a_decode_takes() -> None:
    target = FakeTarget(n_batch=32)
    loop = silent_loop(target)
    loop.add(member_of(0, [5] * 70, 2))
    loop.add(member_of(1, [6] * 10, 2))
    for _ in range(3):
        loop.step()
    assert target.calls == [32, 32, 5 + 9]


def test_parts_of_prompts_fit_the_batch_beside_the_rounds() -> None:
    """Prompts may fill a whole batch, but rounds need rows of it too."""
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


def test_a_prompt_that_is_held_already_is_not_read_again_and_others_are_refused() -> None:
    target = FakeTarget()
    target.extend(3, [1, 2, 3])
    loop = silent_loop(target)
    loop.add(member_of(3, [1, 2, 3, 4], 2, n_cached=3))
    assert loop.n_ready == 1
    for message, prompt, n_cached in (
        ("holds 0 tokens where 2", [1, 2, 3], 2),
        ("cached", [1, 2], 2),
        ("empty", [], 0),
    ):
        with pytest.raises(SpecDecError, match=message):
            loop.add(member_of(0, prompt, 2, n_cached=n_cached))


# -- failures --------------------------------------------------------------------------------------


class Refusing:
    """An acceptance rule that raises in the middle of its second round."""

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
@pytest.mark.parametrize("drafts", [False, True])
def test_a_member_whose_sampler_fails_leaves_alone(recurrent: bool, drafts: bool) -> None:
    target = FakeTarget(recurrent=recurrent)
    drafting = ChainDrafting(target, ModelDrafter(FakeTarget()), Fixed(3)) if drafts else None
    loop = DecodingLoop(target, drafting)
    good, bad = member_of(0, [1, 2], 30), member_of(1, [3, 4], 30, accept=Refusing())
    wanted = plain(target, [1, 2], 30)
    loop.add(good)
    loop.add(bad)
    failed = []
    while not loop.is_idle:
        step = loop.step()
        failed += step.failed
        if step.failed:
            assert len(step.rounds) == 1
            assert [n for n, _ in step.decodes] == [8 if drafts else 2], "its decode is told"
    assert [(m, str(e)) for m, e in failed] == [(bad, "the grammar leaves no token")]
    assert good.history == wanted
    assert bad.history == plain(target, [3, 4], len(bad.history) - 2)
    held = target.tokens(1)
    assert held == bad.history[: len(held)]
    assert len(held) >= len(bad.history) - 1


class Fragile(FakeTarget):
    """Fails the decodes numbered in `fails_at`. A recurrent target then also loses its
    sequences."""

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
@pytest.mark.parametrize("drafter", ["n-grams", "draft", "chain"])
def test_after_a_decode_that_fails_all_members_go_on_as_if_it_had_not_been(
    recurrent: bool, drafter: str
) -> None:
    target = Fragile(recurrent=recurrent, n_vocab=16)
    target.fails_at = frozenset({1, 4, 5, 9, 20})
    drafting = ChainDrafting(target, DRAFTERS[drafter](FakeTarget(n_vocab=16)), Fixed(3))
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


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize(("recurrent", "n_rs_seq"), [(False, 0), (True, 0), (True, 4)])
def test_a_round_that_is_interrupted_leaves_history_only(
    drafts: bool, recurrent: bool, n_rs_seq: int
) -> None:
    class Interrupted(Greedy):
        def choose(self, logits: object, history: object) -> int:
            raise KeyboardInterrupt

    target, prompt = FakeTarget(recurrent=recurrent, n_rs_seq=n_rs_seq), [1, 2, 3]
    drafter = ModelDrafter(FakeTarget()) if drafts else None
    with pytest.raises(KeyboardInterrupt):
        next(generated(target, prompt, 9, drafter, Fixed(4), chooser=Interrupted()))
    held = target.tokens(0)
    assert held == prompt[: len(held)]
    assert len(held) >= 2


# -- where a text ends -----------------------------------------------------------------------------


def drafted(
    target: FakeTarget, prompt: list[int], n: int, *, block: int = 4, end: int | None = None,
    draft: FakeTarget | None = None,
) -> list[Round]:  # fmt: skip
    model = draft or FakeTarget(n_vocab=target.n_vocab)
    return list(generated(target, prompt, n, ModelDrafter(model), Fixed(block), end=end))


def test_n_predict_inside_a_draft_ends_exactly_there() -> None:
    rounds = drafted(FakeTarget(), [1], 7)
    assert [len(r.emitted) for r in rounds] == [5, 2]
    assert (rounds[-1].end, rounds[-1].n_drafted) == ("length", 1)


def test_an_end_token_inside_a_draft_ends_the_text_and_the_memory() -> None:
    target = FakeTarget(n_vocab=512)
    text = plain(target, [1], 10)[1:]
    rounds = drafted(target, [1], 10, block=8, end=text[2])
    assert emitted(rounds) == text[:3]
    assert (rounds[-1].end, rounds[-1].n_accepted) == ("end", 3)
    assert target.tokens(0) == [1, *text[:2]]


def test_the_target_fills_its_context_and_stops() -> None:
    target = FakeTarget(n_ctx=10)
    rounds = drafted(target, [1, 2, 3], 100)
    assert len(emitted(rounds)) == 8  # the last token needs no cell
    assert rounds[-1].end == "context"
    assert target.length(0) == 10


def test_a_full_draft_context_is_said_and_the_target_goes_on() -> None:
    target = FakeTarget()
    rounds = drafted(target, [1, 2, 3], 20, draft=FakeTarget(n_ctx=6))
    assert [1, 2, 3] + emitted(rounds) == plain(target, [1, 2, 3], 20)
    assert rounds[-1].draft.decision.reason == "the draft's context is full"


def test_closing_leaves_a_sequence_to_go_on_from() -> None:
    target, drafter = FakeTarget(), ModelDrafter(FakeTarget(agreement=0.6))
    prompt, text = [4, 5, 6], list[int]()
    whole = plain(target, prompt, 40)[len(prompt) :]
    for _ in range(6):  # six generations cut off after one round each
        history = prompt + text
        rounds = generated(target, history, 40, drafter, Fixed(3), n_cached=target.length(0))
        text += next(iter(rounds)).emitted
        rounds.close()  # type: ignore[attr-defined]
        assert target.length(0) == len(prompt) + len(text) - 1
    assert text == whole[: len(text)]


# -- rows and decodes ------------------------------------------------------------------------------


def test_snapshots_spare_a_recurrent_target_checkpoints_and_replays() -> None:
    def decodes(n_rs_seq: int) -> tuple[list[int], int]:
        target = FakeTarget(seed=3, recurrent=True, n_rs_seq=n_rs_seq)
        rounds = drafted(target, [1, 2, 3], 40, draft=FakeTarget(seed=3, agreement=0.6))
        return emitted(rounds), len(target.calls)

    text, n_replaying = decodes(0)
    same, n_decodes = decodes(4)
    assert text == same
    assert n_decodes < n_replaying
    # A draft longer than the snapshots reach still takes a checkpoint.
    assert decodes(3) == (text, n_replaying)


@pytest.mark.parametrize(
    ("policy", "n_outputs"), [(Fixed(8), 11), (Throughput(CHEAP), 7)], ids=["alike", "jointly"]
)
def test_drafts_of_all_members_fit_the_rows_of_one_decode(policy: Policy, n_outputs: int) -> None:
    target = FakeTarget(n_outputs=n_outputs)
    drafting = ChainDrafting(target, ModelDrafter(FakeTarget(peak=0.99)), policy)
    members = [member_of(s, [s, 2, 3], 40) for s in range(3)]
    for member in members:
        target.extend(member.sequence, member.history[:-1])
    drafts = drafting.propose(members)
    assert sum(1 + len(draft.tokens) for draft in drafts) == n_outputs
    assert max(len(d.tokens) for d in drafts) - min(len(d.tokens) for d in drafts) <= 1
    assert sum(len(draft.dropped) for draft in drafts) > 0
    for draft in drafts:
        assert len(draft.tokens) == len(draft.probs) == draft.decision.n_tokens


def test_a_sampled_draft_is_cut_with_its_rows_and_what_goes_is_no_evidence() -> None:
    rows = tuple(np.eye(4)[i] for i in (1, 2, 3))
    draft = Draft((1, 2, 3), (0.9, 0.8, 0.7), "draft", Decision(3, "3"), rows=rows)
    short = cut(draft, 1)
    assert (short.tokens, short.probs, len(short.rows)) == ((1,), (0.9,), 1)
    assert short.dropped == ()


def test_one_decode_serves_all_sequences() -> None:
    target, draft = FakeTarget(peak=0.99), FakeTarget(peak=0.99)
    loop = DecodingLoop(target, ChainDrafting(target, ModelDrafter(draft), Throughput(CHEAP)))
    for s in range(4):
        loop.add(member_of(s, [s], 24))
    n_steps = 0
    while not loop.is_idle:
        n_steps += bool(loop.step().rounds)
    assert len(target.calls) == n_steps < 24 / 2
    assert len(draft.calls) < 4 * 24


def test_members_without_drafts_are_decided_once_for_many_steps() -> None:
    drafter = Silent()
    target = FakeTarget(n_vocab=200)
    loop = DecodingLoop(target, ChainDrafting(target, drafter, Fixed(0)))
    for s in range(3):
        loop.add(member_of(s, [s + 1], 100))
    for _ in range(50):
        loop.step()
    assert drafter.n_asked == 3
    loop.add(member_of(3, [9], 100))
    loop.step()
    assert drafter.n_asked == 7, "another batch is decided anew"


def test_a_drafter_is_not_asked_again_while_its_decision_holds() -> None:
    """If drafts do not pay, only occasional probes ask for one, and the text stays the same."""

    class Counting(ModelDrafter):
        n_asked = 0

        def propose(self, *args):  # type: ignore[no-untyped-def]
            self.n_asked += 1
            return super().propose(*args)

    target = FakeTarget(n_ctx=3000)
    dear = CostProfile((1.0, 1.9, 2.0, 2.1), draft_step_s=0.5)
    drafter = Counting(FakeTarget(seed=9, n_ctx=3000))
    rounds = list(generated(target, [1, 2, 3], 2000, drafter, Throughput(dear)))
    assert [1, 2, 3] + emitted(rounds) == plain(target, [1, 2, 3], 2000)
    probes = [i for i, r in enumerate(rounds) if r.draft.n_steps]
    gaps = [b - a for a, b in zip(probes, probes[1:], strict=False)]
    assert len(probes) < drafter.n_asked < 200
    assert gaps[-1] > 2 * gaps[0], "the gap grows"
    assert gaps[-1] < 200, "and is bounded"


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
    """A step reports its batch of all members' rounds. Batches with a part of a prompt are left
    out."""
    target = FakeTarget(n_vocab=16, seed=3)
    drafter = ModelDrafter(FakeTarget(n_vocab=16))
    loop = DecodingLoop(target, ChainDrafting(target, drafter, Fixed(3)))
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


def test_a_report_covers_its_step_and_cannot_be_changed() -> None:
    """Steps of all kinds do: with a prompt, with drafts, without them, and of no member."""
    target = FakeTarget(n_vocab=16, seed=3)
    drafting = ChainDrafting(target, ModelDrafter(FakeTarget(n_vocab=16)), Fixed(3))
    for sequence, loop in enumerate((DecodingLoop(target, drafting), DecodingLoop(target))):
        loop.add(member_of(sequence, list(range(9)), 12))
        while loop.members:
            before_s = perf_counter()
            report = loop.step(4)
            assert before_s <= report.began_s <= report.ended_s <= perf_counter()
            for _, round_ in report.rounds:
                parts_s = round_.draft_s + round_.verify_s + round_.rollback_s
                assert parts_s <= report.ended_s - report.began_s + 1e-9
        assert not loop.step().rounds
    with pytest.raises(AttributeError):
        report.rounds = ()  # type: ignore[misc]


def test_a_chain_of_drafters_decides_and_learns_for_several_members() -> None:
    # With order 1 the text soon repeats, so n-grams can draft it.
    target = FakeTarget(n_vocab=16, seed=5, order=1)
    draft = ModelDrafter(FakeTarget(n_vocab=16, seed=5, order=1, agreement=0.5))
    policy = Throughput(CHEAP)
    loop = DecodingLoop(
        target, ChainDrafting(target, ChainDrafter([NgramSimple(2, 4)], draft), policy)
    )
    for s in range(3):
        loop.add(member_of(s, [s, 1, 2] * 4, 60))
    sources = set()
    while not loop.is_idle:
        sources |= {round_.draft.source for _, round_ in loop.step().rounds if round_.n_drafted}
    assert sources == {"draft", "ngram-simple"}
    assert set(policy.calibration.sources) >= sources
