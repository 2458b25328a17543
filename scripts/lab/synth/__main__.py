"""The command line of scripts/synth."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.padding import Padding
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from lab.synth import Plan, plan_preset, plan_shape, write, write_header_only
from lab.synth.shape import PRESETS, parse_setting, read_description, resolve
from lab.synth.tensors import class_of
from offload.errors import BadRequest, OffloadError

out = Console()
errors = Console(stderr=True)


def _show_list(wanted: bool) -> None:
    if not wanted:
        return
    for preset in PRESETS.values():
        planned = plan_preset(preset.name, size="full", vocab="none")
        n_parameters = sum(t.n_values for t in planned.tensors)
        size = f"{planned.size_bytes / 1e9:.1f} GB"
        # A table cuts names at 80 columns, and these have to be typed.
        names = ", ".join((preset.name, *preset.aliases))
        out.print(f"{names} ({preset.architecture}): {n_parameters / 1e9:.1f} B, {size}")
        out.print(Padding(preset.about, (0, 0, 0, 4)))
    raise typer.Exit


def _show_plan(planned: Plan) -> None:
    groups: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    for t in planned.tensors:
        name = re.sub(r"^blk\.\d+\.", "blk.*.", t.name)
        shape = " x ".join(map(str, t.shape))
        group = (name, class_of(t.name), shape, t.type.name.lower())
        groups[group] += 1
        sizes[group] += t.n_bytes
    table = Table("tensor", "class", "shape", "type", "count", "GB")
    for key, count in groups.items():
        table.add_row(*key, str(count), f"{sizes[key] / 1e9:.3f}")
    out.print(table)
    n_parameters = sum(t.n_values for t in planned.tensors)
    out.print(
        f"{planned.shape.name}: {len(planned.tensors)} tensors, {n_parameters / 1e9:.2f} B "
        f"parameters, {planned.size_bytes / 1e9:.3f} GB ({planned.size_bytes} bytes)"
    )


def _write(planned: Plan, path: Path, seed: int) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    more = (TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, *more, console=errors, transient=True) as progress:
        total = sum(t.n_bytes for t in planned.tensors)
        task = progress.add_task(path.name, total=total)
        write(planned, path, seed, lambda _, n: progress.advance(task, n))
    out.print(f"{path}: {planned.shape.name}, {path.stat().st_size / 1e9:.3f} GB")


def _refuse_overrides(overrides: dict[str, Any]) -> None:
    given = [name for name, value in overrides.items() if value not in (None, False)]
    if given:
        raise BadRequest(f"{given[0]} belongs into the .json description, not beside it")


def synth(
    preset: Annotated[str, typer.Argument(help="a name of --list, or a .json description")],
    path: Annotated[Path, typer.Argument(metavar="OUT.gguf")],
    size: Annotated[
        str | None, typer.Option(help="tiny (the default), tiny-vulkan or full")
    ] = None,
    header_only: Annotated[
        bool,
        typer.Option(
            "--header-only", help="only the header, the data is a hole; --size full by default"
        ),
    ] = False,
    layers: Annotated[int | None, typer.Option(help="number of layers")] = None,
    scale: Annotated[float | None, typer.Option(help="multiplies the widths")] = None,
    embd: Annotated[int | None, typer.Option(help="width of the model")] = None,
    ff: Annotated[int | None, typer.Option(help="width of dense feed-forward layers")] = None,
    ff_exp: Annotated[int | None, typer.Option(help="width of one expert")] = None,
    heads: Annotated[int | None, typer.Option()] = None,
    heads_kv: Annotated[int | None, typer.Option()] = None,
    experts: Annotated[int | None, typer.Option()] = None,
    experts_used: Annotated[int | None, typer.Option()] = None,
    n_vocab: Annotated[int | None, typer.Option()] = None,
    n_ctx: Annotated[int | None, typer.Option()] = None,
    quant: Annotated[
        str | None,
        typer.Option(
            help="Q4_K_M, UD-Q2_K_XL or UD-Q4_K_XL; a type, q4_K; or types by kind of weight: "
            "q8_0, experts=mxfp4, output=q6_K, without the spaces"
        ),
    ] = None,
    fused_experts: Annotated[
        bool, typer.Option("--fused-experts", help="gate and up in one tensor")
    ] = False,
    expert_scales: Annotated[
        bool, typer.Option("--expert-scales", help="a factor for each expert")
    ] = False,
    routing: Annotated[
        str | None, typer.Option(help="even (the default), drifting or skewed")
    ] = None,
    vocab: Annotated[
        str, typer.Option(help="bytes, none, or a GGUF file to copy it from")
    ] = "bytes",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="raw metadata")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="show the tensors and the size")
    ] = False,
    list_: Annotated[
        bool, typer.Option("--list", is_eager=True, callback=_show_list, help="all presets")
    ] = False,
) -> None:
    """Write a random-weight GGUF."""
    overrides: dict[str, Any] = {
        **{"n_layer": layers, "scale": scale, "n_embd": embd, "n_ff": ff, "n_ff_exp": ff_exp},
        **{"n_head": heads, "n_head_kv": heads_kv, "n_expert": experts},
        **{"n_expert_used": experts_used, "n_vocab": n_vocab, "n_ctx": n_ctx, "quant": quant},
        "fused_experts": fused_experts,
        "expert_scales": expert_scales,
        "routing": routing,
    }
    try:
        if raw := dict(parse_setting(s) for s in settings or []):
            overrides["metadata"] = raw
        if preset.endswith(".json"):
            _refuse_overrides(overrides)
            shape = read_description(Path(preset))
        else:
            default = "full" if header_only else "tiny"
            shape = resolve(preset, size or default, **overrides)
            if any(value not in (None, False) for value in overrides.values()):
                shape = replace(shape, unchecked=True)
        planned = plan_shape(shape, vocab, n_vocab)
        if dry_run:
            _show_plan(planned)
        elif header_only:
            write_header_only(planned, path)
            out.print(
                f"{path}: {planned.shape.name}, the header of {planned.size_bytes / 1e9:.3f} GB"
            )
        else:
            _write(planned, path, seed)
    except OffloadError as e:
        errors.print(f"scripts/synth: {e}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from e


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(synth)
    app(prog_name="scripts/synth")
