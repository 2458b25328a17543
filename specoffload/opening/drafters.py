"""Checks by the headers of the files which drafters can draft, and says why others cannot."""

from __future__ import annotations

import logging
from dataclasses import replace

from offload.model import ModelFacts
from offload.model_file import check_writes, read_facts
from offload.plan.row_draft import no_mtp_reason
from offload.plan.row_file import no_file_reason
from specoffload.config.speculation import SpecConfig, drafts_by_text_alone, without_rows_note
from specoffload.opening.translation import with_translation

log = logging.getLogger("specoffload.session")


def usable_drafters(target: ModelFacts, spec: SpecConfig) -> SpecConfig:
    """Check by the headers of the files whether the drafters can draft. Raises BadModel.

    If some cannot, the returned settings have other drafters or none, and the reason. A draft
    model of another vocabulary is translated. One that cannot write is refused here, before the
    `target` is loaded, which may take minutes.
    """
    if spec.draft_model is not None:
        check_writes(read_facts(spec.draft_model))
    spec = _with_usable_layers(target, with_translation(target.path, spec))
    if drafts_by_text_alone(spec.options) and target.recurrent_layers:
        reason = "a recurrent model needs memory for snapshots of its state to verify them"
        return _without_text(spec, reason)
    return spec


def _with_usable_layers(target: ModelFacts, spec: SpecConfig) -> SpecConfig:
    if spec.options.from_rows is None:
        return spec
    file = spec.row_file
    reason = no_mtp_reason(target) if file is None else no_file_reason(target, read_facts(file))
    return without_asked_rows(spec, reason) if reason else spec


def without_text(spec: SpecConfig) -> SpecConfig:
    """Return `spec` without drafts by the text alone, for a CPU that computes alone.

    Nothing else needs T(n) there, and measuring it would make the first start some seconds longer.
    """
    if not drafts_by_text_alone(spec.options):
        return spec
    reason = (
        "on a CPU alone, measuring what they cost would make the first start some seconds longer"
    )
    return _without_text(spec, reason)


def _without_text(spec: SpecConfig, reason: str) -> SpecConfig:
    """Return `spec` without the drafters of the text, which are on by default."""
    names = ",".join(spec.options.drafters)
    words = f"drafts: off, because {reason} (--spec-type {names} turns them on)"
    options = replace(spec.options, drafters=())
    return replace(spec, options=options, reasons=(*spec.reasons, words))


def without_asked_rows(spec: SpecConfig, reason: str) -> SpecConfig:
    """Return `spec` with other drafters or none, and the reason. Warns if the user asked for it.

    `reason` says why own layers or a file cannot draft.
    """
    words = without_rows_note(spec.options, reason)
    if spec.row_file is not None or "drafters" in spec.options.given:
        log.warning("%s", words)
    return replace(spec, reasons=(*spec.reasons, words)).without_rows
