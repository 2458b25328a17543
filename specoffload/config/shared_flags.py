"""The flags that every command which opens a model has, declared once.

`@opens_a_model` adds them to a command's own; the command gets them as one resolved Config.
"""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.options import SWITCH
from specoffload.config.environment import LLAMA_ARGS
from specoffload.config.speculation_flags import spec_parameters, take_given
from specoffload.errors import UsageError


def _flags(
    device: Annotated[
        str,
        typer.Option(
            "--device",
            "-dev",
            help="auto, cpu, sim, sim:vram=64MiB,bw=2GB/s,latency=20us, or a name ggml gives.",
        ),
    ] = "auto",
    min_batch: Annotated[
        str | None,
        typer.Option(
            "--min-batch",
            help="Tokens from which streamed weights are computed on the device: N, "
            "dense=N,experts=N, or auto (measured). Below it the CPU computes them. [default: 32]",
        ),
    ] = None,
    vram: Annotated[
        str | None,
        typer.Option("--vram", help="Device memory for weights and slots, e.g. 12GiB."),
    ] = None,
    n_gpu_layers: Annotated[
        int | None,
        typer.Option(
            "--n-gpu-layers",
            "-ngl",
            help="Layers whose dense weights are resident, the others stream. [default: what fits]",
        ),
    ] = None,
    n_cpu_moe: Annotated[
        int | None,
        typer.Option(
            "--n-cpu-moe",
            "-ncmoe",
            help="Layers whose experts lie in host memory and stream. [default: what must]",
        ),
    ] = None,
    expert_cache: Annotated[
        str, typer.Option("--expert-cache", help="Which slots are replaced: lru or lfu.")
    ] = "lru",
    prefetch_depth: Annotated[
        int, typer.Option("--prefetch-depth", help="Weights that copies run ahead.")
    ] = 8,
    no_overlap: Annotated[
        bool, typer.Option("--no-overlap", help="Copy one weight at a time, cache nothing.")
    ] = False,
    no_prefetch: Annotated[
        bool, typer.Option("--no-prefetch", help="Do not guess a batch's experts.")
    ] = False,
    trace: Annotated[
        Path | None, typer.Option("--trace", help="Write what ran when (Chrome trace format).")
    ] = None,
    mla_crossover: Annotated[
        str | None,
        typer.Option(
            "--mla-crossover",
            help="Tokens up to which MLA's value product is matrix-vector: auto (measured) or N; "
            "0 is off. [default: the number of heads]",
        ),
    ] = None,
    mmap: Annotated[
        bool,
        typer.Option("--mmap", help="Keep streamed weights in the page cache: larger than RAM."),
    ] = False,
    draft: Annotated[
        Path | None,
        typer.Option(
            "--draft", "-md", "--model-draft", "--spec-draft-model", help="Draft model, resident."
        ),
    ] = None,
    draft_params: Annotated[
        str | None,
        typer.Option("--draft-params", help='The draft\'s own flags, e.g. "-t 2 -c 2048".'),
    ] = None,
    threads_draft: Annotated[
        int | None,
        typer.Option("--threads-draft", "-td", "--spec-draft-threads", help="The draft's."),
    ] = None,
    threads_batch_draft: Annotated[
        int | None,
        typer.Option("--threads-batch-draft", "-tbd", "--spec-draft-threads-batch", hidden=True),
    ] = None,
    ctx_size_draft: Annotated[
        int | None, typer.Option("--ctx-size-draft", "-cd", hidden=True)
    ] = None,
    device_draft: Annotated[
        str | None,
        typer.Option("--device-draft", "-devd", "--spec-draft-device", hidden=True),
    ] = None,
    draft_ngl: Annotated[
        str | None,
        typer.Option("--spec-draft-ngl", "-ngld", "--gpu-layers-draft", hidden=True),
    ] = None,
    draft_type_k: Annotated[
        str | None,
        typer.Option("--spec-draft-type-k", "-ctkd", "--cache-type-k-draft", hidden=True),
    ] = None,
    draft_type_v: Annotated[
        str | None,
        typer.Option("--spec-draft-type-v", "-ctvd", "--cache-type-v-draft", hidden=True),
    ] = None,
    draft_hf: Annotated[
        str | None, typer.Option("--spec-draft-hf", "-hfd", "--hf-repo-draft", hidden=True)
    ] = None,
    draft_override: Annotated[
        str | None, typer.Option("--spec-draft-override", "-otd", hidden=True)
    ] = None,
    no_profile: Annotated[
        bool,
        typer.Option("--no-profile", help="Measure nothing at a first start: fixed blocks of 4."),
    ] = False,
    record_trace: Annotated[
        Path | None,
        typer.Option("--record-trace", help="Write what was drafted and accepted, for simulate."),
    ] = None,
    no_spec: Annotated[
        bool, typer.Option("--no-spec", help="Decode token by token, no draft.")
    ] = False,
    ctx_size: Annotated[
        int | None,
        typer.Option("--ctx-size", "-c", help="Context in tokens; 0: the model's. [default: 4096]"),
    ] = None,
    ctx_checkpoints: Annotated[
        int,
        typer.Option(
            "--ctx-checkpoints",
            "-ctxcp",
            help="Prompts of a conversation that a recurrent model can go back to.",
        ),
    ] = 32,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", help="CPU threads of a decode.")
    ] = None,
    threads_batch: Annotated[
        int | None, typer.Option("--threads-batch", "-tb", help="CPU threads of prefill.")
    ] = None,
    numa: Annotated[
        str,
        typer.Option(
            "--numa",
            help="Where threads and weights go on several memory nodes: auto (tuned, else rows), "
            "none, single, interleave, rows or distribute.",
        ),
    ] = "auto",
    numa_node: Annotated[
        int | None,
        typer.Option("--numa-node", help="Keep threads and weights on this memory node."),
    ] = None,
    batch_size: Annotated[
        int, typer.Option("--batch-size", "-b", help="Largest decode in tokens.")
    ] = 2048,
    ubatch_size: Annotated[
        int, typer.Option("--ubatch-size", "-ub", help="Tokens computed at once in prefill.")
    ] = 512,
    flash_attn: Annotated[
        str, typer.Option("--flash-attn", "-fa", help="auto, on or off.")
    ] = "auto",
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show the library's log.")
    ] = False,
) -> None:
    """Never called: its signature is what `opens_a_model` adds."""


def opens_a_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give `command(make_config, ...)` the flags above.

    It is called with `make_config(model)`, which resolves them; UsageError says what is wrong.
    """
    shared = list(inspect.signature(_flags, eval_str=True).parameters.values())
    shared += spec_parameters()
    signature = inspect.signature(command, eval_str=True)
    own = list(signature.parameters.values())[1:]
    for parameter in (*own, *shared):
        for info in getattr(parameter.annotation, "__metadata__", ()):
            info.envvar = LLAMA_ARGS.get(parameter.name)

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        typed = {p.name: given.pop(p.name) for p in shared}
        if typed.pop("verbose"):
            logging.basicConfig(level=logging.DEBUG, stream=sys.stderr, format="%(message)s")
        command(functools.partial(_make_config, typed), **given)

    wrapped.__signature__ = signature.replace(parameters=[*own, *shared])  # type: ignore[attr-defined]
    del wrapped.__wrapped__  # typer would follow it to the signature without the shared flags
    wrapped.__annotations__ = {p.name: p.annotation for p in [*own, *shared]}
    return wrapped


def _merge_draft_flags(values: dict[str, Any]) -> None:
    """llama.cpp's flags of the draft into --draft-params; UsageError for those without effect."""
    for name in ("draft_type_k", "draft_type_v", "draft_ngl", "draft_hf", "draft_override"):
        if values.pop(name) is not None:
            raise UsageError(
                f"--spec-{name.replace('_', '-')}: the draft lies on the device whole, with a KV "
                "cache in f16, from a file that --draft names; leave this flag out"
            )
    parts = [values["draft_params"] or ""]
    for name, flag in (
        ("threads_draft", "-t"),
        ("threads_batch_draft", "-tb"),
        ("ctx_size_draft", "-c"),
        ("device_draft", "-dev"),
    ):
        value = values.pop(name)
        if value is not None:
            parts.append(f"{flag} {value}")
    values["draft_params"] = " ".join(filter(None, parts)) or None


def _make_config(typed: dict[str, Any], model: Path | None) -> Any:
    from numa.machine import read_topology
    from specoffload.config.environment import read_environment
    from specoffload.config.numa_choice import resolve_on
    from specoffload.config.resolution import Options
    from specoffload.config.tuned import load_tuned

    values = dict(typed)
    _merge_draft_flags(values)
    if values["flash_attn"] not in SWITCH:
        raise UsageError(f"--flash-attn {values['flash_attn']}: must be auto, on or off")
    values |= {
        "spec": not values.pop("no_spec"),
        "use_profile": not values.pop("no_profile"),
        "spec_given": take_given(values),
        "overlap": not values.pop("no_overlap"),
        "prefetch": not values.pop("no_prefetch"),
    }
    topology = read_topology()
    tuned = load_tuned(read_environment().profile_folder, topology)
    return resolve_on(Options(model=model, **values), topology, tuned)
