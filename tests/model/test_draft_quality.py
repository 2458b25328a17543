"""`profile` tells how good a draft model is for a target, and what that predicts comes true."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from in_process import command
from lossless_parts import open_session, write_quantised
from resolved import config_of, line_of

from lab.synth import write_preset
from specdec.costs.profile import CostProfile
from specoffload.bench import draft_quality
from specoffload.bench.draft_quality import measured_quality
from specoffload.config.resolution import demo_file
from specoffload.session.session import Session
from specoffload.session.startup_lines import always_shown

COSTS = CostProfile(tuple(1.0 + 0.01 * n for n in range(64)), 0.02)


@pytest.fixture
def pair(exact: Path) -> Iterator[Session]:
    """The embedded pair with a target in f32, whose choices do not depend on the batch's size."""
    with open_session(exact, {"--spec-type": "draft"}) as opened:
        yield opened


def test_on_the_same_texts_the_predicted_acceptance_is_the_seen_one(
    pair: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert pair.draft is not None
    prompts = [pair.tokenize(text, add_special=True, parse_special=False) for text in
               ("def read(path):\n    with open(", "The house stood at the end of")]  # fmt: skip
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (2, 2))
    quality = measured_quality(pair.target, pair.draft, COSTS, prompts)
    assert quality.n_tokens == quality.n_other_tokens == 2 * 48
    # Only the last drafts of a text differ: its end cuts them short, and they do not count.
    predicted = quality.lengths[-1].tokens_per_round
    assert quality.blocks.tokens_per_round == pytest.approx(predicted, rel=0.1)
    for at, seen in zip(quality.positions[:3], quality.blocks.acceptance, strict=False):
        assert at.agreement == pytest.approx(seen, abs=0.1)
    assert 0.2 < (quality.positions[0].agreement or 0) < 0.95
    assert 0.2 < (quality.positions[0].overlap or 0) < 0.95
    assert 0.1 < (quality.positions[0].kl or 0) < 5
    assert pair.target.sequences.length(0) == pair.draft.sequences.length(0) == 0


def test_a_model_is_a_perfect_draft_of_itself(exact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (2, 1))
    with open_session(exact, {"--spec-type": "draft"}, draft=exact) as opened:
        assert opened.draft is not None
        quality = measured_quality(opened.target, opened.draft, COSTS)
    for at in quality.positions:
        assert at.agreement == pytest.approx(1.0, abs=0.03)
        assert at.kl == pytest.approx(0.0, abs=1e-3)
        assert at.overlap == pytest.approx(1.0, abs=0.02)
    assert quality.best.n_drafted == 8
    assert quality.blocks.tokens_per_round >= 8  # of 9, as the text's end cuts drafts short


def test_fewer_bits_make_a_model_a_worse_draft_of_itself(
    exact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (2, 1))
    kls, agreements = [], []
    embedded = demo_file("draft.gguf")
    low = write_quantised(tmp_path / "q4_0.gguf", "LLAMA_FTYPE_MOSTLY_Q4_0")
    assert low.stat().st_size < 0.65 * demo_file("target.gguf").stat().st_size
    for draft in (demo_file("target.gguf"), low, embedded):
        with open_session(exact, {"--spec-type": "draft"}, draft=draft) as opened:
            assert opened.draft is not None
            first = measured_quality(opened.target, opened.draft, COSTS).positions[0]
        assert first.agreement is not None
        assert first.kl is not None
        kls.append(first.kl)
        agreements.append(first.agreement)
    assert 0 < kls[0] < kls[1] < 0.2 * kls[2], "8 bits, 4 bits, and another model"
    assert agreements[0] >= agreements[1] > max(0.8, agreements[2])


def test_the_command_shows_and_returns_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (4, 2))
    words = ("profile", "--device", "cpu", "-t", "1", "-c", "1024")
    done = command(*words, "--draft", demo_file("draft.gguf"), "--json")
    assert done.returncode == 0, done.stderr
    quality = json.loads(done.stdout)["draft_quality"]
    assert [at["position"] for at in quality["positions"]] == list(range(1, 9))
    assert len(quality["blocks"]["acceptance"]) == 8
    assert len(quality["lengths"]) == 9
    assert quality["default"]["gain"] > 0
    shown = command(*words, "--draft", demo_file("draft.gguf"))
    assert "how well the draft guesses the target" in shown.stdout
    assert "then accepted" in shown.stdout
    assert "the default policy, measured: " in shown.stdout


def test_without_a_draft_model_nothing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: Path
) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path))
    model = write_preset("qwen3moe", models / "no-draft.gguf", seed=3)
    done = command("profile", model, "--device", "cpu", "-t", "1", "-c", "512", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["draft_quality"] is None


def test_a_draft_vocabulary_that_libllama_ignores_is_told(exact: Path, tmp_path: Path) -> None:
    (kept := tmp_path / "kept.txt").write_text("\n".join(map(str, range(300))))
    words = ("-m", exact, "--draft", demo_file("draft.gguf"), "--draft-vocab", kept)
    line = line_of(*map(str, words), "--device", "cpu", "-t", "1", "-c", "512")
    config = config_of(line.options)
    with Session(config) as opened:
        (said,) = always_shown(opened.notes)
        assert said.startswith("--draft-vocab ignored: libllama computes the draft")
