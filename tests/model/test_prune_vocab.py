"""scripts/lab/run prune-vocab counts, keeps and writes the right tokens, and refuses bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from lab.options import engine_options
from lab.prune_vocab import choose_kept
from offload.engine import open_engine
from specoffload.config.resolution import demo_file
from specoffload.errors import UsageError
from specoffload.opening.draft_model import read_kept

DRAFT = demo_file("draft.gguf")


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.prune_vocab", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_the_most_frequent_tokens_are_kept_and_those_that_end_or_spell(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    (corpus / "a.py").write_text("import os\nreturn None\n" * 50)
    (corpus / "b.bin").write_bytes(b"\xff\xfe\x00" * 99)  # no text: skipped
    kept_file = tmp_path / "kept.txt"
    done = run(str(DRAFT), str(corpus), "--keep", "400", "-o", str(kept_file))
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["coverage"] == 1.0
    assert report["n_kept"] == 400
    kept = read_kept(kept_file)
    assert len(kept) == 400
    with open_engine(DRAFT, engine_options(device="cpu", n_ctx=256)) as engine:
        text = "import os\nreturn None\n" * 2
        assert set(engine.tokenize(text, add_special=False)) <= set(kept)
        assert {t for t in range(engine.n_vocab) if engine.is_end(t)} <= set(kept)
        spelt = b"".join(engine.model.piece(t, special=False) for t in kept)
        assert set(range(32, 127)) <= set(spelt), "every letter can be drafted"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "the following arguments are required"),
        (("none.gguf", "none"), "no such file or folder"),
        ((str(DRAFT), str(DRAFT)), "no text in"),
        ((str(DRAFT), str(Path(__file__)), "--keep", "9999"), "9999 tokens cannot be kept"),
        ((str(DRAFT), str(Path(__file__)), "--keep", "x"), "invalid int value"),
    ],
)
def test_bad_input_is_one_sentence(words: tuple[str, ...], message: str, tmp_path: Path) -> None:
    out = tmp_path / "kept.txt"
    done = run(*words, "-o", str(out))
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_kept_are_those_that_must_be_then_the_frequent() -> None:
    counts = Counter({1: 5, 3: 9, 4: 1, 5: 5})
    assert choose_kept(counts, {2}, 3, 6) == (1, 2, 3)
    assert choose_kept(counts, set(), 6, 6) == (0, 1, 2, 3, 4, 5)
    for always, n in (({2}, 0), ({2}, 7), ({0, 1}, 1)):
        with pytest.raises(UsageError, match="cannot be kept: the number must be"):
            choose_kept(counts, always, n, 6)
