"""Data of earlier starts that a plan uses: hits, times, the mix of tokens, and measured rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from offload.device import MeasureLinks, choose_device
from offload.ggml.native_build import library_build
from offload.plan.objective import MeasuredDecode
from offload.plan.workload import TokenMix
from offload.routing.routing import HitCurve, UnionCurve
from offload.times.machine import TYPICAL
from specoffload.config.resolution import Config
from specoffload.config.speculation import SpecConfig
from specoffload.kept import (
    CACHE,
    ON_DEVICE,
    WORKERS,
    Kept,
    KeptFile,
    place_words,
    thread_words,
)
from specoffload.kept_doubts import threads_doubt, ubatch_doubt
from specoffload.kept_machine import TUNE, links_of, load_disk
from specoffload.opening.choices import devices_of
from specoffload.opening.header import target_facts


@dataclass(frozen=True)
class KeptForPlan:
    """Data of earlier starts for the plan. `reason` says why kept data cannot be used, or ""."""

    hits: HitCurve | None = None  # hit rates counted from the model's routing
    decodes: tuple[MeasuredDecode, ...] = ()  # decodes timed on this device, with any plan
    mix: TokenMix | None = None  # tokens that earlier runs evaluated and generated; None: too few
    reason: str = ""
    n_ubatch: int | None = None  # the fastest ubatch when `tune` measured
    unions: UnionCurve | None = None  # experts of batches, counted in the model's routing
    doubt: str = ""  # why what `tune` chose is not used

    @property
    def reasons(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.reason, self.doubt)))


NOTHING_KEPT = KeptForPlan()


def kept_for_plan(config: Config) -> KeptForPlan:
    """Load the kept data of the model that its plan needs."""
    loaded = _kept_of(config, config.spec.kept_folder)
    if loaded is None:
        return NOTHING_KEPT
    kept, reason = loaded
    mix = kept.mix_for_plan
    tuned = kept.ubatch(ubatch_settings(config)) if kept.ubatches else None
    n_ubatch = None if tuned is None else tuned.n_ubatch or None
    doubt = ""
    if tuned is not None and (contradiction := ubatch_doubt(tuned, kept.runs)):
        doubt = f"the ubatch that `specoffload tune` chose is not used: {contradiction}; tune again"
        n_ubatch = None
    unions = None if kept.hits is None else kept.hits.union_curve
    if kept.hits is None or not config.plan_for_splits:
        return KeptForPlan(mix=mix, reason=reason, n_ubatch=n_ubatch, unions=unions, doubt=doubt)
    decodes = _decodes(kept, config)
    return KeptForPlan(kept.hits.curve, decodes, mix, reason, n_ubatch, unions, doubt)


def doubted_threads(config: Config) -> str:
    """A sentence if decodes contradict the tuned threads and placement that `config` uses, or "".

    They stay in use, since nothing shows which others would be faster now.
    """
    loaded = _kept_of(config, config.spec.kept_folder)
    if loaded is None or config.spec.kept_folder is None:
        return ""
    tuned = KeptFile(config.spec.kept_folder).load()[0].numa
    if tuned is None or tuned.model != config.model.name:
        return ""
    if config.threads != tuned.best.n_threads:
        return ""
    doubt = threads_doubt(tuned, loaded[0].runs)
    return doubt and f"the tuned threads and placement are doubted: {doubt}; run {TUNE} again"


def _kept_of(config: Config, folder: Path | None) -> tuple[Kept, str] | None:
    """Return what earlier starts kept of the model, with a reason or ""; None: nothing."""
    if folder is None or not KeptFile.may_exist(folder, config.model):
        return None
    return KeptFile(folder, target_facts(config)).load()


def ubatch_settings(config: Config) -> dict[str, str]:
    """The settings on which the fastest ubatch depends, as kept with it."""
    memory = config.device_bytes or config.each_device_bytes
    shares = {"shares": str(config.tensor_split)} if config.tensor_split else {}
    workers = {WORKERS: ", ".join(map(str, config.remote.workers))} if config.remote.is_used else {}
    return {
        "device": place_words(devices_of(config)),
        "memory": str(memory or "what is free"),
        "context": str(config.ctx_size) + (", in RAM" if config.kv_offload is False else ""),
        "mix": "usual" if config.mix is None else str(config.mix),
        "build": library_build(),
        **shares,
        **workers,
    }


def _decodes(kept: Kept, config: Config) -> tuple[MeasuredDecode, ...]:
    """Kept times of one-token decodes with these threads, one of the devices and this library.

    Their plans had all layers on this device. A run with workers is another one.
    """
    setting = {
        "threads": thread_words(
            config.threads, config.threads_batch, config.decode_on, config.batch_on
        ),
        "build": library_build(),
        CACHE: ON_DEVICE,  # attention takes another time if the cache is in RAM
    }
    choices = devices_of(config)
    names = {place_words([one]): one.name if len(choices) > 1 else "" for one in choices}
    return tuple(
        MeasuredDecode(run.sharing, run.table.best(1)[1], names[run.settings["device"]])
        for run in kept.runs
        if run.table.is_measured
        and run.settings.get("device") in names
        and WORKERS not in run.settings
        and setting.items() <= run.settings.items()
    )


def disk_rate(config: Config) -> float:
    """Return the bytes/s of the model's disk: as simulated, else as measured, else as typical."""
    sim = choose_device(config.device).sim
    if sim is not None and sim.disk_bytes_per_s is not None:
        return sim.disk_bytes_per_s
    folder = config.spec.kept_folder
    kept = None if folder is None else load_disk(folder, config.model)
    return TYPICAL.disk_bytes_per_s if kept is None else kept.bytes_per_s


def link_rates(folder: Path | None) -> MeasureLinks:
    """Return a function that gives the rates of several devices' links, kept or measured now.

    `folder` has kept data of earlier starts; None: nothing is kept.
    """
    return lambda choices: links_of(choices, folder, keep=True).rates


def with_imported_costs(config: Config) -> SpecConfig:
    """The settings of speculation, with T(n) that `profile --import` kept for the model.

    They are as they were if drafts are not priced by it.

    GGML_BATCH_COSTS takes precedence.
    """
    spec = config.spec
    is_priced = spec.options.is_on and spec.needs_profile
    loaded = _kept_of(config, spec.kept_folder) if is_priced else None
    costs = None if loaded is None else loaded[0].batch_costs
    if not costs:
        return spec
    source = "imported (profile --import); `specoffload profile` measures it instead"
    return replace(spec, batch_costs=costs, costs_from=source)
