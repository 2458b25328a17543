"""`specoffload report`: measures a model on this machine, and writes one file that can be sent.

The measurements are those of `bench`, `profile`, `plan` and `doctor`. The file is written anew
after each part, so that Ctrl-C keeps what was measured.
"""

from __future__ import annotations

import functools
import getpass
import platform
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from numa.machine import read_topology
from offload.device import choose_device
from offload.errors import OffloadError
from offload.ggml.native_build import library_build
from offload.stream.bell_use import BELLS
from specdec.errors import SpecDecError
from specdec.whole_file import write_json
from specoffload import report
from specoffload.bench.card_power import watch_of
from specoffload.bench.llama_server import measure_ways, program_of
from specoffload.bench.load import warn_of_load
from specoffload.bench.machine_report import (
    FORM,
    PrivateNames,
    Term,
    bell_use,
    split_use,
    surprise_words,
    terms_of,
)
from specoffload.bench.paths import Workload, measure_in_turns
from specoffload.commands.bench import (
    commit,
    machine,
    on_some_device,
    open_session,
    tuned_peers,
    with_bench_context,
    workload,
)
from specoffload.commands.models import type_name
from specoffload.commands.plan import as_dict
from specoffload.commands.profile import ways_as_data
from specoffload.config.options import BenchOptions
from specoffload.config.resolution import Config
from specoffload.cpu_load import Watch
from specoffload.errors import SpecOffloadError, UsageError
from specoffload.generation.statistics import GenerationStats
from specoffload.kept_machine import links_of
from specoffload.opening.choices import devices_of
from specoffload.opening.drafters import usable_drafters
from specoffload.opening.header import target_facts
from specoffload.opening.planner import Planner

_SHOWN = 12  # most rows of the table at the end
_KNOWN = (OffloadError, SpecOffloadError, SpecDecError)
# Parts of a plan that a report has: figures and names of the program's own.
_OF_PLAN = ("architecture", "ctx_size", "ubatch", "resident_bytes", "streamed_bytes", "vram_bytes",
            "expected", "cache", "hits", "unions", "machine", "disk")  # fmt: skip


def report_machine(config: Config, own: BenchOptions, path: Path) -> None:
    """Measure `config`, and write a report to `path`.

    Raises UsageError if `path` exists or cannot be written, and KeyboardInterrupt after Ctrl-C.
    """
    run = _Report(config, own, path)
    warn_of_load()
    try:
        with report.steps("report") as tell:
            run.measure(tell)
    finally:
        run.finish()


class _Report:
    """A report while it is made. `part` is what is measured now.

    Until all parts are measured, the file says in which one it ended. So it is also true if this
    process is killed.
    """

    def __init__(self, config: Config, own: BenchOptions, path: Path) -> None:
        self._program = None if own.vs is None else program_of(own.vs)
        self.path, self.part = path, "machine"
        config = on_some_device(with_bench_context(config))
        spec = usable_drafters(target_facts(config), config.spec)
        self._config, self._own = replace(config, spec=spec), own
        self._work: Workload = workload(self._config, own)
        files = [config.model] if config.spec.draft is None else [config.model, config.spec.draft]
        paths = [path, Path.cwd() / path.name, Path.home() / path.name]
        paths += [] if config.is_demo else files
        self._names = PrivateNames.of(paths, _users())
        self._seen: dict[str, Any] = {}
        self._watch = Watch()
        self.data: dict[str, Any] = {"form": FORM, "missing": {}, "ended_in": ""}
        self._write(self.data, is_new=True)

    def measure(self, tell: Callable[[str, float], None]) -> None:
        """Measure part after part, and write the file after each."""
        self._tell = tell
        parts: dict[str, Callable[[], None]] = {
            "machine": self._machine,
            "model": self._model,
            "plan": self._plan,
            "speeds": self._speeds,
            "doorbell": self._without_bell,
        }
        if self._program is not None:
            parts["llama-server"] = self._server
        for nth, (self.part, measure) in enumerate(parts.items()):
            self.data["ended_in"] = self.part
            tell(self.part, nth / len(parts))
            try:
                measure()
            except _KNOWN as e:
                self._leave_out(self.part, e)
            self._write(self.data)
        self.data["ended_in"] = ""

    def finish(self) -> None:
        """Compare, write the file for the last time, and print what surprised."""
        self._take_seen()
        load = self._watch.others()
        self.data["others_share"] = load.others
        terms = terms_of(self.data)
        self.data["terms"] = [term.as_data() for term in terms]
        self._write(self.data)
        _show(self.data, terms)
        if load.is_busy:
            report.paragraph(
                f"{load.words}, so what was measured is too slow: a report of an idle machine says "
                "more"
            )
        report.paragraph(
            f"written to {self.path}, without names of folders, users and hosts; "
            "docs/validation.md says where to send it"
        )
        report.data(self.data)

    def _write(self, data: Mapping[str, Any], *, is_new: bool = False) -> None:
        """Write the file. Raises UsageError."""
        said = f"--output {self.path}"
        if is_new and self.path.exists():
            raise UsageError(f"{said}: exists already, and a report overwrites nothing")
        try:
            write_json(self.path, data)
        except OSError as e:
            raise UsageError(f"{said}: cannot be written ({e.strerror})") from e

    def _leave_out(self, what: str, e: Exception) -> None:
        report.note(f"{what} is left out: {e}")
        self.data["missing"][what] = self._names.free(str(e))

    # -- parts ------------------------------------------------------------------------------------

    def _machine(self) -> None:
        topology, free = read_topology(), self._names.free
        here = machine()
        choices = devices_of(self._config)
        self.data["machine"] = here | {
            "cpu": free(here["cpu"]),
            "system": platform.system(),
            "n_nodes": len(topology.nodes),
            "n_performance_cores": len(topology.performance_cores),
        }
        self.data["program"] = {"commit": commit(), "library": free(library_build())}
        self.data["devices"] = [
            {
                "name": choice.name,
                "description": free(choice.description),
                "on_gpu": choice.on_gpu,
                "memory_bytes": choice.device.memory_bytes()[1],
            }
            for choice in choices
        ]
        gpus = [choice for choice in choices if choice.on_gpu and not choice.shares_ram]
        if gpus:
            links = links_of(gpus, self._config.spec.kept_folder, keep=False)
            self.data["links_bytes_per_s"] = {
                "alone": [rate.value for rate in links.alone],
                "together": [rate.value for rate in links.together],
            }

    def _model(self) -> None:
        facts = target_facts(self._config)
        metadata = facts.header.metadata
        name, free = metadata.get("general.name"), self._names.free
        self.data["model"] = {
            "name": free(name) if isinstance(name, str) else "",
            "architecture": free(facts.architecture),
            "type": free(type_name(metadata)),
            "size_bytes": facts.size_bytes,
            "n_layers": facts.n_layers,
            "n_experts": facts.n_experts,
            "n_experts_used": facts.n_experts_used,
        }
        self.data["settings"] = self._settings()

    def _settings(self) -> dict[str, Any]:
        """The settings that change speeds."""
        config = self._config
        return {
            "device": self._names.free(config.device),
            "ctx_size": config.ctx_size,
            "batch_size": config.batch_size,
            "ubatch_size": config.ubatch_size,
            "type_k": config.type_k,
            "type_v": config.type_v,
            "flash_attn": str(config.flash_attn),
            "threads": config.threads,
            "threads_batch": config.threads_batch,
            "n_gpu_layers": config.n_gpu_layers,
            "n_processors": len(config.decode_on.cpus),
            "has_draft_model": config.spec.draft is not None,
            "drafters": [str(name) for name in config.spec.options.drafters],
            "n_prompt": self._work.n_long,
            "n_predict": self._work.n_predict,
        }

    def _plan(self) -> None:
        """Plan as if nothing had been measured on this machine, so that predictions are tested."""
        config = self._config
        quiet = replace(config, spec=replace(config.spec, use_profile=False))
        no_drafts = quiet.without_drafts
        plain = Planner(no_drafts, no_drafts.spec).planned(config.ctx_size)
        batches = plain.costs.ways
        hits = as_dict(plain)["hits"]
        predicted: dict[str, Any] = {
            "wrapped": {
                "answer_tps": plain.expected["decode_tps"],
                "prompt_tps": plain.prompt_tps(self._work.n_long),
            },
            "batches_s": {
                str(way): {n: entry.seconds for n, entry in sorted(entries.items())}
                for way, entries in batches.items()
            },
            "hits": None if hits is None else hits["rate"],
        }
        if config.spec.has_steps:
            planned = Planner(quiet, quiet.spec).planned(config.ctx_size)
            drafts = planned.expected.get("mtp_decode_tps")
            if drafts is not None:
                predicted["spec"] = {"answer_tps": drafts}
        self.data["predicted"] = predicted
        shown = as_dict(plain)
        self.data["plan"] = self._names.free_all({key: shown[key] for key in _OF_PLAN})

    def _speeds(self) -> None:
        ours = {"wrapped": self._config.without_drafts}
        if self._config.spec.has_steps:
            ours["spec"] = self._config
        self._measure(ours)

    def _without_bell(self) -> None:
        """Measure answers without doorbells too, if layers ran behind one."""
        if not self.data.get("doorbell", {}).get("layers_rung"):
            return
        plain = self._config.without_drafts
        streaming = replace(plain.streaming, doorbell=False)
        self._measure({"without doorbell": replace(plain, streaming=streaming)})

    def _server(self) -> None:
        assert self._program is not None
        tuned = next(iter(tuned_peers(self._config).values()))
        rows = measure_ways(
            self._program, self._config, tuned, self._work.texts, self._work.n_predict
        )
        self.data["llama_server"] = self._names.free_all([asdict(row) for row in rows])

    def _measure(self, ours: Mapping[str, Config]) -> None:
        """Measure these paths one after the other, and write the file after each repetition."""
        speeds = self.data.setdefault("speeds", {})
        n_done, n_all = 0, len(ours) * self._own.repetitions

        def on_measured(name: str, _: int, stats: GenerationStats, prompt_s: float) -> None:
            nonlocal n_done
            n_done += 1
            row = speeds.setdefault(name, {"answer_tps": [], "prompt_tps": []})
            row["answer_tps"].append(stats.tokens_per_s)
            row["prompt_tps"].append(self._work.n_long / prompt_s)
            if stats.n_drafted:
                row["n_drafted"], row["n_accepted"] = stats.n_drafted, stats.n_accepted
            self._write(self.data)
            self._tell(f"{self.part}, {name}", n_done / n_all)

        by_path = measure_in_turns(
            {
                name: functools.partial(open_session, config, name, self._seen)
                for name, config in ours.items()
            },
            self._work,
            repetitions=self._own.repetitions,
            together=False,
            on_left_out=lambda name, e: self._leave_out(name, e),
            on_measured=on_measured,
            card=watch_of(choose_device(self._config.device)),
        )
        for name, measured in by_path.items():
            speeds[name]["n_threads_lost"] = max(measured.n_threads_lost, default=0)
            if measured.card is not None:
                speeds[name]["card"] = self._names.free_all(asdict(measured.card))
        self._take_seen()

    def _take_seen(self) -> None:
        """Add what the sessions measured of themselves."""
        seen = self._seen
        if (table := seen.get("table")) is not None:
            ways = {str(way): rows for way, rows in ways_as_data(table).items()}
            self.data["batches"] = self._names.free_all(ways)
        if (counters := seen.get("counters")) is not None:
            self.data["counters"] = counters
            self.data["hits"] = split_use(counters)
            self.data["doorbell"] = bell_use(counters, self._names.free(BELLS.why_not))
        if (split := seen.get("split")) is not None:
            self.data["split_costs"] = _numbers(asdict(split))


def _users() -> list[str]:
    """The names of this user and of this machine, as far as the system knows them."""
    names = [socket.gethostname(), platform.node()]
    with suppress(KeyError, OSError):  # the user of a container may have no name
        names.append(getpass.getuser())
    return names


def _numbers(value: Any) -> Any:
    """`value` with arrays as lists, for JSON. What is no number becomes the name of its type."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _numbers(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(part) for part in value]
    return value if isinstance(value, int | float | bool | None) else type(value).__name__


def _show(data: Mapping[str, Any], terms: list[Term]) -> None:
    """Print predictions beside measurements, and what surprised."""
    if terms:
        rows = [
            (
                term.what,
                *term.shown,
                "-" if term.ratio is None else f"{term.ratio:.2f}{' *' * term.surprises}",
            )
            for term in terms[:_SHOWN]
        ]
        columns = ("", "predicted", "measured", "predicted ÷ measured")
        report.table("predicted beside measured", columns, rows)
        surprises = surprise_words(terms)
        report.line("surprising (*):" if surprises else "nothing surprised")
        if any(device["name"].startswith("sim") for device in data.get("devices", ())):
            report.paragraph(
                "on sim the CPU takes the place of a GPU, and predictions are for a GPU, so only "
                "the way in place can be compared"
            )
        for words in surprises:
            report.indented(words)
    else:
        report.line("nothing was both predicted and measured")
    if data["ended_in"]:
        report.paragraph(f"ended early, in the part {data['ended_in']}: what follows it is missing")
