"""Checks by the headers of the files which drafters can draft, and says why others cannot."""

from __future__ import annotations

import logging
from dataclasses import replace

from offload.model_file import check_writes, read_facts
from offload.plan.row_draft import eagle_complaint, mtp_complaint
from specoffload.config.resolution import Config
from specoffload.config.speculation import drafts_by_text_alone, why_without_rows

log = logging.getLogger("specoffload.session")


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


def without_text(config: Config) -> Config:
    """Return `config` without drafts by the text alone, for a CPU that computes alone.

    Nothing else needs T(n) there, and measuring it would make the first start some seconds longer.
    """
    if not drafts_by_text_alone(config.spec.options):
        return config
    why = "on a CPU alone, measuring what they cost would make the first start some seconds longer"
    return _without_text(config, why)


def _without_text(config: Config, why: str) -> Config:
    """Return `config` without the drafters of the text, which are on by default."""
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
