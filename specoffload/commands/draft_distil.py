"""`specoffload draft distil`: trains a draft on what a target writes after a user's texts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from offload.model import ModelFacts
from offload.model_file import model_hash, read_facts
from offload.sequences.vocabulary_file import vocabulary_difference
from offload.torch_draft.plan import read_shape
from specoffload import report
from specoffload.commands.draft_judge import judged, open_to_judge
from specoffload.commands.profile import measuring_config
from specoffload.config.options import DistilOptions
from specoffload.config.resolution import Config
from specoffload.draft_making.continuations import (
    N_CTX,
    N_NEW,
    N_PARALLEL,
    N_PROMPT,
    ContinuationFile,
    Records,
    about_records,
    continue_prompts,
)
from specoffload.draft_making.corpus import CutPrompts, cut, texts_of
from specoffload.draft_making.output import check_draft_output, writing
from specoffload.draft_making.weights import read_weights, write_copy, written_types
from specoffload.errors import UsageError
from specoffload.opening.draft_model import SEQUENCE, DraftModel, missing_torch
from specoffload.opening.translation import MOST_APART
from specoffload.session.session import Session

if TYPE_CHECKING:
    from specoffload.draft_making.training import Trained

CONTINUING_SHARE = 0.4  # share of the time in which the target may continue texts
_BATCH = {"cpu": 4, "cuda": 32}  # records of a training step


@dataclass(frozen=True)
class _DistilJob:
    """A command that was checked. The texts are read, and nothing is opened yet."""

    draft: ModelFacts
    texts: list[str]
    output: Path
    work: Path  # folder of the target's texts and of checkpoints


def distil(config: Config, own: DistilOptions) -> None:
    """Continue texts, train the draft on them, write it, and judge it.

    Raises UsageError or BadModel for what cannot be done, before anything is opened.
    """
    job = _checked(config, own)
    config = _with_draft(config, job.draft.path)
    try:
        prompts, file, before = _continued(config, job, own.time_limit_s * CONTINUING_SHARE)
        trained = _trained(config, job, prompts, file, own)
    except KeyboardInterrupt:
        report.note(f"stopped; the same command goes on with what is in {job.work}")
        raise
    report.line(_trained_words(trained, len(file) - prompts.n_held_out, job.output))
    with open_to_judge(_with_draft(config, job.output)) as session:
        assert session.draft is not None
        records = file.records(prompts.n_checked, prompts.n_held_out)
        after = agreement_of(session.draft, records)
        report.line(
            f"agreement with the target on held-out texts: {before:.3f} before, {after:.3f} after "
            f"({len(records) * N_NEW} tokens)"
        )
        judgement = judged(session, prompts.tokens[prompts.n_checked : prompts.n_held_out].tolist())
    report.data(
        {
            "output": str(job.output),
            "agreement_before": before,
            "agreement_after": after,
            "n_judged_tokens": len(records) * N_NEW,
            "n_trained_texts": len(file) - prompts.n_held_out,
            "n_steps": trained.n_steps,
            "trained_s": trained.took_s,
            **judgement,
        }
    )


def _with_draft(config: Config, draft: Path) -> Config:
    return replace(config, spec=replace(config.spec, draft=draft))


def _checked(config: Config, own: DistilOptions) -> _DistilJob:
    """Check words and files. Raises UsageError or BadModel."""
    if own.draft is None or not own.texts:
        raise UsageError(
            "draft distil needs a model, a draft model and texts: MODEL.gguf DRAFT.gguf TEXTS..."
        )
    if own.output is None:
        raise UsageError("draft distil needs -o NEW.gguf, the file to write")
    facts = read_facts(own.draft)
    read_shape(facts)
    if reason := vocabulary_difference(config.model, own.draft, MOST_APART):
        raise UsageError(f"draft distil needs a draft with the target's vocabulary: {reason}")
    check_draft_output(own.output, (config.model, own.draft, *own.texts))
    if reason := missing_torch("train"):
        raise UsageError(f"draft distil cannot train: {reason}")
    work = own.output.with_name(f"{own.output.name}.distil")
    return _DistilJob(facts, texts_of(own.texts), own.output, work)


def _continued(
    config: Config, job: _DistilJob, limit_s: float
) -> tuple[CutPrompts, ContinuationFile, float]:
    """Continue the texts. Returns the prompts, the file, and the agreement of the draft as it is.

    The target is closed again, since training needs the memory.
    """
    wide = replace(config, parallel=N_PARALLEL, ctx_size=N_CTX)
    with report.steps(config.alias or config.model.stem) as on_progress:
        session = Session(measuring_config(wide), on_progress, keeps_hits=False)
        with session:
            target, draft = session.target, session.draft
            assert draft is not None
            tokens = [target.tokenize(text, add_special=False) for text in job.texts]
            prompts = cut(tokens, target.tokenize("", add_special=True), N_PROMPT)
            about = about_records(target.facts, prompts)
            file = ContinuationFile(job.work / "continuations.bin", about)
            continue_prompts(
                target, prompts, file, limit_s, lambda done: on_progress("continuing texts", done)
            )
            judged_records = file.records(prompts.n_checked, prompts.n_held_out)
            return prompts, file, agreement_of(draft, judged_records)


def agreement_of(draft: DraftModel, records: Records) -> float:
    """Share of the target's greedy tokens that the opened draft finds likeliest, too."""
    n_right = 0
    for tokens in records["tokens"]:
        draft.sequences.rewind(SEQUENCE, 0)
        rows = draft.sequences.extend(SEQUENCE, tokens[:-1].tolist(), N_NEW)
        n_right += int((np.asarray(rows).argmax(1) == tokens[N_PROMPT:]).sum())
    draft.sequences.rewind(SEQUENCE, 0)
    return n_right / (len(records) * N_NEW)


def _trained(
    config: Config, job: _DistilJob, prompts: CutPrompts, file: ContinuationFile, own: DistilOptions
) -> Trained:
    """Train the draft's weights until the time limit, and write the best of them."""
    import torch

    from specoffload.draft_making.network import TrainableDraft
    from specoffload.draft_making.training import TrainingPlan, pick_device, train

    torch.set_num_threads(config.threads)
    device, dtype = pick_device()
    weights = read_weights(job.draft)
    network = TrainableDraft(read_shape(job.draft), weights, device, dtype)
    plan = TrainingPlan(
        limit_s=own.time_limit_s - min(file.took_s, own.time_limit_s * CONTINUING_SHARE),
        rate=own.learning_rate,
        n_batch=_BATCH[device.type],
        checkpoint=job.work / "checkpoint.pt",
        draft_hash=model_hash(job.draft),
    )
    records, checks = file.records(prompts.n_held_out), file.records(0, prompts.n_checked)
    with report.steps("training") as on_progress:
        trained = train(
            network, records, checks, plan, lambda done, words: on_progress(words, done)
        )
    new = weights | network.arrays()
    with writing(job.output):
        write_copy(job.draft.path, job.output, new, written_types(job.draft))
    return trained


def _trained_words(trained: Trained, n_texts: int, output: Path) -> str:
    how_much = (
        f"{report.plural(trained.n_steps, 'step')} in {trained.took_s:.0f} s on {n_texts} texts of "
        "the target"
    )
    if trained.best_agreement <= trained.first_agreement:
        return (
            f"{output}: {how_much} found no weights that agree better with texts for checks than "
            "the draft's own, which were written; give more texts or more time"
        )
    return f"{output}: {how_much}"
