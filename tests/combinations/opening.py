"""Opens the session of a case by the words that a user would type."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from combinations.axes import N_CTX
from combinations.cases import Case
from combinations.small_models import draft_of, model_of
from offload.errors import DoesNotFit
from offload.model_file import read_facts
from offload.plan.placement import PlanRequest, make_plan
from specoffload.cli import served_as
from specoffload.config.command_line import read_command_line
from specoffload.config.environment import Environment
from specoffload.session.session import Session


class Opened:
    """A case's session, its options and what belongs to it. Close it, or use `with`."""

    def __init__(self, case: Case, models: Path, folder: Path) -> None:
        """Open it. Kept prompts and saved slots go to `folder`. Raises what a start raises."""
        self.case, self.folder = case, folder
        self.model = model_of(case["memory"], models)
        self.words = words_of(case, models, folder)
        self.session = open_words(self.words)

    def again(self) -> None:
        """End the session as a program does, and start it again."""
        self.session.close()
        self.session = open_words(self.words)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self.session.close()


def open_words(words: Sequence[str]) -> Session:
    """Open what `serve` opens for this command line, with no variables but our own."""
    own = {k: v for k, v in os.environ.items() if k.startswith("SPECOFFLOAD_")}
    line = read_command_line("serve", words, Environment(variables=own))
    return Session(served_as(line).config)


def context_of(case: Case) -> int:
    """Tokens of the context, which all streams of a case share."""
    return N_CTX * int(case["streams"])


def words_of(case: Case, models: Path, folder: Path) -> list[str]:
    """The command line of a case, with paths and sizes in place of braces."""
    model = model_of(case["memory"], models)
    words = [
        str(model), "--ctx-size", str(context_of(case)), *case.words,
        "--slot-save-path", str(folder),
    ]  # fmt: skip
    if "--threads" not in words:
        words += ["--threads", "1"]
    if case["event"] == "reopened":
        words += ["--cache-disk", f"64MiB,{folder}"]
    filled = {
        "{draft}": str(draft_of(case["drafter"], case["memory"], models)),
        "{ram}": str(model.stat().st_size // 2),
    }
    words = [filled.get(word, word) for word in words]
    half = str(_half_bytes(tuple(words), model)) if "{half}" in words else ""
    return [half if word == "{half}" else word for word in words]


@lru_cache
def _half_bytes(words: tuple[str, ...], model: Path) -> int:
    """Memory of each device with which half of its streamed experts have slots.

    It is found by a refusal, which names the least memory.
    """
    slots = make_plan(read_facts(model), PlanRequest()).slot_bytes
    known = 1 << 20
    for _ in range(3):  # each device may refuse
        try:
            open_words([str(known) if word == "{half}" else word for word in words]).close()
        except DoesNotFit as e:
            if e.least_bytes is None:
                raise
            known = max(e.least_bytes, known + 1)
        else:
            break
    return known + slots // 2
