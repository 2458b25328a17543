"""`specoffload draft prune`: writes the ids of the tokens that a draft may use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from offload.errors import OffloadError
from offload.model_file import read_facts
from specdec.whole_file import write_text
from specoffload import report
from specoffload.config.options import PruneOptions
from specoffload.draft_making.corpus import texts_of
from specoffload.draft_making.output import check_draft_output, writing
from specoffload.draft_making.vocabulary import (
    always_kept,
    choose_kept,
    count_tokens,
    tokenizer_of,
)
from specoffload.errors import UsageError
from specoffload.opening.draft_model import measure_step, missing_torch

_N_TIMED_TURNS = 3  # times that both vocabularies are timed, in turn
_CONTEXT = 256  # tokens
_LEAST_GAIN = 0.03  # share of a step; less cannot be told from noise


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a draft step on a device, with all tokens and with those that are kept."""

    device: str
    whole_s: float
    kept_s: float

    @property
    def words(self) -> str:
        """A sentence whether the short list pays."""
        both = (
            f"a draft step in torch on {self.device} takes {self.whole_s * 1e3:.2f} ms with all "
            f"tokens, and {self.kept_s * 1e3:.2f} ms with these"
        )
        saved = 1 - self.kept_s / self.whole_s
        if saved < _LEAST_GAIN:
            return f"the list does not pay here: {both}"
        return f"the list saves {saved:.0%} of a step here: {both}"


def prune(own: PruneOptions) -> None:
    """Write the most frequent ids, and show their share of the texts. Raises UsageError."""
    if own.draft is None or not own.corpus:
        raise UsageError("draft prune needs a draft model and texts: DRAFT.gguf CORPUS...")
    check_draft_output(own.output, (own.draft, *own.corpus))
    texts = texts_of(own.corpus)
    model = tokenizer_of(own.draft)
    counts = count_tokens(model, texts)
    kept = choose_kept(counts, always_kept(model), own.n_kept, model.n_vocab)
    share = sum(counts[token] for token in kept) / counts.total()
    about = (
        f"{len(kept)} of {model.n_vocab} tokens of {own.draft.name}, {share:.4%} of "
        f"{counts.total()} counted in {report.plural(len(texts), 'file')}"
    )
    with writing(own.output):
        write_text(own.output, f"# {about}\n" + "".join(f"{token}\n" for token in kept))
    report.line(f"{own.output}: {about}")
    report.line(f"use it with --draft-vocab {own.output} --draft-engine torch")
    times, reason = _step_times(own.draft, kept)
    report.line(times.words if times else f"whether it pays here was not measured: {reason}")
    report.data(
        {
            "n_kept": len(kept),
            "n_vocab": model.n_vocab,
            "coverage": share,
            "n_counted": counts.total(),
            "output": str(own.output),
            "whole_step_s": times and times.whole_s,
            "kept_step_s": times and times.kept_s,
        }
    )


def _step_times(draft: Path, kept: tuple[int, ...]) -> tuple[StepTimes | None, str]:
    """The times of a draft step, or None and the reason why there are none."""
    if reason := missing_torch("gpu-draft"):
        return None, f"only a draft in torch uses the list, and {reason}"
    import torch

    from offload.torch_draft.draft import TorchDraft
    from offload.torch_draft.plan import TorchDraftOptions, read_shape

    device = "cuda" if torch.cuda.is_available() else "cpu"
    whole = TorchDraftOptions(device=device, n_ctx=_CONTEXT)
    try:
        read_shape(read_facts(draft))
        with (
            TorchDraft(draft, whole) as one,
            TorchDraft(draft, replace(whole, kept=kept)) as other,
        ):
            turns = [
                (measure_step(one, kept), measure_step(other, kept)) for _ in range(_N_TIMED_TURNS)
            ]
    except OffloadError as e:
        return None, str(e)
    return StepTimes(device, *(min(times) for times in zip(*turns, strict=True))), ""
