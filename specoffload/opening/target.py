"""The options of the target's engine, from a configuration and kept data of earlier starts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from offload.device import choose_device
from offload.engine import EngineOptions
from offload.errors import BadModel
from offload.images.place import on_cpu_reason, projector_bytes
from offload.model_file import read_facts
from offload.options import ProjectorOptions
from offload.plan.context_choice import LEAST_CTX
from offload.plan.row_file import has_lattice
from offload.plan.wanted import Wanted
from offload.regular_file import check_regular
from offload.times.context_memory import (
    DEFAULT_UBATCH,
    ContextOptions,
    RopeOptions,
    forgetting_window,
    type_of_values,
)
from offload.times.machine import TYPICAL, Machine
from offload.times.min_batch import MinBatch
from specdec.options import AcceptRule, DrafterName, PolicyName
from specoffload.config.options import DraftEngine, Toggle
from specoffload.config.resolution import Config
from specoffload.config.speculation import SpecConfig
from specoffload.kept_machine import layouts_of, reads_of
from specoffload.opening.choices import StartChoices, devices_of
from specoffload.opening.draft import draft_bytes
from specoffload.opening.header import target_facts
from specoffload.opening.kept_plan import NOTHING_KEPT, KeptForPlan, disk_rate, link_rates

_MOST_SEQUENCES = 64  # most sequences of a context that can hold trees, requests included


def tree_leaves(config: Config, spec: SpecConfig) -> int:
    """Number of temporary sequences for trees of drafted tokens; 0 if all drafts are chains.

    Trees need a draft model in libllama or a block draft with a lattice, the policy `throughput`,
    acceptance by the target's own choice, and memory that keeps a cell of each token.
    """
    options = spec.options
    chosen = options.policy is PolicyName.THROUGHPUT and options.accept is AcceptRule.MATCH
    if not (chosen and _may_branch(spec)):
        return 0
    facts = target_facts(config)
    if facts.recurrent_layers or (forgetting_window(facts) and not config.swa_full):
        return 0
    if config.has_own_cells:  # the leaves of a tree share cells
        return 0
    # libllama rounds a ubatch up to a multiple of the sequences, and ubatches are multiples of 64.
    return min(max(0, _MOST_SEQUENCES - config.parallel), spec.longest)


def _may_branch(spec: SpecConfig) -> bool:
    """True if a drafter proposes trees: a draft model in libllama, or a block draft's lattice."""
    if spec.row_file is not None:
        return has_lattice(read_facts(spec.row_file))
    drafts = DrafterName.DRAFT in spec.options.drafters and spec.options.replacements is None
    is_llama = spec.draft_model is not None and spec.of_draft.engine is not DraftEngine.TORCH
    return is_llama and drafts


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
        file_bytes = check_regular(config.mmproj)
    except OSError as e:
        raise BadModel(f"--mmproj {config.mmproj}: {e.strerror}") from e
    choices = devices_of(config)
    device_bytes = 0
    if choices[0].on_gpu:
        asked_bytes = config.device_bytes
        device_bytes = choices[0].device.memory_bytes()[1] if asked_bytes is None else asked_bytes
    reason = on_cpu_reason(
        file_bytes, device_bytes, n_devices=len(choices), offload=config.mmproj_offload
    )
    return ProjectorOptions(config.mmproj, reason, config.image_min_tokens, config.image_max_tokens)


@dataclass(frozen=True)
class There:
    """The machine that `specoffload plan` plans for, as its options describe it."""

    machine: Machine  # its rates
    is_typical: bool = False  # no rate was said, so that kept times of this machine count
    is_this: bool = True  # False: --hardware names another machine
    has_links: bool = False  # --link says how fast links are
    ram_bytes: int | None = None
    each_device_bytes: tuple[int, ...] = ()  # memory of described GPUs; (): these are the machine's
    gpu_bytes: int = 0  # whole memory of one of them


def target_options(
    config: Config,
    choices: StartChoices,
    kept: KeptForPlan = NOTHING_KEPT,
    there: There | None = None,
) -> EngineOptions:
    """The options of the target's engine; `there`: on another machine than this one."""
    spec, folder, projector = choices.spec, choices.spec.kept_folder, projector_of(config)
    return EngineOptions(
        device=config.device,
        remote=config.remote,
        wanted=wanted_of(config, choices, projector, kept, there),
        streaming=replace(
            config.streaming,
            record_routing=folder is not None and not config.streaming.route.is_on,
        ),
        row_file=spec.row_file,
        projector=projector,
        pooling=config.pooling,
        numa=config.numa,
        decode_on=config.decode_on,
        batch_on=config.batch_on,
        measure_links=None if there is not None and there.has_links else link_rates(folder),
        trial_folder=spec.profile_dir,
        measure_layouts=None if folder is None else partial(layouts_of, folder),
        measure_reads=partial(reads_of, folder),
    )


def _projector_bytes(
    config: Config, projector: ProjectorOptions | None, there: There | None
) -> tuple[int, int]:
    """Return the bytes that a projector takes of the model's device, and those of other RAM."""
    if projector is None:
        return 0, 0
    file_bytes = projector.path.stat().st_size
    n_bytes, reason, wrapped = projector_bytes(file_bytes), projector.on_cpu_reason, True
    if there is not None and there.each_device_bytes:
        reason = on_cpu_reason(
            file_bytes, there.gpu_bytes, n_devices=len(there.each_device_bytes),
            offload=config.mmproj_offload,
        )  # fmt: skip
    else:
        wrapped = choose_device(config.device).wrapped  # else the CPU's memory is the device's
    return (0, n_bytes) if reason and wrapped else (n_bytes, 0)


def wanted_of(
    config: Config,
    choices: StartChoices,
    projector: ProjectorOptions | None,
    kept: KeptForPlan = NOTHING_KEPT,
    there: There | None = None,
) -> Wanted:
    """Return the request for the target's plan. `projector`: as `projector_of` returns it."""
    spec = choices.spec
    tuned = None if config.ubatch_size else config.tuned_ubatch or kept.n_ubatch
    is_timed = there is None or there.is_typical  # kept times are of this machine
    vram = () if there is None else there.each_device_bytes
    of_device, of_host = _projector_bytes(config, projector, there)
    return Wanted(
        context=_context_of(config, choices),
        tensor_split=config.tensor_split,
        min_batch=choices.min_batch or MinBatch(),
        device_bytes=vram[0] if vram else config.device_bytes,
        each_device_bytes=(vram if len(vram) > 1 else ()) if vram else config.each_device_bytes,
        ram_bytes=config.ram_bytes if there is None else there.ram_bytes,
        keep_page_cache=config.mmap,
        draft_device=spec.of_draft.device,
        order=config.remote.order,
        stream_experts=config.stream_experts,
        n_gpu_layers=config.n_gpu_layers,
        n_cpu_moe=config.n_cpu_moe,
        passes=config.passes,
        most_ubatch=None if config.ubatch_size else config.most_ubatch,
        tuned_ubatch=tuned if is_timed and (there is None or there.is_this) else None,
        chooses_cache=config.kv_offload is None
        and config.ctx_size is not None
        and not config.has_own_cells,
        hybrid=choices.hybrid.toggle is not Toggle.OFF,
        plan_for_splits=config.plan_for_splits,
        lend=config.lend,
        prefetch=config.streaming.prefetch,
        mtp=DrafterName.MTP in spec.options.drafters,
        repack=config.repack,
        reserve_bytes=draft_bytes(config, spec, choices.n_ctx) + of_device,
        projector_bytes=of_device,
        host_projector_bytes=of_host,
        hits=kept.hits,
        unions=kept.unions,
        decodes=kept.decodes if is_timed else (),
        mix=config.mix or kept.mix,
        machine=replace(TYPICAL, disk_bytes_per_s=disk_rate(config))
        if there is None
        else there.machine,
    )


def _context_of(config: Config, choices: StartChoices) -> ContextOptions:
    spec = choices.spec
    return ContextOptions(
        n_ctx=LEAST_CTX if choices.n_ctx is None else choices.n_ctx,
        n_ubatch=config.ubatch_size or DEFAULT_UBATCH,
        n_batch=config.batch_size,
        n_sequences=config.parallel,
        n_outputs=max(1 + spec.longest, 64) + config.parallel - 1,
        n_tree_leaves=tree_leaves(config, spec),
        n_rs_seq=spec.n_rs_seq,
        n_threads=config.threads,
        n_threads_batch=config.threads_batch,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=_type_v(config),
        rope=rope_of(config),
        swa_full=config.swa_full,
        kv_offload=config.kv_offload is not False,
        kv_unified=not config.has_own_cells,
        most_each=config.most_each,
    )


def _type_v(config: Config) -> str:
    if config.type_v is not None or config.type_k == "f16":
        return config.type_v or "f16"
    return type_of_values(target_facts(config), config.type_k)
