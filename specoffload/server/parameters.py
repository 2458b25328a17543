"""From a request to GenerateOptions. Pure.

Nothing is ignored silently: a parameter is honoured, or cannot change the answer (INERT), or is
refused by name unless it has the value that means "off" (REFUSED); an unknown one is refused too.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from offload.errors import BadRequest
from specoffload.config.flags import sampling
from specoffload.config.flags.flag import FLOAT, INT, SWITCH
from specoffload.server.wire import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
)
from specoffload.session.generation import GenerateOptions

# Bookkeeping of OpenAI's platform and hints about speed: the answer is the same without them.
INERT = frozenset(
    {
        "cache_prompt",
        "metadata",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# name -> the values besides null that ask for nothing.
REFUSED: Mapping[str, tuple[object, ...]] = {
    "add_generation_prompt": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "dry_multiplier": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "id_slot": (-1,),
    "logit_bias": ({}, []),
    "logprobs": (False,),
    "lora": ([],),
    "min_tokens": (0,),
    "mirostat": (0,),
    "modalities": (["text"],),
    "n": (1,),
    "n_probs": (0,),
    "prediction": (),
    "reasoning_effort": (),
    "reasoning_format": ("none",),
    "repetition_penalty": (1, 1.0),
    "return_progress": (False,),
    "samplers": (),
    "stop_token_ids": ([],),
    "suffix": ("",),
    "timings_per_token": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "typical_p": (1, 1.0),
    "verbosity": (),
    "web_search_options": (),
    "xtc_probability": (0, 0.0),
}

# Fields that go as they are into the GenerateOptions of the same meaning, by its name.
_PASSED_ON = {
    flag.request: flag.field
    for flag in sampling.FLAGS
    if flag.request and flag.kind in (INT, FLOAT, SWITCH)
}
_ROLES = ("system", "developer", "user", "assistant")
_N_SEEDS = 2**32 - 1  # libllama's seeds are 32 bits, and 0xFFFFFFFF means "random"


def check_extra(request: BaseModel, refused: Mapping[str, tuple[object, ...]] = REFUSED) -> None:
    """Raises BadRequest for a parameter that is set and cannot be honoured."""
    for name, value in (request.model_extra or {}).items():
        if value is None or name in INERT:
            continue
        if name not in refused:
            known = [*type(request).model_fields, *refused, *INERT]
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise BadRequest(f"unknown parameter {name}{hint}")
        if not any(type(value) is type(off) and value == off for off in refused[name]):
            raise BadRequest(f"{name} is not supported by this server: leave it out")


def generate_options(request: GenerationRequest, defaults: GenerateOptions) -> GenerateOptions:
    """`defaults` where the request says nothing. Raises BadRequest."""
    check_extra(request)
    if request.stream_options is not None and not request.stream:
        raise BadRequest("stream_options has no effect without stream: true")
    changes: dict[str, Any] = {
        field: value
        for name, field in _PASSED_ON.items()
        if (value := getattr(request, name)) is not None
    }
    structure = _structure(request)
    if structure:  # instead of the default's, whichever form that has
        changes |= {"grammar": None, "json_schema": None, **structure}
    if request.stop is not None:
        changes["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.seed is not None and request.seed != -1:
        changes["seed"] = request.seed % _N_SEEDS
    n_predict = _n_predict(request)
    if n_predict is not None:
        changes["n_predict"] = None if n_predict == -1 else n_predict
    return replace(defaults, **changes)


def _structure(request: GenerationRequest) -> dict[str, Any]:
    """The form that the answer must have: one at most of grammar, json_schema, response_format."""
    found: dict[str, Any] = {}
    if request.grammar:
        found["grammar"] = ("grammar", request.grammar)
    if request.json_schema:
        found["json_schema"] = ("json_schema", json.dumps(request.json_schema))
    schema = _schema_of(request.response_format or {"type": "text"})
    if schema is not None:
        found["response_format"] = ("json_schema", json.dumps(schema))
    if len(found) > 1:
        raise BadRequest(f"{' and '.join(found)} exclude each other: send one of them")
    return dict(found.values())


def _schema_of(response_format: dict[str, Any]) -> dict[str, Any] | None:
    """OpenAI's response_format, and llama-server's `schema` beside json_object."""
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = response_format.get("schema", {"type": "object"})
    elif kind == "json_schema":
        named = response_format.get("json_schema")
        schema = named.get("schema") if isinstance(named, dict) else None
    else:
        raise BadRequest(
            f"response_format: type {kind!r} is not one of text, json_object, json_schema"
        )
    if not isinstance(schema, dict):
        raise BadRequest("response_format: it needs json_schema.schema, a JSON object")
    return schema


def _n_predict(request: GenerationRequest) -> int | None:
    limits = {"max_tokens": request.max_tokens}
    if isinstance(request, ChatRequest):
        limits["max_completion_tokens"] = request.max_completion_tokens
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in given.items():
        if value == 0:
            raise BadRequest(f"{name} is 0: at least one token must be asked for")
    if len(set(given.values())) > 1:
        raise BadRequest(f"max_tokens and max_completion_tokens differ: {given}; send one of them")
    return next(iter(given.values()), None)


def completion_prompt(request: CompletionRequest) -> str | tuple[int, ...]:
    """The one prompt of a completion request: text or token ids. Raises BadRequest."""
    prompt: object = request.prompt
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        if len(prompt) > 1:
            raise BadRequest(f"{len(prompt)} prompts in one request: send one request for each")
        prompt = prompt[0]
    if not prompt:
        raise BadRequest("the prompt is empty: at least one token is needed")
    if isinstance(prompt, str):
        return prompt
    assert isinstance(prompt, list)
    if request.echo:
        raise BadRequest("echo needs the prompt as text, not as token ids")
    return tuple(prompt)


def chat_messages(messages: list[Message]) -> tuple[dict[str, str], ...]:
    """Messages as a chat template takes them. Raises BadRequest."""
    if not messages:
        raise BadRequest("messages is empty: at least one message is needed")
    return tuple(_chat_message(at, message) for at, message in enumerate(messages))


def _chat_message(at: int, message: Message) -> dict[str, str]:
    where = f"messages[{at}]"
    if message.role not in _ROLES:
        raise BadRequest(f"{where}: role {message.role!r} is not one of {', '.join(_ROLES)}")
    # Templates know "system"; OpenAI's newer name for it is "developer".
    role = "system" if message.role == "developer" else message.role
    result = {"role": role, "content": _content(where, message)}
    for name, value in (message.model_extra or {}).items():
        if value is None or value == []:
            continue  # clients send back what they were given, nulls and empty lists included
        if name not in ("name", "reasoning_content") or not isinstance(value, str):
            raise BadRequest(f"{where}: {name} is not supported by this server")
        result[name] = value
    return result


def _content(where: str, message: Message) -> str:
    if message.content is None:
        raise BadRequest(f"{where}: content is missing")
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if part.type != "text" or part.text is None:
            raise BadRequest(f"{where}: a part of type {part.type!r} is not supported, only text")
        texts.append(part.text)
    return "".join(texts)
