"""A session reports its progress while it opens, and afterwards facts about its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

OnProgress = Callable[[str, float], None]  # gets a step's name and the fraction that is done


def ignore(step: str, done: float) -> None:
    """An `OnProgress` that does nothing."""


@dataclass(frozen=True)
class ModelCard:
    """Facts about the loaded model that clients may ask for."""

    name: str
    n_ctx: int
    n_vocab: int
    architecture: str
    n_params: int
    size_bytes: int
    chat_template: str | None
    tool_use_template: str | None = None  # the model file's template for chats with tools
    longest_token_bytes: int = 256  # longest text of one token
    bos: str = ""
    eos: str = ""
    adds_bos: bool = False  # True if the tokenizer puts `bos` before every text
    notes: tuple[str, ...] = ()  # start-up lines on the plan, the device and inactive features
    n_parallel: int = 1  # requests that run at once
