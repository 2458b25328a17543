"""A generation's options, and the pieces that come out of it: plain data, no engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from offload.sampling.options import SamplerParameters
from offload.sampling.probabilities import ChosenLogprob
from offload.sampling.reasoning_limit import ReasoningLimit
from specoffload.session.infill import Fill

FinishReason = Literal["stop", "length"]
N_SEEDS = 2**32 - 1  # libllama's seeds are 32 bits, and 0xFFFFFFFF means "random"


@dataclass(frozen=True)
class GenerateOptions(SamplerParameters):
    """Length, sampling and stops of one answer, by llama.cpp's names where they mean the same.
    `repeat_last_n` and `dry_penalty_last_n` may be -1: all tokens."""

    temperature: float = 0.0
    n_predict: int | None = None  # None: until the end of the context
    stop: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()  # special tokens that are part of the text
    seed: int | None = None
    ignore_eos: bool = False
    reasoning_budget: int | None = None  # tokens of a chat's reasoning; None: as it comes
    reasoning_budget_message: str = ""  # is written before reasoning is so ended
    reasoning_limit: ReasoningLimit | None = None  # that, in the words of the chat's format
    spm_infill: bool = False  # the suffix before the prefix, as some models were trained
    cache_prompt: bool = True  # a beginning that a slot or host memory holds is not evaluated again
    id_slot: int = -1  # the slot to run in, waited for; -1: the one that holds most of the prompt
    # Tokens of a draft at most and at least, and the least probability of each; None: as the policy
    # has it. A `draft_max` of 0: no drafts.
    draft_max: int | None = None
    draft_min: int | None = None
    draft_p_min: float | None = None
    time_limit_s: float | None = None  # from its first step on; then the answer ends as it is
    timings_per_token: bool = False  # each piece tells of the generation as far as it has come
    prompt_logprobs: int | None = None  # likeliest tokens told beside each of the prompt's own
    n: int = 1  # answers to the prompt, which is evaluated once; their seeds follow one another


@dataclass(frozen=True)
class AskedOptions(GenerateOptions):
    """For people and requests that say nothing else: llama-server's defaults. A `GenerateOptions`
    is greedy by itself, as measurements have to be."""

    temperature: float = 0.8


@dataclass(frozen=True)
class GenerationStats:
    """Counters of one finished generation; times in seconds."""

    n_prompt_tokens: int = 0
    n_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    n_rounds: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_could_accept: int = 0  # drafted and not verified, and the text then had them
    streamed_bytes: int = 0
    n_draft_steps: int = 0  # decodes of the draft model
    draft_s: float = 0.0
    verify_s: float = 0.0
    rollback_s: float = 0.0
    n_checkpoints: int = 0  # of a recurrent memory
    n_restores: int = 0
    acceptance_per_position: tuple[float, ...] = ()  # share accepted at each place of a draft
    draft_lengths: tuple[tuple[int, int], ...] = ()  # (length, rounds)
    accepted_by_source: tuple[tuple[str, int], ...] = ()  # (drafter, accepted tokens)
    decisions: tuple[tuple[str, int], ...] = ()  # (why that length, rounds), most frequent first
    n_cached_tokens: int = 0  # of the prompt, held from the conversation before

    @property
    def n_prefilled(self) -> int:
        """Tokens of the prompt that were evaluated in `prefill_s`: not those from a cache, and not
        the last, which the first decode evaluates."""
        return max(0, self.n_prompt_tokens - self.n_cached_tokens - 1)

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None when nothing was drafted."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def tokens_per_round(self) -> float:
        return self.n_tokens / self.n_rounds if self.n_rounds else 0.0


@dataclass(frozen=True)
class Piece:
    """A streamed part of the answer. `text` never ends inside a character or a stop sequence."""

    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # set on the last piece only
    stats: GenerationStats | None = None  # set on the last piece only
    so_far: GenerationStats | None = None  # on each other that has tokens, with timings_per_token
    index: int = 0  # of the answer, where a request asked for several
    stopping_word: str | None = None  # on the last piece, if a stop sequence ended the answer
    logprobs: tuple[ChosenLogprob, ...] = ()  # of `tokens`, if asked for; an end token has none
    id_slot: int = -1  # of the slot that it was made in
    # Of the prompt's tokens that were evaluated, if asked for; the first's is not a number.
    prompt_logprobs: tuple[ChosenLogprob, ...] = ()
    n_prompt_read: int | None = None  # tokens of the prompt that are done; before the answer alone


@dataclass(frozen=True)
class ModelCard:
    """The loaded model, as far as a client may ask."""

    name: str
    n_ctx: int
    n_vocab: int
    architecture: str
    n_params: int
    size_bytes: int
    chat_template: str | None
    tool_use_template: str | None = None  # the file's own for conversations with tools
    longest_token_bytes: int = 256  # of text that one token can stand for
    bos: str = ""
    eos: str = ""
    adds_bos: bool = False  # the vocabulary has `bos` before every text
    notes: tuple[str, ...] = field(default=())  # start-up lines: plan, device, what is not active
    n_parallel: int = 1  # requests that run at once


@dataclass(frozen=True)
class SlotInfo:
    """A slot of the model: the place of one request, and of the prompt it leaves behind."""

    id: int
    is_processing: bool
    n_tokens: int  # held now
    n_prompt_tokens: int = 0  # of the request that is being answered
    n_decoded: int = 0  # tokens of the answer so far
    n_remain: int = 0  # that may follow


@dataclass(frozen=True)
class SlotResult:
    """The outcome of saving, restoring or erasing a slot."""

    n_tokens: int
    n_bytes: int
    took_s: float


SlotAction = Literal["save", "restore", "erase"]


class Running(Protocol):
    """A request under way. `pieces` are taken from the left; after `error`, none follows."""

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
        """Their text, special tokens written out."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of one token's text."""
        ...

    def fill_tokens(self, fill: Fill, options: GenerateOptions) -> list[int]:
        """The prompt that fills in text. Raises NotSupported for a model that cannot."""
        ...

    def embed(self, tokens: Sequence[int]) -> tuple[NDArray[np.float32], bool]:
        """[1, width] and True, or a row for each token and False where nothing pools them.

        Raises NotSupported for a model without embeddings, and DoesNotFit.
        """
        ...

    def counters(self) -> Mapping[str, float]:
        """Counts of the copy path since the model was opened."""
        ...

    def start(
        self, tokens: Sequence[int], options: GenerateOptions, beside: Running | None = None
    ) -> Running:
        """A request for one answer (`n` is the caller's to count), on which `step` works. With
        `beside`, a request of the same prompt, it waits for that one's evaluation of it.

        Raises when the prompt is empty or does not fit.
        """
        ...

    def step(self) -> Sequence[Running]:
        """Work on every request for a moment; those that have news."""
        ...

    def cancel(self, request: Running) -> None:
        """Whoever asked has gone."""
        ...

    @property
    def is_idle(self) -> bool:
        """True while no request waits or runs."""
        ...

    def use_idle_time(self) -> bool:
        """Do a little, some milliseconds, of what is useful while nobody asks for anything. True if
        there is more to do."""
        ...

    def slots(self) -> tuple[SlotInfo, ...]: ...

    def change_slot(self, number: int, action: SlotAction, filename: str) -> SlotResult:
        """Save, restore or erase what an idle slot holds."""
        ...

    def prepare(self) -> None:
        """Make ready what later requests would have to wait for."""
        ...

    def close(self) -> None: ...
