"""Speculation on real files: every drafter and acceptance writes what the target alone would.

Each generation is judged four ways: every token is plain decoding's for its prefix (with the same
random number, where one is drawn), the logits that each verification begins with are those of a
fresh evaluation, no position of the memory has two cells, and drafts were made and rejected.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from lossless_parts import (
    BATCH_NOISE,
    FIXED,
    GREEDY,
    N_PREDICT,
    SAMPLED,
    Judge,
    Run,
    distance_from_fresh,
    generate,
    open_session,
)

from specdec.options import PolicyName
from specoffload.bench.workloads import prompts
from specoffload.session.session import SEQUENCE

pytestmark = pytest.mark.usefixtures("batches_are_cheap")

DRAFTERS: dict[str, dict[str, object]] = {
    "draft": FIXED,
    "draft, throughput": {},
    "suffix": {**FIXED, "--spec-type": "suffix", "--spec-suffix-min-match": 1},
    "ngram-simple": {**FIXED, "--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": 1},
    "ngram-map-k": {**FIXED, "--spec-type": "ngram-map-k", "--spec-ngram-map-k-size-n": 1},
    "ngram-map-k4v": {
        **FIXED,
        "--spec-type": "ngram-map-k4v",
        "--spec-ngram-map-k4v-size-n": 1,
        "--spec-ngram-map-k4v-min-hits": 1,
    },
    "ngram-mod": {**FIXED, "--spec-type": "ngram-mod", "--spec-ngram-mod-n-match": 1},
    "ngram-cache": {**FIXED, "--spec-type": "ngram-cache"},
    "n-grams alone": {**FIXED, "--spec-type": "ngram-mod,suffix,ngram-cache"},
    "chain": {**FIXED, "--spec-type": "suffix,ngram-cache,draft"},
}
STREAMED = pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])


def texts() -> list[str]:
    """Each twice, so that n-grams find something."""
    return [text + text for text in (*prompts("code")[:2], prompts("prose")[0])]


def assert_drafts_were_judged(runs: list[Run]) -> None:
    assert all(len(run.tokens) == N_PREDICT for run in runs)
    assert sum(run.stats.n_drafted for run in runs) > 0
    assert sum(run.n_rejected for run in runs) > 0
    assert sum(run.stats.n_accepted for run in runs) > 0


@STREAMED
@pytest.mark.parametrize("name", DRAFTERS)
def test_match_writes_the_targets_own_text_greedy_and_sampled(
    exact: Path, judge: Judge, name: str, streamed: bool
) -> None:
    with open_session(exact, DRAFTERS[name], streamed=streamed) as opened:
        runs: list[Run] = []
        for request in (GREEDY, SAMPLED):
            of_request = []
            for text in texts()[int(streamed) :]:
                opened.forget()
                of_request.append(run := generate(opened, text, request))
                judge.check(run, request)
                assert judge.distance(run) < BATCH_NOISE
            assert sum(run.n_rejected for run in of_request) > 0
            runs += of_request
        copied = opened.target.counters().streamed_bytes
    assert_drafts_were_judged(runs)
    assert (copied > 0) == streamed


@STREAMED
@pytest.mark.parametrize("name", DRAFTERS)
def test_rejection_sampling_writes_what_the_target_could_and_greedy_what_it_would(
    exact: Path, judge: Judge, name: str, streamed: bool
) -> None:
    spec = {**DRAFTERS[name], "--spec-accept": "reject"}
    with open_session(exact, spec, streamed=streamed) as opened:
        runs = []
        for text in texts()[int(streamed) :]:
            opened.forget()
            runs.append(greedy := generate(opened, text, GREEDY))
            judge.check(greedy, GREEDY)
            opened.forget()
            sampled = generate(opened, text, SAMPLED)
            judge.check_support(sampled, SAMPLED)
            assert max(judge.distance(greedy), judge.distance(sampled)) < BATCH_NOISE
        copied = opened.target.counters().streamed_bytes
    assert_drafts_were_judged(runs)
    assert (copied > 0) == streamed


@pytest.mark.parametrize("policy", PolicyName)
def test_every_policy_writes_the_targets_own_text(exact: Path, judge: Judge, policy: str) -> None:
    spec: dict[str, object] = {"--spec-policy": policy}
    if policy == "p-min":
        spec["--spec-draft-p-min"] = 0.3
    with open_session(exact, spec) as opened:
        runs = []
        for text in texts():
            opened.forget()
            runs.append(run := generate(opened, text, GREEDY))
            judge.check(run, GREEDY)
    assert_drafts_were_judged(runs)


def test_a_session_that_drafts_nothing_passes_the_same_judge_and_gives_the_same_tokens(
    exact: Path, judge: Judge
) -> None:
    with (
        open_session(exact, {"--spec-type": "none"}) as plain,
        open_session(exact, FIXED) as drafting,
    ):
        for request in (GREEDY, SAMPLED):
            for text in texts():
                plain.forget()
                drafting.forget()
                alone, drafted = generate(plain, text, request), generate(drafting, text, request)
                assert alone.stats.n_drafted == 0 < drafted.stats.n_drafted
                n_ties = judge.check(alone, request) + judge.check(drafted, request)
                assert n_ties or alone.tokens == drafted.tokens


def test_the_judge_refuses_a_token_that_is_not_the_targets(exact: Path, judge: Judge) -> None:
    with open_session(exact, {"--spec-type": "none"}) as plain:
        for request in (GREEDY, SAMPLED):
            plain.forget()
            run = generate(plain, texts()[0], request)
            assert judge.check(run, request) == 0
            run.tokens[7] = int(np.argsort(judge.rows(run.prompt, run.tokens)[7])[-30])
            with pytest.raises(AssertionError, match="token 7 is"):
                judge.check(run, request)
            # What was evaluated is now another text's, which shows in the logits, too.
            run.first_rows = run.first_rows[8:10]
            assert judge.distance(run) > 10 * BATCH_NOISE


@STREAMED
def test_turns_with_rejected_drafts_leave_the_memory_of_a_fresh_evaluation(
    exact: Path, judge: Judge, streamed: bool
) -> None:
    with open_session(exact, FIXED, streamed=streamed) as opened:
        history: list[int] = []
        rejected = 0
        for turn, text in enumerate(prompts("code")[:3]):
            history += opened.tokenize(text, add_special=not history, parse_special=True)
            run = generate(opened, history, GREEDY if turn % 2 else SAMPLED)
            assert (run.stats.n_cached_tokens > 0) == (turn > 0)
            history += run.tokens
            rejected += run.n_rejected
        engine = opened.target
        assert engine.sequences.length(SEQUENCE) == len(history) - 1
        kept = engine.sequences.extend(SEQUENCE, history[-1:])[0]
    assert rejected > 0
    assert distance_from_fresh(judge.engine, history, 1, kept) < BATCH_NOISE


def test_statistics_add_up(exact: Path) -> None:
    with open_session(exact, FIXED) as opened:
        run = generate(opened, prompts("code")[0], GREEDY)
    stats = run.stats
    assert stats.n_tokens == len(run.tokens) == N_PREDICT
    assert sum(rounds for _, rounds in stats.draft_lengths) == stats.n_rounds
    assert sum(n * rounds for n, rounds in stats.draft_lengths) == stats.n_drafted
    assert sum(n for _, n in stats.accepted_by_source) == stats.n_accepted
    assert sum(rounds for _, rounds in stats.decisions) == stats.n_rounds
    assert all(0 <= rate <= 1 for rate in stats.acceptance_per_position)
    assert stats.verify_s > 0
    assert stats.draft_s > 0


@pytest.mark.parametrize("drafter", ["suffix", "draft"])
def test_the_same_seed_repeats_rejection_sampling(exact: Path, drafter: str) -> None:
    spec = {**FIXED, "--spec-type": drafter, "--spec-accept": "reject"}
    with open_session(exact, spec) as opened:
        runs = []
        for seed in (1, 1, 2):
            opened.forget()
            request = replace(GREEDY, temperature=1.0, seed=seed)
            runs.append(generate(opened, prompts("code")[0], request).tokens)
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
