"""The command line resolved: defaults with reasons, bad values in one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from offload.device import MinBatch
from specdec.errors import BadOption
from specdec.options import DrafterName
from specoffload.commands.run import read_seed, split_model_and_prompt
from specoffload.config.environment import read_environment
from specoffload.config.resolution import Config, Options, parse_min_batch, resolve
from specoffload.config.shared_flags import opens_a_model
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


def program() -> tuple[typer.Typer, dict[str, Config]]:
    """A command line that opens a model, and where the configuration of its last run goes."""
    seen: dict[str, Config] = {}

    @opens_a_model
    def command(make_config: Callable[[Path | None], Config]) -> None:
        seen["config"] = make_config(None)

    app = typer.Typer()
    app.command()(command)
    return app, seen


def test_llama_cpps_variables_stand_for_their_flags_and_others_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app, seen = program()
    monkeypatch.setenv("LLAMA_ARG_CTX_SIZE", "300")
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_N_MAX", "5")
    monkeypatch.setenv("LLAMA_ARG_POOLING", "mean")
    done = CliRunner().invoke(app, ["-t", "1"])
    assert done.exception is None
    config = seen["config"]
    assert config.ctx_size == 300
    assert config.spec.longest == 5
    assert any("not read here: LLAMA_ARG_POOLING" in reason for reason in config.reasons)
    assert CliRunner().invoke(app, ["-c", "400"]).exception is None
    assert seen["config"].ctx_size == 400


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-td", "3", "-cd", "100"], {"n_threads": 3, "n_ctx": 100}),
        (["-devd", "cpu", "--draft-params", "-tb 2"], {"n_threads_batch": 2, "device": "cpu"}),
    ],
)
def test_llama_cpps_flags_of_the_draft_are_its_parameters(
    words: list[str], options: dict[str, object]
) -> None:
    app, seen = program()
    assert CliRunner().invoke(app, words).exception is None
    assert seen["config"].spec.draft_options == options
    for refused in ("-ngld", "-hfd", "-ctkd"):
        done = CliRunner().invoke(app, [refused, "5"])
        assert isinstance(done.exception, UsageError)


def test_a_prompt_that_is_no_file_name_is_a_prompt() -> None:
    for text in ("x" * 5000, "a\0b"):
        assert split_model_and_prompt(text, None) == (None, text)


@pytest.mark.parametrize(("typed", "seed"), [(None, None), (-1, None), (0, 0), (42, 42)])
def test_a_seed_of_minus_one_is_random(typed: int | None, seed: int | None) -> None:
    assert read_seed(typed) == seed


def test_other_negative_seeds_are_refused() -> None:
    with pytest.raises(UsageError, match="--seed -7"):
        read_seed(-7)


def test_no_profile_without_a_drafter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--no-profile has no effect"):
        resolve(Options(model=tmp_path / "m.gguf", use_profile=False))


def test_a_number_as_draft_is_answered_with_the_flag_that_was_meant(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--draft 8: no such file; .* --draft-max 8"):
        resolve(Options(draft=Path("8")))


def test_a_variable_of_speculation_without_effect_is_noted_and_a_flag_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_P_MIN", "0.5")
    config = resolve(Options())
    assert config.spec.options.p_min == 0.75
    assert any("LLAMA_ARG_SPEC_DRAFT_P_MIN has no effect" in r for r in config.spec.reasons)
    used = resolve(Options(spec_given={"--spec-policy": "p-min"}))
    assert used.spec.options.p_min == 0.5
    assert not used.spec.reasons
    typed = resolve(Options(spec_given={"--spec-policy": "p-min", "--spec-draft-p-min": 0.25}))
    assert typed.spec.options.p_min == 0.25
    assert resolve(Options(spec=False)).spec.options.drafters == (DrafterName.NONE,)
    with pytest.raises(BadOption, match="--spec-draft-p-min takes no effect"):
        resolve(Options(spec_given={"--spec-draft-p-min": 0.25}))
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_P_MIN", "much")
    with pytest.raises(UsageError, match="LLAMA_ARG_SPEC_DRAFT_P_MIN=much"):
        resolve(Options())


def test_the_draft_model_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_DRAFT_MODEL", str(tmp_path / "d.gguf"))
    assert resolve(Options()).draft == tmp_path / "d.gguf"
    assert resolve(Options(spec=False)).draft is None
    other = resolve(Options(spec_given={"--spec-type": "ngram-mod"}))
    assert other.draft is None
    assert any("LLAMA_ARG_SPEC_DRAFT_MODEL has no effect" in r for r in other.reasons)
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "suffix")
    with pytest.raises(UsageError, match="LLAMA_ARG_SPEC_TYPE=suffix"):
        resolve(Options(draft=tmp_path / "typed.gguf"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": False, "use_profile": False}, "--no-profile takes no effect"),
        (
            {"spec_given": {"--spec-type": "none"}, "use_profile": False},
            "--no-profile takes no effect",
        ),
    ],
)
def test_no_profile_where_nothing_drafts_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(Options(**changes))


def test_no_profile_and_a_look_ahead_of_the_environment_exclude_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GGML_MAX_LOOK_AHEAD", "4")
    with pytest.raises(UsageError, match="--no-profile and GGML_MAX_LOOK_AHEAD"):
        resolve(Options(use_profile=False))
    monkeypatch.setenv("GGML_BATCH_COSTS", "1,0.6,0.5")
    assert resolve(Options(use_profile=False)).spec.options.policy == "costs"
