"""Facts about the loaded model for clients."""

from __future__ import annotations

from dataclasses import dataclass, field


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
    notes: tuple[str, ...] = field(
        default=()
    )  # start-up lines on the plan, the device and inactive features
    n_parallel: int = 1  # requests that run at once
