"""The options of the target's engine, from a configuration and kept data of earlier starts."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TypeVar

from offload.device import choose_device, choose_devices
from offload.engine import EngineOptions
from offload.errors import BadModel
from offload.images.place import projector_bytes, why_on_cpu
from offload.model_file import read_facts
from offload.options import ProjectorOptions
from offload.plan.context_choice import LEAST_CTX
from offload.plan.placement import PlanRequest
from offload.regular_file import check_regular
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
from specoffload.kept_machine import layouts_of
from specoffload.opening.draft import draft_bytes
from specoffload.opening.kept_plan import NOTHING_KEPT, KeptForPlan, disk_rate, link_rates

log = logging.getLogger("specoffload.session")

_Request = TypeVar("_Request", bound=PlanRequest)

_MOST_SEQUENCES = 64  # most sequences of a context that can hold trees, requests included


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
        file_bytes = check_regular(config.mmproj)
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


def _with_projector(
    request: _Request, projector: ProjectorOptions | None, *, wrapped: bool
) -> _Request:
    """Return `request`, which has none, with the memory that the projector takes.

    `wrapped`: the model's device has memory of its own, so the CPU's is elsewhere.
    """
    if projector is None:
        return request
    n_bytes = projector_bytes(projector.path.stat().st_size)
    if projector.why_on_cpu and wrapped:
        return replace(request, host_projector_bytes=n_bytes)
    return replace(request, reserve_bytes=request.reserve_bytes + n_bytes, projector_bytes=n_bytes)


def with_projector_there(
    request: PlanRequest, config: Config, device_bytes: int, n_devices: int
) -> PlanRequest:
    """Return `request` with the projector where it would compute beside described GPUs.

    `device_bytes`: memory of one of them.
    """
    projector = projector_of(config)
    if projector is None:
        return request
    why = why_on_cpu(
        projector.path.stat().st_size, device_bytes, n_devices=n_devices,
        offload=config.mmproj_offload,
    )  # fmt: skip
    without = replace(
        request, reserve_bytes=request.reserve_bytes - request.projector_bytes,
        projector_bytes=0, host_projector_bytes=0,
    )  # fmt: skip
    return _with_projector(without, replace(projector, why_on_cpu=why), wrapped=True)


def target_options(config: Config, kept: KeptForPlan = NOTHING_KEPT) -> EngineOptions:
    """The options of the target's engine."""
    spec, projector, folder = config.spec, projector_of(config), config.spec.kept_folder
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
            _with_projector(
                replace(config.streaming, reserve_bytes=draft_bytes(config)),
                projector,
                wrapped=choose_device(config.device).wrapped,
            ),
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
        measure_links=link_rates(config),
        measure_layouts=None if folder is None else partial(layouts_of, folder),
        stream_experts=config.stream_experts,
        store=StoreOptions(keep_page_cache=config.mmap, ram_bytes=config.ram_bytes),
        numa=config.numa,
        trial_folder=spec.profile_dir,
        repack=config.repack,
    )


def _type_v(config: Config) -> str:
    if config.type_v is not None or config.type_k == "f16":
        return config.type_v or "f16"
    return type_of_values(read_facts(config.model), config.type_k)
