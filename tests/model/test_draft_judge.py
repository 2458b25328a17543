"""`draft judge` shows how well a draft guesses on one's own texts, and whether it pays."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from in_process import command

from specoffload.bench import draft_quality
from specoffload.bench.draft_quality import DraftQuality, Played
from specoffload.config.command_line import read_command_line
from specoffload.config.options import DistilOptions, JudgeOptions, Options
from specoffload.config.resolution import demo_file

PAIR = (demo_file("target.gguf"), "-md", demo_file("draft.gguf"))
ON_CPU = ("--device", "cpu", "-t", "1", "-c", "1024")


@pytest.fixture(autouse=True)
def brief(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECOFFLOAD_PROFILE_DIR", str(tmp_path / "kept"))
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(draft_quality, "_N_TEXTS", (2, 2))


def test_texts_of_ones_own_are_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (texts := tmp_path / "texts").mkdir()
    (texts / "a.py").write_text("def read(path):\n    with open(path) as f:\n" * 40)
    seen: list[Sequence[int]] = []
    compared = draft_quality._compared

    def watched(target: object, draft: object, prompt: Sequence[int]) -> object:
        seen.append(prompt)
        return compared(target, draft, prompt)  # type: ignore[arg-type]

    monkeypatch.setattr(draft_quality, "_compared", watched)
    done = command("draft", "judge", *PAIR, texts, *ON_CPU, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    quality = found["draft_quality"]
    assert [len(prompt) for prompt in seen] == [128, 128], "pieces of the text"
    assert found["draft_step_s"] > 0
    assert found["profile"][0] > 0
    assert len(quality["positions"]) == 8
    assert quality["pays"] is (None if quality["best_length"] else False) or quality["pays"]
    assert found["verdict"].startswith(("the draft ", "it is not certain"))


def test_it_ends_with_a_sentence_whether_the_draft_pays() -> None:
    done = command("draft", "judge", *PAIR, *ON_CPU)
    assert done.returncode == 0, done.stderr
    assert "milliseconds of a decode of n tokens" in done.stdout
    assert "one draft step: " in done.stdout
    assert "then accepted" in done.stdout
    assert "the draft pays here" in done.stdout or "pay" in done.stdout.splitlines()[-1]


def quality_with(predicted: float, measured: float, per_round: float = 1.5) -> DraftQuality:
    """A draft of 4 tokens with these speeds, in units of decoding without drafts."""
    lengths = tuple(
        draft_quality.BlockLength(n, 1.0, gain) for n, gain in ((0, 1.0), (4, predicted))
    )
    played = Played(per_round, measured, ())
    return DraftQuality(1, 1, 1, (), lengths, played, played)


@pytest.mark.parametrize(
    ("predicted", "measured", "pays", "words"),
    [
        (1.3, 1.25, True, "the draft pays here: drafts of 4 tokens are expected to reach 1.30"),
        (0.8, 0.99, False, "the draft does not pay here: no draft length is expected"),
        (0.8, 1.01, False, "the draft does not pay here: no draft length is expected"),
        (1.3, 0.97, None, "it is not certain that the draft pays here: "),
    ],
)
def test_the_verdict_is_by_price_and_a_measurement_can_deny_it(
    predicted: float, measured: float, pays: bool | None, words: str
) -> None:
    quality = quality_with(predicted, measured)
    assert quality.pays is pays
    assert quality.verdict.startswith(words)
    assert f"{measured:.2f} times the speed without drafts" in quality.verdict


@pytest.mark.parametrize("predicted", [0.8, 1.3])
def test_the_speed_of_a_policy_that_drafted_nothing_is_no_gain(predicted: float) -> None:
    quality = quality_with(predicted, 1.25, per_round=1.0)
    assert quality.pays is (None if predicted > 1 else False)
    assert "the default policy drafted next to nothing" in quality.verdict
    assert "1.25" not in quality.verdict


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((demo_file("target.gguf"), "--spec", "none"), "draft judge needs a draft model"),
        ((*PAIR, "none"), "none: no such file or folder"),
        ((*PAIR, demo_file("draft.gguf")), "no text in"),
    ],
)
def test_what_cannot_be_judged_is_one_sentence(words: tuple[str | Path, ...], message: str) -> None:
    done = command("draft", "judge", *words, *ON_CPU)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_too_short_texts_are_refused(tmp_path: Path) -> None:
    (text := tmp_path / "short.txt").write_text("few")
    done = command("draft", "judge", *PAIR, text, *ON_CPU)
    assert done.returncode == 2
    assert "no text has 16 tokens" in done.stderr


def test_words_are_a_model_a_draft_and_texts() -> None:
    line = read_command_line("draft judge", ["m.gguf", "-md", "d.gguf", "a", "b"])
    assert line.of(JudgeOptions).texts == (Path("a"), Path("b"))
    assert line.options.model == Path("m.gguf")
    by_flag = read_command_line("draft judge", ["-m", "m.gguf", "a"])
    assert by_flag.of(JudgeOptions).texts == (Path("a"),)
    distil = read_command_line("draft distil", ["m.gguf", "d.gguf", "a", "b", "-o", "n.gguf"])
    own = DistilOptions(Path("d.gguf"), (Path("a"), Path("b")), Path("n.gguf"))
    assert distil.of(DistilOptions) == own
    assert distil.of(Options).model == Path("m.gguf")
