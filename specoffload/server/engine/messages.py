"""Messages between the API process and the engine process: plain, picklable data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from specoffload.errors import meaning_of
from specoffload.session.generation import (
    GenerateOptions,
    ModelCard,
    Piece,
    SlotAction,
    SlotInfo,
    SlotResult,
)
from specoffload.session.infill import Fill

# ---- API process -> engine process


@dataclass(frozen=True)
class CompletionJob:
    """Continue a text, token ids of the model's own vocabulary, or both in turn."""

    prompt: str | tuple[int | str, ...]
    options: GenerateOptions
    with_text: bool = False  # `Started` has the prompt's text


@dataclass(frozen=True)
class InfillJob:
    """Write what stands between two texts."""

    fill: Fill
    options: GenerateOptions


@dataclass(frozen=True)
class ChatJob:
    """Answer a conversation, of which a chat template made `text`, special tokens and all."""

    text: str
    options: GenerateOptions


@dataclass(frozen=True)
class TokenizeJob:
    """Token ids of a text; nothing is generated."""

    text: str
    add_special: bool
    parse_special: bool
    with_pieces: bool = False


@dataclass(frozen=True)
class DetokenizeJob:
    """The text of token ids; nothing is generated."""

    tokens: tuple[int, ...]


@dataclass(frozen=True)
class EmbedJob:
    """The embedding of a text or of token ids; nothing is generated."""

    prompt: str | tuple[int | str, ...]


@dataclass(frozen=True)
class CountersJob:
    """Counters of the copy path since the engine was opened; nothing is generated."""


@dataclass(frozen=True)
class SlotsJob:
    """The state of every slot; nothing is generated."""


@dataclass(frozen=True)
class SlotJob:
    """Save a slot to a file, restore it from one, or erase it; nothing is generated."""

    number: int
    action: SlotAction
    filename: str


GeneratingJob = CompletionJob | ChatJob | InfillJob
BriefJob = TokenizeJob | DetokenizeJob | EmbedJob | SlotsJob | SlotJob | CountersJob
Job = GeneratingJob | BriefJob


@dataclass(frozen=True)
class Submit:
    """`job_id` rises by one with every job, so it also tells their order."""

    job_id: int
    job: Job


@dataclass(frozen=True)
class Cancel:
    """The client has gone: end this job at the next piece, or never start it."""

    job_id: int


@dataclass(frozen=True)
class Shutdown:
    """Close the generator and leave."""


ToEngine = Submit | Cancel | Shutdown

# ---- engine process -> API process


@dataclass(frozen=True)
class Problem:
    """An error as every border of the program needs it.

    `type` is llama-server's error type; `can_retry` false tells clients not to send it again.
    """

    name: str
    message: str
    http_status: int
    type: str
    exit_code: int = 1
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None
    retry_after_s: int | None = None
    retry_after_ms: int | None = None  # the same, not in whole seconds
    can_retry: bool = True


@dataclass(frozen=True)
class Alive:
    """The engine process runs, whatever its main thread is at. Sent every second."""


@dataclass(frozen=True)
class Loading:
    """The model is being opened: which step, and the fraction of it that is done."""

    step: str
    done: float


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    card: ModelCard


@dataclass(frozen=True)
class LoadFailed:
    """The generator could not be made; the process exits after saying so."""

    problem: Problem


@dataclass(frozen=True)
class Started:
    """The prompt is accepted; prefill begins."""

    n_prompt_tokens: int
    text: str | None = None  # of the prompt, if asked for


@dataclass(frozen=True)
class Tokens:
    """Answer to a TokenizeJob."""

    ids: tuple[int, ...]
    pieces: tuple[bytes, ...] | None = None  # of each, if asked for


@dataclass(frozen=True)
class Text:
    """Answer to a DetokenizeJob."""

    text: str


@dataclass(frozen=True)
class Embedded:
    """Answer to an EmbedJob: [1, width] if it is pooled, else a row for each token."""

    rows: NDArray[np.float32]
    n_tokens: int
    is_pooled: bool


@dataclass(frozen=True)
class Counters:
    """Answer to a CountersJob: names and counts."""

    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Slots:
    """Answer to a SlotsJob."""

    slots: tuple[SlotInfo, ...]


@dataclass(frozen=True)
class SlotChanged:
    """Answer to a SlotJob."""

    job: SlotJob
    result: SlotResult


@dataclass(frozen=True)
class Finished:
    """The job's slot is free again, whether it ended by itself or was cancelled."""


Event = (
    Started | Piece | Tokens | Text | Embedded | Slots | SlotChanged | Counters | Problem | Finished
)
"""One of the things that a job yields. Problem and Finished are the last."""


class Output(NamedTuple):
    """One event of one job."""

    job_id: int
    event: Event


@dataclass(frozen=True)
class Outputs:
    """The events of one step of the engine, in one message for all of its jobs.

    `made_at_s` is when they were known, by time.monotonic(), which on Linux is one clock for all
    processes (CLOCK_MONOTONIC).
    """

    outputs: tuple[Output, ...]
    made_at_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        """Nearly all outputs are a text and its tokens, and are pickled as no more than that."""
        return _outputs, (self.made_at_s, *map(_packed, self.outputs))


_Packed = Output | tuple[int, str, tuple[int, ...], int, int]


def _packed(output: Output) -> _Packed:
    job_id, event = output
    if not isinstance(event, Piece) or event.logprobs or event.so_far is not None:
        return output
    if event.finish_reason is not None or event.stats is not None or event.stopping_word:
        return output
    if event.prompt_logprobs or event.n_prompt_read is not None:
        return output
    return job_id, event.text, event.tokens, event.index, event.id_slot


def _outputs(made_at_s: float, *packed: _Packed) -> Outputs:
    return Outputs(tuple(map(_unpacked, packed)), made_at_s)


def _unpacked(packed: _Packed) -> Output:
    if isinstance(packed, Output):
        return packed
    job_id, text, tokens, index, id_slot = packed
    return Output(job_id, Piece(text, tokens, index=index, id_slot=id_slot))


FromEngine = Alive | Loading | Ready | LoadFailed | Outputs


def problem_of(
    error: BaseException, *, n_prompt_tokens: int | None = None, n_ctx: int | None = None
) -> Problem:
    """The error's name, sentence and meaning; unknown classes are named in the sentence."""
    meaning = meaning_of(error)
    name = type(error).__name__
    text = str(error) or name
    exceeds = meaning.type == "exceed_context_size_error"
    return Problem(
        name=name,
        message=text if meaning.http_status < 500 else f"{name}: {text}",
        http_status=meaning.http_status,
        type=meaning.type,
        exit_code=meaning.exit_code,
        n_prompt_tokens=n_prompt_tokens if exceeds else None,
        n_ctx=n_ctx if exceeds else None,
    )
