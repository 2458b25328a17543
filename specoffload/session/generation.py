"""A generation's options, the pieces of its answer, and the server's interface to a session."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from offload.sampling.options import SamplingOptions
from offload.sampling.probabilities import ChosenLogprob
from offload.sampling.reasoning_limit import ReasoningLimit
from specoffload.session.card import ModelCard
from specoffload.session.infill import Fill
from specoffload.session.statistics import GenerationStats

FinishReason = Literal["stop", "length"]
N_SEEDS = 2**32 - 1  # libllama's seeds are 32 bits, and 0xFFFFFFFF means "random"


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    """Length, sampling and stops of one answer, under llama.cpp's names if they mean the same."""

    temperature: float = 0.0
    n_predict: int | None = None  # None: until the end of the context
    stop: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()  # special tokens that are shown in the text
    ignore_eos: bool = False
    reasoning_budget: int | None = None  # most tokens of a chat's reasoning; None: no limit
    reasoning_budget_message: str = ""  # written before the budget ends the reasoning
    reasoning_limit: ReasoningLimit | None = None  # the budget in the chat format's markers
    spm_infill: bool = False  # the suffix before the prefix, as some models were trained
    cache_prompt: bool = True  # reuse first tokens that a slot or host memory holds
    id_slot: int = -1  # the slot to run in; -1: the one that holds most of the prompt
    # Limits of drafts: most tokens (0: no drafts), fewest tokens, and least probability of a token.
    # None: the policy decides.
    draft_max: int | None = None
    draft_min: int | None = None
    draft_p_min: float | None = None
    time_limit_s: float | None = None  # seconds, from getting a slot, after which the answer ends
    timings_per_token: bool = False  # each piece has the statistics so far
    prompt_logprobs: int | None = None  # number of likeliest tokens given with each prompt token
    n: int = 1  # number of answers to the prompt, which is evaluated once; seeds count up from one


@dataclass(frozen=True)
class AskedOptions(GenerateOptions):
    """Options with llama-server's defaults, for people and requests.

    The defaults of `GenerateOptions` are greedy, for measurements.
    """

    temperature: float = 0.8


@dataclass(frozen=True)
class Piece:
    """A streamed part of the answer. `text` never ends inside a character or a stop sequence."""

    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # set on the last piece only
    stats: GenerationStats | None = None  # set on the last piece only
    so_far: GenerationStats | None = None  # on other pieces with tokens, if timings_per_token
    index: int = 0  # number of the answer, if a request asked for several
    stopping_word: str | None = None  # on the last piece, if a stop sequence ended the answer
    logprobs: tuple[
        ChosenLogprob, ...
    ] = ()  # one for each of `tokens`, if asked for; an end token has none
    id_slot: int = -1  # number of the slot that made this piece
    # Logprobs of evaluated prompt tokens, if asked for; that of the first token is NaN.
    prompt_logprobs: tuple[ChosenLogprob, ...] = ()
    n_prompt_read: int | None = None  # evaluated tokens of the prompt, on pieces before the answer


@dataclass(frozen=True)
class SlotInfo:
    """The state of a slot, a place for one request and the text it holds afterwards."""

    id: int
    is_processing: bool
    n_tokens: int  # tokens held now
    n_prompt_tokens: int = 0  # prompt tokens of the request that is being answered
    n_decoded: int = 0  # tokens of the answer so far
    n_remain: int = 0  # tokens that may follow


@dataclass(frozen=True)
class SlotResult:
    """The outcome of saving, restoring or erasing a slot."""

    n_tokens: int
    n_bytes: int
    took_s: float


SlotAction = Literal["save", "restore", "erase"]


class Running(Protocol):
    """A request in progress. Take `pieces` from the left; none follows after `error`."""

    @property
    def pieces(self) -> deque[Piece]: ...

    @property
    def error(self) -> Exception | None: ...

    @property
    def is_over(self) -> bool: ...


class Generator(Protocol):
    """The part of a `Session` that the server needs."""

    @property
    def card(self) -> ModelCard: ...

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]: ...

    def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of `tokens`, with special tokens written out."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of one token's text."""
        ...

    def fill_tokens(self, fill: Fill, options: GenerateOptions) -> list[int]:
        """The prompt's tokens for filling in the middle. May raise NotSupported."""
        ...

    def embed(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], bool]:
        """Embeddings [1, width] and True if pooled; [n_tokens, width] and False without pooling.

        Raises NotSupported for a model without embeddings, and DoesNotFit.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Counts of the copy path since the model was opened."""
        ...

    def start(
        self, tokens: Sequence[int], options: GenerateOptions, beside: Running | None = None
    ) -> Running:
        """Queue a request for one answer; `options.n` is ignored. `step` works on it.

        If `beside` is given, the request waits until `beside` has evaluated the same prompt. Raises
        BadRequest if the prompt is empty, and DoesNotFit.
        """
        ...

    def step(self) -> Sequence[Running]:
        """Decode one batch for all requests. Returns those with a new piece or an error."""
        ...

    def cancel(self, request: Running) -> None:
        """Cancel a request whose client has left."""
        ...

    @property
    def is_idle(self) -> bool:
        """True while no request waits or runs."""
        ...

    def use_idle_time(self) -> bool:
        """Do some milliseconds of useful work between requests. Returns True if there is more."""
        ...

    def slots(self) -> tuple[SlotInfo, ...]: ...

    def change_slot(self, number: int, action: SlotAction, filename: str) -> SlotResult:
        """Save the text of an idle slot to a file, restore it, or erase it."""
        ...

    def prepare(self) -> None:
        """Do slow preparations before the first request, so that no request waits for them."""
        ...

    def close(self) -> None: ...
