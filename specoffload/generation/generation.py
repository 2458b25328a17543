"""Plain data that a session exchanges with its clients, in this process or another.

It has a generation's options, the pieces of its answer, and facts about the model and its slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from offload.notes import Note
from offload.sampling.answer_start import CallSpan, ReasoningSpan
from offload.sampling.answers import ChosenLogprob, ReasoningLimit
from offload.sampling.options import SamplingOptions
from specoffload.generation.statistics import GenerationStats

FinishReason = Literal["stop", "length"]
N_SEEDS = 2**32 - 1  # libllama's seeds are 32 bits, and 0xFFFFFFFF means "random"


@dataclass(frozen=True)
class GenerateOptions(SamplingOptions):
    """Length, sampling and stops of one answer, under llama.cpp's names if they mean the same."""

    temperature: float = 0.0
    n_predict: int | None = None  # most tokens of the answer; None: to the end of the context
    stop: tuple[str, ...] = ()  # texts that end the answer, outside of its reasoning and its calls
    end_texts: tuple[str, ...] = ()  # texts of the chat format that end it anywhere
    reasoning_span: ReasoningSpan | None = None  # markers of the chat format; None: no reasoning
    call_span: CallSpan | None = None  # markers of tool calls; None: no calls
    shown: tuple[str, ...] = ()  # special tokens that are shown in the text
    reasoning_budget: int | None = None  # most tokens of a chat's reasoning; None: no limit
    reasoning_budget_message: str = ""  # text that is written when the budget ends the reasoning
    reasoning_limit: ReasoningLimit | None = None  # the budget, with the format's markers
    spm_infill: bool = False  # True: the suffix goes before the prefix in infill prompts
    cache_prompt: bool = True  # True: reuse first tokens that a slot or host memory holds
    # Whose prompt it is, as hexadecimal digits: only requests with the same salt reuse it (vLLM's
    # `cache_salt`).
    cache_salt: str = ""
    id_slot: int = -1  # number of the slot to use; -1: the slot that holds most of the prompt
    # Numbers of the prompt's first tokens with which later prompts will begin, ascending. A memory
    # that cannot be cut keeps a checkpoint at each.
    keep_at: tuple[int, ...] = ()
    # Limits of drafts: most tokens (0: no drafts), fewest tokens, and least probability of a token.
    # None: the policy decides.
    draft_max: int | None = None
    draft_min: int | None = None
    draft_p_min: float | None = None
    n_indent: int = 0  # least blanks or tabs of each line after the first; a shorter one ends it
    t_max_predict_ms: int = -1  # after this time the answer ends with its line; -1: no limit
    time_limit_s: float | None = None  # seconds, from getting a slot, after which the answer ends
    timings_per_token: bool = False  # True: each piece has the statistics so far
    prompt_logprobs: int | None = None  # number of likeliest tokens given with each prompt token
    n: int = 1  # number of answers to the prompt; each next answer has the next seed


@dataclass(frozen=True)
class AskedOptions(GenerateOptions):
    """Options with llama-server's defaults, for people and requests.

    The defaults of `GenerateOptions` are greedy, for measurements.
    """

    temperature: float = 0.8


@dataclass(frozen=True)
class TextPiece:
    """A streamed part of the answer. `text` never ends inside a character or a stop sequence."""

    text: str
    tokens: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None  # set on the last piece only
    stats: GenerationStats | None = None  # set on the last piece only
    so_far: GenerationStats | None = None  # set on other pieces with tokens, if timings_per_token
    index: int = 0  # number of the answer, if a request asked for several
    stopping_word: str | None = None  # set on the last piece, if a stop sequence ended the answer
    fills_context: bool = False  # True on the last piece, if the end of the context cut the answer
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
    notes: tuple[Note, ...] = ()  # start-up lines on the plan, the device and inactive features
    only_continues: bool = False  # True: it knows no chats, so messages are text to continue
    n_parallel: int = 1  # requests that run at once
    keeps_prompts: bool = False  # closing writes prompts to the disk, which may take a while
    shelves_prompts: bool = False  # closing can keep prompts in RAM for the model's next start
    path: str = ""  # the model's file
    image_decoder: Path | None = None  # decodes images for its projector; None: it has none

    @property
    def reads_images(self) -> bool:
        """True if the model has a projector (--mmproj)."""
        return self.image_decoder is not None
