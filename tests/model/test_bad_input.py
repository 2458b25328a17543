"""Bad input ends with one clear sentence and exit code 2, without traceback, abort or hang."""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
from pathlib import Path

import in_process
import pytest

from lab.options import engine_options
from lab.synth import write_preset
from offload.engine import open_engine
from offload.errors import BadModel, BadRequest, DoesNotFit, OffloadError

N_CUTS = 4


def run_program(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specoffload", "run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("specoffload:")]
    assert len(lines) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def whole(tiny_moe: Path) -> bytes:
    return tiny_moe.read_bytes()


def table_of(raw: bytes) -> tuple[int, int]:
    """Byte offsets of the tensor table's start and end, found by the tensor names in it."""
    first = raw.find(b"token_embd.weight")
    names = [raw.rfind(b"_exps.weight"), raw.rfind(b"output_norm.weight"), raw.rfind(b"blk.")]
    return first - 8, max(names) + 40


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.gguf", None, "no such file"),
        (".", None, "no .gguf model lies in this folder"),
        ("empty.gguf", b"", "empty"),
        (
            "text.gguf",
            b"once upon a time\n" * 100,
            "not a GGUF file, because it begins with 'once'",
        ),
        ("cut.gguf", 0.5, "damaged or was not downloaded completely"),
    ],
)
def test_what_is_no_model_is_said(
    name: str, content: bytes | float | None, words: str, tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else whole[: len(whole) // 2])
    assert_one_sentence(in_process.command("run", path, "-p", "x"), words)


def test_a_prompt_that_is_empty_or_longer_than_the_context() -> None:
    assert_one_sentence(in_process.command("run", "-p", ""), "prompt is empty")
    long = in_process.command("run", "-c", "256", "-t", "1", "-p", "word " * 400)
    assert_one_sentence(long, "--ctx-size", "256")


@pytest.mark.parametrize(
    "more",
    [
        ("-c", "8", "--spec-policy", "fixed", "--draft-max", "32", "-n", "60"),
        ("-c", "100", "--no-spec", "-p", "word " * 70, "-n", "3"),
        ("--draft-params", "-c 3", "-p", "word " * 40, "-n", "3", "--spec-policy", "fixed"),
    ],
)
def test_contexts_that_the_library_rounds_up_hold_batches_of_all_their_tokens(
    more: tuple[str, ...],
) -> None:
    done = run_program("-t", "1", *more) if "-p" in more else run_program("-t", "1", "hi", *more)
    assert done.returncode == 0, done.stderr


def test_a_shell_that_limits_files_to_less_than_a_page_is_one_sentence() -> None:
    words = [sys.executable, "-m", "specoffload", "run", "-p", "x", "-n", "1", "-t", "1"]
    shell = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *words]
    done = subprocess.run(shell, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    message = (
        f"specoffload: a file of {mmap.PAGESIZE} bytes in memory cannot be made (File too large)"
    )
    assert message in done.stderr


def test_a_draft_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    """One with another vocabulary is translated (tests/model/test_vocabulary_pairs.py)."""
    draft = write_preset("mistral-large", tmp_path / "none.gguf", size="tiny", vocab="none")
    done = run_program("-md", draft, "-p", "x")
    assert_one_sentence(done, draft.name, "no tokenizer", "--draft")


def test_an_architecture_unknown_to_the_library(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "unknown.gguf"
    name = b"deepseek2"
    at = whole.find(name, whole.find(b"general.architecture"))
    path.write_bytes(whole[:at] + b"deepsoup2" + whole[at + len(name) :])
    assert_one_sentence(run_program(path, "-p", "x"), "unknown model architecture", "deepsoup2")


def test_an_assertion_inside_the_library_ends_in_a_sentence_too(
    tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "assert.gguf"
    key = b"deepseek2.rope.dimension_count"
    at = whole.find(key) + len(key) + 4
    path.write_bytes(whole[:at] + (10_000).to_bytes(4, "little") + whole[at + 4 :])
    assert_one_sentence(run_program(path, "-p", "x"), "assert.gguf", "stopped at an assertion")


@pytest.mark.parametrize("seed", range(N_CUTS))
@pytest.mark.parametrize("damage", ["cut", "corrupted"])
def test_a_file_cut_anywhere_or_with_a_corrupted_tensor_table(
    tmp_path: Path, whole: bytes, seed: int, damage: str
) -> None:
    rng, (first, end) = random.Random(seed), table_of(whole)
    damaged = bytearray(whole)
    if damage == "cut":  # half of the cuts are in the small header
        del damaged[rng.randrange(1, end if seed % 2 else len(whole) - 1) :]
    else:
        for _ in range(8):
            damaged[rng.randrange(first, end)] = rng.randrange(256)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with pytest.raises(BadModel if damage == "cut" else OffloadError) as caught:
        open_engine(path, engine_options(device="cpu", n_ctx=64))
    assert "\n" not in str(caught.value)


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    path = write_preset("deepseek-v3", tmp_path / "mute.gguf", size="tiny", vocab="none")
    with (
        open_engine(path, engine_options(device="cpu", n_ctx=64)) as engine,
        pytest.raises(BadModel, match="no tokenizer"),
    ):
        engine.tokenize("x")


def test_the_context_ends_and_nothing_is_lost(tiny_moe: Path) -> None:
    with open_engine(tiny_moe, engine_options(device="cpu", n_ctx=256)) as engine:
        n_ctx = engine.n_ctx
        engine.sequences.extend(0, [1] * (n_ctx - 1), n_logits=0)
        with pytest.raises(DoesNotFit):
            engine.sequences.extend(0, [1, 2])
        assert engine.sequences.extend(0, [1]).shape[0] == 1
        with pytest.raises(BadRequest):
            engine.sequences.rewind(0, n_ctx + 1)
