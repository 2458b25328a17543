"""Reads from the engines the plain data that the start-up lines are made of."""

from __future__ import annotations

from offload.costs.measuring import streamed_kinds
from offload.costs.table import ranges
from offload.engine import Engine
from specoffload.config.resolution import Config
from specoffload.session.startup_lines import (
    DraftFacts,
    MemoryFacts,
    StartUp,
    StreamedFacts,
)
from specoffload.speculation.draft_model import DraftModel
from specoffload.speculation.speculation import Speculation


def describe(
    config: Config,
    target: Engine,
    draft: DraftModel | None,
    speculation: Speculation | None,
    chosen: tuple[str, ...],
) -> StartUp:
    """The facts for the start-up lines. `chosen` are lines on measurements made while opening."""
    spec, device = config.spec, target.device
    notes = (*spec.reasons, "every token is decoded alone")
    return StartUp(
        device=target.choice.name,
        device_description=target.choice.description,
        device_reason=target.choice.reason,
        device_notes=tuple(target.notes),
        wanted_ctx=config.ctx_size,
        n_ctx=target.n_ctx,
        has_experts=bool(target.facts.n_experts),
        streamed=_streamed(target),
        draft=None if draft is None else _draft(target, draft),
        speculation=notes if speculation is None else speculation.notes,
        memory=MemoryFacts(
            architecture=target.facts.architecture,
            can_rewind=target.sequences.can_rewind,
            n_rs_seq=target.sequences.n_rs_seq,
            device_checkpoints=target.sequences.device_checkpoints,
            speculates=speculation is not None,
        ),
        declined=() if device is None else tuple(device.declined),
        others=(
            *target.numa_notes,
            *chosen,
            *config.reasons,
        ),
    )


def _streamed(target: Engine) -> StreamedFacts | None:
    plan, store = target.plan, target.store
    if plan is None or not plan.streamed:
        return None
    report = None if store is None else store.report
    return StreamedFacts(
        streamed_bytes=plan.streamed_bytes,
        slot_bytes=plan.slot_bytes,
        min_batch=target.min_batch.words(streamed_kinds(target)),
        split="" if target.hybrid is None else ranges(target.hybrid.switch.sizes),
        reasons=plan.reasons,
        reading=None if report is None else report.sentence(),
    )


def _draft(target: Engine, draft: DraftModel) -> DraftFacts:
    return DraftFacts(
        file_name=draft.facts.path.name,
        n_params=draft.model.n_params,
        size_bytes=draft.model.size_bytes,
        target_bytes=target.model.size_bytes,
    )
