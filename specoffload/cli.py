"""The command line: parses and calls one function. No logic, no heavy imports."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from specoffload import __version__, report
from specoffload.errors import KNOWN, UsageError, meaning_of

app = typer.Typer(
    name="specoffload",
    help="Run big mixture-of-experts GGUF models on one GPU and a lot of RAM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Device = Annotated[
    str, typer.Option("--device", "-dev", help="auto, cpu, sim, or a name that ggml gives.")
]
MinBatch = Annotated[
    str | None,
    typer.Option(
        "--min-batch",
        help="Tokens from which streamed weights are computed on the device: N, or "
        "dense=N,experts=N. Below it the CPU computes them.",
    ),
]
Draft = Annotated[
    Path | None,
    typer.Option("--draft", "-md", "--model-draft", help="Draft model, resident on the device."),
]
DraftMax = Annotated[
    int | None, typer.Option("--draft-max", help="Tokens drafted each round (default 4).")
]
CtxSize = Annotated[
    int | None, typer.Option("--ctx-size", "-c", help="Context in tokens; 0: the model's.")
]
Threads = Annotated[int | None, typer.Option("--threads", "-t", help="CPU threads of a decode.")]
ThreadsBatch = Annotated[
    int | None, typer.Option("--threads-batch", "-tb", help="CPU threads of prefill.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", help="Largest decode in tokens.")]
UbatchSize = Annotated[
    int, typer.Option("--ubatch-size", "-ub", help="Tokens computed at once in prefill.")
]
FlashAttn = Annotated[str, typer.Option("--flash-attn", "-fa", help="auto, on or off.")]
NoSpec = Annotated[bool, typer.Option("--no-spec", help="Decode token by token, no draft.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Show the library's log.")]


def _config(**typed: Any) -> Any:
    from specoffload.config import Options, resolve

    if typed.get("flash_attn") not in ("auto", "on", "off"):
        raise UsageError(f"--flash-attn {typed['flash_attn']}: must be auto, on or off")
    return resolve(Options(**typed))


def _logging(verbose: bool) -> None:
    if verbose:
        logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(message)s")


@app.command()
def run(
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
    seed: Annotated[int | None, typer.Option("--seed", "-s")] = None,
    device: Device = "auto",
    min_batch: MinBatch = None,
    draft: Draft = None,
    draft_max: DraftMax = None,
    no_spec: NoSpec = False,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    batch_size: BatchSize = 2048,
    ubatch_size: UbatchSize = 512,
    flash_attn: FlashAttn = "auto",
    verbose: Verbose = False,
) -> None:
    """Continue a prompt: with the embedded pair, or with MODEL.gguf -p PROMPT."""
    from specoffload.generation import GenerateOptions
    from specoffload.run import read_prompt, run_prompt, split_model_and_prompt

    _logging(verbose)
    model, words = split_model_and_prompt(model_or_prompt, prompt)
    config = _config(
        model=model, draft=draft, device=device, min_batch=min_batch, ctx_size=ctx_size,
        batch_size=batch_size, ubatch_size=ubatch_size, threads=threads,
        threads_batch=threads_batch, flash_attn=flash_attn, spec=not no_spec, draft_max=draft_max,
    )  # fmt: skip
    options = GenerateOptions(
        n_predict=None if n_predict < 0 else n_predict, temperature=temperature, top_k=top_k,
        top_p=top_p, min_p=min_p, repeat_penalty=repeat_penalty, seed=seed,
    )  # fmt: skip
    run_prompt(config, lambda: read_prompt(words, file), options)


@app.command()
def serve(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL.gguf]")] = None,
    host: Annotated[str, typer.Option("--host")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.")] = 8080,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Bearer token to ask for.")
    ] = None,
    device: Device = "auto",
    min_batch: MinBatch = None,
    draft: Draft = None,
    draft_max: DraftMax = None,
    no_spec: NoSpec = False,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    batch_size: BatchSize = 2048,
    ubatch_size: UbatchSize = 512,
    flash_attn: FlashAttn = "auto",
    verbose: Verbose = False,
) -> None:
    """Serve the OpenAI API on a socket."""
    from specoffload.serving import serve_config

    _logging(verbose)
    config = _config(
        model=model, draft=draft, device=device, min_batch=min_batch, ctx_size=ctx_size,
        batch_size=batch_size, ubatch_size=ubatch_size, threads=threads,
        threads_batch=threads_batch, flash_attn=flash_attn, spec=not no_spec, draft_max=draft_max,
    )  # fmt: skip
    serve_config(config, host=host, port=port, api_key=api_key)


@app.command()
def bench(
    model: Annotated[Path | None, typer.Argument(metavar="[MODEL.gguf]")] = None,
    device: Device = "auto",
    min_batch: MinBatch = None,
    draft: Draft = None,
    draft_max: DraftMax = None,
    no_spec: NoSpec = False,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", help="Tokens per prompt.")] = 64,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r")] = 5,
    ctx_size: CtxSize = None,
    threads: Threads = None,
    threads_batch: ThreadsBatch = None,
    batch_size: BatchSize = 2048,
    ubatch_size: UbatchSize = 512,
    flash_attn: FlashAttn = "auto",
    verbose: Verbose = False,
) -> None:
    """Measure plain, wrapped and speculative decoding; the last line is one JSON object."""
    from specoffload.bench import bench_config

    _logging(verbose)
    config = _config(
        model=model, draft=draft, device=device, min_batch=min_batch, ctx_size=ctx_size,
        batch_size=batch_size, ubatch_size=ubatch_size, threads=threads,
        threads_batch=threads_batch, flash_attn=flash_attn, spec=not no_spec, draft_max=draft_max,
    )  # fmt: skip
    bench_config(config, n_predict=n_predict, repetitions=repetitions)


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
