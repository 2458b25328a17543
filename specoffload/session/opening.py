"""Opening the target and its draft: options of the engines, room for both, the measured min-batch.

Whoever calls closes what is returned; a failure on the way closes what this module opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offload.engine import Engine, EngineOptions, context_spec
from offload.model_file import read_facts
from offload.plan.context import context_memory, type_of_values
from offload.plan.min_batch import MinBatch, choose
from offload.store.store import StoreOptions
from specoffload.config.resolution import Config
from specoffload.session.min_batch import measure
from specoffload.speculation.vocabulary import check_same_vocabulary

TREE_LEAVES = 32  # of a verified tree
TREE_DRAFT_LEAVES = 96  # of a tree that the draft grows, before it is cut
_DEFAULT_CTX = 4096  # of a draft whose context is not known yet
_DRAFT_UBATCH = 512  # its weights are resident: more would only take memory
_N_MEASURED = 64  # tokens on which --min-batch auto measures


def open_target(config: Config, on_progress: Callable[[float], None] | None = None) -> Engine:
    """The model that answers. Raises OffloadError."""
    spec = config.spec
    options = EngineOptions(
        device=config.device,
        min_batch=config.min_batch,
        n_ctx=config.ctx_size,
        n_batch=config.batch_size,
        n_ubatch=config.ubatch_size,
        n_outputs=max(1 + spec.longest, 64),
        n_tree_leaves=TREE_LEAVES if spec.options.tree else 0,
        n_rs_seq=spec.n_rs_seq(config.ubatch_size),
        device_checkpoints=spec.device_checkpoints,
        n_threads=config.threads,
        n_threads_batch=config.threads_batch,
        flash_attn=config.flash_attn,
        type_k=config.type_k,
        type_v=_type_v(config),
        swa_full=config.swa_full,
        streaming=replace(config.streaming, reserve_bytes=draft_bytes(config)),
        mla_crossover=config.mla_crossover,
        stream_experts=config.stream_experts,
        store=StoreOptions(keep_page_cache=config.mmap),
        numa=config.numa,
        trial_folder=spec.profile_dir,
    )
    return Engine(config.model, options, on_progress)


def _type_v(config: Config) -> str:
    if config.type_v is not None or config.type_k == "f16":
        return config.type_v or "f16"
    return type_of_values(read_facts(config.model), config.type_k)


def draft_bytes(config: Config) -> int:
    """Device memory that the target leaves to the draft: its weights and its context."""
    if config.draft is None:
        return 0
    facts = read_facts(config.draft)
    options = _of_draft(config, EngineOptions(n_ctx=config.ctx_size or _DEFAULT_CTX))
    return facts.size_bytes + context_memory(facts, context_spec(facts, options)).total_bytes


def _of_draft(config: Config, options: EngineOptions) -> EngineOptions:
    """The draft's own options over the target's."""
    options = replace(
        options,
        n_ubatch=min(config.ubatch_size, _DRAFT_UBATCH),
        n_rs_seq=0,  # it decodes token by token, which leaves no snapshots
        type_k="f16",
        type_v="f16",
    )
    if config.spec.options.tree:
        options = replace(options, n_tree_leaves=TREE_DRAFT_LEAVES, n_outputs=256)
    return replace(options, **config.spec.draft_options)


def open_draft(config: Config, target: Engine) -> Engine | None:
    """The draft model, where there is one: resident and never wrapped, since it is small and must
    answer at once. Raises OffloadError, or VocabularyMismatch for one of another family."""
    if config.draft is None:
        return None
    spec = config.spec
    options = replace(
        target.options,
        device=target.choice.name if target.choice.on_gpu else "cpu",
        wrapped=False,
        stream_experts=False,
        n_ctx=target.n_ctx,
        # Threads typed for the draft alone are taken as they are, unpinned.
        numa=None
        if config.numa is None or "n_threads" in spec.draft_options
        else config.numa.for_draft(),
    )
    draft = Engine(config.draft, _of_draft(config, options))
    try:
        if spec.options.replacements is None:
            check_same_vocabulary(target, draft)
    except BaseException:
        draft.close()
        raise
    return draft


def choose_min_batch(config: Config, target: Engine) -> tuple[str, ...]:
    """With `--min-batch auto`, measure and set it; the lines that say what came of it."""
    if not config.min_batch_auto:
        return ()
    if target.plan is None or not target.plan.streamed:
        return ("--min-batch auto has no effect: nothing streams here",)
    tokens = [(997 * i + 11) % target.n_vocab for i in range(_N_MEASURED)]
    n, why = choose(measure(target, tokens))
    target.set_min_batch_by_decoding(MinBatch(n, n))
    return (why,)
