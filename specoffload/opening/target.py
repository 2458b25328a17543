"""Opens the target: makes its engine's options, with kept data of earlier starts for its plan."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from offload.device import choose_device, choose_devices
from offload.engine import Engine, EngineOptions, open_engine
from offload.errors import BadModel
from offload.ggml.native_build import library_build
from offload.images.place import projector_bytes, why_on_cpu
from offload.model_file import check_writes, read_facts
from offload.options import ProjectorOptions
from offload.plan.context_choice import LEAST_CTX
from offload.plan.objective import MeasuredDecode
from offload.plan.row_draft import eagle_complaint, mtp_complaint
from offload.plan.workload import TokenMix
from offload.probe import MeasureLinks
from offload.routing.routing import HitCurve, UnionCurve
from offload.store.store import StoreOptions
from offload.times.context import (
    DEFAULT_UBATCH,
    RopeOptions,
    forgetting_window,
    type_of_values,
)
from offload.times.machine import TYPICAL
from offload.times.min_batch import MinBatch
from specdec.options import AcceptRule, DrafterName, PolicyName
from specoffload.config.options import DraftEngine
from specoffload.config.resolution import Config
from specoffload.config.speculation import drafts_by_text_alone, ignored, why_without_rows
from specoffload.generation.generation import OnProgress, ignore
from specoffload.kept import CACHE_IN_RAM, Kept, KeptFile, place_words, thread_words
from specoffload.kept_machine import layouts_of, links_of, load_disk
from specoffload.opening.draft import draft_bytes

log = logging.getLogger("specoffload.session")

_MOST_SEQUENCES = 64  # most sequences of a context that can hold trees, requests included


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


def with_usable_drafters(config: Config) -> Config:
    """Check by the headers of the files whether the drafters can draft. Raises BadModel.

    If some cannot, the returned configuration has other drafters or none, and the reason. A draft
    model that cannot write is refused here, before the target is loaded, which may take minutes.
    """
    if config.draft is not None and config.eagle is None:
        check_writes(read_facts(config.draft))
    config = _with_usable_layers(config)
    if drafts_by_text_alone(config.spec.options) and read_facts(config.model).recurrent_layers:
        why = "a recurrent model needs memory for snapshots of its state to verify them"
        return _without_text(config, why)
    return config


def _with_usable_layers(config: Config) -> Config:
    spec = config.spec
    if spec.options.from_rows is None:
        return config
    target, file = read_facts(config.model), config.eagle
    complaint = mtp_complaint(target) if file is None else eagle_complaint(target, read_facts(file))
    if not complaint:
        return config
    return without_asked_rows(config, complaint)


def without_text_on_cpu(config: Config) -> Config:
    """Returns `config` without drafts by the text alone if the CPU computes alone.

    Nothing else needs T(n) there, and measuring it would make the first start some seconds longer.
    """
    if not drafts_by_text_alone(config.spec.options) or config.uses_workers:
        return config
    choice = choose_device(config.device)
    if choice.wrapped:
        return config
    why = "on a CPU alone, measuring what they cost would make the first start some seconds longer"
    return _without_text(config, why)


def _without_text(config: Config, why: str) -> Config:
    """Returns `config` without the drafters of the text, which are on by default."""
    spec = config.spec
    names = ",".join(spec.options.drafters)
    said = f"drafts: off, because {why} (--spec-type {names} turns them on)"
    return replace(
        config,
        spec=replace(
            spec, options=replace(spec.options, drafters=()), reasons=(*spec.reasons, said)
        ),
    )


def without_asked_rows(config: Config, complaint: str) -> Config:
    """Returns `config` with other drafters or none, and the reason. Warns if the user asked for it.

    `complaint` says why own layers or an EAGLE-3 file cannot draft.
    """
    spec = config.spec
    why = why_without_rows(spec.options, complaint)
    if config.eagle is not None or "drafters" in spec.options.given:
        log.warning("%s", why)
    return replace(config, spec=replace(spec, reasons=(*spec.reasons, why))).without_rows


def without_gpu_flags(config: Config) -> Config:
    """Name the given flags that need a GPU, if the model is opened on the CPU alone.

    Returns the configuration with these sentences among its reasons.
    """
    choice = choose_device(config.device)
    if choice.wrapped or config.uses_workers:
        return config
    why = f"the CPU computes alone ({choice.reason}), and nothing is copied to a GPU"
    said = tuple(ignored(name, why) for name in config.gpu_flags)
    for words in said:
        log.warning("%s", words)
    return replace(config, gpu_flags=(), reasons=(*config.reasons, *said))


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


def open_target(
    config: Config,
    on_progress: OnProgress = ignore,
    kept: KeptForPlan = NOTHING_KEPT,
) -> Engine:
    """Open the target, and try it out if --warmup is on. Raises OffloadError."""
    folder = config.spec.kept_folder
    options = replace(
        target_options(config, kept),
        measure_links=link_rates(config),
        measure_layouts=None if folder is None else partial(layouts_of, folder),
    )
    engine = open_engine(config.model, options, on_progress)
    try:
        if config.streaming.warmup:
            engine.try_out()
    except BaseException:
        engine.close()
        raise
    return engine


def link_rates(config: Config) -> MeasureLinks:
    """Return a function that gives the rates of several devices' links, kept or measured now."""
    folder = config.spec.kept_folder
    return lambda choices: links_of(choices, folder, keep=True).together


def tree_leaves(config: Config) -> int:
    """Number of temporary sequences for trees of drafted tokens; 0 if all drafts are chains.

    Trees need a draft model in libllama, the policy `throughput`, acceptance by the target's own
    choice, and memory that keeps a cell of each token.
    """
    spec = config.spec
    options = spec.options
    by_model = config.draft is not None and config.eagle is None
    chosen = options.policy is PolicyName.THROUGHPUT and options.accept is AcceptRule.MATCH
    drafts = DrafterName.DRAFT in options.drafters and options.replacements is None
    if not (by_model and chosen and drafts and spec.of_draft.engine is not DraftEngine.TORCH):
        return 0
    facts = read_facts(config.model)
    if facts.recurrent_layers or (forgetting_window(facts) and not config.swa_full):
        return 0
    # libllama rounds a ubatch up to a multiple of the sequences, and ubatches are multiples of 64.
    return min(max(0, _MOST_SEQUENCES - config.parallel), spec.longest)


def rope_of(config: Config) -> RopeOptions:
    """The target's rotary settings, as far as flags choose them."""
    freq_scale = config.rope_freq_scale
    if freq_scale is None and config.rope_scale is not None:
        freq_scale = 1 / config.rope_scale
    return RopeOptions(
        config.rope_scaling,
        config.rope_freq_base,
        freq_scale,
        config.yarn_orig_ctx,
        config.yarn_ext_factor,
        config.yarn_attn_factor,
        config.yarn_beta_slow,
        config.yarn_beta_fast,
    )


def projector_of(config: Config) -> ProjectorOptions | None:
    """The projector for images, and where it computes. Raises BadModel if there is no such file."""
    if config.mmproj is None:
        return None
    try:
        file_bytes = config.mmproj.stat().st_size
    except OSError as e:
        raise BadModel(f"--mmproj {config.mmproj}: {e.strerror}") from e
    choices = choose_devices(config.device, all_gpus=len(config.tensor_split) > 1)
    device_bytes = 0
    if choices[0].on_gpu:
        asked_bytes = config.streaming.device_bytes
        device_bytes = choices[0].device.memory_bytes()[1] if asked_bytes is None else asked_bytes
    why = why_on_cpu(
        file_bytes, device_bytes, n_devices=len(choices), offload=config.mmproj_offload
    )
    return ProjectorOptions(config.mmproj, why, config.image_min_tokens, config.image_max_tokens)


def _projector_bytes(projector: ProjectorOptions | None, config: Config) -> int:
    """The bytes that the projector takes of the memory of the model's device."""
    if projector is None:
        return 0
    is_elsewhere = bool(projector.why_on_cpu) and choose_device(config.device).wrapped
    return 0 if is_elsewhere else projector_bytes(projector.path.stat().st_size)


def target_options(config: Config, kept: KeptForPlan = NOTHING_KEPT) -> EngineOptions:
    """The options of the target's engine."""
    spec, projector = config.spec, projector_of(config)
    return EngineOptions(
        device=config.device,
        tensor_split=config.tensor_split,
        remote=config.remote,
        min_batch=config.min_batch or MinBatch(),
        n_ctx=LEAST_CTX if config.ctx_size is None else config.ctx_size,
        n_batch=config.batch_size,
        n_ubatch=config.ubatch_size or DEFAULT_UBATCH,
        most_ubatch=None if config.ubatch_size else config.most_ubatch,
        n_sequences=config.parallel,
        n_tree_leaves=tree_leaves(config),
        n_outputs=max(1 + spec.longest, 64) + config.parallel - 1,
        n_rs_seq=spec.n_rs_seq,
        n_threads=config.threads,
        n_threads_batch=config.threads_batch,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=_type_v(config),
        rope=rope_of(config),
        swa_full=config.swa_full,
        kv_offload=config.kv_offload is not False,
        chooses_cache=config.kv_offload is None and config.ctx_size is not None,
        pooling=config.pooling,
        projector=projector,
        mtp=DrafterName.MTP in spec.options.drafters,
        eagle=config.eagle,
        streaming=replace(
            config.streaming,
            reserve_bytes=draft_bytes(config) + _projector_bytes(projector, config),
            hits=kept.hits,
            unions=kept.unions,
            decodes=kept.decodes,
            mix=config.streaming.mix or kept.mix,
            tuned_ubatch=(
                None if config.ubatch_size else config.streaming.tuned_ubatch or kept.n_ubatch
            ),
            machine=replace(TYPICAL, disk_bytes_per_s=disk_rate(config)),
            draft_device=spec.of_draft.device,
            record_routing=spec.kept_folder is not None,
        ),
        stream_experts=config.stream_experts,
        store=StoreOptions(keep_page_cache=config.mmap, ram_bytes=config.ram_bytes),
        numa=config.numa,
        trial_folder=spec.profile_dir,
        repack=config.repack,
    )


def disk_rate(config: Config) -> float:
    """Return the bytes/s of the model's disk: as simulated, else as measured, else as typical."""
    sim = choose_device(config.device).sim
    if sim is not None and sim.disk_bytes_per_s is not None:
        return sim.disk_bytes_per_s
    folder = config.spec.kept_folder
    kept = None if folder is None else load_disk(folder, config.model)
    return TYPICAL.disk_bytes_per_s if kept is None else kept.bytes_per_s


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
    if kept.hits is None or not config.streaming.plan_for_splits:
        return KeptForPlan(mix=mix, complaint=complaint, n_ubatch=n_ubatch, unions=unions)
    decodes = _decodes(kept, config)
    return KeptForPlan(kept.hits.curve, decodes, mix, complaint, n_ubatch, unions)


def ubatch_settings(config: Config) -> dict[str, str]:
    """The settings on which the fastest ubatch depends, as kept with it."""
    choices = choose_devices(config.device, all_gpus=len(config.tensor_split) > 1)
    streaming = config.streaming
    memory = streaming.vram_bytes or streaming.device_bytes or streaming.each_device_bytes
    return {
        "device": place_words(choices),
        "memory": str(memory or "what is free"),
        "context": str(config.ctx_size) + (", in RAM" if config.kv_offload is False else ""),
        "mix": "usual" if streaming.mix is None else str(streaming.mix),
        "build": library_build(),
    }


def _decodes(kept: Kept, config: Config) -> tuple[MeasuredDecode, ...]:
    """Kept times of one-token decodes with these threads, device and library, and any plan."""
    choices = choose_devices(config.device, all_gpus=len(config.tensor_split) > 1)
    place = {
        "threads": thread_words(config.threads, config.threads_batch),
        "device": place_words(choices),
        "build": library_build(),
    }
    return tuple(
        MeasuredDecode(run.sharing, run.table.best(1)[1])
        for run in kept.runs
        if run.table.is_measured
        and place.items() <= run.settings.items()
        and CACHE_IN_RAM not in run.settings.get("plan", "")  # attention takes another time then
    )


def _type_v(config: Config) -> str:
    if config.type_v is not None or config.type_k == "f16":
        return config.type_v or "f16"
    return type_of_values(read_facts(config.model), config.type_k)
