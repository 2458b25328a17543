"""`specoffload models`: lists the models in the caches, and how each would run here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from gguf import LlamaFileType

from numa.errors import NumaError
from offload.device import has_gpu
from offload.errors import OffloadError
from offload.model_file import read_facts
from offload.store.store import room_now
from specoffload import report
from specoffload.config.environment import Environment
from specoffload.config.options import PlanOptions
from specoffload.config.resolution import Config
from specoffload.models.hub import models_folder
from specoffload.models.local import CachedModel, cached_models, models_below, unreadable
from specoffload.opening.context_size import planned_with_context
from specoffload.opening.planning import Planned


def show_models(
    config_for: Callable[[Path], Config], environment: Environment, folder: Path | None = None
) -> None:
    """Print each model's name and how it would run here, one after the other.

    `config_for` returns the configuration to open a file with. Lists the files below `folder` if
    that is given, and otherwise the caches. Raises UsageError if `folder` is none.
    """
    hub = models_folder()
    if folder is not None:
        listed = models_below(folder)
    else:
        for cache in (hub, environment.llama_cache, *environment.ollama_folders):
            if unreadable(cache):
                report.note(f"{cache} is left out: this user may not read it (HOME, HF_HOME)")
        listed = cached_models(hub, environment.llama_cache, environment.ollama_folders)
    rows = []
    for model in listed:
        report.line(model.name)  # before its plan, which takes seconds
        row = describe(model, config_for)
        about = (report.bytes_text(row["size_bytes"]), row["architecture"], row["quantisation"])
        report.indented(" · ".join(filter(None, (*about, row["here"]))))
        rows.append(row)
    report.data(rows)
    if not rows:
        folders = (hub, environment.llama_cache, *environment.ollama_folders)
        folders = folders if folder is None else (folder,)
        report.paragraph(f"no models in {', '.join(map(str, folders))}")
        report.line("fetch one: specoffload run -hf user/repo:Q4_K_M")


def describe(model: CachedModel, config_for: Callable[[Path], Config]) -> dict[str, Any]:
    """One model as data for scripts. `here` is its plan in one line, or the error."""
    row: dict[str, Any] = dataclasses.asdict(model) | {"path": str(model.path)}
    row |= {"size_bytes": 0, "architecture": "", "quantisation": "", "fits": False}
    if model.missing:
        return row | {"here": model.missing}
    try:
        facts = read_facts(model.path)
        row |= {
            "size_bytes": facts.size_bytes,
            "architecture": facts.architecture,
            "quantisation": type_name(facts.header.metadata),
        }
        planned = planned_with_context(config_for(model.path), PlanOptions())
    except (OffloadError, NumaError) as e:
        return row | {"here": str(e).removeprefix(f"{model.path}: ")}
    available = room_now().available_bytes
    words, fits = in_one_line(planned, available, on_gpu=has_gpu())
    return row | {"here": words, "fits": fits}


def in_one_line(planned: Planned, ram_bytes: int, *, on_gpu: bool) -> tuple[str, bool]:
    """A line on the memory that the model needs, and True if the machine has it.

    Without `on_gpu` everything is in RAM, and the plan's GPU is only assumed.
    """
    plan = planned.plan
    of_host = plan.streamed_bytes if on_gpu else planned.facts.size_bytes
    of_device = plan.used_bytes
    if on_gpu and not of_host:
        return f"fits the GPU: {report.bytes_text(of_device)}", True
    host, free = report.bytes_text(of_host), report.bytes_text(ram_bytes)
    there = f", {report.bytes_text(of_device)} on the GPU" if on_gpu else ", on the CPU"
    if of_host <= ram_bytes:
        return f"{host} in RAM{there}", True
    needs = f"needs {host} of RAM, {free} is free"
    if planned.facts.n_experts:
        return f"{needs}: experts that do not fit are read from the disk, which is slow", False
    return needs, False


def type_name(metadata: Mapping[str, object]) -> str:
    """llama.cpp's name of a file's quantisation type, such as Q4_K_M."""
    file_type = metadata.get("general.file_type")
    if not isinstance(file_type, int):
        return ""
    try:
        name: str = LlamaFileType(file_type).name
    except ValueError:
        return str(file_type)
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")
