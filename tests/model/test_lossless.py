"""Speculation on real files writes what the target alone would, with every drafter, acceptance
rule and placement of the experts.

Each generation is judged. Every token must be what plain decoding chooses for its prefix, with the
same random number if one is drawn. Each position must have one memory cell. Drafts must have been
both kept and rejected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lossless_parts import (
    BATCH_NOISE,
    FIXED,
    GREEDY,
    N_CTX,
    N_PREDICT,
    NEAR_TIE,
    SAMPLED,
    Answer,
    Judge,
    assert_kept_and_rejected,
    generate,
    judged,
    open_session,
)

from offload.model import layer_of
from specoffload.bench.workloads import judged_prompts
from specoffload.config.options import WorkloadName
from specoffload.config.resolution import demo_file, demo_prompts
from specoffload.session.session import Session

pytestmark = pytest.mark.usefixtures("batches_are_cheap")

DRAFTERS: dict[str, dict[str, object]] = {
    "none": {"--spec-type": "none"},
    "draft": FIXED,
    "draft, throughput": {},
    "draft, p-min": {"--spec-policy": "p-min", "--spec-draft-p-min": 0.3},
    "draft, p-min-kept": {"--spec-policy": "p-min-kept", "--spec-draft-p-min": 0.3},
    "draft, speed-b": {"--spec-policy": "speed-b"},
    "draft, bandit": {"--spec-policy": "bandit"},
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
    "n-grams": {**FIXED, "--spec-type": "ngram-mod,suffix,ngram-cache"},
    "chain": {**FIXED, "--spec-type": "suffix,ngram-cache,draft"},
}
# (drafter, acceptance rule, placement of the experts)
CASES = [
    *((name, "match", "resident") for name in DRAFTERS),
    *((name, "reject", "streamed") for name in DRAFTERS if name != "none"),
    *((name, "match", "streamed") for name in ("draft", "suffix", "chain")),
    *((name, "reject", "resident") for name in ("draft", "n-grams")),
    *((name, rule, "split") for name in ("draft", "chain") for rule in ("match", "reject")),
    ("draft, throughput", "match", "streamed from 2"),
]


def texts() -> list[str]:
    """Prompts whose text is repeated, so that n-grams find something."""
    return [2 * text for text in (demo_prompts("code")[1], demo_prompts("prose")[0])]


@pytest.mark.parametrize(("drafter", "rule", "place"), CASES)
def test_the_text_is_the_targets_own(
    exact: Path, judge: Judge, drafter: str, rule: str, place: str
) -> None:
    spec = {**DRAFTERS[drafter], "--spec-accept": rule}
    with open_session(exact, spec, place) as opened:
        before = opened.target.counters()
        runs = judged(opened, judge, texts(), rejects=rule == "reject")
        after = opened.target.counters()
    if drafter == "none":
        assert not any(run.stats.n_drafted for run in runs)
    else:
        assert_kept_and_rejected(runs)
    assert (after.streamed_bytes > before.streamed_bytes) == (place != "resident")
    if place == "split":
        plan, n_rounds = opened.target.opened.plan, sum(run.stats.n_rounds for run in runs)
        assert plan is not None
        n_layers = len({layer_of(entry.name) for entry in plan.streamed})
        assert after.split_layers - before.split_layers >= n_rounds * n_layers
        assert after.n_pairs_host > before.n_pairs_host
        assert after.n_pairs_hit > before.n_pairs_hit


@pytest.mark.parametrize("place", ["resident", "streamed", "split"])
def test_requests_decoded_together_write_the_targets_own_texts(
    exact: Path, judge: Judge, place: str
) -> None:
    lengths = (30, 12, 21)  # tokens: the requests end at different times
    asked = [replace(GREEDY, n_predict=n) for n in lengths]
    with open_session(exact, {}, place, parallel=3, ctx_size=3 * N_CTX) as opened:
        found = [
            opened.tokenize(text, add_special=True, parse_special=True)
            for text in (*demo_prompts("code")[:2], demo_prompts("prose")[0])
        ]
        requests = [opened.start(text, each) for text, each in zip(found, asked, strict=True)]
        while not opened.is_idle:
            opened.step()
        assert opened.counters()["draft_batches"] > 0
    stats = [request.pieces[-1].stats for request in requests]
    assert 0 < sum(s.n_accepted for s in stats if s) < sum(s.n_drafted for s in stats if s)
    for text, request, each in zip(found, requests, asked, strict=True):
        tokens = [token for piece in request.pieces for token in piece.tokens]
        assert len(tokens) == each.n_predict
        judge.check(Answer(text, tokens), each)


def test_the_judge_refuses_a_token_that_is_not_the_targets(exact: Path, judge: Judge) -> None:
    with open_session(exact, FIXED) as opened:
        run = generate(opened, texts()[0], SAMPLED)
        judge.check(run, SAMPLED)
        run.tokens[7] = int(np.argsort(judge.rows(run.prompt, run.tokens)[7])[-30])
        with pytest.raises(AssertionError, match="token 7 is"):
            judge.check(run, SAMPLED)


def test_the_judge_refuses_the_second_best_token_unless_it_is_nearly_tied(
    exact: Path, judge: Judge
) -> None:
    with open_session(exact, FIXED) as opened:
        run = generate(opened, texts()[0], GREEDY)
    rows = np.array(judge.rows(run.prompt, run.tokens))
    second, best = np.sort(rows, axis=1)[:, -2:].T
    gaps = np.where(best - second > 2 * NEAR_TIE, best - second, np.inf)
    at = int(gaps.argmin())
    run.tokens[at] = int(np.argsort(rows[at])[-2])
    with pytest.raises(AssertionError, match=f"token {at} is"):
        judge.check(run, GREEDY)


def test_batches_of_all_sizes_agree_and_a_wrong_token_far_back_does_not(
    exact: Path, judge: Judge
) -> None:
    with open_session(exact, DRAFTERS["none"]) as opened:
        run = generate(opened, texts()[0], GREEDY)
    alone = np.array(judge.rows(run.prompt, run.tokens))
    for size in (2, 3, 8):
        together = np.array(judge.rows(run.prompt, run.tokens, size))
        assert np.abs(together - alone).max() < BATCH_NOISE
    wrong = [*run.prompt[:2], run.prompt[2] + 1, *run.prompt[3:]]
    assert np.abs(np.array(judge.rows(wrong, run.tokens)) - alone).max() > 100 * BATCH_NOISE
    nearer = [*run.prompt[:-1], run.prompt[-1] + 1]
    with pytest.raises(AssertionError, match="plain decoding chooses"):
        judge.check(Answer(nearer, run.tokens), GREEDY)


def test_statistics_add_up_and_a_seed_repeats_rejection_sampling(exact: Path) -> None:
    with open_session(exact, {**FIXED, "--spec-accept": "reject"}) as opened:
        runs = []
        for seed in (1, 1, 2):
            opened.forget()
            request = replace(GREEDY, temperature=1.0, seed=seed)
            runs.append(generate(opened, demo_prompts("code")[0], request))
    first, again, other = (run.tokens for run in runs)
    assert first == again != other
    stats = runs[0].stats
    assert stats.n_tokens == len(first) == N_PREDICT
    assert sum(rounds for _, rounds in stats.draft_lengths) == stats.n_rounds
    assert sum(n * rounds for n, rounds in stats.draft_lengths) == stats.n_drafted
    assert sum(n for _, n in stats.accepted_by_source) == stats.n_accepted
    assert sum(rounds for _, rounds in stats.decisions) == stats.n_rounds
    assert all(0 <= rate <= 1 for rate in stats.acceptance_per_position)
    assert min(stats.verify_s, stats.draft_s) > 0


def test_on_the_shipped_file_the_choice_differs_no_more_than_batch_sizes_do() -> None:
    """Products with its 8-bit weights round activations too, so logits depend on the batch size.

    So do they with flash attention and caches in f16, the defaults.
    """
    usual: dict[str, Any] = {"flash_attn": "auto", "type_k": "f16", "type_v": "f16"}

    def logits(opened: Session, prompt: Sequence[int], fed: Sequence[int], size: int) -> np.ndarray:  # type: ignore[type-arg]
        opened.forget()
        sequences = opened.target.sequences
        sequences.extend(0, prompt[:-1], n_logits=0)
        return np.concatenate(
            [sequences.extend(0, fed[i : i + size]) for i in range(0, len(fed), size)]
        )

    shipped = demo_file("target.gguf")
    with (
        open_session(shipped, DRAFTERS["none"], "streamed from 2", **usual) as plain,
        open_session(shipped, FIXED, "streamed from 2", **usual) as drafting,
    ):
        for text in texts():
            run = generate(drafting, text, GREEDY)
            fed = [run.prompt[-1], *run.tokens[:-1]]
            one, two = (logits(plain, run.prompt, fed, size) for size in (1, 2))
            noise = float(np.abs(one - two).max())
            for row, token in zip(one, run.tokens, strict=True):
                assert row.max() - row[token] <= 2 * noise + NEAR_TIE
            drafting.forget()


@pytest.mark.usefixtures("batches_are_cheap")
def test_n_grams_bring_several_tokens_a_round_where_code_is_written_again() -> None:
    spec = {"--spec-type": "ngram-mod", "--spec-ngram-mod-n-match": 4, "--spec-ngram-mod-n-min": 1}
    n_tokens = n_rounds = 0
    with open_session(demo_file("target.gguf"), spec, draft=None) as opened:
        for text in judged_prompts(WorkloadName.REWRITE):
            opened.forget()
            *_, last = opened.generate(text, replace(GREEDY, n_predict=64))
            assert last.stats is not None
            n_tokens += last.stats.n_tokens
            n_rounds += last.stats.n_rounds
    assert n_tokens > 1.5 * n_rounds
