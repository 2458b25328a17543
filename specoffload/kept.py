"""The kept file: measurements and counts of one model on one machine, for later starts.

The profile folder has one readable JSON file per model and machine, and `machine.json` for data
that holds for every model (`kept_machine`). Files of earlier versions are ignored.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import logging
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil
from pydantic import TypeAdapter, ValidationError

from numa.threads import Processors
from numa.tune import TuneResult
from offload.ggml.native_build import library_build
from offload.model import ModelFacts
from offload.model_file import behaviour_hash
from offload.plan.ubatch_search import UbatchTrial
from offload.plan.workload import PlannedWork, TokenMix
from offload.routing.routing import SHARES, CountedHits
from offload.schedule.division import DeviceCosts, MeasuredCosts
from offload.times.hits import Sharing
from offload.times.table import CostTable
from specdec.costs.calibration import Bins
from specdec.whole_file import is_folder, read_text, whole_file
from specoffload.kept_bounds import drop_absurd
from specoffload.kept_engines import KeptEngines
from specoffload.kept_values import KeptDisk, KeptLayouts, KeptLinks, KeptReads

if TYPE_CHECKING:
    from offload.device import DeviceChoice
    from offload.engine import Engine
    from offload.times.min_batch import MinBatch

log = logging.getLogger("specoffload.kept")

MACHINE_FILE = "machine.json"
LEAST_MIX_TOKENS = 4096  # tokens counted over all runs before plans use their mix
MIX_HALF_LIFE_TOKENS = float(1 << 18)  # newer tokens after which older ones weigh half
_MOST_COUNTED = 1e9  # tokens of which hits and uses are counted, which a file cannot exceed
_MOST_BYTES = 4 << 20
_MOST_RUNS = 24  # most runs kept of one model; one more replaces the oldest
_SLOTS_ALIKE = 0.1  # relative difference of slots up to which two runs count as equal


@dataclass
class KeptDraft:
    """Measurements of one draft model beside the target, and the drafters' calibration."""

    step_s: float = 0.0
    calibration: dict[str, Bins] = field(default_factory=dict)
    step_spread: float = 0.0  # half the interquartile range over the median; 0.0: not known


@dataclass
class KeptRun:
    """The measured costs of a model that was opened with `settings`, values by name."""

    settings: dict[str, str]
    sharing: Sharing = Sharing()  # the plan's division of device memory
    table: CostTable = field(default_factory=CostTable)
    split: MeasuredCosts | None = None  # times of a split layer on the only device
    date: str = ""
    n_verify: int = 0  # the largest batch with a row of logits for each token
    n_least: int = 0  # least timings per size in a thorough measurement
    drafts: dict[str, KeptDraft] = field(default_factory=dict)
    splits: dict[str, MeasuredCosts] = field(default_factory=dict)  # `split` of several devices
    split_date: str = ""  # day on which all times of split layers were last repeated twice

    def difference(self, settings: Mapping[str, str], sharing: Sharing) -> str:
        """A clause on the first setting that differs; "" if this run's costs are valid."""
        mine, names = self.settings, {**self.settings, **settings}
        if other := [name for name in names if mine.get(name) != settings.get(name)]:
            return _setting_words(mine, settings, other)
        if self.sharing.n_resident != sharing.n_resident:
            n = self.sharing.n_resident
            return f"the kept run had {n} resident layers, not {sharing.n_resident}"
        if not alike(self.sharing, sharing):
            had, has = self.sharing.n_cached, sharing.n_cached
            return f"the kept run had {had} slots for experts, not {has}"
        return ""


# Names of settings, and a value.
STREAMED, CACHE, ON_DEVICE = "streamed bytes", "KV cache", "on the device"
WORKERS = "workers"
_LABELS = {"flash-attn": "flash attention", "ubatch": "--ubatch-size", "min-batch": "--min-batch"}


def _setting_words(mine: Mapping[str, str], theirs: Mapping[str, str], other: Sequence[str]) -> str:
    """A clause on how a kept run's settings differ from these, in the names of `other`. Pure."""
    if (STREAMED in mine) != (STREAMED in theirs):
        return f"the kept run had {'' if STREAMED in mine else 'no '}weights streamed to the GPU"
    on_device = [settings.get(CACHE, ON_DEVICE) == ON_DEVICE for settings in (mine, theirs)]
    if on_device[0] != on_device[1]:
        return f"the kept run had the KV cache {'on the GPU' if on_device[0] else 'in RAM'}"
    both = [name for name in other if name in mine and name in theirs]
    if not both:
        return "the kept run had other layouts or devices"
    words = [
        f"{label} {mine[name]}, not {theirs[name]}"
        if (label := _LABELS.get(name))
        else f"{name} {mine[name]!r}, not {theirs[name]!r}"
        for name in both
    ]
    return f"the kept run had {'; '.join(words)}"


def alike(a: Sharing, b: Sharing) -> bool:
    """True if decodes of both plans cost about the same.

    Their numbers of slots may differ by a tenth, since free memory varies between starts.
    """
    same = (a.n_resident, a.n_dense_streamed) == (b.n_resident, b.n_dense_streamed)
    return same and abs(a.n_cached - b.n_cached) <= _SLOTS_ALIKE * max(a.n_cached, b.n_cached)


@dataclass
class KeptUbatch:
    """The ubatch that computed the usual mix of prompts and answers fastest, by `tune`."""

    settings: dict[str, str]  # device, its memory, context and mix, by name
    n_ubatch: int  # 0 while the search has not ended
    date: str
    trials: dict[int, UbatchTrial] = field(default_factory=dict)  # by ubatch
    # What a later run has in common with the trials if their decodes can be compared.
    run: dict[str, str] = field(default_factory=dict)
    work: PlannedWork | None = None  # the workload whose time was compared


@dataclass
class Kept:
    """The contents of a kept file. `model` is a hash of the model's bytes; "" in machine.json."""

    model: str = ""
    machine: str = ""
    format: Literal[4] = 4
    runs: list[KeptRun] = field(default_factory=list)
    hits: CountedHits | None = None
    mix: TokenMix = TokenMix(0, 0)
    engines: dict[str, KeptEngines] = field(default_factory=dict)  # by draft and settings
    numa: TuneResult | None = None
    disks: dict[str, KeptDisk] = field(default_factory=dict)  # by the kernel's name; machine.json
    links: dict[str, KeptLinks] = field(default_factory=dict)  # by the devices; machine.json
    reads: dict[str, KeptReads] = field(default_factory=dict)  # by the device; machine.json
    batch_costs: str = ""  # T(n) of `profile --import`, as GGML_BATCH_COSTS; "": none
    batch_costs_date: str = ""
    layouts: dict[str, KeptLayouts] = field(default_factory=dict)  # by kind; machine.json
    workers: list[DeviceCosts] = field(default_factory=list)  # of split layers, by workers
    ubatches: list[KeptUbatch] = field(default_factory=list)

    @property
    def mix_for_plan(self) -> TokenMix | None:
        """The mix of prompt and generated tokens to plan for; None if too few were counted."""
        if self.mix.n_prompt + self.mix.n_generated < LEAST_MIX_TOKENS:
            return None
        return TokenMix(max(1, self.mix.n_prompt), max(1, self.mix.n_generated)).rounded

    def run(self, settings: Mapping[str, str], sharing: Sharing) -> tuple[KeptRun | None, str]:
        """The newest run with these settings and its date in words, or None and the reason."""
        reason = "nothing was measured yet"
        for run in reversed(self.runs):
            difference = run.difference(settings, sharing)
            if not difference:
                return run, f"measured on {run.date}"
            reason = difference
        return None, reason

    def put(self, run: KeptRun) -> None:
        """Keep a run, replacing the one with the same settings."""
        others = [r for r in self.runs if r.difference(run.settings, run.sharing)]
        self.runs = [*others, run][-_MOST_RUNS:]

    def put_worker(self, costs: DeviceCosts) -> None:
        """Keep a worker's costs of split layers, replacing those of the same device."""
        others = [one for one in self.workers if not one.is_like(costs)]
        self.workers = [*others, costs][-_MOST_RUNS:]

    def ubatch(self, settings: Mapping[str, str]) -> KeptUbatch | None:
        """The measured ubatch for these settings."""
        return next((one for one in self.ubatches if one.settings == settings), None)

    def put_ubatch(self, new: KeptUbatch) -> None:
        """Keep a measured ubatch, replacing the one with the same settings."""
        others = [one for one in self.ubatches if one.settings != new.settings]
        self.ubatches = [*others, new][-_MOST_RUNS:]

    def split_costs(self) -> tuple[DeviceCosts, ...]:
        """Return all costs of split layers on a single device, the newest first."""
        of_runs = [
            DeviceCosts(
                run.settings.get("device", ""), int(run.settings["threads"].split("/")[0]),
                run.settings.get("build", ""), run.split, run.split_date or run.date,
            )
            for run in self.runs
            if run.split is not None and run.settings.get("threads", "").split("/")[0].isdigit()
        ]  # fmt: skip
        costs = [*reversed(self.workers), *reversed(of_runs)]
        return tuple(sorted(costs, key=lambda one: one.date, reverse=True))

    def drop(self, run: KeptRun) -> None:
        """Forget the run with the same settings."""
        self.runs = [r for r in self.runs if r.difference(run.settings, run.sharing)]

    def count(self, hits: CountedHits | None, mix: TokenMix) -> None:
        """Add hits and tokens. The more tokens are added, the less earlier ones weigh."""
        if self.hits is not None and (hits is None or hits.n_used == self.hits.n_used):
            hits = self.hits if hits is None else self.hits.merged(hits)
        self.hits = hits
        weight = 0.5 ** ((mix.n_prompt + mix.n_generated) / MIX_HALF_LIFE_TOKENS)
        self.mix = TokenMix(
            round(weight * self.mix.n_prompt + mix.n_prompt, 1),
            round(weight * self.mix.n_generated + mix.n_generated, 1),
        )


@functools.cache
def _form() -> TypeAdapter[Kept]:
    """Returns pydantic's reader of kept files. Building it takes a tenth of a program's start."""
    return TypeAdapter(Kept)


def today() -> str:
    """Today's ISO date (UTC), which is kept with new measurements."""
    return datetime.now(UTC).date().isoformat()


@functools.cache
def machine_words() -> str:
    """This machine's processors and memory, as text. Measurements hold only for this machine."""
    memory_gib = round(psutil.virtual_memory().total / (1 << 30))
    return f"{os.cpu_count()} processors ({platform.machine()}), {memory_gib} GiB"


def read_file(path: Path) -> tuple[Kept | None, str]:
    """A file's contents and "", or None and why it cannot be used ("" if there is no file)."""
    try:
        return _form().validate_json(read_text(path, _MOST_BYTES)), ""
    except FileNotFoundError:
        return None, ""
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        return None, f"{path} is damaged and not used: {where}: {first['msg']:.200}"
    except (OSError, ValueError, RecursionError) as e:
        return None, f"{path} cannot be read and is not used: {e}"


@functools.cache  # a start reads a file several times
def _warn(path: Path, reason: str) -> None:
    log.warning("%s: a measurement is not used, and is made again when needed: %s", path, reason)


class KeptFile:
    """The kept file of one model on this machine."""

    def __init__(self, folder: Path, facts: ModelFacts | None = None) -> None:
        """The file of the model with these `facts`; None: the file for all models."""
        self._model = "" if facts is None else behaviour_hash(facts)
        self._n_experts = 0 if facts is None else facts.n_experts
        self._expert_bytes = None if facts is None else facts.one_expert_bytes
        self.path = folder / MACHINE_FILE
        if facts is not None:
            digest = hashlib.sha256(f"{self._model}\0{machine_words()}".encode()).hexdigest()
            self.path = folder / f"{facts.path.stem}-{digest[:12]}.json"

    @staticmethod
    def may_exist(folder: Path, model_file: Path) -> bool:
        """False if `folder` has no kept file for a model of that name. Does not read the model."""
        return is_folder(folder) and any(folder.glob(f"{escape(model_file.stem)}-*.json"))

    def load(self) -> tuple[Kept, str]:
        """The kept data and "", or nothing and why the file cannot be used ("" if there is none).

        A warning names each measurement that is out of bounds (`kept_bounds`). It counts as
        missing, so it is measured again when it is needed.
        """
        nothing = Kept(self._model, machine_words())
        kept, reason = read_file(self.path)
        if kept is None:
            return nothing, reason
        if (kept.model, kept.machine) != (nothing.model, nothing.machine):
            return nothing, f"{self.path} is not used: it is of another model or machine"
        said = drop_absurd(kept, self._expert_bytes)
        if kept.hits is not None and (reason := self._bad_hits(kept.hits)):
            kept.hits = None
            said.append(f"the counted hits: {reason}")
        for reason in said:
            _warn(self.path, reason)
        return kept, ""

    def update(self, change: Callable[[Kept], None]) -> str:
        """Apply `change` to the kept data and write the file, whole or not at all.

        What is out of bounds is not written, for example a time of a busy machine. Otherwise the
        next start would warn of it. `change` may put objects into the data that are still in use,
        and these stay as they are.

        Returns a sentence if it cannot be written, else "". A failure does not end the run.
        """
        kept, _ = self.load()
        change(kept)
        kept = copy.deepcopy(kept)
        for reason in drop_absurd(kept, self._expert_bytes):
            log.info("not kept: %s", reason)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self.path) as f:
                f.write(_form().dump_json(kept, indent=1) + b"\n")
        except OSError as e:
            why = e.strerror or e
            return f"measurements are not kept: {why}; SPECOFFLOAD_PROFILE_DIR names another folder"
        return ""

    def _bad_hits(self, hits: CountedHits) -> str:
        """The reason why `hits` cannot come from this model; "" if they can."""
        rates = [rate for of_layer in hits.layers.values() for rate in of_layer]
        if hits.n_experts != self._n_experts or not 0 < hits.n_used <= hits.n_experts:
            return f"hits of {hits.n_experts} experts, {hits.n_used} of them used"
        if not hits.layers or any(len(of) != len(SHARES) for of in hits.layers.values()):
            return f"a layer lacks hits for some of the {len(SHARES)} shares of slots"
        if not all(0.0 <= rate <= 1.0 for rate in rates) or not 0.0 < hits.n_tokens < _MOST_COUNTED:
            return "hits or tokens out of range"
        if any(len(uses) != hits.n_experts or min(uses) < 0 for uses in hits.uses.values()):
            return f"a layer lacks uses of some of the {hits.n_experts} experts"
        if any(max(uses) >= _MOST_COUNTED for uses in hits.uses.values()):
            return "uses of an expert out of range"
        for n, used in hits.unions.items():
            if not (n >= 1 and hits.n_used * (1 - 1e-6) <= used <= hits.n_experts):
                return f"{n} tokens that use {used:.3g} of {hits.n_experts} experts"
        return ""


# -- settings of a run -----------------------------------------------------------------------------


def settings_of(target: Engine, fixed: MinBatch | None) -> dict[str, str]:
    """The settings that decode times depend on, besides the number of slots.

    `fixed` is the user's --min-batch, or None for auto.
    """
    o, plan = target.layout.context, target.opened.plan
    batch = None if plan is None else plan.attention_batch
    settings = {
        "flash-attn": o.flash_attn,
        "ubatch": str(o.n_ubatch),
        CACHE: ON_DEVICE if o.kv_offload else f"in RAM, batches of {batch} copy from it",
    }
    if target.start.repacking.setting:
        settings["layout"] = target.start.repacking.setting
    if plan is not None:
        s = target.start.options.streaming
        settings |= {
            STREAMED: str(plan.streamed_bytes),
            "min-batch": "auto" if fixed is None else f"{fixed.experts}/{fixed.dense}",
            "prefetch depth": str(s.depth),
            "guesses": str(s.prefetch),
        }
    if target.opened.remote is not None:
        settings[WORKERS] = target.opened.remote.words
    if len(target.start.choices) > 1:
        ranges = "/".join(f"{layers.first}-{layers.end - 1}" for _, layers in target.start.choices)
        settings["layers"] = f"{ranges} on {target.start.options.device}"
    return settings | {
        "threads": thread_words(o.n_threads, o.n_threads_batch, *target.start.options.processors),
        "device": place_words([choice for choice, _ in target.start.choices]),
        "build": library_build(),
    }


def place_words(choices: Sequence[DeviceChoice]) -> str:
    """Return the devices as text, in the form that kept settings use."""
    return "; ".join(choice.words for choice in choices)


def thread_words(
    n_threads: int, n_threads_batch: int, decode_on: Processors, batch_on: Processors
) -> str:
    """Threads in the form that kept settings use: their numbers for one token / several tokens.

    Processors follow if threads do not run everywhere.
    """
    counts = f"{n_threads}/{n_threads_batch}"
    if not decode_on.cpus and not batch_on.cpus:
        return counts
    return f"{counts} on {' / '.join(dict.fromkeys((decode_on.words, batch_on.words)))}"
