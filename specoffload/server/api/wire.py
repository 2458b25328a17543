"""The JSON that goes over HTTP: OpenAI's requests and answers, llama-server's errors and timings.

Requests are strict: a wrong type is refused, not converted. Keys that no model here declares are
kept in `model_extra`; `body/names.py` decides about them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from specoffload.config.flags import sampling
from specoffload.server.engine.messages import Problem
from specoffload.session.generation import FinishReason, GenerationStats

# ---- requests


class RequestModel(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def _whole(value: object) -> object:
    """4.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]


# A union tries each kind in turn: this one gives a kind up at the first element that does not fit.
_AT_FIRST_MISFIT = Field(fail_fast=True)
_Texts = Annotated[list[str], _AT_FIRST_MISFIT]
_Tokens = Annotated[list[Whole], _AT_FIRST_MISFIT]


MOST_ANSWERS = 64  # to one prompt


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: OpenAI's own


_RANGES = {flag.request: flag for flag in sampling.FLAGS if flag.request}


def _ranged(name: str) -> Any:
    """A field that may be left out, with the range of the flag of the same meaning."""
    flag = _RANGES[name]
    return Field(None, ge=flag.least, gt=flag.above, le=flag.most)


# Checked by `prompts_of`, in one pass: as a union, each kind would be tried on all of it.
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": ["string", "integer", "array"]}},
            ]
        }
    ),
]


class GenerationRequest(RequestModel):
    """The fields common to /v1/completions and /v1/chat/completions. `model` is not matched:
    one model is served, and its name is in the answer."""

    model: str | None = None
    max_tokens: Whole | None = Field(None, ge=-1)  # -1, as in llama-server: to the context's end
    temperature: float | None = _ranged("temperature")
    top_k: Whole | None = _ranged("top_k")
    top_p: float | None = _ranged("top_p")
    min_p: float | None = _ranged("min_p")
    repeat_penalty: float | None = _ranged("repeat_penalty")
    repeat_last_n: Whole | None = _ranged("repeat_last_n")
    frequency_penalty: float | None = _ranged("frequency_penalty")
    presence_penalty: float | None = _ranged("presence_penalty")
    typical_p: float | None = _ranged("typical_p")
    top_n_sigma: float | None = _ranged("top_n_sigma")
    xtc_probability: float | None = _ranged("xtc_probability")
    xtc_threshold: float | None = _ranged("xtc_threshold")
    dynatemp_range: float | None = _ranged("dynatemp_range")
    dynatemp_exponent: float | None = _ranged("dynatemp_exponent")
    dry_multiplier: float | None = _ranged("dry_multiplier")
    dry_base: float | None = _ranged("dry_base")
    dry_allowed_length: Whole | None = _ranged("dry_allowed_length")
    dry_penalty_last_n: Whole | None = _ranged("dry_penalty_last_n")
    dry_sequence_breakers: str | _Texts | None = None  # a text is JSON of the list
    mirostat: Whole | None = _ranged("mirostat")
    mirostat_tau: float | None = _ranged("mirostat_tau")
    mirostat_eta: float | None = _ranged("mirostat_eta")
    adaptive_target: float | None = _ranged("adaptive_target")
    adaptive_decay: float | None = _ranged("adaptive_decay")
    min_keep: Whole | None = _ranged("min_keep")
    samplers: str | _Texts | None = None  # names, or llama.cpp's letters
    logit_bias: dict[str, Any] | list[Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    seed: Whole | None = None
    stop: str | _Texts | None = None
    ignore_eos: bool | None = None
    cache_prompt: bool | None = None
    id_slot: Whole | None = Field(None, ge=-1)
    draft_max: Whole | None = Field(None, ge=0)
    draft_min: Whole | None = Field(None, ge=0)
    draft_p_min: float | None = Field(None, ge=0, le=1)
    time_limit_s: float | None = Field(None, gt=0)
    stream: bool | None = None
    timings_per_token: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[Whole, Field(ge=0, le=20)] | Literal[False] | None = None
    n: Whole | None = Field(None, ge=1)
    suffix: str | None = None


class _NativeFields(GenerationRequest):
    n_probs: Whole | None = Field(None, ge=0, le=1000)
    post_sampling_probs: bool | None = None
    return_tokens: bool | None = None
    response_fields: _Texts | None = None


class NativeRequest(_NativeFields):
    """llama-server's POST /completion."""

    prompt: Prompts


class ExtraFile(RequestModel):
    filename: str = ""
    text: str


class InfillRequest(_NativeFields):
    """llama-server's POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str = ""


class TextPart(RequestModel):
    type: str
    text: str | None = None


class FunctionCall(RequestModel):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(RequestModel):
    id: str | None = None
    type: str | None = None
    function: FunctionCall


class Message(RequestModel):
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # vLLM's and OpenRouter's name for it
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class Function(RequestModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolParameter(RequestModel):
    type: str
    function: Function | None = None


class FunctionName(RequestModel):
    name: str


class ToolChoiceObject(RequestModel):
    type: str
    function: FunctionName | None = None


class ConversationRequest(RequestModel):
    """The fields that a chat template is rendered with."""

    messages: list[Message]
    tools: list[ToolParameter] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    reasoning_format: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(ConversationRequest, GenerationRequest):
    max_completion_tokens: Whole | None = Field(None, ge=-1)
    n: Whole | None = Field(None, ge=1, le=MOST_ANSWERS)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    thinking_budget_tokens: Whole | None = Field(None, ge=-1)


class TokenizeRequest(RequestModel):
    """llama-server's POST /tokenize."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(RequestModel):
    """llama-server's POST /detokenize."""

    tokens: _Tokens


class TemplateRequest(ConversationRequest):
    """llama-server's POST /apply-template."""


class SlotRequest(RequestModel):
    """llama-server's POST /slots/ID?action=..."""

    filename: str | None = None


# ---- answers


class _Answer(BaseModel):
    def to_json(self) -> str:
        """JSON; a field that was never set is absent, one that was set to None is null."""
        return self.model_dump_json(exclude_unset=True)


class PromptTokensDetails(_Answer):
    cached_tokens: int


class CompletionTokensDetails(_Answer):
    reasoning_tokens: int


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class Timings(_Answer):
    """llama-server's; milliseconds, and tokens per second."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float
    draft_n: int | None = None
    draft_n_accepted: int | None = None
    streamed_bytes: int | None = None  # ours: weights copied to the device
    speculation: dict[str, Any] | None = None  # ours: where the time of a round goes, and why


ChatFinishReason = FinishReason | Literal["tool_calls"]


class CalledFunction(_Answer):
    name: str
    arguments: str


class Called(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[Called] | None = None


class CalledFunctionDelta(_Answer):
    name: str | None = None
    arguments: str


class CalledDelta(_Answer):
    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: CalledFunctionDelta


class Delta(_Answer):
    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[CalledDelta] | None = None


class TokenLogprobs(_Answer):
    """`bytes` are there because a token may be part of a character, and then `token` is not it."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenLogprobs] = []


class ChatLogprobs(_Answer):
    content: list[TokenLogprobs]
    refusal: None


class ChatChoice(_Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class ChunkChoice(_Answer):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class TextChoice(_Answer):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: FinishReason | None


class ChatCompletion(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class ChatChunk(_Answer):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    timings: Timings | None = None


class TextCompletion(_Answer):
    """Whole answer and chunk of /v1/completions have the same shape."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    timings: Timings | None = None


def usage_of(stats: GenerationStats) -> Usage:
    return Usage(
        prompt_tokens=stats.n_prompt_tokens,
        completion_tokens=stats.n_tokens,
        total_tokens=stats.n_prompt_tokens + stats.n_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=stats.n_cached_tokens),
    )


def sum_usage(answers: Sequence[GenerationStats], n_per_prompt: int) -> Usage:
    """Of several answers, of which each `n_per_prompt` have their prompt in common."""
    prompts = answers[::n_per_prompt]
    return usage_of(
        GenerationStats(
            n_prompt_tokens=sum(stats.n_prompt_tokens for stats in prompts),
            n_cached_tokens=sum(stats.n_cached_tokens for stats in prompts),
            n_tokens=sum(stats.n_tokens for stats in answers),
        )
    )


def timings_of(stats: GenerationStats) -> Timings:
    def ratio(a: float, b: float) -> float:
        return a / b if b > 0 else 0.0

    n_evaluated = stats.n_prompt_tokens - stats.n_cached_tokens
    timings = Timings(
        cache_n=stats.n_cached_tokens,
        prompt_n=n_evaluated,
        prompt_ms=1e3 * stats.prefill_s,
        prompt_per_token_ms=ratio(1e3 * stats.prefill_s, stats.n_prefilled),
        prompt_per_second=ratio(stats.n_prefilled, stats.prefill_s),
        predicted_n=stats.n_tokens,
        predicted_ms=1e3 * stats.decode_s,
        predicted_per_token_ms=ratio(1e3 * stats.decode_s, stats.n_tokens),
        predicted_per_second=stats.tokens_per_s,
    )
    if stats.n_drafted:
        timings.draft_n = stats.n_drafted
        timings.draft_n_accepted = stats.n_accepted
        timings.speculation = speculation_of(stats)
    if stats.streamed_bytes:
        timings.streamed_bytes = stats.streamed_bytes
    return timings


def speculation_of(stats: GenerationStats) -> dict[str, Any]:
    """Milliseconds, tokens and rounds of an answer's drafts, for people who tune them."""
    return {
        "rounds": stats.n_rounds,
        "tokens_per_round": stats.tokens_per_round,
        "acceptance_rate": stats.acceptance_rate,
        "acceptance_per_position": list(stats.acceptance_per_position),
        "draft_steps": stats.n_draft_steps,
        "draft_ms": 1e3 * stats.draft_s,
        "verify_ms": 1e3 * stats.verify_s,
        "rollback_ms": 1e3 * stats.rollback_s,
        "checkpoints": stats.n_checkpoints,
        "restores": stats.n_restores,
        "rounds_per_draft_length": {str(n): rounds for n, rounds in stats.draft_lengths},
        "accepted_per_drafter": dict(stats.accepted_by_source),
        "decisions": dict(stats.decisions),
    }


def error_body(problem: Problem) -> dict[str, Any]:
    """`{"error": {"code", "message", "type"}}`, with the token counts that overflowed, if any."""
    error: dict[str, Any] = {
        "code": problem.http_status,
        "message": problem.message,
        "type": problem.type,
    }
    if problem.n_prompt_tokens is not None:
        error["n_prompt_tokens"] = problem.n_prompt_tokens
    if problem.n_ctx is not None:
        error["n_ctx"] = problem.n_ctx
    return {"error": error}


def server_sent(json_text: str) -> bytes:
    """One server-sent event. JSON text has no raw line feed, so one data line is enough."""
    return b"data: " + json_text.encode() + b"\n\n"


def server_sent_error(problem: Problem) -> bytes:
    return server_sent(json.dumps(error_body(problem)))


DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": the model is working\n\n"
