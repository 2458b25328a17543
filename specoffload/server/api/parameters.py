"""Translates requests into GenerateOptions, prompts and conversations.

No parameter is ignored silently. `body.py` decides about unknown names.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from offload.errors import BadRequest
from offload.sampling.options import read_logit_bias, sampler_letters, sampler_names
from specoffload.chat.cache_points import MOST_POINTS
from specoffload.chat.conversation import (
    Allowed,
    CachePoint,
    ChatSettings,
    ContinuedPart,
    Conversation,
    Named,
    Tool,
    ToolChoice,
    kwargs_forms,
)
from specoffload.chat.thinking import ThinkingWish, thinking_wish
from specoffload.generation.generation import N_SEEDS, GenerateOptions
from specoffload.server.api.chat_messages import template_message
from specoffload.server.api.images import ConversationImages, MediaRules, text_with_images
from specoffload.server.api.requests import (
    PLAIN_FLAGS,
    ChatRequest,
    ChatToolChoice,
    CompletionRequest,
    ConversationRequest,
    Function,
    GenerationRequest,
    InfillRequest,
    NativeRequest,
    ToolParameter,
)
from specoffload.server.engine.messages import Prompt

MAX_STOPS = 256  # each is searched for in every piece of the answer
MAX_STOP_LETTERS = 1024
MAX_SAMPLERS = 64
# llama-server's words
_WRONG_ELEMENT = (
    '"prompt" elements must be a string, a list of tokens, a JSON object containing a prompt '
    "string, or a list of mixed strings & tokens."
)
MAX_ANSWERS = 1024  # answers to one request; all take memory until the last is finished
_CHOICES: dict[str, ToolChoice] = {
    "auto": "auto",
    "none": "none",
    "required": "required",
    "any": "required",  # Mistral's name for it
}
# Fields whose values are copied unchanged into the options.
_PLAIN = {name: flag.field for name, flag in PLAIN_FLAGS.items()} | {
    name: name
    for name in (
        *("cache_prompt", "id_slot", "timings_per_token", "time_limit_s"),
        *("draft_max", "draft_min", "draft_p_min", "n_indent", "t_max_predict_ms"),
    )
}


def generate_options(
    request: GenerationRequest, defaults: GenerateOptions
) -> tuple[GenerateOptions, tuple[str, ...]]:
    """Return a request's options, and the names of its parameters that have no effect.

    `defaults` has the options that the request does not set. Raises BadRequest.
    """
    idle = []
    if request.stream_options is not None and not request.stream:
        idle.append("stream_options")
    changes: dict[str, Any] = {
        field: value
        for name, field in _PLAIN.items()
        if (value := getattr(request, name)) is not None
    }
    if request.samplers is not None:
        changes["samplers"], unknown = _samplers(request.samplers)
        idle += unknown
    if request.dry_sequence_breakers is not None:
        changes["dry_sequence_breakers"] = _breakers(request.dry_sequence_breakers)
    if request.logit_bias is not None:
        changes["logit_bias"] = read_logit_bias(request.logit_bias)
    structure = _structure(request)
    if structure:  # replaces a default grammar or schema
        changes |= {"grammar": None, "json_schema": None, **structure}
    if request.stop is not None:
        changes["stop"] = _stops(request.stop)
    if request.seed is not None and request.seed != -1:
        changes["seed"] = request.seed % N_SEEDS
    limit = request.max_tokens
    if isinstance(request, ChatRequest):
        if request.max_completion_tokens is not None:
            if limit not in (None, request.max_completion_tokens):
                idle.append("max_tokens")  # OpenAI's older name of max_completion_tokens
            limit = request.max_completion_tokens
        if (budget := _thinking_budget(request)) is not None:
            changes["reasoning_budget"] = None if budget < 0 else budget
        if request.n is not None:
            changes["n"] = request.n
    if limit is not None:
        changes["n_predict"] = None if limit == -1 else limit
    changes |= _probabilities(request, idle)
    return replace(defaults, **changes), tuple(idle)


def _thinking_budget(request: ChatRequest) -> int | None:
    """Return the most tokens of thinking. Raises BadRequest for two different numbers."""
    own, other = request.thinking_budget_tokens, wish_of(request).budget_tokens
    if own is not None and other not in (None, own):
        raise BadRequest(
            f"thinking_budget_tokens is {own}, and another field sets {other}: send one number"
        )
    return other if own is None else own


def _probabilities(request: GenerationRequest, idle: list[str]) -> dict[str, Any]:
    """Return the options for token probabilities. Adds names without effect to `idle`."""
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return {"n_probs": max(1, request.top_logprobs or 0)}
        if request.top_logprobs:
            idle.append("top_logprobs")
    elif isinstance(request, CompletionRequest):
        if request.logprobs is not None and request.logprobs is not False:
            n = max(1, request.logprobs)
            return {"n_probs": n, **({"prompt_logprobs": n} if request.echo else {})}
    elif isinstance(request, NativeRequest | InfillRequest):
        after = bool(request.post_sampling_probs)
        if request.n_probs:
            return {"n_probs": request.n_probs, "post_sampling_probs": after}
        if after:
            idle.append("post_sampling_probs")
    return {}


def _samplers(given: str | list[str]) -> tuple[tuple[str, ...], list[str]]:
    """Return the samplers given by names or llama.cpp's letters, and the places of unknown ones.

    Unknown samplers are skipped, as in llama.cpp. Raises BadRequest for too many.
    """
    if len(given) > MAX_SAMPLERS:
        raise BadRequest(f"samplers has {len(given)} names: at most {MAX_SAMPLERS}")
    read = sampler_letters if isinstance(given, str) else lambda name: sampler_names([name])
    samplers: list[str] = []
    unknown = []
    for i, name in enumerate(given):
        try:
            samplers += read(name)
        except BadRequest:
            unknown.append(f"samplers[{i}]")
    return tuple(samplers), unknown


def _breakers(given: str | list[str]) -> tuple[str, ...]:
    if isinstance(given, str):
        try:
            texts = json.loads(given)
        except (ValueError, RecursionError):
            texts = None
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise BadRequest("dry_sequence_breakers must be a list of texts")
        given = texts
    return tuple(given)


def _stops(given: str | list[str]) -> tuple[str, ...]:
    """Return the non-empty stop sequences. Raises BadRequest for too many or too long ones."""
    stops = tuple(filter(None, [given] if isinstance(given, str) else given))
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LETTERS for stop in stops):
        longest = max(len(stop) for stop in stops)
        raise BadRequest(
            f"stop has {len(stops)} texts of up to {longest} letters; at most {MAX_STOPS} texts of "
            f"up to {MAX_STOP_LETTERS} letters are allowed"
        )
    return stops


_TEXT = {"type": "text"}


def structure_name(request: GenerationRequest) -> str | None:
    """Return the field that restricts the form of the answer, None if the request has none."""
    if request.grammar:
        return "grammar"
    if request.json_schema:
        return "json_schema"
    return None if _schema_of(request.response_format or _TEXT) is None else "response_format"


def _structure(request: GenerationRequest) -> dict[str, Any]:
    """Return the option that restricts the form of the answer, if the request has one.

    Schemas are not read here, because that takes long. Raises BadRequest for more than one of
    grammar, json_schema and response_format.
    """
    structures: dict[str, Any] = {}
    if request.grammar:
        structures["grammar"] = ("grammar", request.grammar)
    schemas = {
        "json_schema": request.json_schema or None,
        "response_format": _schema_of(request.response_format or _TEXT),
    }
    for name, schema in schemas.items():
        if schema is not None:
            structures[name] = ("json_schema", json.dumps(schema))
    if len(structures) > 1:
        raise BadRequest(f"{' and '.join(structures)} exclude each other: send one of them")
    return dict(structures.values())


def _schema_of(response_format: dict[str, Any]) -> dict[str, Any] | None:
    """Return the schema in OpenAI's response_format or llama-server's `schema`; None for text."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    named = response_format.get("json_schema")
    schema = response_format.get("schema")  # llama-server's form
    if kind == "json_schema" and isinstance(named, dict):
        schema = named.get("schema")  # OpenAI's form
    elif kind == "json_object" and schema is None:
        schema = {"type": "object"}
    elif kind not in ("json_object", "json_schema"):
        raise BadRequest(
            f"response_format: type {kind!r} is not one of text, json_object, json_schema"
        )
    if not isinstance(schema, dict):
        raise BadRequest(
            "response_format: it needs json_schema.schema or schema, which is a JSON object"
        )
    return schema


def settings_of(options: GenerateOptions) -> dict[str, Any]:
    """Return the options under llama-server's names, with -1 or "" for None."""
    values = asdict(options)
    for name in ("grammar", "json_schema"):
        values[name] = values[name] or ""
    for name in ("n_predict", "seed", "reasoning_budget"):
        values[name] = -1 if values[name] is None else values[name]
    for name in (
        "end_texts",
        "reasoning_limit",
        "reasoning_span",
        "prompt_logprobs",
        "spm_infill",
        "keep_at",
        "cache_salt",
    ):  # options that no request may set
        del values[name]
    values["max_tokens"] = values["n_predict"]
    return values


def prompts_of(
    given: object, name: str = "prompt", media: MediaRules | None = None, *, are_read: bool = False
) -> list[Prompt]:
    """Return the prompts in field `name`. Raises BadRequest.

    The field is a text, a list of token ids, a list of both, llama-server's object of a text and
    files, or a list of such prompts. `media` and `are_read` are for the images in such objects.
    Without `media`, images are refused.
    """

    def prompt(where: str, given: object) -> Prompt:
        if not isinstance(given, dict):
            return _prompt(where, given)
        if "prompt_string" not in given:
            raise BadRequest(_WRONG_ELEMENT)
        if "multimodal_data" not in given:
            return _prompt(f"{where}.prompt_string", given["prompt_string"])
        if media is None:
            raise BadRequest(f"{where}: images have no embeddings here: send text or token ids")
        return text_with_images(where, given, media, are_read=are_read)

    if isinstance(given, str | dict):
        return [prompt(name, given)]
    if not isinstance(given, list):
        raise BadRequest(f"{name} must be text, token ids, or a list of such")
    if given and (
        any(isinstance(part, list | dict) for part in given)
        or all(isinstance(part, str) for part in given)
    ):
        if len(given) > MAX_ANSWERS:
            raise BadRequest(f"{name}: {len(given)} texts; at most {MAX_ANSWERS} in a request")
        return [prompt(f"{name}[{at}]", part) for at, part in enumerate(given)]
    return [prompt(name, given)]


def _prompt(where: str, given: object) -> Prompt:
    if not isinstance(given, str | list):
        raise BadRequest(f"{where} must be text or a list of token ids")
    if not given:
        raise BadRequest(f"{where}: the prompt is empty: at least one token is needed")
    if isinstance(given, str):
        return given
    return tuple(_part(f"{where}[{at}]", part) for at, part in enumerate(given))


def _part(where: str, part: object) -> int | str:
    if isinstance(part, float) and part.is_integer():
        return int(part)
    if isinstance(part, bool) or not isinstance(part, int | str):
        raise BadRequest(f"{where} must be text or a token id")
    return part


# ---- conversations


def conversation_of(
    request: ConversationRequest,
    settings: ChatSettings,
    images: ConversationImages | None = None,
    schema: str | None = None,
) -> Conversation:
    """Return the conversation of a request. Raises BadRequest.

    `images` gets its images (None: images are refused). `schema` is the JSON schema that the answer
    has to follow (None: no schema).
    """
    images = images or ConversationImages(are_read=False)
    points: list[CachePoint] = []
    messages: list[dict[str, Any]] = []
    # A refused question may be followed by the next one, without an answer between them.
    answered = [at + 1 for at, m in enumerate(request.messages[:-1]) if m.role == "assistant"]
    asked = [at for at, m in enumerate(request.messages) if m.role == "user"]
    n_old = max([0, *answered[-1:], *asked[-1:]])
    for at, message in enumerate(request.messages):
        is_last = at == len(request.messages) - 1
        template, own_points = template_message(
            at, message, images, is_last=is_last, is_old=at < n_old
        )
        if template is not None:
            points += [CachePoint("message", len(messages), end) for end in own_points]
            messages.append(template)
    if not messages:
        raise BadRequest("messages is empty: at least one message is needed")
    given_tools = request.tools or ()
    tools = [_function(at, tool) for at, tool in enumerate(given_tools)]
    points += [CachePoint("tool", at) for at, tool in enumerate(given_tools) if tool.cache_control]
    if len(points) > MOST_POINTS:
        raise BadRequest(
            f"{len(points)} parts have cache_control: at most {MOST_POINTS} of a request may"
        )
    return Conversation(
        tuple(messages),
        tuple(Tool(t.name, t.description, t.parameters or {}, bool(t.strict)) for t in tools),
        _choice(request.tool_choice, has_tools=bool(tools)),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=settings.reasoning_for(wish_of(request), request.reasoning_format),
        template_kwargs=settings.kwargs_with(request.chat_template_kwargs or {}),
        add_generation_prompt=request.add_generation_prompt is not False,
        continues=_continued(request, messages[-1], by_default=settings.continues),
        schema=schema,
        cache_points=tuple(points),
    )


def wish_of(request: ConversationRequest) -> ThinkingWish:
    """Return what the request says about thinking, in any form. Raises BadRequest."""
    kwargs = request.chat_template_kwargs or {}
    names = (
        *("enable_thinking", "think", "thinking"),
        *("reasoning", "reasoning_effort", "include_reasoning"),
    )
    return thinking_wish(
        {name: getattr(request, name) for name in names}
        | {"output_config.effort": (request.output_config or {}).get("effort")}
        | kwargs_forms("chat_template_kwargs", kwargs)
    )


def _continued(
    request: ConversationRequest, last: dict[str, Any], *, by_default: bool
) -> ContinuedPart | None:
    """Return the part of the last message that the answer continues; None if it is a new turn.

    The fields are those of vLLM and llama-server (llama.cpp #23012, #23089). Raises BadRequest for
    wishes that exclude each other, and for a last message that no answer can continue.
    """
    wished = request.continue_final_message
    is_answer = last["role"] == "assistant" and "tool_calls" not in last
    if wished is None:
        return "auto" if is_answer and by_default else None
    if wished is False:
        return None
    if request.add_generation_prompt:
        raise BadRequest(
            "continue_final_message and add_generation_prompt exclude each other: one goes on with "
            "the last message, the other begins a new one"
        )
    if not is_answer:
        kind = "has tool_calls" if last["role"] == "assistant" else f"is of role {last['role']}"
        raise BadRequest(
            f"continue_final_message: the last message {kind}; it has to be text of the assistant"
        )
    return "auto" if wished is True else wished


def _function(at: int, tool: ToolParameter) -> Function:
    if tool.type != "function" or tool.function is None:
        raise BadRequest(
            f"tools[{at}]: type {tool.type[:80]!r} is not supported; define a function, with type "
            "'function' and an object 'function'"
        )
    return tool.function


def _choice(choice: str | ChatToolChoice | None, *, has_tools: bool) -> ToolChoice:
    if isinstance(choice, ChatToolChoice):
        if choice.type not in _CHOICES:
            return _named_choice(choice)
        choice = choice.type
    if choice is None:
        return "auto" if has_tools else "none"
    if choice in _CHOICES:
        return _CHOICES[choice]
    raise BadRequest(f"tool_choice {choice[:80]!r} is not one of auto, none, required")


def _named_choice(choice: ChatToolChoice) -> ToolChoice:
    if choice.type in ("function", "tool") and (choice.function or choice.name):
        return Named(choice.function.name if choice.function else choice.name or "")
    if choice.type == "allowed_tools" and choice.allowed_tools is not None:
        names = []
        for at, tool in enumerate(choice.allowed_tools.tools):
            name = tool.function.name if tool.function is not None else tool.name
            if tool.type != "function" or name is None:
                raise BadRequest(
                    f"tool_choice.allowed_tools.tools[{at}]: type {tool.type[:80]!r} is not "
                    "supported; name a function"
                )
            names.append(name)
        return Allowed(tuple(names), choice.allowed_tools.mode == "required")
    raise BadRequest(
        f"tool_choice: type {choice.type[:80]!r} is not supported, or lacks its object; it is "
        "auto, none, required, function or allowed_tools"
    )
