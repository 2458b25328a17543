"""The command line becomes a configuration: defaults with reasons, errors in one sentence."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from resolved import line_of
from typer.testing import CliRunner

from offload.errors import WorkerUnavailable
from specdec.errors import BadOption
from specdec.options import OF_TEXT, PRICED, DrafterName, PolicyName, SpecOptions
from specoffload import cli
from specoffload.cli import SHELLS, app, completed
from specoffload.cli import config_of as cli_config_of
from specoffload.config.command_flags import POSITIONALS
from specoffload.config.command_line import flags_of, names_of, read_command_line
from specoffload.config.environment import Environment, read_environment, read_host
from specoffload.config.flag import Flag
from specoffload.config.hardware_parts import NAMES as MACHINE_NAMES
from specoffload.config.options import DiskRoom, ServeOptions, Toggle
from specoffload.config.resolution import Config, for_serving, resolve
from specoffload.config.table import TABLE
from specoffload.config.values import CONTENTS, disk_room
from specoffload.errors import UsageError
from specoffload.generation.generation import AskedOptions

NO_PROFILE = {"SPECOFFLOAD_WITHOUT": "profile"}
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
    # A text has two flags: one takes it, the other a file that contains it.
    places = [(flag.section, flag.field, flag.kind is CONTENTS) for flag in flags]
    assert len(places) == len(set(places))


def test_a_file_stands_for_its_text(tmp_path: Path) -> None:
    file = tmp_path / "rules.gbnf"
    file.write_text('root ::= "ja"', encoding="utf-8")
    line = read_command_line("run", ["--grammar", "x", "--grammar-file", str(file)])
    assert line.of(AskedOptions).grammar == 'root ::= "ja"', "the last one wins"
    with pytest.raises(UsageError, match=r"-sysf .*: cannot be read \(No such file"):
        read_command_line("chat", ["-sysf", str(tmp_path / "missing")])
    file.write_bytes(b"\xff")
    with pytest.raises(UsageError, match="-sysf .*: cannot be read as UTF-8 text"):
        read_command_line("chat", ["-sysf", str(file)])


@pytest.mark.parametrize("named", ["-", "/dev/stdin", "/dev/fd/0", "/proc/self/fd/0"])
def test_an_open_pipe_stands_for_its_text(named: str) -> None:
    program = (
        "from specoffload.config.command_line import read_command_line\n"
        "from specoffload.config.options import RunOptions\n"
        f"print(read_command_line('run', ['-f', {named!r}]).of(RunOptions).prompt)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input="Grüße\n", capture_output=True, text=True,
        timeout=60, check=True, encoding="utf-8",
    )  # fmt: skip
    assert done.stdout == "Grüße\n\n"


def test_a_pipe_that_is_not_open_is_refused() -> None:
    with pytest.raises(UsageError, match=r"-f /dev/fd/999: cannot be read \(Bad file descriptor"):
        read_command_line("run", ["-f", "/dev/fd/999"])


@pytest.mark.parametrize("flag", TABLE, ids=lambda flag: f"{flag.section.__name__}.{flag.field}")
def test_a_flag_fills_a_field_that_has_a_default(flag: Flag) -> None:
    section = flag.section()
    assert getattr(section, flag.field) == flag.default
    assert flag.names or flag.off
    assert flag.help.endswith(".")
    assert not flag.digits_mean or flag.digits_mean in names_of(flags_of("run"))


def test_every_command_of_the_program_has_its_words_read_by_the_table() -> None:
    taken = {command for positional in POSITIONALS for command in positional.commands}
    for command in sorted({*COMMANDS, *taken}):
        done = CliRunner().invoke(app, [*command.split(), "--no-such-flag"])
        assert isinstance(done.exception, UsageError), command
        assert "there is no flag --no-such-flag" in str(done.exception)


@pytest.mark.parametrize("command", ["run", "serve"])
def test_help_fits_a_screen_and_shows_all_of_it_on_demand(command: str) -> None:
    short = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"}).stdout
    assert "─ to begin with ─" in short
    assert len(short.splitlines()) <= 50
    assert "--spec-ngram-mod-n-max" not in short
    assert all(panel in short for panel in ("model", "offload", "speculation", "sampling"))


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_no_name_of_a_flag_is_cut_in_80_columns(command: str) -> None:
    words = [*command.split(), "--help-all"]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "80", "TERMINAL_WIDTH": "80"})
    assert done.exit_code == 0
    shown = {word.rstrip(",") for word in done.stdout.split()}
    for flag in flags_of(command):
        assert set((*flag.names, *flag.off)) <= shown, flag
    assert "…" not in done.stdout


def test_tune_shows_that_it_takes_a_model() -> None:
    done = CliRunner().invoke(app, ["tune", "--help"], env={"COLUMNS": "80"})
    assert "[all | numa] [FLAGS] [MODEL.gguf]" in " ".join(done.stdout.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("plan --hardware rtx-4090-", ["rtx-4090-ddr5", "rtx-4090-epyc"]),
        ("run --numa aut", ["auto"]),
        ("plan --vram ", []),
    ],
)
def test_a_shell_completes_the_values_that_have_names(
    words: str,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("_SPECOFFLOAD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"specoffload {words}")
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ") + 1))
    with pytest.raises(SystemExit):
        app(args=[], prog_name="specoffload")
    assert capsys.readouterr().out.split() == expected


def test_the_help_of_plan_names_the_machines() -> None:
    shown = CliRunner().invoke(app, ["plan", "--help"]).stdout
    words = " ".join(shown.replace("│", " ").split())
    assert [name for name in MACHINE_NAMES if name not in words.replace(" ", "")] == []


@pytest.mark.parametrize("shell", SHELLS)
def test_the_completion_of_a_named_shell_is_shown(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert completed(["--show-completion", shell], "specoffload")
    script = capsys.readouterr().out
    marks = {"bash": "complete -o", "zsh": "#compdef specoffload", "fish": "complete --command"}
    assert marks.get(shell, "Register-ArgumentCompleter") in script


def test_an_unknown_shell_is_refused_and_none_is_left_to_typer() -> None:
    with pytest.raises(UsageError, match="--show-completion csh: bash, zsh, fish, powershell"):
        completed(["--show-completion", "csh"], "specoffload")
    assert not completed(["--show-completion"], "specoffload")
    assert not completed(["serve", "--show-completion", "zsh"], "specoffload")


def test_the_share_of_a_prompt_that_chooses_a_slot_is_the_servers_flag() -> None:
    own = line_of("-sps", "0.5", command="serve").of(ServeOptions)
    assert for_serving(resolved(), own).slot_similarity == 0.5


def test_all_flags_are_shown_without_a_command() -> None:
    done = CliRunner().invoke(app, ["--help-all"], env={"COLUMNS": "80"})
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    for flag in TABLE:
        names = ", ".join((*flag.names, *flag.off) or flag.variables)
        assert any(line == names or line.startswith(f"{names} ") for line in lines), names
    for command in COMMANDS:
        assert command.split()[0] in done.stdout


# -- resolution


def test_every_automatic_choice_has_a_reason() -> None:
    config = resolved()
    assert config.model.name == "target.gguf"
    assert config.spec.draft is not None
    assert config.spec.draft.name == "draft.gguf"
    assert any("embedded" in reason for reason in config.reasons)
    assert any("thread" in reason for reason in config.reasons)


def test_what_was_said_needs_no_reason() -> None:
    one = replace(read_host(Environment()), n_physical=1, n_allowed=1)
    words = ("-m", "m.gguf", "-t", "1", "-b", "9", "-fa", "-ctk", "f16", "-dev", "cpu")
    config = resolve(line_of(*words).options, one)
    assert config.spec.reasons == ()
    assert (config.threads, config.threads_batch, config.spec.draft) == (1, 1, None)
    assert all("one memory node" in reason for reason in config.reasons)


def test_the_streaming_of_a_configuration_is_what_was_typed() -> None:
    config = resolved("--vram", "1GiB", "-ncmoe", "3", "-ngl", "all")
    assert config.device_bytes == 1 << 30
    assert config.n_cpu_moe == 3
    assert config.n_gpu_layers is not None
    assert config.n_gpu_layers > 1000
    assert resolved().n_cpu_moe == "fit"


@pytest.mark.parametrize(
    ("words", "toggle", "asked", "why"),
    [
        ((), Toggle.AUTO, False, ""),
        (("--min-batch", "auto"), Toggle.AUTO, False, ""),
        (("--min-batch", "3"), Toggle.OFF, False, "--min-batch decides alone"),
        (("--min-batch", "3", "--hybrid", "auto"), Toggle.AUTO, True, ""),
        (("--hybrid", "on"), Toggle.ON, True, ""),
        (("--hybrid", "off"), Toggle.OFF, True, ""),
    ],
)
def test_layers_are_split_where_that_is_measured_faster_unless_min_batch_is_given(
    words: tuple[str, ...], toggle: Toggle, asked: bool, why: str
) -> None:
    config = resolved(*words)
    assert (config.hybrid.toggle, config.hybrid.asked) == (toggle, asked)
    assert config.hybrid.reason.startswith(why)
    assert bool(config.hybrid.reason) == bool(why)
    plans = {Toggle.OFF: False, Toggle.ON: True, Toggle.AUTO: True}
    assert config.plan_for_splits == plans[toggle]


@pytest.mark.parametrize(
    ("words", "passes"),
    [
        ((), "auto"),
        (("--min-batch", "off"), "auto"),
        (("--min-batch", "1"), "on"),
        (("--min-batch", "dense=1,experts=16384"), "on"),
        (("--min-batch", "dense=1,experts=16385"), "auto"),
        (("--min-batch", "1000", "-b", "999"), "auto"),
        (("--min-batch", "1000", "-b", "1000"), "on"),
    ],
)
def test_batches_that_a_number_asks_for_stream_in_passes_if_slots_are_few(
    words: tuple[str, ...], passes: str
) -> None:
    assert resolved(*words).passes == passes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--spec", "draft", "-m", "m.gguf"), "--spec draft needs a draft model"),
        (("first", "second"), "Unexpected 'second'; with a model the prompt needs -p"),
    ],
)
def test_what_cannot_be_taken_together_is_refused(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolved(*words)


@pytest.mark.parametrize(
    "words",
    [
        ("--spec-policy", "p-min", "--draft-min", "20"),
        ("--spec-policy", "p-min", "--draft-min", "20", "--draft-max", "4"),
        ("--spec", "ngram-mod", "--spec-ngram-mod-n-min", "100", "--spec-ngram-mod-n-max", "10"),
    ],
)
def test_a_least_length_above_the_longest_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(BadOption, match="is above .* no draft could be verified"):
        resolved(*words)


MODEL = ("-m", "m.gguf")


@pytest.mark.parametrize(
    ("words", "note"),
    [
        (("--draft-p-min", "0.5"), "--draft-p-min ignored: it needs --spec-policy p-min"),
        (
            ("--spec-ngram-simple-size-n", "8"),
            "--spec-ngram-simple-size-n ignored: it needs --spec-type ngram-simple",
        ),
        (
            ("--spec-ngram-mod-n-max", "8", "--spec", "draft"),
            "--spec-ngram-mod-n-max ignored: it needs --spec-type ngram-mod",
        ),
        (
            ("--draft-p-split", "0.2"),
            "--draft-p-split 0.2 ignored: a draft branches by its "
            "expected gain, wherever measured times allow a tree",
        ),
        (("-lcs", "x", "--spec", "draft"), "-lcs ignored: it needs --spec-type ngram-cache"),
        (("--no-spec", "--spec-accept", "reject"), "--spec-accept ignored: nothing drafts"),
        (
            ("--spec", "synthetic", "--spec-synth-len", "2", "--spec-accept", "reject"),
            "--spec-accept ignored: synthetic drafts are accepted at the rates",
        ),
        (
            ("--spec-accept", "reject", "--spec-policy", "p-min", "--draft-min", "2"),
            "--draft-min ignored: rejection sampling has to verify every",
        ),
        (
            (*MODEL, "--draft-max", "4", "--spec-policy", "p-min"),
            "--draft-max ignored: nothing drafts: add --draft",
        ),
        ((*MODEL, "-td", "3"), "-td ignored: it needs a draft model"),
        ((*MODEL, "--draft-params", "-t 3"), "--draft-params: -t ignored: it needs a draft model"),
        (
            ("--no-spec", "--spec-policy", "fixed"),
            "--spec-policy ignored: nothing dr",
        ),
        (("--no-spec", "-md", "d.gguf"), "-md ignored: nothing drafts with --no-spec"),
        (("--spec", "suffix", "--draft", "d"), "--draft ignored: --spec does not name draft"),
    ],
)
def test_a_flag_that_changes_nothing_is_noted(words: tuple[str, ...], note: str) -> None:
    config = resolved(*words)
    said = [r for r in (*config.reasons, *config.spec.reasons) if r.startswith(note)]
    assert len(said) == 1, (config.reasons, config.spec.reasons)


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("--vram", "4GiB", "-ngl", "99", "--min-batch", "8"), {"--vram", "-ngl", "--min-batch"}),
        (("-ngl", "0", "--min-batch", "off"), set()),
        (("-ngl", "auto", "--min-batch", "auto"), set()),
        (("--plan-for", "decode"), set()),  # it chooses the layouts of the CPU's weights
        (("--plan-for", "decode", "--no-repack"), {"--plan-for"}),
        (("-ts", "1,3"), {"-ts"}),
    ],
)
def test_flags_that_need_a_gpu_are_known(words: tuple[str, ...], flags: set[str]) -> None:
    assert set(resolved(*words).gpu_flags) == flags


def test_patience_with_workers_needs_workers() -> None:
    said = "--rpc-timeout ignored: no worker is used: --rpc names them"
    assert said in resolved("--rpc-timeout", "5").notes
    assert said not in resolved("--rpc-timeout", "5", "--rpc", "127.0.0.1:1").notes


def test_what_has_no_effect_is_not_in_the_configuration() -> None:
    spec = resolved(*MODEL, "--spec-policy", "p-min", "--draft-max", "3").spec
    assert spec.options == SpecOptions()
    other = resolved(*MODEL, "--draft-p-min", "0.5").spec
    assert other.options == SpecOptions(drafters=OF_TEXT)


def test_no_spec_drafts_nothing_even_with_the_embedded_pair() -> None:
    config = resolved("--no-spec")
    assert config.spec.draft is None
    assert config.spec.options.drafters == (DrafterName.NONE,)
    assert not config.spec.options.is_on


def test_the_text_drafts_by_default_where_measured_costs_price_it() -> None:
    def drafters(*words: str, **variables: str) -> tuple[DrafterName, ...]:
        return with_variables(*words, **variables).spec.options.drafters

    models = (DrafterName.MTP, DrafterName.DRAFT)  # of the embedded pair
    assert drafters() == (*OF_TEXT, *models)
    assert drafters(*MODEL) == OF_TEXT
    assert drafters(*MODEL, "--spec-policy", "throughput") == OF_TEXT
    for policy in sorted({*PolicyName} - {PolicyName.THROUGHPUT}):
        assert drafters("--spec-policy", policy) == models
        assert drafters(*MODEL, "--spec-policy", policy) == ()
    assert drafters(**NO_PROFILE) == models
    assert drafters(**NO_PROFILE, GGML_BATCH_COSTS="1,0.6,0.5") == (*OF_TEXT, *models)
    assert drafters("--spec-accept", "reject") == (DrafterName.DRAFT,)
    assert drafters("--spec", "suffix,draft") == (DrafterName.SUFFIX, DrafterName.DRAFT)


def test_without_a_profile_drafts_are_fixed_blocks_unless_a_policy_was_named() -> None:
    assert with_variables(**NO_PROFILE).spec.options.policy is PolicyName.FIXED
    named = with_variables("--spec-policy", "p-min", **NO_PROFILE).spec
    assert (named.options.policy, named.use_profile) == (PolicyName.P_MIN, False)
    with pytest.raises(UsageError, match="--spec-policy throughput needs measurements"):
        with_variables("--spec-policy", "throughput", **NO_PROFILE)


def test_parts_are_left_out_by_name() -> None:
    config = with_variables(SPECOFFLOAD_WITHOUT="prefetch,graphs,lend")
    assert (config.streaming.prefetch, config.streaming.bounce) == (False, True)
    assert (config.spec.of_draft.graphs, config.lend) == (False, False)
    assert "left out, as SPECOFFLOAD_WITHOUT asks: graphs, lend, prefetch" in config.reasons
    with pytest.raises(UsageError, match="SPECOFFLOAD_WITHOUT=speed: must be some of .*profile"):
        with_variables(SPECOFFLOAD_WITHOUT="speed")


def test_a_variable_of_speculation_needs_what_its_flag_needs() -> None:
    config = resolved(LLAMA_ARG_SPEC_DRAFT_P_MIN="0.5")
    assert config.spec.options.p_min == 0.75
    assert any("LLAMA_ARG_SPEC_DRAFT_P_MIN ignored" in r for r in config.spec.reasons)
    used = resolved("--spec-policy", "p-min", LLAMA_ARG_SPEC_DRAFT_P_MIN="0.5")
    assert used.spec.options.p_min == 0.5
    assert not used.spec.reasons
    typed = ("--spec-policy", "p-min", "--draft-p-min", "0.25")
    assert resolved(*typed, LLAMA_ARG_SPEC_DRAFT_P_MIN="0.5").spec.options.p_min == 0.25


def test_the_draft_model_of_the_environment() -> None:
    variable = {"LLAMA_ARG_SPEC_DRAFT_MODEL": "d.gguf"}
    assert resolved(**variable).spec.draft == Path("d.gguf")
    assert resolved("--no-spec", **variable).spec.draft is None
    other = resolved("--spec", "ngram-mod", **variable)
    assert other.spec.draft is None
    assert any("LLAMA_ARG_SPEC_DRAFT_MODEL ignored" in r for r in other.reasons)


def test_batch_costs_of_the_environment_are_read_by_policies_with_prices_alone() -> None:
    costs = {"GGML_BATCH_COSTS": "1,0.6,0.5"}
    assert with_variables(**costs).spec.options.policy is PolicyName.THROUGHPUT
    for name in PRICED:
        spec = with_variables("--spec-policy", name, **costs).spec
        assert (spec.options.policy, spec.batch_costs) == (name, "1,0.6,0.5")
    assert with_variables(**costs, **NO_PROFILE).spec.batch_costs == "1,0.6,0.5"
    fixed = with_variables("--spec-policy", "fixed", **costs).spec
    assert fixed.batch_costs is None
    assert "GGML_BATCH_COSTS ignored: --spec-policy fixed does not read it" in fixed.reasons
    nothing = with_variables("--no-spec", **costs).spec
    assert "GGML_BATCH_COSTS ignored: nothing drafts" in nothing.reasons


def test_a_look_ahead_of_the_environment_chooses_the_policy_that_reads_it() -> None:
    ahead = {"GGML_MAX_LOOK_AHEAD": "4"}
    spec = with_variables(**ahead).spec
    assert (spec.options.policy, spec.options.look_ahead) == (PolicyName.COSTS, 4)
    assert any("GGML_MAX_LOOK_AHEAD is set, so --spec-policy is costs" in r for r in spec.reasons)
    typed = with_variables("--spec-policy", "costs", "--spec-look-ahead", "2", **ahead).spec
    assert typed.options.look_ahead == 2
    for words, why in (
        (("--spec-policy", "throughput"), "--spec-policy throughput does not read it"),
        (("--no-spec",), "nothing drafts"),
    ):
        other = with_variables(*words, **ahead).spec
        assert other.options.look_ahead == 0
        assert f"GGML_MAX_LOOK_AHEAD ignored: {why}" in other.reasons
    for bad in ("-1", "two", "1.5"):
        with pytest.raises(UsageError, match=f"GGML_MAX_LOOK_AHEAD={bad}: must be"):
            with_variables(GGML_MAX_LOOK_AHEAD=bad)


def test_a_first_start_measures_as_long_as_the_environment_says() -> None:
    assert read_environment({"HOME": "/root"}).measure_s is None
    assert read_environment({"HOME": "/root", "SPECOFFLOAD_MEASURE_S": "0.5"}).measure_s == 0.5
    for bad in ("0", "-1", "soon", "nan", "inf", "1e9"):
        with pytest.raises(UsageError, match=f"SPECOFFLOAD_MEASURE_S={bad}: must be a number"):
            read_environment({"HOME": "/root", "SPECOFFLOAD_MEASURE_S": bad})


@pytest.mark.parametrize(
    ("words", "device"),
    [
        (("--device", "CUDA0,CUDA1", "-sm", "none", "-mg", "1"), "CUDA1"),
        (("--device", "sim:vram=1GiB,bw=1GB/s,sim", "-sm", "none"), "sim:vram=1GiB,bw=1GB/s"),
        (("-sm", "none", "-mg", "2"), "auto:2"),
        (("-sm", "none"), "auto:0"),  # "auto" takes all GPUs that save time
        (("-sm", "layer", "-mg", "1"), "auto"),
    ],
)
def test_split_mode_none_leaves_the_main_gpu(words: tuple[str, ...], device: str) -> None:
    assert resolved(*words).device == device


def test_the_main_gpu_gets_its_own_size() -> None:
    config = resolved("-sm", "none", "-mg", "1", "--vram", "24GiB,12GiB")
    assert (config.device_bytes, config.each_device_bytes) == (12 << 30, ())


def test_a_main_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="-mg 2: --device CUDA0,CUDA1 has 2 devices"):
        resolved("--device", "CUDA0,CUDA1", "-sm", "none", "-mg", "2")


def test_row_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="must be layer or none"):
        resolved("-sm", "row")


def test_shares_are_read_as_llama_cpp_reads_them() -> None:
    assert resolved("-ts", "3,1").tensor_split == resolved("-ts", "3/1").tensor_split == (3.0, 1.0)


@pytest.mark.parametrize(
    ("words", "is_named"),
    [
        (("--device", "cpu"), True),
        (("--device", "sim"), True),
        ((), False),
        (("--device", "RPC0"), False),
        (("--device", "cpu", "-devd", "RPC0"), False),
    ],
)
def test_workers_that_no_model_uses_are_named_and_must_be_there(
    words: tuple[str, ...], is_named: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        config = resolved("--rpc", address, *words)
        said = [r for r in config.notes if f"--rpc {address} is not used, because --device" in r]
        assert len(said) == is_named
        config.check_unused_workers()
    if is_named:
        with pytest.raises(WorkerUnavailable, match=f"{address} cannot be reached within 3 s"):
            config.check_unused_workers()
    else:
        config.check_unused_workers()  # opening the models asks them


# -- what was asked for and is not active


@pytest.mark.parametrize(
    ("words", "environ", "name"),
    [
        (("--draft-p-min", "0.5"), {}, "--draft-p-min"),
        (("--spec-look-ahead", "3"), {}, "--spec-look-ahead"),
        (("--draft-max", "8", "--no-spec"), {}, "--draft-max"),
        (("--no-spec",), {"GGML_BATCH_COSTS": "1,0.9"}, "GGML_BATCH_COSTS"),
        (
            ("--spec-policy", "throughput"),
            {"GGML_MAX_LOOK_AHEAD": "4"},
            "GGML_MAX_LOOK_AHEAD",
        ),
    ],
)
@pytest.mark.parametrize("command", ["run", "chat", "serve", "bench", "plan"])
def test_what_is_asked_for_and_not_active_is_a_remark_of_every_command(
    command: str, words: tuple[str, ...], environ: dict[str, str], name: str
) -> None:
    line = line_of(*words, command=command)
    config = resolve(line.options, read_host(read_environment(environ)))
    (said,) = [note for note in config.notes if note.startswith(f"{name} ignored: ")]
    assert len(said) > len(f"{name} ignored: ")


def test_remarks_are_printed_once_and_without_verbose(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("run", "bench", "profile", "plan"):
        config = cli_config_of(line_of("--draft-p-min", "0.5", command=command))
        assert config.notes
        printed = " ".join(capsys.readouterr().err.split())
        for words in config.notes:
            assert printed.count(words) == 1


def test_a_servers_log_says_once_what_has_no_effect(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("specoffload.commands.serve.serve", lambda *_, **__: 0)
    cli.serve(read_command_line("serve", ["--draft-p-min", "0.5", "--spec-look-ahead", "3"]))
    printed = " ".join(capsys.readouterr().err.split())
    for name in ("--draft-p-min", "--spec-look-ahead"):
        assert printed.count(f"{name} ignored: ") == 1


@pytest.mark.parametrize(
    ("command", "words", "place"),
    [
        ("serve", ("--draft-p-min", "0.5", "--spec-look-ahead", "3"), "serve.serve"),
        ("tune all", ("--draft-p-min", "0.5", "--draft-max", "8"), "tune.tune_all"),
        ("tune numa", (), "tune.tune_numa"),
        ("profile", ("--draft-p-min", "0.5"), "profile.profile_config"),
        ("worker", (), "worker.run_worker"),
    ],
)
def test_commands_print_their_inert_flags_and_variables_once(
    command: str,
    words: tuple[str, ...],
    place: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The commands run up to where they would open a model."""
    began: list[str] = []

    def instead(*args: object, **settings: object) -> int:
        began.append(command)
        return 0

    monkeypatch.setattr(f"specoffload.commands.{place}", instead)
    environment = read_environment({"GGML_BATCH_COSTS": "1,0.9"})
    if command == "serve":  # a server drafts, so there the variable is ignored for its policy
        words = (*words, "--spec-policy", "fixed")
    line = read_command_line(command, words, environment)
    getattr(cli, command.replace(" ", "_"))(line)
    assert began == [command]
    printed = " ".join(capsys.readouterr().err.split())
    flags = [word for word in words if word.startswith("-") and word != "--spec-policy"]
    for name in ("GGML_BATCH_COSTS", *flags):
        assert printed.count(f"{name} ignored: ") == 1


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("50GiB", DiskRoom(50 << 30)),
        ("8G,/srv/prompts", DiskRoom(8 << 30, Path("/srv/prompts"))),
    ],
)
def test_a_room_on_the_disk_is_a_size_and_perhaps_a_folder(text: str, wanted: DiskRoom) -> None:
    assert disk_room(text) == wanted
    own = ServeOptions(cache_disk=wanted)
    usual = Path("/usual")
    assert for_serving(resolved(), own, usual).cache_disk == replace(
        wanted, folder=wanted.folder or usual
    )


@pytest.mark.parametrize("text", ["", "50", "GiB", "8G,", "-1GiB", ",/srv"])
def test_a_room_on_the_disk_without_a_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        disk_room(text)


def serving(*words: str, **changes: object) -> Config:
    return for_serving(
        replace(resolved(), **changes), line_of(*words, command="serve").of(ServeOptions)
    )  # type: ignore[arg-type]


def test_slots_share_their_cells_unless_a_flag_separates_them() -> None:
    for words in ((), ("-np", "4"), ("-np", "4", "-kvu"), ("-np", "4", "-no-kvu", "--kv-unified")):
        assert not serving(*words).has_own_cells
    own = serving("-np", "4", "--no-kv-unified")
    assert own.has_own_cells
    assert own.n_ctx_each(4096) == 1024
    assert serving("--no-kv-unified").has_own_cells
    assert not serving("-np", "1", "--no-kv-unified").has_own_cells
    assert (
        "--no-kv-unified ignored: there is one slot"
        in serving("-np", "1", "--no-kv-unified").reasons
    )


def test_a_cache_in_ram_cannot_be_separated() -> None:
    with pytest.raises(UsageError, match="--no-kv-unified: a KV cache in RAM"):
        serving("-np", "2", "--no-kv-unified", kv_offload=False)
    assert not serving("-np", "2", kv_offload=False).has_own_cells


def test_a_limit_for_each_slot_sizes_the_context_unless_that_is_given() -> None:
    sized = serving("-np", "3", "--kv-unified-per-slot", "2000")
    assert (sized.ctx_size, sized.n_ctx_each(6000)) == (6000, 2000)
    assert any("2,000 for each of 3 slots" in words for words in sized.reasons)
    whole = serving("-np", "3", "--kv-unified-per-slot", "2000", ctx_size=0)
    assert (whole.ctx_size, whole.most_each) == (0, 2000)
    capped = serving("-np", "3", "--kv-unified-per-slot", "2000", ctx_size=4096)
    assert capped.n_ctx_each(4096) == 2000
    assert not any("ignored" in words for words in capped.reasons)
    own = serving("-np", "3", "--no-kv-unified", "--kv-unified-per-slot", "2000", ctx_size=4096)
    assert own.n_ctx_each(4096) == 1536
    said = "--kv-unified-per-slot 2000 ignored: a slot has at most 1,536 tokens (--ctx-size)"
    assert said in own.reasons
    rounded = serving("-np", "3", "--no-kv-unified", "--kv-unified-per-slot", "1400", ctx_size=4096)
    assert rounded.n_ctx_each(4096) == 1400
    assert not any("ignored" in words for words in rounded.reasons)
    assert serving("-np", "3", "--kv-unified-per-slot", "0").ctx_size is None


def test_a_slot_without_room_for_an_answer_is_refused() -> None:
    with pytest.raises(UsageError, match="--kv-unified-per-slot 1: .* use 2 or more, or 0"):
        serving("-np", "3", "--kv-unified-per-slot", "1")
    assert serving("-np", "3", "--kv-unified-per-slot", "2").most_each == 2


def test_commands_of_one_slot_ignore_the_flags_of_cells() -> None:
    line = line_of("-kvu", "--kv-unified-per-slot", "9", command="run")
    assert line.ignored == (
        ("-kvu", "there is one slot"), ("--kv-unified-per-slot 9", "there is one slot"),
    )  # fmt: skip
