"""The decoding loop on fakes: exactly the plain text, whatever ends it."""

from __future__ import annotations

import numpy as np
import pytest
from drafting_parts import emitted, generated, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from lab.simulation.fake import FakeTarget
from specdec.costs.profile import CostProfile
from specdec.decoding.acceptance import Greedy
from specdec.decoding.drafting import decode
from specdec.drafters.model import ModelDrafter
from specdec.errors import SpecDecError
from specdec.policies.rules import Fixed
from specdec.policies.throughput import Throughput
from specdec.types import Round


def run(
    target: FakeTarget,
    draft: FakeTarget,
    prompt: list[int],
    n: int,
    *,
    block: int = 4,
    end: int | None = None,
) -> list[Round]:
    history, out = list(prompt), []
    for round_ in generated(target, prompt, n, ModelDrafter(draft), Fixed(block), end=end):
        history += round_.emitted
        assert target.tokens(0) == history[:-1]
        out.append(round_)
    return out


@settings(max_examples=60, deadline=None)
@given(
    agreement=st.floats(0, 1),
    block=st.integers(0, 9),
    n=st.integers(0, 40),
    recurrent=st.booleans(),
    n_rs_seq=st.integers(0, 6),
    draft_recurrent=st.booleans(),
    n_ctx=st.integers(4, 60),
    draft_ctx=st.integers(2, 60),
    seed=st.integers(0, 1000),
)
def test_the_text_is_that_of_decoding_without_a_draft(
    agreement: float,
    block: int,
    n: int,
    recurrent: bool,
    n_rs_seq: int,
    draft_recurrent: bool,
    n_ctx: int,
    draft_ctx: int,
    seed: int,
) -> None:
    target = FakeTarget(n_vocab=16, seed=seed, recurrent=recurrent, n_rs_seq=n_rs_seq, n_ctx=n_ctx)
    draft = FakeTarget(
        n_vocab=16, seed=seed, agreement=agreement, recurrent=draft_recurrent, n_ctx=draft_ctx
    )
    rounds = run(target, draft, [1, 2, 3], n, block=block, end=5)
    assert [1, 2, 3] + emitted(rounds) == plain(target, [1, 2, 3], n, end=5)
    for round_ in rounds[:-1]:
        assert round_.end == ""
    if n:
        assert rounds[-1].end != ""


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 40),
    recurrent=st.booleans(),
    n_ctx=st.integers(4, 30),
    n_cached=st.integers(0, 2),
    end=st.integers(0, 20),
)
def test_decoding_alone_is_decoding_with_a_drafter_that_has_nothing(
    n: int, recurrent: bool, n_ctx: int, n_cached: int, end: int
) -> None:
    found = []
    for alone in (True, False):
        target = FakeTarget(n_vocab=16, recurrent=recurrent, n_ctx=n_ctx)
        if n_cached:
            target.extend(0, [1, 2, 3][:n_cached])
        asked = {"n_predict": n, "is_end": lambda t: t == end, "n_cached": n_cached}
        if alone:
            rounds = list(decode(target, 0, [1, 2, 3], chooser=Greedy(), **asked))
        else:
            rounds = list(
                decode(
                    target,
                    0,
                    [1, 2, 3],
                    drafter=ModelDrafter(FakeTarget(n_vocab=16)),
                    policy=Fixed(0),
                    chooser=Greedy(),
                    **asked,
                )
            )
        found.append(([(r.emitted, r.end) for r in rounds], target.tokens(0), target.calls))
    assert found[0] == found[1]
    assert [1, 2, 3] + emitted(rounds) == plain(target, [1, 2, 3], n, end=end)


@pytest.mark.parametrize("n_rs_seq", [0, 2])
def test_a_decode_that_fails_is_undone(n_rs_seq: int) -> None:
    class Failing(Greedy):
        def choose(self, logits: object, history: object) -> int:
            raise KeyboardInterrupt

    for recurrent in (False, True):
        target = FakeTarget(recurrent=recurrent, n_rs_seq=n_rs_seq)
        rounds = generated(target, [1, 2, 3], 4, chooser=Failing())
        with pytest.raises(KeyboardInterrupt):
            next(rounds)
        assert target.tokens(0) == ([1, 2, 3] if recurrent else [1, 2])


def test_a_drafter_is_not_asked_again_while_its_decision_holds() -> None:
    """A draft that does not pay is asked for by probes only, and the text is the same."""

    class Counting(ModelDrafter):
        n_asked = 0

        def propose(self, *args):  # type: ignore[no-untyped-def]
            self.n_asked += 1
            return super().propose(*args)

    target = FakeTarget(n_ctx=3000)
    dear = CostProfile((1.0, 2.0, 3.0, 4.0), draft_step_s=0.5)
    drafter = Counting(FakeTarget(seed=9, n_ctx=3000))
    rounds = list(generated(target, [1, 2, 3], 2000, drafter, Throughput(dear)))
    assert [1, 2, 3] + emitted(rounds) == plain(target, [1, 2, 3], 2000)
    probes = [i for i, r in enumerate(rounds) if r.draft.n_steps]
    gaps = [b - a for a, b in zip(probes, probes[1:], strict=False)]
    assert len(probes) < drafter.n_asked < 200
    assert gaps[-1] > 2 * gaps[0], "the gap grows"
    assert gaps[-1] < 200, "and is bounded"


def test_n_predict_inside_a_draft_ends_exactly_there() -> None:
    target, draft = FakeTarget(), FakeTarget()
    rounds = run(target, draft, [1], 7, block=4)
    assert [len(r.emitted) for r in rounds] == [5, 2]
    assert rounds[-1].end == "length"
    assert rounds[-1].n_drafted == 1


def test_an_end_token_inside_a_draft_ends_the_text_and_the_memory() -> None:
    target, draft = FakeTarget(n_vocab=512), FakeTarget(n_vocab=512)
    text = plain(target, [1], 10)[1:]
    end = text[2]
    rounds = run(target, draft, [1], 10, block=8, end=end)
    assert emitted(rounds) == text[:3]
    assert (rounds[-1].end, rounds[-1].n_accepted) == ("end", 3)
    assert target.tokens(0) == [1, *text[:2]]


def test_the_target_fills_its_context_and_stops() -> None:
    target, draft = FakeTarget(n_ctx=10), FakeTarget()
    rounds = run(target, draft, [1, 2, 3], 100, block=4)
    assert len(emitted(rounds)) == 8  # the last token needs no cell
    assert rounds[-1].end == "context"
    assert target.length(0) == 10


def test_a_full_draft_context_is_said_and_the_target_goes_on() -> None:
    target, draft = FakeTarget(), FakeTarget(n_ctx=6)
    rounds = run(target, draft, [1, 2, 3], 20, block=4)
    assert [1, 2, 3] + emitted(rounds) == plain(target, [1, 2, 3], 20)
    assert rounds[-1].draft.decision.reason == "the draft's context is full"


def test_the_draft_never_evaluates_an_accepted_token_twice() -> None:
    target, draft = FakeTarget(), FakeTarget()
    drafter = ModelDrafter(draft)
    rounds = generated(target, list(range(20)), 50, drafter, Fixed(4))
    n_text = 20 + sum(len(r.emitted) for r in rounds)
    assert drafter.n_rows <= n_text


def test_a_rejected_draft_is_rolled_back_in_the_draft_too() -> None:
    target, draft = FakeTarget(seed=3), FakeTarget(seed=3, agreement=0.5)
    drafter = ModelDrafter(draft)
    history = [1, 2]
    for round_ in generated(target, history, 60, drafter, Fixed(5)):
        fed = draft.tokens(0)[: len(history)]
        assert fed == history  # what the draft saw of the accepted text is the text
        history = [*history, *round_.emitted]


def test_closing_leaves_a_sequence_to_go_on_from() -> None:
    target, draft = FakeTarget(), FakeTarget(agreement=0.6)
    drafter = ModelDrafter(draft)
    prompt = [4, 5, 6]
    whole = plain(target, prompt, 40)[len(prompt) :]
    text: list[int] = []
    for _ in range(6):  # six generations cut off after one round each
        history = prompt + text
        rounds = generated(target, history, 40, drafter, Fixed(3), n_cached=target.length(0))
        text += next(iter(rounds)).emitted
        rounds.close()  # type: ignore[attr-defined]
        assert target.length(0) == len(prompt) + len(text) - 1
    assert text == whole[: len(text)]


def test_another_prompt_in_the_same_sequence_is_drafted_from_its_own_text() -> None:
    draft = FakeTarget()
    drafter = ModelDrafter(draft)
    for prompt in ([1, 2, 3, 4], [1, 2, 9, 9, 9], [7]):
        target = FakeTarget()
        rounds = generated(target, prompt, 20, drafter, Fixed(4))
        done = list(rounds)
        assert prompt + emitted(done) == plain(target, prompt, 20)
        assert all(r.n_accepted == r.n_drafted for r in done)


def test_an_error_of_the_target_leaves_the_round_undone() -> None:
    class Failing(FakeTarget):
        fail = False

        def logits_after(self, tokens: object) -> np.ndarray:  # type: ignore[type-arg]
            if self.fail:
                raise RuntimeError("device lost")
            return super().logits_after(tokens)  # type: ignore[arg-type]

    target = Failing()
    rounds = generated(target, [1, 2], 40, ModelDrafter(FakeTarget()), Fixed(4))
    next(iter(rounds))
    held = target.tokens(0)
    target.fail = True
    with pytest.raises(RuntimeError, match="device lost"):
        next(iter(rounds))
    target.fail = False
    assert target.tokens(0) == held


def test_a_prompt_that_does_not_fit_the_memory_is_refused() -> None:
    target = FakeTarget()
    kinds = {
        "empty": ([], 0),
        "holds 0 tokens": ([1, 2, 3], 1),
        "cached": ([1, 2], 2),
    }
    for message, (prompt, n_cached) in kinds.items():
        with pytest.raises(SpecDecError, match=message):
            generated(target, prompt, 4, None, Fixed(0), n_cached=n_cached)


def test_snapshots_spare_a_recurrent_target_checkpoints_and_replays() -> None:
    def decodes(n_rs_seq: int, block: int) -> tuple[list[int], int]:
        target = FakeTarget(seed=3, recurrent=True, n_rs_seq=n_rs_seq)
        draft = FakeTarget(seed=3, agreement=0.6)
        rounds = run(target, draft, [1, 2, 3], 40, block=block)
        return emitted(rounds), len(target.calls)

    text, n_replaying = decodes(0, 4)
    same, n_decodes = decodes(4, 4)
    assert text == same
    assert n_decodes < n_replaying
    # A draft longer than the snapshots reach takes its checkpoint all the same.
    assert decodes(3, 4) == (text, n_replaying)


@pytest.mark.parametrize("n_rs_seq", [0, 4])
def test_a_round_that_fails_leaves_a_recurrent_target_with_history_only(n_rs_seq: int) -> None:
    class Failing:
        def choose(self, logits: object, history: object) -> int:
            raise KeyboardInterrupt

        def accepted(self, token: int) -> None:
            raise AssertionError("nothing was chosen")

    target = FakeTarget(recurrent=True, n_rs_seq=n_rs_seq)
    prompt = [1, 2, 3]
    rounds = generated(target, prompt, 9, ModelDrafter(FakeTarget()), Fixed(4), chooser=Failing())
    with pytest.raises(KeyboardInterrupt):
        next(rounds)
    held = target.tokens(0)
    assert held == prompt[: len(held)]
