"""The command line resolved: defaults with reasons, bad values in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.device import MinBatch
from specoffload.config import Options, parse_min_batch, resolve
from specoffload.env import read_environment
from specoffload.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, MinBatch(32, 32)),
        ("3", MinBatch(3, 3)),
        ("dense=8,experts=24", MinBatch(experts=24, dense=8)),
        ("experts=5", MinBatch(experts=5, dense=32)),
        ("2, dense=9", MinBatch(experts=2, dense=9)),
    ],
)
def test_min_batch_is_a_number_or_one_per_kind(text: str | None, expected: MinBatch) -> None:
    assert parse_min_batch(text) == expected


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "experts=", "attention=3", "3.5"])
def test_a_bad_min_batch_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--min-batch"):
        parse_min_batch(text)


def test_every_automatic_choice_has_a_reason() -> None:
    config = resolve(Options())
    assert config.model.name == "target.gguf"
    assert config.draft is not None
    assert config.draft.name == "draft.gguf"
    assert any("embedded" in reason for reason in config.reasons)
    assert any("threads" in reason for reason in config.reasons)


def test_what_was_said_needs_no_reason() -> None:
    config = resolve(Options(model=Path("m.gguf"), threads=3))
    assert (config.threads, config.threads_batch, config.draft) == (3, 3, None)
    assert config.reasons == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(draft=Path("d.gguf"), spec=False), "--no-spec"),
        (Options(threads=0), "--threads 0"),
        (Options(threads_batch=0), "--threads-batch 0"),
        (Options(ctx_size=-1), "--ctx-size"),
        (Options(draft_max=64), "--draft-max"),
        (Options(model=Path("m.gguf"), draft_max=4), "no effect without a draft"),
        (Options(expert_cache="fifo"), "--expert-cache"),
        (Options(prefetch_depth=-1), "--prefetch-depth"),
        (Options(n_gpu_layers=-1), "--n-gpu-layers"),
        (Options(vram="much"), "--vram"),
    ],
)
def test_options_that_cannot_be_taken_are_refused(options: Options, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(options)


@pytest.mark.parametrize(
    "environ",
    [
        {"GGML_MAX_LOOK_AHEAD": "many"},
        {"GGML_MAX_LOOK_AHEAD": "-1"},
        {"SPECOFFLOAD_VERBOSE": "yes"},
    ],
)
def test_a_bad_environment_variable_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=next(iter(environ))):
        read_environment(environ)


def test_unset_variables_are_unset() -> None:
    read = read_environment({})
    assert (read.batch_costs, read.max_look_ahead, read.verbose) == (None, None, False)
