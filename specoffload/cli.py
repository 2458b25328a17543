"""The command line: its commands, each of which calls one function.

The table of flags decides which arguments a command accepts.

No heavy imports: `--help` must not load the native library.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from specoffload import __version__, report
from specoffload.config.command_line import CommandLine
from specoffload.config.options import (
    BenchOptions,
    ChatOptions,
    CommandOptions,
    DistilOptions,
    JudgeOptions,
    Options,
    PlanOptions,
    ProfileOptions,
    PruneOptions,
    RunOptions,
    ServeOptions,
    SweepOptions,
    WorkerFlags,
)
from specoffload.config.speculation import measuring_only, noted
from specoffload.config.typer_commands import HELP_ALL, add_command, show_all_flags
from specoffload.errors import KNOWN, UsageError, meaning_of
from specoffload.generation.generation import AskedOptions

if TYPE_CHECKING:
    from specoffload.commands.serve import ServedAs
    from specoffload.config.resolution import Config

app = typer.Typer(
    name="specoffload",
    help="Run big mixture-of-experts GGUF models on one GPU and a lot of RAM.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _TuneGroup(TyperGroup):
    """Reads `specoffload tune MODEL` as `specoffload tune all MODEL`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_completing = ctx.resilient_parsing and not args
        if not is_completing and (not args or args[0] not in {*self.commands, "--help", "-h"}):
            args = ["all", *args]
        return super().parse_args(ctx, args)


tune_app = typer.Typer(
    help="Measure this machine and keep what is best. `tune MODEL.gguf` is `tune all MODEL.gguf`.",
    cls=_TuneGroup,
    options_metavar="",
    subcommand_metavar="[all | numa] [FLAGS] [MODEL.gguf]",
)


draft_app = typer.Typer(
    help="Make a draft model for a model and texts of your own, or judge one.",
    no_args_is_help=True,
    options_metavar="",
)


def config_of(
    line: CommandLine,
    options: Options | None = None,
    *,
    header_only: bool = False,
    says: bool = True,
) -> Config:
    """The configuration of a command line on this machine. Raises UsageError.

    Prints what was asked for and is not active, unless `says` is False. With `header_only`, only
    the headers of models on the hub are fetched.
    """
    from specoffload.config.environment import read_host
    from specoffload.config.resolution import resolve
    from specoffload.models.local import located

    options = options or line.options
    if options.verbose or options.library_log:
        report.be_verbose(library_level=options.library_log)
    options = located(options, line.environment, header_only=header_only)
    config = resolve(options, read_host(line.environment))
    for words in config.notes if says else ():
        report.note(words)
    return config


def _config_without_drafts(
    line: CommandLine, reason: str, options: Options | None = None
) -> Config:
    """The configuration of a command that verifies no drafts, because of `reason`.

    Prints which flags and variables on drafts have no effect.
    """
    environment = line.environment
    options = measuring_only(options or line.options, environment.of_drafts(), reason=reason)
    return config_of(replace(line, environment=environment.without_drafts()), options)


def run(line: CommandLine) -> None:
    """Answer or continue a text, or chat, with a model or the embedded pair."""
    from specoffload.commands.run import (
        piped_text,
        read_prompt,
        run_prompt,
        split_model_and_prompt,
    )
    from specoffload.models.names import may_name_model

    own, options = line.of(RunOptions), line.options
    if own.words is not None and may_name_model(own.words):
        options = _without_variables_model(options)
    by_repo = None if options.hf_repo is None else Path(options.hf_repo)
    model, prompt = split_model_and_prompt(own.words, options.model or by_repo, own.prompt)
    options = replace(options, model=None if model is by_repo else model)
    kept = line.names(RunOptions, "prompt_cache", "prompt_cache_all", "prompt_cache_ro")
    piped = piped_text() if prompt is None else None
    if model is not None and prompt is None and piped is None and own.conversation is not False:
        _converse(line, noted(options, kept, "/save keeps a conversation"), None)
        return
    if own.prompt_cache is None:
        options = noted(options, kept, "no --prompt-cache")
    if model is None and prompt is not None and prompt == own.words and len(prompt.split()) == 1:
        said = f"continuing the text {prompt!r}; docs/models.md says how to name a model"
        options = replace(options, notes=(*options.notes, said))
    if model is None and own.conversation is None:  # the embedded pair knows code, not questions
        own = replace(own, conversation=False)
    run_prompt(
        config_of(line, options),
        lambda: read_prompt(prompt or piped, escape=own.escape),
        _asked(line),
        own,
        line.of(ChatOptions),
        has_limit=bool(line.names(RunOptions, "n_predict")),
    )


def _without_variables_model(options: Options) -> Options:
    """Return `options` without a model that a variable names, since the arguments name another."""
    fields = [
        name
        for name in ("model", "hf_repo", "hf_file")
        if not options.given.get(name, "-").startswith("-")
    ]
    given = {name: used for name, used in options.given.items() if name not in fields}
    without: dict[str, Any] = dict.fromkeys(fields)
    return replace(options, given=given, **without)


def chat(line: CommandLine) -> None:
    """Converse with a model."""
    from specoffload.commands.run import piped_text

    _converse(line, line.options, piped_text())


def _converse(line: CommandLine, options: Options, piped: str | None) -> None:
    """Answer `piped`, the text on standard input. If it is None, hold a conversation."""
    from specoffload.terminal import command

    own, sampling = line.of(ChatOptions), _asked(line)
    if line.names(RunOptions, "n_predict"):
        sampling = replace(sampling, n_predict=line.of(RunOptions).n_predict)
    if piped is not None:
        config = config_of(line, options)
        with command.opened(config) as session:
            command.answer_text(session, piped, _limited(line, config, sampling), own)
    elif sys.stdin is not None and sys.stdin.isatty():
        config = config_of(line, options)
        history = line.environment.chat_history
        command.chat(config, _limited(line, config, sampling), own, history)
    else:
        raise UsageError("nothing to answer: pipe a question in, or use -p TEXT")


def _asked(line: CommandLine) -> AskedOptions:
    """Return the options of answers, and say what is not enforced of `--json-schema`."""
    options = line.of(AskedOptions)
    if options.json_schema:
        from offload.sampling.json_schema import ignored_places

        for place in ignored_places(options.json_schema):
            report.note(f"--json-schema: {place} is ignored, and answers may violate it")
    return options


def _limited(line: CommandLine, config: Config, sampling: AskedOptions) -> AskedOptions:
    """`sampling`, with the limit of continued texts for the demo pair unless the user gave one.

    Its texts have no end of their own, so they would fill the context.
    """
    given = line.names(RunOptions, "n_predict") or line.names(AskedOptions, "n_predict")
    if given or not config.is_demo:
        return sampling
    return replace(sampling, n_predict=RunOptions.n_predict)


def serve(line: CommandLine) -> None:
    """Serve a page to chat with, and OpenAI's and Anthropic's APIs, over HTTP."""
    from specoffload.commands.serve import serve_config

    own = line.of(ServeOptions)
    if own.has_several:
        from specoffload.commands.serve_models import serve_several

        serve_several(line, served_as)
        return
    served = served_as(line)
    serve_config(served.config, own, served.chat, served.defaults)


def served_as(line: CommandLine, *, header_only: bool = False) -> ServedAs:
    """Resolve a command line of `serve` with one model. Raises UsageError.

    With `header_only`, only the headers of models on the hub are fetched.
    """
    from specoffload.commands.serve import ServedAs
    from specoffload.config.resolution import chat_settings, for_serving

    own = line.of(ServeOptions)
    chat = chat_settings(line.of(ChatOptions))
    config = config_of(line, header_only=header_only, says=False)  # its log says it
    config = for_serving(config, own, line.environment.prompt_folder)
    return ServedAs(config, chat, _limited(line, config, _asked(line)))


def worker(line: CommandLine) -> None:
    """Compute some layers of a model for another machine."""
    from specoffload.commands.worker import run_worker

    config = _config_without_drafts(line, "a worker computes layers, and its clients draft")
    run_worker(config, line.of(WorkerFlags))


def bench(line: CommandLine) -> None:
    """Compare plain, streamed and speculative decoding with llama.cpp."""
    own = line.of(BenchOptions)
    if own.output is not None and line.of(CommandOptions).as_json:
        raise UsageError("--json and --output exclude each other")
    options = line.options
    if not own.by_policy:
        names = line.names(BenchOptions, "only_policies", "workloads", "blocks")
        options = noted(options, names, "no --policies")
    if own.texts is None:
        names = line.names(BenchOptions, "runs", "n_responses")
        options = noted(options, names, "no --texts")
    if not own.strengths:
        names = line.names(BenchOptions, "n_kept", "plot")
        options = noted(options, names, "no --route-cached")
        if own.texts is None:
            names = line.names(BenchOptions, "conversations")
            options = noted(options, names, "no --texts and no --route-cached")
    if not own.by_agent and not own.agent_urls:
        options = noted(options, line.names(BenchOptions, "tool_choice"), "no --agent")
    else:
        _bench_agent(line, options, own)
        return
    if own.strengths:
        _bench_routing(line, options, own)
        return
    if own.texts is not None:
        if own.by_drafter or own.by_policy or own.vs or own.n_pp or own.n_tg or own.n_pl:
            raise UsageError(
                "--texts opens no model: leave out --drafters, --policies, --vs, -npl, -npp and "
                "-ntg"
            )
        from specoffload.commands.bench_texts import bench_responses, bench_texts

        if own.n_responses:
            bench_responses(own)
        else:
            bench_texts(own)
        return
    if line.of(SweepOptions).is_asked:
        _bench_sweep(line, options, own)
        return
    if own.by_drafter and own.by_policy:
        raise UsageError("--drafters and --policies are two comparisons: leave one of them out")
    if own.by_drafter:
        if own.output is not None or own.vs is not None:
            raise UsageError("--drafters compares our drafters alone: leave out --output and --vs")
        from specoffload.commands.bench_drafters import bench_drafters

        bench_drafters(config_of(line, options), own)
        return
    if own.by_policy:
        if own.vs is not None or own.n_pp or own.n_tg or own.n_pl:
            raise UsageError(
                "--policies compares our lengths of drafts alone: leave out --vs, -npl, -npp and "
                "-ntg"
            )
        from specoffload.commands.bench_policies import bench_policies

        bench_policies(config_of(line, options), own)
        return
    if own.n_pp or own.n_tg or own.n_pl:
        from specoffload.bench.batched import Sweep, bench_batched

        sweep = Sweep(own.n_pp or (512,), own.n_tg or (128,), own.n_pl or (1,), own.is_pp_shared)
        bench_batched(config_of(line, options), sweep, own.output)
    else:
        from specoffload.commands.bench import bench_config

        bench_config(config_of(line, options), own)


def _bench_agent(line: CommandLine, options: Options, own: BenchOptions) -> None:
    """Play an agent's tasks with the model of `options`, or at the given addresses."""
    from specoffload.commands.bench_agent import N_PREDICT, bench_agent, bench_agent_at

    others = (
        *(own.by_drafter, own.by_policy, own.vs, own.n_pp, own.n_tg, own.n_pl),
        *(own.texts, own.output, own.strengths, line.of(SweepOptions).is_asked),
    )
    if any(others):
        raise UsageError(
            "--agent plays tasks alone: leave out --drafters, --policies, --texts, --vs, --output, "
            "--route-cached, -npl, -npp, -ntg and lists of values"
        )
    n_predict = own.n_predict if line.names(BenchOptions, "n_predict") else N_PREDICT
    if own.agent_urls:
        bench_agent_at(own, n_predict)
    else:
        bench_agent(config_of(line, options), own, n_predict)


def _bench_routing(line: CommandLine, options: Options, own: BenchOptions) -> None:
    """Compare strengths of --route-cached."""
    from specoffload.commands.bench_routing import bench_routing

    others = own.by_drafter or own.by_policy or own.vs or own.n_pp or own.n_tg or own.n_pl
    if others or own.texts or own.output or line.of(SweepOptions).is_asked:
        raise UsageError(
            "--route-cached compares our routing alone: leave out --drafters, --policies, --texts, "
            "--vs, --output, -npl, -npp, -ntg and lists of values"
        )
    names = line.names(BenchOptions, "n_prompt", "repetitions")
    options = noted(options, names, "--route-cached decodes each token of its text once")
    bench_routing(config_of(line, options), own)


def _bench_sweep(line: CommandLine, options: Options, own: BenchOptions) -> None:
    """Measure every combination of the listed values, each with `options` otherwise."""
    from specoffload.bench.sweep import settings_of, timed_tests
    from specoffload.commands.bench_sweep import bench_sweep

    if own.by_drafter or own.by_policy or own.vs or own.n_pp or own.n_tg or own.n_pl:
        raise UsageError(
            "lists of values, -pg, -d and 0 for -p or -n measure every combination by itself: "
            "leave out --drafters, --policies, --vs, -npl, -npp and -ntg, or give each flag one "
            "value"
        )
    sweep = line.of(SweepOptions)
    settings = settings_of(sweep, options)
    configs = [config_of(line, setting, says=not i) for i, setting in enumerate(settings)]
    bench_sweep(configs, timed_tests(sweep), own)


def profile(line: CommandLine) -> None:
    """Show what a decode of n tokens takes, in each way that it can be computed."""
    from specoffload.commands.profile import plot_stored, profile_config

    own = line.of(ProfileOptions)
    model = line.options.model
    if model is not None and model.suffix == ".json":
        plot_stored([model, *own.plot_with], own.plot, own.labels)
        return
    options = line.options
    if own.plot is None:
        options = noted(options, line.names(ProfileOptions, "plot_with", "labels"), "no --plot")
    profile_config(_config_without_drafts(line, "profile only measures", options), own)


def report_speeds(line: CommandLine) -> None:
    """Measure a model here, beside what was predicted, and write one file that can be sent."""
    from specoffload.commands.report_machine import report_machine

    path = line.of(CommandOptions).report_file
    report_machine(config_of(line), line.of(BenchOptions), path)


def plan(line: CommandLine) -> None:
    """Show what would go to the GPU and what to RAM, and the expected speed."""
    from specoffload.commands.plan import plan_config

    config = replace(config_of(line, header_only=True), serves=True)
    details = line.options.verbose or line.options.library_log > 0
    start = ("serve", *line.words_for("serve"))
    serve = line.of(ServeOptions)
    plan_config(
        config, line.of(PlanOptions), start, cache_ram_mib=serve.cache_ram_mib,
        parallel=serve.parallel, details=details,
    )  # fmt: skip


def models(line: CommandLine) -> None:
    """List the models on this machine, and whether they fit."""
    from specoffload.commands.models import show_models

    show_models(
        lambda path: config_of(line, replace(line.options, model=path), says=False),
        line.environment,
        line.of(CommandOptions).models_folder,
    )


def demo(line: CommandLine) -> None:
    """Watch one prompt decoded plainly, streamed and with drafts, side by side."""
    from specoffload.commands.demo import demo as show

    show(line.environment)


def trace(line: CommandLine) -> None:
    """Summarise a trace: overlap, use of the link, waits and their causes."""
    from specoffload.commands.trace import show_trace

    file = line.of(CommandOptions).trace_file
    if file is None:
        raise UsageError("trace needs a file that --trace wrote")
    show_trace(file)


def doctor(line: CommandLine) -> None:
    """Show what this machine has, and what is missing."""
    from specoffload.commands.doctor import doctor as examine
    from specoffload.kept import thread_words

    config = config_of(line)
    threads_now = thread_words(
        config.threads, config.threads_batch, config.decode_on, config.batch_on
    )
    examine(
        line.environment.profile_folder,
        threads_now=threads_now,
        numa=line.of(CommandOptions).shows_nodes,
    )


def tune_all(line: CommandLine) -> None:
    """Find the fastest threads, placement, ubatch and ways to compute; later starts use them."""
    from specoffload.commands.tune import tune_all as tune

    minutes = line.of(CommandOptions).minutes
    config = _config_without_drafts(line, "tune only measures")
    tune(config, minutes, asked=line.options.given)


def tune_numa(line: CommandLine) -> None:
    """Try placements and thread counts on this machine; later starts use the best."""
    from specoffload.commands.tune import tune_numa as tune

    limit_s = line.of(CommandOptions).time_limit_s
    config = _config_without_drafts(line, "tune only measures")
    tune(config, line.environment.profile_folder, time_limit_s=limit_s)


def draft_prune(line: CommandLine) -> None:
    """Write the ids of the tokens that your texts use most, for --draft-vocab."""
    from specoffload.commands.draft_prune import prune

    prune(line.of(PruneOptions))


def draft_judge(line: CommandLine) -> None:
    """Measure how well a draft guesses a model, and whether it pays on this machine."""
    from specoffload.commands.draft_judge import judge

    config = _config_without_drafts(line, "draft judge only measures")
    judge(config, line.of(JudgeOptions))


def draft_distil(line: CommandLine) -> None:
    """Train a draft on what a model writes after your texts. Ctrl-C stops it, and it goes on."""
    from specoffload.commands.draft_distil import distil

    config = _config_without_drafts(line, "draft distil only trains and measures")
    distil(config, line.of(DistilOptions))


for command in (run, chat, serve, worker, bench, profile, plan, models, demo, trace, doctor):
    add_command(app, command.__name__, command)
add_command(app, "report", report_speeds)
app.add_typer(tune_app, name="tune")
add_command(tune_app, "all", tune_all, under="tune")
add_command(tune_app, "numa", tune_numa, under="tune")
app.add_typer(draft_app, name="draft")
add_command(draft_app, "prune", draft_prune, under="draft")
add_command(draft_app, "judge", draft_judge, under="draft")
add_command(draft_app, "distil", draft_distil, under="draft")


_Every = Annotated[bool, typer.Option(HELP_ALL, help="Show the flags of all commands and leave.")]


@tune_app.callback(invoke_without_command=True)
def tune_flags(every: _Every = False) -> None:
    """Measure this machine and keep what is best."""
    if every:
        show_all_flags()
        raise typer.Exit


@app.callback(invoke_without_command=True)
def version(
    context: typer.Context,
    show: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
    every: _Every = False,
) -> None:
    if every:
        if words := context.get_help():  # empty if typer has printed the help itself, with rich
            report.line(words)
        show_all_flags()
        raise typer.Exit
    if show:
        from offload.ggml.installed import built_for

        report.line(f"specoffload {__version__}, with libllama for {built_for()}")
        raise typer.Exit


def commands() -> list[tuple[str, str]]:
    """(name, first paragraph of the help) of each command, in the order of --help."""
    return [
        (before + str(command.name), " ".join(str(command.help).partition("\n\n")[0].split()))
        for before, group in (("", app), ("tune ", tune_app), ("draft ", draft_app))
        for command in group.registered_commands
    ]


SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def completed(words: list[str], program: str) -> bool:
    """Show or install the completion of the shell that `words` name. Returns False if they do not.

    Without a shell's name typer takes the shell that runs. Raises UsageError for other shells.
    """
    if len(words) != 2 or words[0] not in ("--show-completion", "--install-completion"):
        return False
    flag, shell = words
    if shell not in SHELLS:
        raise UsageError(f"{flag} {shell}: {', '.join(SHELLS)} are known")
    from typer.completion import get_completion_script, install  # type: ignore[attr-defined]

    variable = f"_{program.replace('-', '_')}_COMPLETE".upper()
    if flag == "--show-completion":
        script = get_completion_script(prog_name=program, complete_var=variable, shell=shell)
        report.raw(f"{script}\n")
    else:
        _, path = install(shell=shell, prog_name=program, complete_var=variable)
        report.line(f"{shell} completion installed in {path}; it begins with the next shell")
    return True


def main() -> None:
    """Run a command line. Errors raised on purpose become one sentence and an exit code."""
    report.wrap_warnings()
    report.UnwrittenFiles.is_any = False
    try:
        if not completed(sys.argv[1:], "specoffload"):
            app()
    except SystemExit as e:
        if not e.code and report.UnwrittenFiles.is_any:
            raise SystemExit(1) from None
        raise
    except KNOWN as e:
        report.error(str(e))
        raise SystemExit(meaning_of(e).exit_code) from e
    except OSError as e:
        if not report.is_of_output(e):
            raise
        report.no_more_output(e)
        raise SystemExit(1) from e
    except KeyboardInterrupt:
        report.note("interrupted")
        raise SystemExit(130) from None
