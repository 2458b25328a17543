"""Declares the JSON bodies of requests in OpenAI's and llama-server's form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, create_model, model_validator

from specoffload.chat.conversation import ReasoningFormat
from specoffload.config.flag import FLOAT, INT, SWITCH
from specoffload.config.sampling_flags import SAMPLING
from specoffload.server.api.foreign_parts import SetAside
from specoffload.server.api.loose_forms import (
    arguments_text,
    id_text,
    llama_format,
    mark_of,
    nested_call,
    nested_tool,
    object_of,
    objects_of,
    parts_of,
    text_of,
    text_or_parts,
)
from specoffload.server.api.request_model import RequestModel

MOST_CHOICES = 64  # answers of one chat request
MOST_TOOLS = 1024


def _whole(value: object) -> object:
    """Return floats such as 4.0 as integers, which they are in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Whole = Annotated[int, BeforeValidator(_whole)]

# A union tries each type in turn. `fail_fast` stops at the first wrong element of a list.
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Tokens = Annotated[list[Whole], Field(fail_fast=True)]

# `prompts_of` checks prompts in one pass. A union would try each type on the whole list.
Prompts = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "object", "required": ["prompt_string"]},
                {"type": "array", "items": {"type": ["string", "integer", "array", "object"]}},
            ]
        }
    ),
]

# Fields with the name, type and range of a sampling flag. Their values are copied unchanged into
# GenerateOptions.
_TYPES: dict[Any, Any] = {INT: Whole | None, FLOAT: float | None, SWITCH: bool | None}
PLAIN_FLAGS = {flag.request: flag for flag in SAMPLING if flag.request and flag.kind in _TYPES}

if TYPE_CHECKING:
    _SamplingFields = RequestModel
else:
    _SamplingFields = create_model(
        "_SamplingFields",
        __base__=RequestModel,
        **{
            name: (_TYPES[flag.kind], Field(None, ge=flag.least, gt=flag.above, le=flag.most))
            for name, flag in PLAIN_FLAGS.items()
        },
    )


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # OpenAI's padding against traffic analysis


class GenerationRequest(_SamplingFields):
    """The fields common to all requests that generate. `model` may be any name: one model is
    served, and its name is in the answer."""

    model: str | None = None
    max_tokens: Whole | None = Field(None, ge=-1)  # -1, as in llama-server: the rest of the context
    dry_sequence_breakers: str | _Texts | None = None  # a list, or its JSON as text
    samplers: str | _Texts | None = None  # names, or llama.cpp's letters
    logit_bias: dict[str, Any] | list[Any] | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    seed: Whole | None = None
    stop: str | _Texts | None = None
    cache_prompt: bool | None = None
    cache_salt: str | None = None  # as vLLM's: only requests with the same one reuse the prompt
    id_slot: Whole | None = Field(None, ge=-1)
    draft_max: Whole | None = Field(None, ge=0)
    draft_min: Whole | None = Field(None, ge=0)
    draft_p_min: float | None = Field(None, ge=0, le=1)
    time_limit_s: float | None = Field(None, gt=0)
    n_indent: Whole | None = Field(None, ge=0)
    t_max_predict_ms: Whole | None = Field(None, ge=-1)
    stream: bool | None = None
    timings_per_token: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionRequest(GenerationRequest):
    """/v1/completions."""

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
    """/completion."""

    prompt: Prompts


class ExtraFile(RequestModel):
    filename: str = ""
    text: str


class InfillRequest(_NativeFields):
    """/infill."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] | None = None
    prompt: str = ""


class ImageUrl(RequestModel):
    """`detail` has no effect: the projector's limits decide (--image-max-tokens)."""

    url: str
    detail: str | None = None


class CacheControl(RequestModel):
    """Marks the end of a part that the next requests will have, too.

    `type` and `ttl` have no effect: a kept text stays until others need its memory.
    """

    type: str = "ephemeral"
    ttl: str | None = None


Mark = Annotated[CacheControl | None, BeforeValidator(mark_of)]
Id = Annotated[str | None, BeforeValidator(id_text)]
ReasoningText = Annotated[str | None, BeforeValidator(text_of)]
_Object = Annotated[dict[str, Any], BeforeValidator(object_of)]
_Objects = Annotated[list[dict[str, Any]] | None, BeforeValidator(objects_of)]


class TextPart(SetAside):
    """A part of a message: text, or an image of type image_url."""

    known_types: ClassVar = frozenset({"text", "input_text", "output_text", "refusal", "image_url"})

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    cache_control: Mark = None


class FunctionCall(RequestModel):
    name: str
    arguments: Annotated[str | None, BeforeValidator(arguments_text)] = None


class CustomCall(RequestModel):
    """A call to a tool whose argument is a text."""

    name: str
    input: str | None = None


class _CallItem(RequestModel):
    id: Id = None
    type: str | None = None
    function: FunctionCall | None = None
    custom: CustomCall | None = None


ToolCall = Annotated[_CallItem, BeforeValidator(nested_call)]


class ChatMessage(RequestModel):
    """A message. The older role `function` and field `function_call` are read as `tool` and as a
    call. A tool's result that is neither text nor parts becomes JSON text."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: Id = None
    reasoning_content: ReasoningText = None
    reasoning: ReasoningText = None  # vLLM's and OpenRouter's name of reasoning_content
    reasoning_details: _Objects = None  # OpenRouter's parts of the same
    thinking_blocks: _Objects = None  # LiteLLM's
    tool_calls: list[ToolCall] | None = None
    tool_call_id: Id = None
    cache_control: Mark = None  # the whole message

    @model_validator(mode="before")
    @classmethod
    def _of_older_names(cls, sent: Any) -> Any:
        if not isinstance(sent, dict):
            return sent
        message = dict(sent)
        call = message.get("function_call")
        if message.get("role") == "assistant" and call and not message.get("tool_calls"):
            message["tool_calls"] = [{"function": message.pop("function_call")}]
        if message.get("role") == "assistant" and message.get("content") is None:
            message["content"] = message.get("refusal")
        if message.get("role") == "function":
            message["role"] = "tool"
        if message.get("role") == "tool":
            message["content"] = text_or_parts(message.get("content"))
        else:
            message["content"] = parts_of(message.get("content"))
        return message


class Function(RequestModel):
    name: str
    description: str | None = None
    parameters: _Object | None = None
    strict: bool | None = None


class ToolParameter(RequestModel):
    """A tool: a function in an object of its own, or in a form of other APIs (Cursor)."""

    type: str
    function: Function | None = None
    cache_control: Mark = None

    @model_validator(mode="before")
    @classmethod
    def _nested(cls, sent: Any) -> Any:
        return nested_tool(sent, Function.model_fields)


def function_tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
) -> dict[str, Any]:
    """Return the JSON of a `ToolParameter`. Keys without a value are left out."""
    function = {"name": name, "description": description, "strict": strict}
    known = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": known | {"parameters": parameters or {}}}


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    """A function's name, in the form of chat requests or of the Responses API."""

    type: str
    name: str | None = None
    function: FunctionName | None = None


class AllowedTools(RequestModel):
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = Field(max_length=MOST_TOOLS)


class ChatToolChoice(RequestModel):
    """A function that must be called, or the tools that may be called (`allowed_tools`).

    `type` may also be auto, none, required or any, as Anthropic's clients write it. `name` is the
    function's if the Responses API's form is used.
    """

    type: str
    name: str | None = None
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ConversationRequest(RequestModel):
    """The fields that a chat template is rendered with; the body of /apply-template."""

    model: str | None = None
    messages: list[ChatMessage]
    tools: list[ToolParameter] | None = Field(None, max_length=MOST_TOOLS)
    tool_choice: str | ChatToolChoice | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: _Object | None = None
    # `specoffload/chat/thinking.py` reads these forms.
    reasoning_effort: Any = None
    enable_thinking: Any = None
    think: Any = None
    thinking: Any = None
    reasoning: Any = None
    include_reasoning: Any = None
    output_config: dict[str, Any] | None = None
    reasoning_format: Annotated[ReasoningFormat | None, BeforeValidator(llama_format)] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | Literal["reasoning_content", "content"] | None = None


class ChatRequest(ConversationRequest, GenerationRequest):
    """/v1/chat/completions."""

    max_completion_tokens: Whole | None = Field(None, ge=-1)
    n: Whole | None = Field(None, ge=1, le=MOST_CHOICES)
    logprobs: bool | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=20)
    thinking_budget_tokens: Whole | None = Field(None, ge=-1)


class TokenizeRequest(RequestModel):
    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(RequestModel):
    tokens: _Tokens


class SlotRequest(RequestModel):
    """/slots/ID?action=..."""

    filename: str | None = None


class EmbeddingsRequest(RequestModel):
    """/v1/embeddings. `dimensions` cuts each vector and scales it to length 1 again."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Whole | None = Field(None, ge=1)


class NativeEmbeddingRequest(RequestModel):
    """/embedding. `input` is another name for `content`."""

    content: Prompts = None
    input: Prompts = None
