"""The command line read and resolved: defaults with reasons, bad values in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from resolved import config_of, line_of
from typer.testing import CliRunner

from numa.place import Strategy
from offload.plan.min_batch import MinBatch
from specdec.errors import BadOption
from specdec.options import DrafterName, PolicyName, SpecOptions
from specoffload.cli import app
from specoffload.commands.run import split_model_and_prompt
from specoffload.config.command_line import flags_of, names_of
from specoffload.config.environment import Environment, read_environment
from specoffload.config.flags.flag import Flag
from specoffload.config.flags.reading import NEVER
from specoffload.config.flags.table import POSITIONALS, TABLE
from specoffload.config.host import read_host
from specoffload.config.options import DraftOptions, Options, ServeOptions, Toggle
from specoffload.config.resolution import Config, resolve
from specoffload.errors import UsageError
from specoffload.session.generation import GenerateOptions

COMMANDS = sorted({command for flag in TABLE for command in flag.commands})


def resolved(*words: str, **variables: str) -> Config:
    """A command line of `run`, resolved here with only these variables."""
    return resolve(line_of(*words, **variables).options, read_host(Environment()))


def with_variables(*words: str, **environ: str) -> Config:
    environment = read_environment(environ)
    line = line_of(*words)
    return resolve(line.options, read_host(environment))


# -- the table


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_or_variable_means_one_flag_of_a_command(command: str) -> None:
    flags = flags_of(command)
    names = [name for flag in flags for name in (*flag.names, *flag.off)]
    assert len(names) == len(set(names))
    assert all(name.startswith("-") for name in names)
    variables = [name for flag in flags for name in flag.variables]
    assert len(variables) == len(set(variables))
    places = [(flag.section, flag.field) for flag in flags]
    assert len(places) == len(set(places))


@pytest.mark.parametrize("flag", TABLE, ids=lambda flag: f"{flag.section.__name__}.{flag.field}")
def test_a_flag_fills_a_field_that_has_a_default(flag: Flag) -> None:
    section = flag.section()
    assert getattr(section, flag.field) == flag.default
    assert flag.names or flag.off
    assert flag.help.endswith(".")
    assert not flag.digits_mean or flag.digits_mean in names_of(flags_of("run"))


def test_ten_flags_come_first_in_run_and_serve() -> None:
    for command in ("run", "serve"):
        assert sum(flag.first for flag in flags_of(command)) == 10


def test_every_command_of_the_program_has_its_words_read_by_the_table() -> None:
    taken = {command for positional in POSITIONALS for command in positional.commands}
    for command in sorted({*COMMANDS, *taken}):
        done = CliRunner().invoke(app, [*command.split(), "--no-such-flag"])
        assert isinstance(done.exception, UsageError), command
        assert "there is no flag --no-such-flag" in str(done.exception)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_help_shows_panels_and_all_of_it_on_demand(command: str) -> None:
    short = CliRunner().invoke(app, [command, "--help"]).stdout
    for panel in ("to begin with", "model", "offload", "speculation", "sampling", "debugging"):
        assert f"─ {panel} ─" in short
    assert "--spec-ngram-mod-n-max" not in short
    every = CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "200"}).stdout
    for flag in flags_of(command):
        assert (*flag.names, *flag.off)[0] in every


# -- reading words


def test_words_become_typed_values_under_the_names_that_were_typed() -> None:
    line = line_of("-m", "m.gguf", "-t", "3", "--draft-max=5", "--policy", "p-min", "-fa")
    options = line.options
    assert (options.model, options.threads) == (Path("m.gguf"), 3)
    assert options.flash_attn is Toggle.ON
    assert options.spec.policy is PolicyName.P_MIN
    assert options.spec.n_max == 5
    assert options.given == {"model": "-m", "threads": "-t", "flash_attn": "-fa"}
    assert options.spec.given == {"n_max": "--draft-max", "policy": "--policy"}


def test_the_last_of_several_wins_and_underscores_are_hyphens() -> None:
    assert line_of("-c", "1", "--ctx_size", "2", "-c", "3").options.ctx_size == 3


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-fa",), Toggle.ON),
        (("-fa", "off", "-c", "9"), Toggle.OFF),
        (("-fa", "1"), Toggle.ON),
        (("-fa", "-c", "9"), Toggle.ON),
        ((), Toggle.AUTO),
    ],
)
def test_a_flag_that_may_stand_bare_swallows_nothing(
    words: tuple[str, ...], expected: Toggle
) -> None:
    options = line_of(*words).options
    assert options.flash_attn is expected
    assert options.ctx_size == (9 if "-c" in words else 4096)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-nq", "2"), "there is no flag -nq"),
        (("--draft-mx", "2"), "did you mean --draft-max?"),
        (("--thread", "2"), "did you mean --threads?"),
        (("--port", "80"), "--port is no flag of run, but of serve"),
        (("-t",), "-t needs a value"),
        (("-t", "-c", "3"), "-t needs a value"),
        (("-t", "x"), "-t x: must be a whole number"),
        (("-c", "-1"), "-c -1: must be at least 0"),
        (("--ctx-size=x",), "--ctx-size x: must be"),
        (("--mmap=1",), "--mmap takes no value"),
        (("--draft-max", "-1"), "--draft-max -1: must be between 0 and 63"),
        (("--spec-draft-n-max", "x"), "--spec-draft-n-max x: must be"),
        (("--draft-p-min", "nan"), "--draft-p-min nan: must be a number"),
        (("--policy", "p_min"), "--policy p_min: must be one of throughput, "),
        (("--spec", "ngram-mod,ngram-mod"), "names a drafter twice"),
        (("--spec", "none,suffix"), "none stands alone"),
        (("--spec", "draft-mtp"), "'draft-mtp' is unknown; there are none, draft, "),
        (("--expert-cache", "fifo"), "--expert-cache fifo: must be one of lru, lfu"),
        (("--vram", "much"), "--vram much: "),
        (("--seed", "-7"), "--seed -7: must lie between"),
        (("--repeat-penalty", "0"), "--repeat-penalty 0: must be over 0"),
        (("--spec-synth-rates", "0.5,x"), "must be numbers, comma separated"),
        (("a", "b"), "'b' is one word too many"),
    ],
)
def test_bad_words_are_answered_under_the_name_that_was_typed(
    words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        line_of(*words)
    assert message in str(caught.value)


def refusal_of(words: list[str]) -> str | None:
    """The sentence with which words are refused, None if they are read."""
    try:
        line_of(*words)
    except UsageError as e:
        return str(e)
    return None


_NAMES = st.sampled_from([name for flag in TABLE for name in (*flag.names, *flag.off)])


@given(st.lists(_NAMES | st.text(max_size=8), max_size=5))
def test_any_words_are_read_or_refused_under_one_of_them(words: list[str]) -> None:
    refused = refusal_of(words)
    assert refused is None or any(
        word.partition("=")[0].replace("_", "-") in refused or repr(word) in refused
        for word in words
    )


@given(st.integers(0, 1 << 40), st.sampled_from(["-c", "--ctx-size"]), st.booleans())
def test_a_number_is_read_back_however_it_is_written(n: int, name: str, joined: bool) -> None:
    words = [f"--ctx-size={n}"] if joined else [name, str(n)]
    assert line_of(*words).options.ctx_size == n


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3", MinBatch(3, 3)),
        ("dense=8,experts=24", MinBatch(experts=24, dense=8)),
        ("experts=5", MinBatch(experts=5, dense=32)),
        ("2, dense=9", MinBatch(experts=2, dense=9)),
        ("off", MinBatch(NEVER, NEVER)),
        ("auto", "auto"),
    ],
)
def test_min_batch_is_a_number_or_one_per_kind(text: str, expected: object) -> None:
    assert line_of("--min-batch", text).options.min_batch == expected


@pytest.mark.parametrize("text", ["0", "-1", "x", "", "experts=", "attention=3", "3.5"])
def test_a_bad_min_batch_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="--min-batch"):
        line_of("--min-batch", text)


@pytest.mark.parametrize(
    ("words", "seed"),
    [((), None), (("-s", "-1"), None), (("--seed", "0"), 0), (("--seed", "42"), 42)],
)
def test_a_seed_of_minus_one_is_random(words: tuple[str, ...], seed: int | None) -> None:
    assert line_of(*words).of(GenerateOptions).seed == seed


def test_a_number_for_the_draft_is_read_as_its_longest_length() -> None:
    line = line_of("--draft", "16")
    assert line.options.draft is None
    assert line.options.spec.n_max == 16
    assert line.remarks == ("--draft 16 is read as --draft-max 16",)
    assert line_of("--draft", "./16").options.draft == Path("./16")


def test_a_longest_draft_without_room_is_the_longest_with_room() -> None:
    line = line_of("--draft-max", "64")
    assert line.options.spec.n_max == 63
    assert line.remarks == ("--draft-max 64 is read as 63, the most there is room for",)
    line = line_of(LLAMA_ARG_SPEC_DRAFT_N_MAX="100")
    assert line.options.spec.n_max == 63
    assert line.remarks[0].startswith("LLAMA_ARG_SPEC_DRAFT_N_MAX=100 is read as 63")
    assert line_of("--draft-max", "63").remarks == ()


def test_a_value_may_begin_with_a_hyphen_unless_it_is_a_flag() -> None:
    assert line_of("-n", "-1", "-p", "- a list").of(GenerateOptions) == GenerateOptions()
    with pytest.raises(UsageError, match="-p needs a value"):
        line_of("-p", "-n", "3")
    assert line_of("--", "-p").given  # behind -- everything is the prompt


# -- variables


def test_llama_cpps_variables_stand_for_their_flags_and_others_are_named() -> None:
    variables = {
        "LLAMA_ARG_CTX_SIZE": "300",
        "LLAMA_ARG_SPEC_DRAFT_N_MAX": "5",
        "LLAMA_ARG_NOT_KNOWN": "mean",
        "GGML_OFFLOAD_OP_MIN_BATCH_SIZE": "3",
        "LLAMA_ARG_MMAP": "1",
    }
    options = line_of("-t", "1", **variables).options
    assert (options.ctx_size, options.spec.n_max) == (300, 5)
    assert options.mmap
    assert options.min_batch == MinBatch(3, 3)
    assert options.given["ctx_size"] == "LLAMA_ARG_CTX_SIZE"
    assert any("not read here: LLAMA_ARG_NOT_KNOWN" in remark for remark in options.remarks)
    assert line_of("-c", "400", **variables).options.ctx_size == 400


def test_a_variable_of_another_command_is_neither_read_nor_named() -> None:
    assert line_of(LLAMA_ARG_PORT="1").remarks == ()
    assert line_of(command="serve", LLAMA_ARG_PORT="1").of(ServeOptions).port == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [("LLAMA_ARG_THREADS", "x"), ("LLAMA_ARG_MMAP", "maybe"), ("LLAMA_ARG_SPEC_TYPE", "mtp")],
)
def test_a_bad_variable_is_named_with_its_value(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"{name}={text}: "):
        line_of(**{name: text})


@pytest.mark.parametrize("text", ["many", "-1"])
def test_a_bad_look_ahead_is_named(text: str) -> None:
    with pytest.raises(UsageError, match="GGML_MAX_LOOK_AHEAD"):
        read_environment({"GGML_MAX_LOOK_AHEAD": text})


def test_profiles_lie_where_the_environment_says() -> None:
    assert read_environment({"SPECOFFLOAD_PROFILE_DIR": "x"}).profile_folder == Path("x")
    assert read_environment({"XDG_CACHE_HOME": "c"}).profile_folder == Path(
        "c/specoffload/profiles"
    )
    assert read_environment({}).profile_folder == Path.home() / ".cache/specoffload/profiles"


# -- the draft's own flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("-td", "3", "-cd", "100"), DraftOptions(threads=3, ctx_size=100)),
        (("-devd", "cpu", "--draft-params", "-tb 2"), DraftOptions(device="cpu", threads_batch=2)),
        (("--draft-params", "-t 2 -c 0", "-td", "5"), DraftOptions(threads=5, ctx_size=0)),
        (("--draft-params", "-b 7 -ub 3 -fa"), DraftOptions(7, 3, flash_attn=Toggle.ON)),
    ],
)
def test_flags_of_the_draft_are_typed_one_by_one_or_as_its_command_line(
    words: tuple[str, ...], expected: DraftOptions
) -> None:
    assert line_of(*words).options.of_draft == expected
    assert resolved(*words).spec.of_draft == expected


def test_the_draft_s_options_have_the_engine_s_names() -> None:
    config = resolved("--draft-params", "-t 3 -c 100 -dev cpu -fa off")
    assert config.spec.draft_options == {
        "n_threads": 3,
        "n_ctx": 100,
        "device": "cpu",
        "flash_attn": Toggle.OFF,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--bogus 3", "--draft-params: there is no flag --bogus"),
        ("-c many", "--draft-params: -c many: must be a whole number"),
        ("word", "--draft-params: 'word' is no flag"),
        ('--device "x', '--draft-params --device "x: cannot be split into words'),
    ],
)
def test_a_bad_command_line_of_the_draft_is_answered(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        line_of("--draft-params", text)
    assert message in str(caught.value)


def test_what_a_draft_does_not_have_is_said() -> None:
    (idle,) = line_of("--draft-params", "--top-k 3").idle
    assert idle == ("--draft-params: --top-k", "a draft has no such choice here")


# -- models and prompts


def test_a_prompt_that_is_no_file_name_is_a_prompt() -> None:
    for text in ("x" * 5000, "a\0b", "def f(n):", "hi"):
        assert split_model_and_prompt(text, None, None) == (None, text)
    assert split_model_and_prompt("word", Path("m.gguf"), None) == (Path("m.gguf"), "word")


@pytest.mark.parametrize("word", ["gemma3:270m", "unsloth/DeepSeek-R1:Q4_K_M", "llama3", "a/b"])
def test_the_name_of_a_model_is_never_a_silent_prompt(word: str) -> None:
    with pytest.raises(UsageError, match="is no file here"):
        split_model_and_prompt(word, None, None)


def test_a_model_or_a_prompt_that_is_given_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="there is a prompt already"):
        split_model_and_prompt("def f(n):", None, "text")
    with pytest.raises(UsageError, match="'a.gguf' and -m b.gguf name two"):
        line_of("-m", "b.gguf", "a.gguf", command="serve")


# -- resolution


def test_every_automatic_choice_has_a_reason() -> None:
    config = resolved()
    assert config.model.name == "target.gguf"
    assert config.draft is not None
    assert config.draft.name == "draft.gguf"
    assert any("embedded" in reason for reason in config.reasons)
    assert any("threads" in reason for reason in config.reasons)


def test_what_was_said_needs_no_reason() -> None:
    one = replace(read_host(Environment()), n_physical=1, n_allowed=1)
    words = ("-m", "m.gguf", "-t", "1", "-b", "9", "-fa", "-ctk", "f16", "-dev", "cpu")
    config = resolve(line_of(*words).options, one)
    assert config.spec.reasons == ()
    assert (config.threads, config.threads_batch, config.draft) == (1, 1, None)
    assert all("one memory node" in reason for reason in config.reasons)


def test_the_streaming_of_a_configuration_is_what_was_typed() -> None:
    streaming = resolved("--vram", "1GiB", "-ncmoe", "3", "--no-overlap", "-ngl", "all").streaming
    assert streaming.device_bytes == 1 << 30
    assert (streaming.n_cpu_moe, streaming.overlap) == (3, False)
    assert streaming.n_gpu_layers is not None
    assert streaming.n_gpu_layers > 1000
    assert resolved().streaming.n_cpu_moe == "fit"


def test_min_batch_auto_is_measured_and_a_number_is_taken() -> None:
    assert resolved("--min-batch", "auto").min_batch_auto
    config = resolved("--min-batch", "3")
    assert (config.min_batch, config.min_batch_auto) == (MinBatch(3, 3), False)
    assert resolved().min_batch == MinBatch(32, 32)


@pytest.mark.parametrize("strategy", Strategy)
def test_every_numa_strategy_can_be_named(strategy: Strategy) -> None:
    assert line_of("--numa", str(strategy)).options.numa is strategy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--spec", "draft", "-m", "m.gguf"), "--spec draft needs a draft model"),
        (("--policy", "costs", "--no-profile"), "--policy costs needs a profile: drop --no-profi"),
        (("--numa-node", "0", "--numa", "rows"), "--numa-node 0 keeps .* excludes --numa rows"),
    ],
)
def test_what_cannot_be_taken_together_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("--policy", "p-min", "--draft-min", "20"),
        ("--policy", "p-min", "--draft-min", "20", "--draft-max", "4"),
        ("--spec", "ngram-mod", "--spec-ngram-mod-n-min", "100", "--spec-ngram-mod-n-max", "10"),
    ],
)
def test_a_least_length_above_the_longest_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadOption, match="is above .* no draft could be verified"):
        resolved(*words)


MODEL = ("-m", "m.gguf")


@pytest.mark.parametrize(
    ("words", "remark"),
    [
        (("--draft-p-min", "0.5"), "--draft-p-min has no effect: it needs --spec-policy p-min"),
        (
            ("--spec-ngram-mod-n-max", "8"),
            "--spec-ngram-mod-n-max has no effect: it needs --spec-type ngram-mod",
        ),
        (("--draft-p-split", "0.2"), "--draft-p-split has no effect: it needs --spec-tree"),
        (
            ("--spec-look-ahead", "2"),
            "--spec-look-ahead has no effect: it needs --spec-pol",
        ),
        (("-lcs", "x", "--spec", "draft"), "-lcs has no effect: it needs --spec-type ngram-cache"),
        ((*MODEL, "--draft-max", "4"), "--draft-max has no effect: nothing drafts: add --draft"),
        ((*MODEL, "--no-profile"), "--no-profile has no effect: nothing drafts"),
        ((*MODEL, "--record-trace", "x"), "--record-trace has no effect: nothing drafts"),
        ((*MODEL, "-td", "3"), "-td has no effect: nothing drafts"),
        ((*MODEL, "--draft-params", "-t 3"), "--draft-params: -t has no effect: nothing dr"),
        (("--no-spec", "--policy", "fixed"), "--policy has no effect: nothing drafts with --no-sp"),
        (("--no-spec", "-md", "d.gguf"), "-md has no effect: nothing drafts with --no-spec"),
        (("--spec", "suffix", "--draft", "d"), "--draft has no effect: --spec does not name draft"),
        (
            ("--spec-tree", "--spec", "suffix,draft"),
            "--spec-tree has no effect: it needs the dr",
        ),
        (("--spec-tree", "--spec-accept", "reject"), "--spec-accept has no effect: --spec-tree ex"),
    ],
)
def test_a_flag_that_changes_nothing_is_a_remark_and_an_error_when_strict(
    words: tuple[str, ...], remark: str
) -> None:
    config = resolved(*words)
    said = [r for r in (*config.reasons, *config.spec.reasons) if r.startswith(remark)]
    assert len(said) == 1, (config.reasons, config.spec.reasons)
    with pytest.raises(UsageError) as caught:
        resolved(*words, "--strict-flags")
    assert str(caught.value).startswith(remark)


def test_what_has_no_effect_is_not_in_the_configuration() -> None:
    spec = resolved(*MODEL, "--spec-tree", "--record-trace", "x", "--draft-max", "3").spec
    assert spec.options == SpecOptions()
    assert spec.record_trace is None


def test_no_spec_drafts_nothing_even_with_the_embedded_pair() -> None:
    config = resolved("--no-spec")
    assert config.draft is None
    assert config.spec.options.drafters == (DrafterName.NONE,)
    assert not config.spec.options.is_on


def test_without_a_profile_drafts_are_fixed_blocks_unless_a_policy_was_named() -> None:
    assert resolved("--no-profile").spec.options.policy is PolicyName.FIXED
    config = resolved("--no-profile", "--policy", "ratio")
    assert config.spec.options.policy is PolicyName.RATIO
    assert config_of(use_profile=False).spec.options.policy is PolicyName.FIXED
    named = SpecOptions(policy=PolicyName.BANDIT)
    assert config_of(use_profile=False, spec=named).spec.options.policy is PolicyName.BANDIT


def test_a_variable_of_speculation_without_effect_is_no_error_even_when_strict() -> None:
    config = resolved("--strict-flags", LLAMA_ARG_SPEC_DRAFT_P_MIN="0.5")
    assert config.spec.options.p_min == 0.75
    assert any("LLAMA_ARG_SPEC_DRAFT_P_MIN has no effect" in r for r in config.spec.reasons)
    used = resolved("--policy", "p-min", LLAMA_ARG_SPEC_DRAFT_P_MIN="0.5")
    assert used.spec.options.p_min == 0.5
    assert not used.spec.reasons
    typed = ("--policy", "p-min", "--draft-p-min", "0.25")
    assert resolved(*typed, LLAMA_ARG_SPEC_DRAFT_P_MIN="0.5").spec.options.p_min == 0.25


def test_the_draft_model_of_the_environment() -> None:
    variable = {"LLAMA_ARG_SPEC_DRAFT_MODEL": "d.gguf"}
    assert resolved(**variable).draft == Path("d.gguf")
    assert resolved("--no-spec", **variable).draft is None
    other = resolved("--spec", "ngram-mod", **variable)
    assert other.draft is None
    assert any("LLAMA_ARG_SPEC_DRAFT_MODEL has no effect" in r for r in other.reasons)


def test_batch_costs_select_the_policy_that_reads_them_where_none_was_named() -> None:
    costs = {"GGML_BATCH_COSTS": "1,0.6,0.5"}
    spec = with_variables(**costs).spec
    assert (spec.options.policy, spec.batch_costs) == (PolicyName.COSTS, "1,0.6,0.5")
    assert with_variables("--no-profile", **costs).spec.options.policy is PolicyName.COSTS
    named = with_variables("--policy", "throughput", **costs).spec
    assert (named.options.policy, named.batch_costs) == (PolicyName.THROUGHPUT, None)
    assert "GGML_BATCH_COSTS has no effect: --policy throughput was asked for" in named.reasons
    nothing = with_variables("--no-spec", **costs).spec
    assert "GGML_BATCH_COSTS has no effect: nothing drafts" in nothing.reasons


def test_a_look_ahead_of_the_environment_needs_something_measured() -> None:
    spec = with_variables(GGML_MAX_LOOK_AHEAD="4").spec
    assert (spec.options.policy, spec.options.look_ahead) == (PolicyName.COSTS, 4)
    spec = with_variables("--no-profile", GGML_MAX_LOOK_AHEAD="4").spec
    assert spec.options.policy is PolicyName.FIXED
    assert any(r.startswith("GGML_MAX_LOOK_AHEAD has no effect: it needs") for r in spec.reasons)


def test_nothing_resolved_depends_on_when_it_is_resolved() -> None:
    options = Options(threads=1)
    host = read_host(Environment())
    assert replace(resolve(options, host), streaming=None) == replace(  # type: ignore[arg-type]
        resolve(options, host), streaming=None
    )
