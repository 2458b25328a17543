"""Texts that end inside a draft: by a limit, the context, stop sequences, grammars or end tokens.

Each text equals plain decoding's up to its end, and the next turn continues as after a fresh
evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lossless_parts import (
    BATCH_NOISE,
    FIXED,
    GREEDY,
    SAMPLED,
    Judge,
    Run,
    assert_each_position_once,
    distance_from_fresh,
    generate,
    let_batches_be_cheap,
    open_session,
)

from specoffload.config.resolution import demo_prompts
from specoffload.generation.generation import GenerateOptions
from specoffload.session.session import SEQUENCE, Session

# Rejection sampling draws drafts at random. With a seed, a repeated request draws the same ones.
SEEDED = replace(GREEDY, seed=11)
SPECS: dict[str, dict[str, object]] = {
    "chain": {**FIXED, "--spec-draft-n-max": 8},
    "reject": {**FIXED, "--spec-draft-n-max": 8, "--spec-accept": "reject"},
    "n-grams": {**FIXED, "--spec-type": "suffix", "--spec-suffix-min-match": 1},
}


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> dict[str, object]:
    return SPECS[request.param]


@pytest.fixture(scope="module")
def opened(
    exact: Path, spec: dict[str, object], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path_factory.mktemp("ends")))
        let_batches_be_cheap(patch)
        with open_session(exact, spec) as session:
            yield session


@pytest.fixture(scope="module")
def whole(opened: Session, judge: Judge) -> Run:
    """A judged generation that the tests end earlier. Some of its rounds accept several tokens."""
    opened.forget()
    run = generate(opened, demo_prompts("code")[0] * 2, replace(SEEDED, n_predict=48))
    judge.check(run, SEEDED)
    return run


def accepted_round(run: Run) -> tuple[int, int]:
    """Returns (index of its first token, number of its tokens) for the longest accepted draft."""
    starts, at = [], 0
    for round_ in run.rounds:
        starts.append((round_.n_accepted, at))
        at += len(round_.emitted)
    n, start = max(starts)
    assert n >= 2
    return start, n


def assert_goes_on(opened: Session, judge: Judge, run: Run) -> None:
    """Check that the next turn is what plain decoding writes, with a fresh evaluation's logits."""
    assert_each_position_once(opened.target)
    more = opened.tokenize("\n\ndef next_one(", add_special=False, parse_special=False)
    request = replace(SEEDED, n_predict=8)
    after = generate(opened, [*run.prompt, *run.tokens, *more], request)
    assert after.stats.n_cached_tokens >= len(run.prompt)
    judge.check(after, request)
    text = [*after.prompt, *after.tokens]
    row = opened.target.sequences.extend(SEQUENCE, text[-1:])[0]
    assert distance_from_fresh(judge.engine, text, len(after.prompt), row) < BATCH_NOISE


@pytest.mark.parametrize("room", [1, 2, 20])
def test_a_draft_never_passes_the_end_of_the_context(
    exact: Path,
    judge: Judge,
    spec: dict[str, object],
    opened: Session,
    room: int,
    batches_are_cheap: None,
) -> None:
    n_ctx = 256
    prompt = opened.tokenize(demo_prompts("code")[0] * 8, add_special=True, parse_special=True)
    prompt = prompt[: n_ctx - room]
    assert len(prompt) == n_ctx - room
    with open_session(exact, spec, ctx_size=n_ctx) as short:
        assert short.target.n_ctx == n_ctx
        run = generate(short, prompt, replace(SEEDED, n_predict=None))
    # The last token is chosen, but needs no room.
    assert len(run.tokens) in (room, room + 1)
    assert run.finish_reason == "length"
    judge.check(run, SEEDED)
    if room == 20:
        assert run.stats.n_drafted > 0


def test_a_stop_sequence_inside_a_draft_ends_the_text_before_it(
    opened: Session, judge: Judge, whole: Run
) -> None:
    start, n = accepted_round(whole)
    before = opened.target.detokenize(whole.tokens[:start])
    inside = opened.target.detokenize(whole.tokens[: start + n])[len(before) :]
    # A part of the draft's text, from the middle of one token to the middle of a later one.
    stop = inside[1:-1] or inside
    opened.forget()
    request = replace(SEEDED, n_predict=48, stop=(stop,))
    run = generate(opened, whole.prompt, request)
    assert run.finish_reason == "stop"
    assert run.text == whole.text[: whole.text.index(stop)]
    # The answer has the tokens before the one that completes the stop sequence.
    seen = [stop in opened.target.detokenize(whole.tokens[:n]) for n in range(len(whole.tokens))]
    assert run.answer == whole.tokens[: seen.index(True)]
    assert run.stats.n_tokens == len(run.answer) <= len(run.tokens)
    judge.check(run, request)
    assert_goes_on(opened, judge, run)


def test_an_end_token_inside_a_draft_ends_the_text_with_it(
    opened: Session, judge: Judge, whole: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accepted tokens that do not occur before are made end tokens, one after the other."""
    ends, at = [], 0
    for round_ in whole.rounds:
        ends += [t for t in round_.emitted[: round_.n_accepted] if whole.tokens.index(t) >= at]
        at += len(round_.emitted)
    ends = ends[:3]
    n_inside = 0
    for end in ends:
        monkeypatch.setattr(opened.target, "is_end", lambda token, end=end: token == end)
        opened.forget()
        request = replace(SEEDED, n_predict=48, ignore_eos=False)
        run = generate(opened, whole.prompt, request)
        assert run.finish_reason == "stop"
        assert run.tokens == whole.tokens[: whole.tokens.index(end) + 1]
        assert run.text == opened.target.detokenize(run.tokens[:-1])
        last = run.rounds[-1]
        n_inside += last.n_accepted == len(last.emitted)
        monkeypatch.undo()
        assert_goes_on(opened, judge, run)
    assert n_inside == len(ends) > 0


@pytest.mark.parametrize("request_name", ["greedy", "sampled"])
def test_the_end_of_a_grammar_inside_a_draft_ends_the_text(
    opened: Session, judge: Judge, whole: Run, request_name: str, spec: dict[str, object]
) -> None:
    """The grammar allows the text itself, and ends in the middle of an accepted draft."""
    start, n = accepted_round(whole)
    n_characters = len(opened.target.detokenize(whole.tokens[: start + n - 1]))
    base = {"greedy": SEEDED, "sampled": SAMPLED}[request_name]
    request: GenerateOptions = replace(
        base, n_predict=300, ignore_eos=False, grammar=f"root ::= [^\\x00]{{{n_characters}}}"
    )
    opened.forget()
    run = generate(opened, whole.prompt, request)
    assert run.finish_reason == "stop"
    assert len(run.text) == n_characters
    assert opened.target.is_end(run.tokens[-1])
    if request_name == "greedy":
        assert run.text == whole.text[:n_characters]
        assert run.n_rejected > 0  # tokens drafted after the end
    if request_name == "greedy" or spec.get("--spec-accept") != "reject":
        judge.check(run, request)
    else:
        judge.check_support(run, request)
    assert opened.target.sequences.length(SEQUENCE) == len(run.prompt) + len(run.tokens) - 1
    assert_goes_on(opened, judge, run)


def test_closing_inside_a_text_leaves_memory_to_go_on_from(
    opened: Session, judge: Judge, whole: Run
) -> None:
    opened.forget()
    pieces = opened.generate(whole.prompt, replace(SEEDED, n_predict=48))
    seen: list[int] = []
    for piece in pieces:
        seen += piece.tokens
        if len(seen) > 10:
            break
    pieces.close()  # type: ignore[attr-defined]
    assert seen == whole.tokens[: len(seen)]
    assert opened.target.sequences.length(SEQUENCE) == len(whole.prompt) + len(seen) - 1
    assert_goes_on(opened, judge, replace(whole, tokens=seen))


def test_pieces_hold_every_token_also_of_rounds_that_end_inside_a_character(
    opened: Session, whole: Run
) -> None:
    """A hiragana character has three bytes, and each byte is a token of this vocabulary."""
    opened.forget()
    request = replace(SAMPLED, n_predict=20, grammar="root ::= [ぁ-ん]{20}")
    pieces = list(opened.generate(whole.prompt, request))
    stats = pieces[-1].stats
    assert stats is not None
    assert stats.n_tokens == 20
    assert sum(len(piece.tokens) for piece in pieces) == 20
