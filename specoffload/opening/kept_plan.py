"""Data of earlier starts that a plan uses: hits, times, the mix of tokens, and measured rates."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.device import MeasureLinks, choose_device, choose_devices
from offload.ggml.native_build import library_build
from offload.model_file import read_facts
from offload.plan.objective import MeasuredDecode
from offload.plan.workload import TokenMix
from offload.routing.routing import HitCurve, UnionCurve
from offload.times.machine import TYPICAL
from specoffload.config.resolution import Config
from specoffload.kept import CACHE, ON_DEVICE, Kept, KeptFile, place_words, thread_words
from specoffload.kept_machine import links_of, load_disk


@dataclass(frozen=True)
class KeptForPlan:
    """Data of earlier starts for the plan. `complaint` says why kept data cannot be used, or ""."""

    hits: HitCurve | None = None  # hit rates counted from the model's routing
    decodes: tuple[MeasuredDecode, ...] = ()  # decodes timed on this device, with any plan
    mix: TokenMix | None = None  # tokens that earlier runs evaluated and generated; None: too few
    complaint: str = ""
    n_ubatch: int | None = None  # the fastest ubatch when `tune` measured
    unions: UnionCurve | None = None  # experts of batches, counted in the model's routing

    @property
    def complaints(self) -> tuple[str, ...]:
        return (self.complaint,) if self.complaint else ()


NOTHING_KEPT = KeptForPlan()


def kept_for_plan(config: Config) -> KeptForPlan:
    """Load the kept data of the model that its plan needs."""
    folder = config.spec.kept_folder
    if folder is None or not KeptFile.may_exist(folder, config.model):
        return NOTHING_KEPT
    kept, complaint = KeptFile(folder, read_facts(config.model)).load()
    mix = kept.mix_for_plan
    tuned = kept.ubatch(ubatch_settings(config)) if kept.ubatches else None
    n_ubatch = None if tuned is None else tuned.n_ubatch or None
    unions = None if kept.hits is None else kept.hits.union_curve
    if kept.hits is None or not config.plan_for_splits:
        return KeptForPlan(mix=mix, complaint=complaint, n_ubatch=n_ubatch, unions=unions)
    decodes = _decodes(kept, config)
    return KeptForPlan(kept.hits.curve, decodes, mix, complaint, n_ubatch, unions)


def ubatch_settings(config: Config) -> dict[str, str]:
    """The settings on which the fastest ubatch depends, as kept with it."""
    choices = choose_devices(config.device, all_gpus=len(config.tensor_split) > 1)
    memory = config.device_bytes or config.each_device_bytes
    return {
        "device": place_words(choices),
        "memory": str(memory or "what is free"),
        "context": str(config.ctx_size) + (", in RAM" if config.kv_offload is False else ""),
        "mix": "usual" if config.mix is None else str(config.mix),
        "build": library_build(),
    }


def _decodes(kept: Kept, config: Config) -> tuple[MeasuredDecode, ...]:
    """Kept times of one-token decodes with these threads, device and library, and any plan."""
    choices = choose_devices(config.device, all_gpus=len(config.tensor_split) > 1)
    place = {
        "threads": thread_words(config.threads, config.threads_batch),
        "device": place_words(choices),
        "build": library_build(),
        CACHE: ON_DEVICE,  # attention takes another time if the cache is in RAM
    }
    return tuple(
        MeasuredDecode(run.sharing, run.table.best(1)[1])
        for run in kept.runs
        if run.table.is_measured and place.items() <= run.settings.items()
    )


def disk_rate(config: Config) -> float:
    """Return the bytes/s of the model's disk: as simulated, else as measured, else as typical."""
    sim = choose_device(config.device).sim
    if sim is not None and sim.disk_bytes_per_s is not None:
        return sim.disk_bytes_per_s
    folder = config.spec.kept_folder
    kept = None if folder is None else load_disk(folder, config.model)
    return TYPICAL.disk_bytes_per_s if kept is None else kept.bytes_per_s


def link_rates(config: Config) -> MeasureLinks:
    """Return a function that gives the rates of several devices' links, kept or measured now."""
    folder = config.spec.kept_folder
    return lambda choices: links_of(choices, folder, keep=True).together


def with_imported_costs(config: Config) -> Config:
    """`config` with T(n) that `profile --import` kept for its model, if drafts are priced by it.

    GGML_BATCH_COSTS takes precedence.
    """
    spec = config.spec
    folder = spec.kept_folder
    is_priced = spec.options.is_on and spec.needs_profile
    if not is_priced or folder is None or not KeptFile.may_exist(folder, config.model):
        return config
    costs = KeptFile(folder, read_facts(config.model)).load()[0].batch_costs
    if not costs:
        return config
    source = "imported (profile --import); `specoffload profile` measures it instead"
    return replace(config, spec=replace(spec, batch_costs=costs, costs_from=source))
