"""`draft prune` counts, keeps and writes the right tokens, and refuses bad input."""

from __future__ import annotations

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
from in_process import command

from lab.options import engine_options
from offload.engine import open_engine
from specoffload.commands.draft_prune import StepTimes
from specoffload.config.command_line import read_command_line
from specoffload.config.options import PruneOptions
from specoffload.config.resolution import demo_file
from specoffload.draft_making.vocabulary import choose_kept
from specoffload.errors import UsageError
from specoffload.opening.draft_model import read_kept

DRAFT = demo_file("draft.gguf")
HAS_TORCH = importlib.util.find_spec("torch") is not None


def test_the_most_frequent_tokens_are_kept_and_those_that_end_or_spell(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text("import os\nreturn None\n" * 50)
    (corpus / "b.bin").write_bytes(b"\xff\xfe\x00" * 99)  # no text: skipped
    kept_file = tmp_path / "kept.txt"
    done = command("draft", "prune", DRAFT, corpus, "--keep", "400", "-o", kept_file, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["coverage"] == 1.0
    assert report["n_kept"] == 400
    assert (report["kept_step_s"] is not None) == HAS_TORCH
    kept = read_kept(kept_file)
    assert len(kept) == 400
    with open_engine(DRAFT, engine_options(device="cpu", n_ctx=256)) as engine:
        text = "import os\nreturn None\n" * 2
        assert set(engine.tokenize(text, add_special=False)) <= set(kept)
        assert {t for t in range(engine.n_vocab) if engine.is_end(t)} <= set(kept)
        spelt = b"".join(engine.model.piece(t, special=False) for t in kept)
        assert set(range(32, 127)) <= set(spelt), "every letter can be drafted"


def test_the_end_says_which_share_is_covered_and_which_flag_uses_the_list(tmp_path: Path) -> None:
    (text := tmp_path / "a.py").write_text("import os\n" * 50)
    out = tmp_path / "kept.txt"
    done = command("draft", "prune", DRAFT, text, "--keep", "400", "-o", out)
    said = " ".join(done.stdout.split())
    assert "400 of 4096 tokens of draft.gguf, 100.0000% of " in said
    assert f"--draft-vocab {out}" in said
    if HAS_TORCH:
        assert "a draft step in torch on " in said
    else:
        assert "whether it pays here was not measured: " in said


@pytest.mark.parametrize(
    ("whole_s", "kept_s", "words"),
    [
        (1e-3, 0.8e-3, "the list saves 20% of a step here: "),
        (1e-3, 0.99e-3, "the list does not pay here: "),
        (1e-3, 1.4e-3, "the list does not pay here: "),
    ],
)
def test_a_list_pays_if_steps_are_shorter_by_more_than_noise(
    whole_s: float, kept_s: float, words: str
) -> None:
    assert StepTimes("cpu", whole_s, kept_s).words.startswith(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "draft prune needs a draft model and texts: DRAFT.gguf CORPUS..."),
        ((str(DRAFT),), "draft prune needs a draft model and texts: DRAFT.gguf CORPUS..."),
        ((str(DRAFT), "none"), "none: no such file or folder"),
        (("none.gguf", str(Path(__file__))), "none.gguf"),
        ((str(DRAFT), str(DRAFT)), "no text in"),
        ((str(DRAFT), str(Path(__file__)), "--keep", "9999"), "--keep 9999: must be at least"),
        ((str(DRAFT), str(Path(__file__)), "--keep", "x"), "--keep x: must be a whole number"),
        ((str(DRAFT), str(Path(__file__)), "-md", "y"), "-md is not a flag of draft prune"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    out = tmp_path / "kept.txt"
    done = command("draft", "prune", *words, "-o", out)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())
    assert not out.exists()


def test_neither_the_draft_nor_a_text_is_overwritten(tmp_path: Path) -> None:
    (text := tmp_path / "a.txt").write_text("some words")
    done = command("draft", "prune", DRAFT, text, "--keep", "400", "-o", text)
    assert done.returncode == 2
    assert "would overwrite" in done.stderr
    assert text.read_text() == "some words"


def test_kept_are_those_that_must_be_then_the_frequent() -> None:
    counts = Counter({1: 5, 3: 9, 4: 1, 5: 5})
    assert choose_kept(counts, {2}, 3, 6) == (1, 2, 3)
    assert choose_kept(counts, set(), 6, 6) == (0, 1, 2, 3, 4, 5)
    for always, n in (({2}, 0), ({2}, 7), ({0, 1}, 1)):
        with pytest.raises(UsageError, match=f"--keep {n}: must be at least"):
            choose_kept(counts, always, n, 6)


def test_words_are_read_in_order_and_the_last_takes_the_rest() -> None:
    own = read_command_line("draft prune", ["d.gguf", "a", "--keep", "5", "b", "c"]).of(
        PruneOptions
    )
    assert own == PruneOptions(Path("d.gguf"), (Path("a"), Path("b"), Path("c")), 5)
