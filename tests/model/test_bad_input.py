"""Bad input: one clear sentence and exit code 2; never a traceback, an abort or a hang."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest

from lab.synth import write_preset
from offload.engine import Engine, EngineOptions
from offload.errors import BadModel, BadRequest, DoesNotFit, OffloadError

N_CUTS = 20


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
    """Where the tensor table begins and ends, from the names in it."""
    first = raw.find(b"token_embd.weight")
    names = [raw.rfind(b"_exps.weight"), raw.rfind(b"output_norm.weight"), raw.rfind(b"blk.")]
    return first - 8, max(names) + 40


def test_a_missing_file() -> None:
    assert_one_sentence(run_program("missing.gguf", "-p", "x"), "missing.gguf", "no such file")


def test_a_directory(tmp_path: Path) -> None:
    assert_one_sentence(run_program(tmp_path, "-p", "x"), "directory")


def test_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "empty.gguf"
    path.touch()
    assert_one_sentence(run_program(path, "-p", "x"), "empty")


def test_text_instead_of_a_model(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("once upon a time\n" * 100)
    assert_one_sentence(run_program(path, "-p", "x"), "not a GGUF file")


def test_a_prompt_that_is_empty() -> None:
    assert_one_sentence(run_program("-p", ""), "prompt is empty")


def test_a_prompt_longer_than_the_context() -> None:
    assert_one_sentence(run_program("-c", "256", "-p", "word " * 400), "--ctx-size", "256")


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


def test_a_draft_whose_vocabulary_does_not_fit(tiny_moe: Path) -> None:
    done = run_program("-md", tiny_moe, "-p", "x")
    assert_one_sentence(done, tiny_moe.name, "draft")


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
    key = b"deepseek2.expert_used_count"
    at = whole.find(key) + len(key) + 4
    path.write_bytes(whole[:at] + (10_000).to_bytes(4, "little") + whole[at + 4 :])
    assert_one_sentence(run_program(path, "-p", "x"), "assert.gguf", "assertion")


@pytest.mark.parametrize("seed", range(N_CUTS))
def test_a_file_truncated_anywhere(tmp_path: Path, whole: bytes, seed: int) -> None:
    rng = random.Random(seed)
    # Half of the cuts fall in the header, which is small, half anywhere.
    end = table_of(whole)[1] if seed % 2 else len(whole) - 1
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: rng.randrange(1, end)])
    with pytest.raises(BadModel) as caught:
        Engine(path, EngineOptions(device="cpu", n_ctx=64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", range(N_CUTS))
def test_a_corrupted_tensor_table(tmp_path: Path, whole: bytes, seed: int) -> None:
    rng = random.Random(seed)
    first, end = table_of(whole)
    damaged = bytearray(whole)
    for _ in range(8):
        damaged[rng.randrange(first, end)] = rng.randrange(256)
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    with pytest.raises(OffloadError) as caught:
        Engine(path, EngineOptions(device="cpu", n_ctx=64))
    assert "\n" not in str(caught.value)


def test_a_truncated_model_at_the_command_line(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: len(whole) // 2])
    assert_one_sentence(run_program(path, "-p", "x"), "damaged or was not downloaded completely")


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    path = write_preset("deepseek-v3", tmp_path / "mute.gguf", size="tiny", vocab="none")
    with (
        Engine(path, EngineOptions(device="cpu", n_ctx=64)) as engine,
        pytest.raises(BadModel, match="no tokenizer"),
    ):
        engine.tokenize("x")


def test_the_context_ends_and_nothing_is_lost(tiny_moe: Path) -> None:
    with Engine(tiny_moe, EngineOptions(device="cpu", n_ctx=256)) as engine:
        n_ctx = engine.n_ctx
        engine.sequences.extend(0, [1] * (n_ctx - 1), n_logits=0)
        with pytest.raises(DoesNotFit):
            engine.sequences.extend(0, [1, 2])
        assert engine.sequences.extend(0, [1]).shape[0] == 1
        with pytest.raises(BadRequest):
            engine.sequences.rewind(0, n_ctx + 1)
