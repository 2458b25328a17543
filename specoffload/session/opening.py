"""Opening the target: options of its engine, room for the draft, the measured min-batch.

Whoever calls closes what is returned; a failure on the way closes what this module opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offload.engine import Engine, EngineOptions
from offload.model_file import read_facts
from offload.plan.context import type_of_values
from offload.plan.min_batch import MinBatch
from offload.store.store import StoreOptions
from specoffload.config.resolution import Config
from specoffload.session.draft_opening import draft_bytes
from specoffload.session.min_batch import choose_min_batch, streamed_kinds

TREE_LEAVES = 32  # of a verified tree


def open_target(config: Config, on_progress: Callable[[float], None] | None = None) -> Engine:
    """The model that answers. Raises OffloadError."""
    return Engine(config.model, target_options(config), on_progress)


def target_options(config: Config) -> EngineOptions:
    """The options of the target's engine."""
    spec = config.spec
    return EngineOptions(
        device=config.device,
        min_batch=config.min_batch or MinBatch(),
        n_ctx=config.ctx_size,
        n_batch=config.batch_size,
        n_ubatch=config.ubatch_size,
        most_ubatch=config.most_ubatch,
        n_sequences=config.parallel,
        n_outputs=max(1 + spec.longest, 64) + config.parallel - 1,
        n_tree_leaves=TREE_LEAVES if spec.options.tree else 0,
        n_rs_seq=spec.n_rs_seq,
        device_checkpoints=spec.device_checkpoints,
        n_threads=config.threads,
        n_threads_batch=config.threads_batch,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=_type_v(config),
        swa_full=config.swa_full,
        pooling=config.pooling,
        streaming=replace(config.streaming, reserve_bytes=draft_bytes(config)),
        mla_crossover=config.mla_crossover,
        stream_experts=config.stream_experts,
        store=StoreOptions(keep_page_cache=config.mmap),
        numa=config.numa,
        trial_folder=spec.profile_dir,
    )


def _type_v(config: Config) -> str:
    if config.type_v is not None or config.type_k == "f16":
        return config.type_v or "f16"
    return type_of_values(read_facts(config.model), config.type_k)


def set_min_batch(
    config: Config, target: Engine, on_progress: Callable[[float], None] | None = None
) -> tuple[str, ...]:
    """Where no thresholds were given, measure and set them; the lines that tell of it."""
    if config.min_batch is not None or not streamed_kinds(target):
        return ()
    folder = config.spec.profile_dir if config.spec.use_profile else None
    chosen = choose_min_batch(target, folder, on_progress)
    target.set_min_batch_by_decoding(chosen.min_batch)
    return (chosen.note,)
