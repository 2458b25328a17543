"""`specoffload draft judge`: how well a draft guesses a target, and whether it pays here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from offload.engine import Engine
from specoffload import report
from specoffload.bench.draft_quality import show
from specoffload.bench.load import warn_of_load
from specoffload.commands.profile import measuring_config, quality_of, show_costs
from specoffload.config.options import JudgeOptions
from specoffload.config.resolution import Config
from specoffload.draft_making.corpus import pieces, shuffled, texts_of
from specoffload.errors import UsageError
from specoffload.session.session import Session
from specoffload.session.startup_lines import show_always_shown

_N_PROMPT = 128  # tokens of a prompt from a user's text
_LEAST_PROMPT = 16  # tokens of a shorter text that is a prompt as a whole


def judge(config: Config, own: JudgeOptions) -> None:
    """Show the acceptance by position, T(n), a draft step, and whether drafts pay.

    Raises UsageError without a draft model, or without text.
    """
    if config.spec.draft_model is None:
        raise UsageError("draft judge needs a draft model: -md DRAFT.gguf")
    texts = texts_of(own.texts) if own.texts else []
    with open_to_judge(config) as session:
        report.data(judged(session, own_prompts(session.target, texts)))


def own_prompts(target: Engine, texts: Sequence[str]) -> list[list[int]]:
    """Prompts from a user's texts, in a random order that is always the same.

    They are pieces of equal length, and the whole of a text that is shorter. Raises UsageError if
    there are texts, and none of them is long enough.
    """
    prompts = []
    begin = target.tokenize("", add_special=True)
    for text in texts:
        tokens = target.tokenize(text, add_special=False)
        parts = pieces([tokens], begin, _N_PROMPT)
        if not parts and len(tokens) >= _LEAST_PROMPT:
            parts = [[*begin, *tokens]]
        prompts += parts
    if texts and not prompts:
        raise UsageError(f"no text has {_LEAST_PROMPT} tokens: give longer texts")
    return shuffled(prompts)


def open_to_judge(config: Config) -> Session:
    """Open the target and the draft of `config`, and measure T(n) and a draft step."""
    warn_of_load()
    with report.steps(config.alias or config.model.stem) as on_progress:
        return Session(measuring_config(config), on_progress, keeps_hits=False, prices=True)


def judged(session: Session, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Measure and show the pair, with texts that begin with `prompts`. Returns the numbers."""
    costs, steps_s = session.costs.drafts.profile, session.costs.drafts.steps_s
    show_always_shown(session.notes)
    for note in session.costs.notes:
        report.note(note)
    quality = quality_of(session, costs, prompts)
    show_costs(costs, session.costs.run.table, steps_s)
    if quality is not None:
        show(quality, costs)
    return {
        "profile": list(costs.step_s),
        "draft_step_s": costs.draft_step_s,
        "draft_quality": None if quality is None else quality.as_data(),
        "verdict": None if quality is None else quality.verdict,
    }
