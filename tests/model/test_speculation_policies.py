"""Speculation on real files: every drafter and acceptance writes what the target alone would.

The target is an f32 copy of the embedded one, on which batches of different sizes agree to 1e-3
(8-bit weights round activations too, which makes a batch's size show in the logits).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from offload.engine import Engine, EngineOptions
from offload.synth import write_preset
from specdec.accept import Greedy
from specdec.decode import decode
from specdec.drafters.suffix import SuffixDrafter
from specdec.policies.fixed import Fixed
from specoffload.bench import prompts
from specoffload.config import Options, demo_file, resolve
from specoffload.generation import GenerateOptions, GenerationStats
from specoffload.session import SEQUENCE, Session

N_PREDICT = 24
NEAR_TIE = 1e-3
FIXED = {"--spec-policy": "fixed", "--spec-draft-n-max": 4}


@pytest.fixture(autouse=True)
def profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))


@pytest.fixture(scope="module")
def exact(models: Path) -> Path:
    import llama_cpp.llama_cpp as native

    path = models / "policies-f32.gguf"
    params = native.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = native.LLAMA_FTYPE_ALL_F32, True
    source = str(demo_file("target.gguf")).encode()
    assert native.llama_model_quantize(source, str(path).encode(), params) == 0
    return path


@pytest.fixture(scope="module")
def judge(exact: Path) -> Iterator[Engine]:
    with Engine(exact, EngineOptions(device="cpu", n_ctx=1024)) as engine:
        yield engine


def session(exact: Path, spec: dict[str, object], device: str = "cpu", **more: object) -> Session:
    drafters = spec.get("--spec-type", "draft")
    draft = demo_file("draft.gguf") if "draft" in str(drafters) else None
    options = Options(
        model=exact, draft=draft, device=device, ctx_size=1024, threads=1, spec_given=spec, **more
    )  # type: ignore[arg-type]
    return Session(resolve(options))


def generate(
    opened: Session, prompt: str | list[int], **options: object
) -> tuple[list[int], GenerationStats]:
    wanted = GenerateOptions(n_predict=N_PREDICT, ignore_eos=True, **options)  # type: ignore[arg-type]
    pieces = list(opened.generate(prompt, wanted))
    stats = pieces[-1].stats
    assert stats is not None
    return [t for piece in pieces for t in piece.tokens], stats


def assert_chosen_by_the_target(judge: Engine, prompt: list[int], tokens: list[int]) -> None:
    judge.rewind(SEQUENCE, 0)
    judge.extend(SEQUENCE, prompt[:-1], n_logits=0)
    for last, token in zip([prompt[-1], *tokens], tokens, strict=False):
        row = judge.extend(SEQUENCE, [last])[0]
        assert row.max() - row[token] <= NEAR_TIE, f"token {token}, argmax {int(row.argmax())}"


SPECS = {
    "draft, fixed": FIXED,
    "draft, throughput": {},
    "draft, p-min": {"--spec-policy": "p-min", "--spec-draft-p-min": 0.3},
    "draft, rejection": {**FIXED, "--spec-accept": "reject"},
    "draft, tree": {"--spec-tree": True},
    "suffix": {**FIXED, "--spec-type": "suffix"},
    "ngram-simple": {**FIXED, "--spec-type": "ngram-simple", "--spec-ngram-simple-size-n": 2},
    "ngram-map-k": {**FIXED, "--spec-type": "ngram-map-k", "--spec-ngram-map-k-size-n": 2},
    "ngram-map-k4v": {
        **FIXED,
        "--spec-type": "ngram-map-k4v",
        "--spec-ngram-map-k4v-size-n": 2,
        "--spec-ngram-map-k4v-min-hits": 1,
    },
    "ngram-mod": {**FIXED, "--spec-type": "ngram-mod", "--spec-ngram-mod-n-match": 2},
    "ngram-cache": {**FIXED, "--spec-type": "ngram-cache"},
    "chain": {**FIXED, "--spec-type": "suffix,ngram-cache,draft"},
}


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
@pytest.mark.parametrize("name", SPECS)
def test_every_drafter_and_acceptance_writes_the_targets_own_text(
    exact: Path, judge: Engine, name: str, streamed: bool
) -> None:
    device, more = ("sim", {"min_batch": "1"}) if streamed else ("cpu", {})
    drafted = 0
    with session(exact, dict(SPECS[name]), device, **more) as opened:
        for text in (*prompts("code")[:2], prompts("prose")[0]):
            # The text twice, so that n-grams find something.
            prompt = opened.tokenize(text + text, add_special=True, parse_special=True)
            opened.forget()
            tokens, stats = generate(opened, prompt)
            assert len(tokens) == N_PREDICT
            assert_chosen_by_the_target(judge, prompt, tokens)
            drafted += stats.n_drafted
        copied = opened.target.counters().streamed_bytes
    assert (copied > 0) == streamed
    if name not in ("draft, throughput", "draft, tree"):  # those may rightly decline
        assert drafted > 0


def test_turns_with_rejected_drafts_leave_the_memory_of_a_fresh_evaluation(
    exact: Path, judge: Engine
) -> None:
    with session(exact, dict(FIXED)) as opened:
        history: list[int] = []
        rejected = 0
        for text in prompts("code")[:3]:
            history += opened.tokenize(text, add_special=not history, parse_special=True)
            tokens, stats = generate(opened, history)
            history += tokens
            rejected += stats.n_drafted - stats.n_accepted
        engine = opened.target
        assert engine.length(SEQUENCE) == len(history) - 1
        kept = engine.extend(SEQUENCE, history[-1:])[0]
    assert rejected > 0
    judge.rewind(SEQUENCE, 0)
    fresh = judge.extend(SEQUENCE, history, n_logits=1)[0]
    # The same prefix in batches of one and at once: how far the kernels themselves differ.
    judge.rewind(SEQUENCE, 0)
    for token in history:
        single = judge.extend(SEQUENCE, [token])[0]
    noise = float(np.abs(single - fresh).max())
    assert noise < 0.02
    assert min(np.abs(kept - fresh).max(), np.abs(kept - single).max()) <= NEAR_TIE + 2 * noise


def test_a_recurrent_target_is_rolled_back_by_checkpoints(models: Path) -> None:
    path = write_preset("qwen3next", models / "recurrent.gguf", size="tiny", seed=3)
    with Engine(path, EngineOptions(device="cpu", n_ctx=512)) as engine:
        assert not engine.can_rewind
        prompt = [5, 9, 17, 33, 5, 9, 17, 33, 5, 9, 17, 33]
        plain, _ = recurrent_rounds(engine, prompt, 0)
        spec, judged = recurrent_rounds(engine, prompt, 4)
        engine.rewind(SEQUENCE, 0)
        engine.extend(SEQUENCE, prompt[:-1], n_logits=0)
        for last, token in zip([prompt[-1], *spec], spec, strict=False):
            row = engine.extend(SEQUENCE, [last])[0]
            assert row.max() - row[token] <= NEAR_TIE
    assert len(spec) == len(plain) == 20
    assert judged["rejected"] > 0


def recurrent_rounds(
    engine: Engine, prompt: list[int], n_draft: int
) -> tuple[list[int], dict[str, int]]:
    engine.rewind(SEQUENCE, 0)
    out: list[int] = []
    judged = {"accepted": 0, "rejected": 0}
    for round_ in decode(
        engine,
        SEQUENCE,
        prompt,
        drafter=SuffixDrafter(min_match=1),
        policy=Fixed(n_draft),
        chooser=Greedy(),
        n_predict=20,
        is_end=lambda _: False,
    ):
        out += round_.emitted
        judged["accepted"] += round_.n_accepted
        judged["rejected"] += round_.n_drafted - round_.n_accepted
        assert engine.length(SEQUENCE) == len(prompt) + len(out) - 1
    return out, judged


def test_statistics_add_up(exact: Path) -> None:
    with session(exact, dict(FIXED)) as opened:
        tokens, stats = generate(opened, prompts("code")[0])
    assert stats.n_tokens == len(tokens) == N_PREDICT
    assert sum(rounds for _, rounds in stats.draft_lengths) == stats.n_rounds
    assert sum(n * rounds for n, rounds in stats.draft_lengths) == stats.n_drafted
    assert sum(n for _, n in stats.accepted_by_source) == stats.n_accepted
    assert sum(rounds for _, rounds in stats.decisions) == stats.n_rounds
    assert all(0 <= rate <= 1 for rate in stats.acceptance_per_position)
    assert stats.verify_s > 0
    assert stats.draft_s > 0


def test_the_same_seed_repeats_rejection_sampling(exact: Path) -> None:
    spec = {**FIXED, "--spec-type": "suffix", "--spec-accept": "reject"}
    with session(exact, spec) as opened:
        runs = []
        for seed in (1, 1, 2):
            opened.forget()
            runs.append(generate(opened, prompts("code")[0], temperature=1.0, seed=seed)[0])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
