"""`specoffload doctor`: reports on this machine and what slows it down. Changes nothing."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, date, datetime
from glob import escape
from pathlib import Path
from types import MappingProxyType

import psutil

from numa.doctor import Finding, diagnose
from numa.machine import read_topology
from numa.threads import plan_threads
from numa.topology import Topology, format_list
from offload.backends import backend_of
from offload.errors import OffloadError
from offload.model_file import model_hash, read_facts
from offload.store.store import room_now
from offload.units import plural
from specdec.whole_file import is_folder
from specoffload import report
from specoffload.config.resolution import DEMO_NAME, demo_file
from specoffload.kept import MACHINE_FILE, Kept, KeptFile, KeptRun, machine_words, read_file
from specoffload.kept_bounds import drop_absurd
from specoffload.kept_doubts import threads_doubt
from specoffload.kept_list import TODAY, Measurement, age, of_machine, of_model, refused
from specoffload.kept_machine import (
    TUNE,
    lines_of_disks,
    link_lines,
    links_of,
    load_tuned,
    tuned_sentence,
)
from specoffload.models.hub import models_folder

_MOST_MODELS = 12  # most models listed


def doctor(folder: Path, *, threads_now: str, numa: bool) -> None:
    """Print the machine, the library, its devices, the kept measurements and the findings.

    With `numa`, also print the memory nodes. `folder` holds the kept files. `threads_now` are
    the thread counts of a start without flags.
    Raises LibraryMismatch when the library's self-test fails.
    """
    from offload.device import devices
    from offload.ggml.native_build import library_build

    topology = read_topology()  # read before the library starts threads
    threads = plan_threads(topology)
    machine = machine_lines(topology)
    library, not_used = library_lines(folder)
    tuned = load_tuned(folder, topology)
    there = frozenset((device.name.lower(), device.description) for device in devices())
    embedded = {model_hash(read_facts(demo_file("target.gguf"))): DEMO_NAME}
    kept = kept_models(folder, MachineNow(there, threads_now, library_build()), embedded)
    command = "tune numa" if topology.is_numa else "tune MODEL.gguf"
    how = tuned.reason or f"not tuned yet (`specoffload {command}`)"
    if tuned.result is not None:
        how = f"{tuned.result.best}, {tuned_sentence(tuned.result)}"
    disks = KeptFile(folder).load()[0].disks
    of_disks = lines_of_disks(disks, models_folder())
    links = _links(folder)
    for line in (*machine, *of_disks, *library, *links, f"threads: {how}", *kept_lines(kept)):
        report.paragraph(line)
    of_all = _of_machine(folder)
    show_measurements("all models", of_all)
    for model in newest(kept)[:_MOST_MODELS]:
        show_measurements(model.model, model.measurements)
    if numa:
        _show_nodes(topology)
    findings = diagnose(topology, threads)
    for finding in findings:
        if numa or finding.severity != "info":
            report.paragraph(
                f"{finding.severity} {finding.code}: {finding.sentence} -> {finding.advice}"
            )
    is_tuned = not topology.is_numa or tuned.result is not None
    last = last_line(not_used, findings, not_kept_reason(folder), is_tuned=is_tuned)
    report.paragraph(last)
    report.data(
        {
            "machine": machine,
            "disks": of_disks,
            "library": library,
            "links": links,
            "measurements": [asdict(one) for one in of_all],
            "kept": [_kept_json(model) for model in kept],
            "findings": [asdict(finding) for finding in findings],
            "last": last,
        }
    )


def _links(folder: Path) -> list[str]:
    """Lines on the links of all GPUs, as kept or measured now."""
    from offload.device import devices

    gpus = [device for device in devices() if device.on_gpu]
    if not gpus:
        return []
    try:
        return link_lines(gpus, links_of(gpus, folder, keep=False))
    except OffloadError as e:
        return [f"links are not measured: {e}"]


def last_line(
    not_used: Sequence[str], findings: Sequence[Finding], not_kept: str, *, is_tuned: bool
) -> str:
    """A sentence on the most important thing to do next, or that all is ready. Pure.

    The order is: a better build, a bad finding, a writable folder, tuned threads.
    """
    if not_used:
        return f"next: {not_used[0]}"
    for finding in findings:
        if finding.severity == "bad":
            return f"next: {finding.sentence}: {finding.advice}"
    if not_kept:
        return f"next: {not_kept}"
    if not is_tuned:
        return "next: specoffload tune numa finds the best threads and placement, and keeps them"
    return "ready: specoffload run -hf user/repo fetches a model and chats with it"


def not_kept_reason(folder: Path) -> str:
    """A sentence if profiles cannot be written to `folder`, else ""."""
    there = next((f for f in (folder, *folder.parents) if os.path.lexists(f)), folder)
    if os.access(there, os.W_OK | os.X_OK) and is_folder(there):
        return ""
    return (
        f"measurements cannot be stored in {folder}, so each start measures again;"
        " SPECOFFLOAD_PROFILE_DIR names another folder"
    )


def machine_lines(topology: Topology) -> list[str]:
    """Processors, memory and limits, one sentence each."""
    memory, room = psutil.virtual_memory(), room_now()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    reserved = [
        f"{h.n_free} of {h.n_total} of {report.bytes_text(h.page_bytes)} on node {node.id}"
        for node in topology.nodes
        for h in node.huge_pages
        if h.n_total
    ]
    locked = "unlimited" if soft == resource.RLIM_INFINITY else report.bytes_text(soft)
    kinds = ""
    if fast := topology.performance_cores:
        cpus = format_list(tuple(cpu for core in fast for cpu in core.cpus))
        kinds = f"{len(fast)} of them performance cores ({cpus}), "
    return [
        f"processors: {len(topology.cores)} cores, {len(topology.usable_cores)} usable by this"
        f" process ({format_list(topology.allowed_cpus)}), {kinds}"
        + ("one memory node" if not topology.is_numa else f"{len(topology.nodes)} memory nodes"),
        f"memory: {report.bytes_text(memory.total)}, of which"
        f" {report.bytes_text(room.available_bytes)} are available (limited by {room.limited_by})",
        f"huge pages: transparent {topology.huge_page_mode}, "
        + ("reserved: " + ", ".join(reserved) if reserved else "none reserved"),
        f"memory lock limit: {locked}",
    ]


def library_lines(folder: Path) -> tuple[list[str], tuple[str, ...]]:
    """Lines on the library's version, self-test and devices. Raises LibraryMismatch.

    Also returns the lines on hardware that the build leaves unused.
    """
    from offload.device import devices
    from offload.ggml.installed import built_for, no_device_reason
    from offload.ggml.library import abi
    from offload.ggml.native_build import amx_verdict, missing_in_build
    from offload.ggml.threads import cpu_features

    there = devices()  # loads the library, whose self-test raises
    features = ", ".join(name for name, value in cpu_features().items() if value == "1")
    lines = [
        f"library: llama-cpp-python {abi.PACKAGE_VERSION} for {built_for()}, self-test passed",
        f"CPU backend: {features}",
    ]
    for device in there:
        line = f"device {device.name}: {device.description}"
        if device.on_gpu:  # ggml reports all RAM as free, and the line on memory tells what is
            free, total = device.device.memory_bytes()
            copies = "asynchronous copies" if device.device.has_async_and_events else "copies wait"
            line += f", {report.bytes_text(free)} of {report.bytes_text(total)} free, {copies}"
        lines.append(line)
    verdict = amx_verdict(folder)
    if verdict is not None:
        lines.append(verdict.sentence or "AMX: a product of two tokens is right")
    has_gpu = any(device.on_gpu for device in there)
    unsuited = (no_device_reason(device.name) for device in there if device.on_gpu)
    not_used = (*filter(None, unsuited), *missing_in_build(has_gpu=has_gpu))
    lines += not_used
    if not has_gpu:
        lines.append(
            "no GPU: models run on the CPU; --device sim puts the CPU in the place of a GPU"
        )
    return lines, not_used


def newest(kept: Sequence[KeptModel]) -> list[KeptModel]:
    """Return the models, those that were measured last first."""
    return sorted(kept, key=lambda model: model.measured_on, reverse=True)


def _of_machine(folder: Path) -> list[Measurement]:
    kept, _ = read_file(folder / MACHINE_FILE)
    if kept is None:
        return []
    not_used = refused(drop_absurd(kept))
    doubt = "" if kept.numa is None else threads_doubt(kept.numa, _runs_of(folder, kept.numa.model))
    again = doubt and f"{doubt}: run {TUNE} again"
    return [*of_machine(kept, again), *not_used]


def _runs_of(folder: Path, model: str) -> list[KeptRun]:
    """The kept runs of the models with this file name."""
    runs: list[KeptRun] = []
    for path in sorted(folder.glob(f"{escape(Path(model).stem)}-*.json")) if model else ():
        kept, _ = read_file(path)
        if kept is not None:
            drop_absurd(kept)
            runs += kept.runs
    return runs


def show_measurements(of: str, measurements: Sequence[Measurement]) -> None:
    """Print a table of kept measurements, if there are any."""
    if measurements:
        today = datetime.now(UTC).date()
        columns = ("measurement", "value", "spread", "age", "state")
        report.table(f"measurements of {of}", columns, [one.cells(today) for one in measurements])


def kept_lines(kept: Sequence[KeptModel]) -> list[str]:
    """One line for each of the models that were measured last."""
    today = datetime.now(UTC).date()
    lines = [model.words(today) for model in newest(kept)[:_MOST_MODELS]]
    if len(kept) > _MOST_MODELS:
        lines.append(f"speeds of {len(kept) - _MOST_MODELS} more models are kept")
    return lines or ["speeds: none measured yet (the first start of a model measures them)"]


# -- kept files of models --------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineNow:
    """This machine's devices, threads and build, in the form that a run's settings use."""

    devices: frozenset[tuple[str, str]]  # names in lower case, and descriptions
    threads: str  # thread counts of a start without --threads
    build: str


def _kept_json(model: KeptModel) -> dict[str, object]:
    shown = asdict(model)
    return shown | {"why_not": shown.pop("reason")}


@dataclass(frozen=True)
class KeptModel:
    """A summary of a model's kept file. `reason` says why a start would measure again, or ""."""

    model: str
    measured_on: str = ""  # ISO date
    n_sizes: int = 0  # batch sizes that were timed, over all ways
    reason: str = ""
    measurements: Sequence[Measurement] = ()

    def words(self, today: date) -> str:
        """The summary as one sentence for a user."""
        if not (self.measured_on and self.n_sizes):
            return f"speeds of {self.model}: {self.reason or 'none measured yet'}"
        days = age(self.measured_on, today)
        ago = days if days == TODAY else f"{days} ago"
        times = plural(self.n_sizes, "decode time")
        words = f"speeds of {self.model}: {times} of {self.measured_on} ({ago})"
        if self.reason:
            return f"{words}; the next start measures anew, since {self.reason}"
        return f"{words}, on this machine as it is now"


def kept_models(
    folder: Path, now: MachineNow, names: Mapping[str, str] = MappingProxyType({})
) -> list[KeptModel]:
    """The kept files in this folder, by model, compared with this machine.

    `names` are those of models that are not called after their file, by their hashes.
    """
    summaries = []
    for path in sorted(folder.glob("*-*.json")) if is_folder(folder) else ():
        name = path.stem.rpartition("-")[0]
        kept, reason = read_file(path)
        if (
            kept is None and reason and ": format: " not in reason
        ):  # no report on files of other versions
            summaries.append(KeptModel(name, reason=reason))
        elif kept is not None and kept.model:
            not_used = refused(drop_absurd(kept))
            summary, run = _against(names.get(kept.model, name), kept, now)
            summaries.append(replace(summary, measurements=[*of_model(kept, run), *not_used]))
    return summaries


def _against(name: str, kept: Kept, now: MachineNow) -> tuple[KeptModel, KeptRun | None]:
    """A summary of the newest run that is valid on this machine, and the run.

    If no run is valid, the summary is of the newest run, and says why that run is not valid.
    """
    if not kept.runs:
        reason = "uses of experts are counted, no speed is measured yet"
        return KeptModel(name, reason=reason), None
    reasons = [(run, _difference(kept.machine, run, now)) for run in reversed(kept.runs)]
    run, reason = next((pair for pair in reasons if not pair[1]), reasons[0])
    n_sizes = sum(len(run.table.measured(way)) for way in run.table.ways)
    return KeptModel(name, run.date, n_sizes, reason), run


def _difference(machine: str, run: KeptRun, now: MachineNow) -> str:
    """A clause on a part of the machine that has changed since the run; "" if none has."""
    device, build = run.settings.get("device", ""), run.settings.get("build", "")
    threads = run.settings.get("threads", "")
    if machine != machine_words():
        return f"it was measured on {machine}, and this machine has {machine_words()}"
    for place in device.split("; "):
        name, _, description = place.partition(", ")
        name = "cpu" if backend_of(name).on_cpu else name.lower()
        if (name, description) not in now.devices:
            return f"there is no device {place} now"
    if build != now.build:
        return f"the library is {now.build} now, it was {build}"
    if threads != now.threads:
        return f"a start uses {now.threads} threads now (one token/several), it used {threads}"
    return ""


def _show_nodes(topology: Topology) -> None:
    report.table(
        "memory nodes",
        ("node", "processors", "memory", "free", "distances"),
        [
            (
                str(node.id),
                format_list(node.cpus) or "none",
                report.bytes_text(node.memory_bytes),
                report.bytes_text(node.free_bytes),
                " ".join(str(d) for d in node.distances),
            )
            for node in topology.nodes
        ],
    )
