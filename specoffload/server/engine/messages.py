"""Messages between the API process and the engine process: plain, picklable data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from offload.stream.bell_use import NoDoorbell
from specoffload.errors import KNOWN, meaning_of
from specoffload.generation.generation import GenerateOptions, ModelCard, TextPiece
from specoffload.session.images import PromptImages
from specoffload.session.infill import Fill


@dataclass(frozen=True)
class TextWithImages:
    """A raw prompt, in whose text the marker of `images` stands for each of them."""

    text: str
    images: PromptImages


Prompt = str | tuple[int | str, ...] | TextWithImages
"""Text, token ids of the model's own vocabulary, or both in turn; or text with images."""

# ---- API process -> engine process


@dataclass(frozen=True)
class CompletionJob:
    """Continue a prompt. If `with_text` is set, `Started` has the prompt's text."""

    prompt: Prompt
    options: GenerateOptions
    with_text: bool = False


@dataclass(frozen=True)
class InfillJob:
    """Write the text between a prefix and a suffix."""

    fill: Fill
    options: GenerateOptions


@dataclass(frozen=True)
class ChatJob:
    """Answer a conversation. `text` is the rendered prompt, with its special tokens written out.

    `cache_ends` are the numbers of characters of `text` before the places that the client marks
    with `cache_control`, ascending.
    """

    text: str
    options: GenerateOptions
    images: PromptImages | None = None
    cache_ends: tuple[int, ...] = ()


@dataclass(frozen=True)
class EngineCall:
    """Call `function(session, *arguments)` between two steps, and return one `Result`.

    The function must belong to a module, so that it can be pickled.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()


GeneratingJob = CompletionJob | ChatJob | InfillJob
Job = GeneratingJob | EngineCall


def images_of(job: Job) -> PromptImages | None:
    """Return the images of a job's prompt, None if it has none."""
    if isinstance(job, ChatJob):
        return job.images
    if isinstance(job, CompletionJob) and isinstance(job.prompt, TextWithImages):
        return job.prompt.images
    return None


@dataclass(frozen=True)
class Submit:
    """Start a job. Job ids rise by one with every job."""

    job_id: int
    job: Job


@dataclass(frozen=True)
class Cancel:
    """End this job before the next step."""

    job_id: int


@dataclass(frozen=True)
class Shutdown:
    """Close the session and exit. `shelves_prompts`: keep its prompts in RAM for the next start."""

    shelves_prompts: bool = False


ToEngine = Submit | Cancel | Shutdown

# ---- engine process -> API process


class Event(Enum):
    """A reason for a refusal that each API has its own words for (`api/refusals.py`)."""

    PROMPT_TOO_LONG = "the prompt leaves no room for an answer in the context"
    TEXT_TOO_LONG = "the text is longer than one that can be embedded"
    BODY_OVER_CONTEXT = "the body is larger than any prompt that fits the context"
    BODY_TOO_LARGE = "the body is larger than any that the server reads"
    QUEUE_FULL = "too many requests wait"
    LOADING = "the model is being loaded"
    UNKNOWN_MODEL = "no model has this name"
    UNKNOWN_RESPONSE = "no response has this id"
    BAD_KEY = "the key is missing or wrong"


@dataclass(frozen=True)
class Problem:
    """An error as the command line and HTTP clients need it.

    `type` is llama-server's error type. If `can_retry` is False, clients are told not to send the
    request again.
    """

    name: str
    message: str
    http_status: int
    type: str
    exit_code: int = 1
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None
    retry_after_s: int | None = None
    retry_after_ms: int | None = None  # the same time in milliseconds
    can_retry: bool = True
    details: dict[str, Any] | None = None  # by which Anthropic's clients choose another way
    event: Event | None = None  # for which an API may have its own status, type, code and words
    is_lower_bound: bool = False  # True: the prompt has at least `n_prompt_tokens`


@dataclass(frozen=True)
class Alive:
    """The engine process runs, even if its main thread is busy. Sent every second."""


@dataclass(frozen=True)
class Loading:
    """The model is being loaded. `done` is the finished fraction of `step`."""

    step: str
    done: float


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    card: ModelCard


@dataclass(frozen=True)
class LoadFailed:
    """The model could not be opened; the process exits after this message."""

    problem: Problem


@dataclass(frozen=True)
class Stopping:
    """The engine process ends at once, for this reason.

    `by_worker`: a worker is lost. `changed`: the model's file that another program wrote to.
    """

    reason: str
    by_worker: bool = False
    changed: Path | None = None


@dataclass(frozen=True)
class Started:
    """The prompt is accepted and will be evaluated. `text` is its text, if asked for."""

    n_prompt_tokens: int
    text: str | None = None


@dataclass(frozen=True)
class Result:
    """The return value of an `EngineCall`."""

    value: Any


@dataclass(frozen=True)
class Finished:
    """The job's slot is free again, whether the job ended or was cancelled."""


JobEvent = Started | TextPiece | Result | Problem | Finished
"""One thing that a job yields. Problem and Finished are the last."""


class JobOutput(NamedTuple):
    """One event of one job."""

    job_id: int
    event: JobEvent


@dataclass(frozen=True)
class Outputs:
    """The events of one step of the engine, of all jobs, in one message.

    `made_at_s` is the time.monotonic() at which they were known. On Linux, that clock is the same
    in all processes (CLOCK_MONOTONIC).
    """

    outputs: tuple[JobOutput, ...]
    made_at_s: float

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle events that have only a text and its tokens as plain tuples. Most events do."""
        return _outputs, (self.made_at_s, *map(_packed, self.outputs))


_Packed = JobOutput | tuple[int, str, tuple[int, ...], int, int]


def _packed(output: JobOutput) -> _Packed:
    job_id, event = output
    if not isinstance(event, TextPiece) or event.logprobs or event.so_far is not None:
        return output
    if event.finish_reason is not None or event.stats is not None or event.stopping_word:
        return output
    if event.prompt_logprobs or event.n_prompt_read is not None:
        return output
    return job_id, event.text, event.tokens, event.index, event.id_slot


def _outputs(made_at_s: float, *packed: _Packed) -> Outputs:
    return Outputs(tuple(map(_unpacked, packed)), made_at_s)


def _unpacked(packed: _Packed) -> JobOutput:
    if isinstance(packed, JobOutput):
        return packed
    job_id, text, tokens, index, id_slot = packed
    return JobOutput(job_id, TextPiece(text, tokens, index=index, id_slot=id_slot))


FromEngine = Alive | Loading | Ready | LoadFailed | Stopping | NoDoorbell | Outputs


def problem_of(
    error: BaseException, *, n_prompt_tokens: int | None = None, n_ctx: int | None = None
) -> Problem:
    """Return the Problem of an error. Its message names the error's class if that is unknown."""
    meaning = meaning_of(error)
    name = type(error).__name__
    text = str(error) or name
    exceeds = meaning.type == "exceed_context_size_error"
    return Problem(
        name=name,
        message=text if isinstance(error, KNOWN) else f"{name}: {text}",
        http_status=meaning.http_status,
        type=meaning.type,
        exit_code=meaning.exit_code,
        n_prompt_tokens=n_prompt_tokens if exceeds else None,
        n_ctx=n_ctx if exceeds else None,
    )


class RequestFailed(Exception):
    """A job gets no answer, or no more of it. `problem` tells the client why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


def unavailable(
    message: str, retry_after_s: int | None = None, event: Event | None = None
) -> Problem:
    kind = "unavailable_error"
    return Problem("Unavailable", message, 503, kind, retry_after_s=retry_after_s, event=event)
