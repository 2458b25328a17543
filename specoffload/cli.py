"""The command line: parses and calls one function. No logic, no heavy imports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from specoffload import __version__, report
from specoffload.config.shared_flags import opens_a_model
from specoffload.errors import KNOWN, meaning_of

app = typer.Typer(
    name="specoffload",
    help="Run big mixture-of-experts GGUF models on one GPU and a lot of RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

tune_app = typer.Typer(help="Measure this machine and keep what is best.", no_args_is_help=True)
app.add_typer(tune_app, name="tune")

Model = Annotated[Path | None, typer.Argument(metavar="[MODEL.gguf]", show_default=False)]
MakeConfig = Callable[[Path | None], Any]


@app.command()
@opens_a_model
def run(
    make_config: MakeConfig,
    model_or_prompt: Annotated[
        str | None, typer.Argument(metavar="[MODEL.gguf | PROMPT]", show_default=False)
    ] = None,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to continue.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File whose text is continued.")
    ] = None,
    n_predict: Annotated[
        int, typer.Option("--n-predict", "-n", help="Most tokens to write; -1: to the end.")
    ] = 128,
    temperature: Annotated[float, typer.Option("--temp", help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option("--top-k")] = 40,
    top_p: Annotated[float, typer.Option("--top-p")] = 0.95,
    min_p: Annotated[float, typer.Option("--min-p")] = 0.05,
    repeat_penalty: Annotated[float, typer.Option("--repeat-penalty")] = 1.0,
    repeat_last_n: Annotated[
        int, typer.Option("--repeat-last-n", min=-1, help="Tokens penalties look at; -1: all.")
    ] = 64,
    frequency_penalty: Annotated[float, typer.Option("--frequency-penalty")] = 0.0,
    presence_penalty: Annotated[float, typer.Option("--presence-penalty")] = 0.0,
    grammar: Annotated[
        str | None, typer.Option("--grammar", help="GBNF that the answer must follow.")
    ] = None,
    grammar_file: Annotated[
        Path | None, typer.Option("--grammar-file", help="File with that grammar.")
    ] = None,
    json_schema: Annotated[
        str | None, typer.Option("--json-schema", "-j", help="JSON schema of the answer.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s")] = None,
) -> None:
    """Continue a prompt: with the embedded pair, or with MODEL.gguf -p PROMPT."""
    from specoffload.commands.run import (
        read_grammar,
        read_prompt,
        read_seed,
        run_prompt,
        split_model_and_prompt,
    )
    from specoffload.session.generation import GenerateOptions

    model, words = split_model_and_prompt(model_or_prompt, prompt)
    options = GenerateOptions(
        n_predict=None if n_predict < 0 else n_predict,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        repeat_last_n=repeat_last_n,
        frequency_penalty=frequency_penalty,
        presence_penalty=presence_penalty,
        grammar=read_grammar(grammar, grammar_file),
        json_schema=json_schema,
        seed=read_seed(seed),
    )
    run_prompt(make_config(model), lambda: read_prompt(words, file), options)


@app.command()
@opens_a_model
def serve(
    make_config: MakeConfig,
    model: Model = None,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Bearer token to ask for.")
    ] = None,
    max_queue: Annotated[
        int, typer.Option("--max-queue", help="Requests that may wait; more get a 503.")
    ] = 16,
) -> None:
    """Serve the OpenAI API on a socket."""
    from specoffload.commands.serve import serve_config

    config = make_config(model)
    serve_config(config, host=host, port=port, api_key=api_key, max_queue=max_queue)


@app.command()
@opens_a_model
def bench(
    make_config: MakeConfig,
    model: Model = None,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", help="Tokens per prompt.")] = 64,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r")] = 5,
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Measure how well copies hide behind compute.")
    ] = False,
    policies: Annotated[
        bool, typer.Option("--policies", help="Compare draft-length policies (code, prose, noise).")
    ] = False,
) -> None:
    """Measure plain, wrapped and speculative decoding; the last line is one JSON object."""
    if overlap:
        from specoffload.commands.bench_overlap import bench_overlap

        bench_overlap(repetitions)
        return
    if policies:
        from specoffload.commands.bench_policies import bench_policies

        bench_policies(make_config(model), n_predict=n_predict)
        return
    from specoffload.commands.bench import bench_config

    bench_config(make_config(model), n_predict=n_predict, repetitions=repetitions)


@app.command()
@opens_a_model
def profile(
    make_config: MakeConfig,
    model: Model = None,
    text: Annotated[
        Path | None, typer.Option("--text", help="Text to measure on. [default: the demo's]")
    ] = None,
    n_max: Annotated[
        int | None, typer.Option("--n-max", help="Largest batch, up to 64. [default: 64]")
    ] = None,
    repetitions: Annotated[
        int | None, typer.Option("--repetitions", "-r", help="Timed sets. [default: 4]")
    ] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Write a plot (.png).")] = None,
    export_to: Annotated[
        Path | None,
        typer.Option("--export", help="Write .json, .jsonl (llama-batched-bench) or costs."),
    ] = None,
    import_from: Annotated[
        Path | None, typer.Option("--import", help="Read one of those instead of measuring.")
    ] = None,
) -> None:
    """Measure T(n), what a decode of n tokens takes, and keep it for the next start."""
    from specoffload.commands.profile import profile_config

    profile_config(
        make_config(model),
        text=text,
        n_max=n_max,
        repetitions=repetitions,
        plot=plot,
        export_to=export_to,
        import_from=import_from,
    )


@app.command()
def demo() -> None:
    """Watch one prompt decoded plainly, streamed and speculatively, side by side."""
    from specoffload.commands.demo import demo as show

    show()


@app.command()
def simulate(
    profile: Annotated[
        Path | None, typer.Option("--profile", help="Costs. [default: the published curves]")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Replay what --record-trace wrote.")
    ] = None,
    n_tokens: Annotated[
        int | None, typer.Option("--tokens", help="Length of synthetic texts. [default: 2000]")
    ] = None,
    draft_share: Annotated[
        float, typer.Option("--draft-share", help="A draft step in units of T(1), if unmeasured.")
    ] = 0.05,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", help="Of the texts. [default: 1]")
    ] = None,
) -> None:
    """Compare the draft-length policies without a model, on profiles and traces."""
    from specoffload.commands.simulate import simulate_policies

    simulate_policies(
        profile=profile, trace=trace, n_tokens=n_tokens, draft_share=draft_share, seed=seed
    )


@app.command()
def trace(file: Annotated[Path, typer.Argument(help="What --trace wrote.")]) -> None:
    """Read a trace: overlap, link utilisation, stalls and their causes."""
    from specoffload.commands.trace import show_trace

    show_trace(file)


@app.command()
def doctor(
    numa: Annotated[
        bool, typer.Option("--numa", help="Prove where pages lie, strategy by strategy.")
    ] = False,
) -> None:
    """Say what this machine has and what stands in the way."""
    from specoffload.commands.doctor import doctor as examine
    from specoffload.config.environment import read_environment

    examine(read_environment().profile_folder, numa=numa)


@tune_app.command("numa")
def tune_numa(
    model: Model = None,
    device: Annotated[str, typer.Option("--device", "-dev", help="As for run.")] = "auto",
    min_batch: Annotated[str | None, typer.Option("--min-batch", help="As for run.")] = None,
    vram: Annotated[str | None, typer.Option("--vram", help="As for run.")] = None,
    time_limit_s: Annotated[
        float, typer.Option("--time-limit", help="Seconds; what is left out is named.")
    ] = 600.0,
) -> None:
    """Try placements and thread counts on this machine; later starts use the best."""
    from specoffload.commands.tune import tune_numa as tune
    from specoffload.config.environment import read_environment
    from specoffload.config.resolution import Options, resolve

    config = resolve(Options(model=model, device=device, min_batch=min_batch, vram=vram))
    tune(config, read_environment().profile_folder, time_limit_s=time_limit_s)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Show the version and leave.")] = False,
) -> None:
    if show:
        report.line(f"specoffload {__version__}")
        raise typer.Exit


def main() -> None:
    """Errors that were raised on purpose become one sentence and their exit code."""
    try:
        app()
    except KNOWN as e:
        report.error(str(e))
        raise SystemExit(meaning_of(e).exit_code) from e
    except KeyboardInterrupt:
        report.note("interrupted")
        raise SystemExit(130) from None
