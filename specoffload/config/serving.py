"""The configuration of a server: the slots for requests, and what is kept of prompts. Pure."""

from __future__ import annotations

from dataclasses import replace

from offload.plan.pooling import OWN, OWN_OR_NONE
from specoffload.config.options import ServeOptions
from specoffload.config.resolution import Config

_USUAL = 4
_LEAST_TOKENS = 512  # of the context for each request, unless more requests were asked for


def for_serving(config: Config, serve: ServeOptions) -> Config:
    """`config` with slots for several requests, and the reason for their number."""
    reasons = config.reasons
    parallel = serve.parallel
    if parallel is None:
        n_ctx = config.ctx_size
        parallel = _USUAL if not n_ctx else max(1, min(_USUAL, n_ctx // _LEAST_TOKENS))
        why = f"{parallel} requests may run at once and share the context (--parallel)"
        reasons = (*reasons, why)
    mib = serve.cache_ram_mib
    return replace(
        config,
        parallel=parallel,
        cache_ram_bytes=None if mib < 0 else mib << 20,
        slot_save_path=serve.slot_save_path,
        slot_similarity=serve.slot_similarity,
        pooling=_pooling(serve),
        reasons=reasons,
    )


def _pooling(serve: ServeOptions) -> str:
    """As a flag says; a model file that names a pooling is for embeddings without a flag too."""
    return serve.pooling or (OWN_OR_NONE if serve.embeddings else OWN)
