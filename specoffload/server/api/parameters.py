"""From a request to GenerateOptions. Pure.

Nothing is ignored silently: names that no field has are for `body.names` to judge.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from offload.errors import BadRequest
from offload.sampling.options import sampler_letters, sampler_names
from specoffload.config.flags import sampling
from specoffload.config.flags.flag import FLOAT, INT, SWITCH
from specoffload.server.api.wire import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    InfillRequest,
    NativeRequest,
)
from specoffload.session.generation import N_SEEDS, GenerateOptions
from specoffload.session.sampling import read_logit_bias

# Fields that go as they are into the GenerateOptions of the same meaning, by its name.
_PASSED_ON = {
    flag.request: flag.field
    for flag in sampling.FLAGS
    if flag.request and flag.kind in (INT, FLOAT, SWITCH)
}
MAX_STOPS = 256  # each is looked for at every piece of the answer
MAX_STOP_LETTERS = 1024
MAX_SAMPLERS = 64
# Parameters that are fields of the options under the same name.
_ALIKE = (
    *("cache_prompt", "id_slot", "timings_per_token"),
    *("draft_max", "draft_min", "draft_p_min"),
)


def generate_options(
    request: GenerationRequest, defaults: GenerateOptions
) -> tuple[GenerateOptions, tuple[str, ...]]:
    """`defaults` where the request says nothing; and parameters that have no effect beside others.

    Raises BadRequest.
    """
    idle = []
    if request.stream_options is not None and not request.stream:
        idle.append("stream_options")
    changes: dict[str, Any] = {
        field: value
        for name, field in _PASSED_ON.items()
        if (value := getattr(request, name)) is not None
    }
    for name in _ALIKE:
        if (value := getattr(request, name)) is not None:
            changes[name] = value
    if request.samplers is not None:
        changes["samplers"], unknown = _samplers(request.samplers)
        idle += unknown
    if request.dry_sequence_breakers is not None:
        changes["dry_sequence_breakers"] = _breakers(request.dry_sequence_breakers)
    if request.logit_bias is not None:
        changes["logit_bias"] = read_logit_bias(request.logit_bias)
    structure = _structure(request)
    if structure:  # instead of the default's, whichever form that has
        changes |= {"grammar": None, "json_schema": None, **structure}
    if request.stop is not None:
        changes["stop"] = _stops(request.stop)
    if request.seed is not None and request.seed != -1:
        changes["seed"] = request.seed % N_SEEDS
    limit = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if limit not in (None, request.max_completion_tokens):
            idle.append("max_tokens")  # OpenAI's older name for it
        limit = request.max_completion_tokens
    if limit is not None:
        changes["n_predict"] = None if limit == -1 else limit
    if isinstance(request, ChatRequest):
        if request.n is not None:
            changes["n"] = request.n
        if (budget := request.thinking_budget_tokens) is not None:
            changes["reasoning_budget"] = None if budget < 0 else budget
    wished, vain = _probabilities(request)
    return replace(defaults, **changes, **wished), (*idle, *vain)


def _probabilities(request: GenerationRequest) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options of probabilities that are told beside tokens, and names without effect."""
    if isinstance(request, ChatRequest):
        if request.logprobs:
            return {"n_probs": max(1, request.top_logprobs or 0)}, ()
        return {}, ("top_logprobs",) if request.top_logprobs else ()
    if isinstance(request, CompletionRequest):
        if request.logprobs is None or request.logprobs is False:
            return {}, ()
        n = max(1, request.logprobs)
        return {"n_probs": n, **({"prompt_logprobs": n} if request.echo else {})}, ()
    if not isinstance(request, NativeRequest | InfillRequest):
        return {}, ()
    if not request.n_probs:
        return {}, ("post_sampling_probs",) if request.post_sampling_probs else ()
    return {
        "n_probs": request.n_probs,
        "post_sampling_probs": bool(request.post_sampling_probs),
    }, ()


def _samplers(given: str | list[str]) -> tuple[tuple[str, ...], list[str]]:
    """The samplers of names or llama.cpp's letters; others are passed over, as there, and named.

    Raises BadRequest for more than any chain has.
    """
    if len(given) > MAX_SAMPLERS:
        raise BadRequest(f"samplers has {len(given)} names: at most {MAX_SAMPLERS}")
    read = sampler_letters if isinstance(given, str) else lambda name: sampler_names([name])
    found: list[str] = []
    unknown = []
    for i, name in enumerate(given):
        try:
            found += read(name)
        except BadRequest:
            unknown.append(f"samplers[{i}]")
    return tuple(found), unknown


def _breakers(given: str | list[str]) -> tuple[str, ...]:
    """Texts that end a repetition. Raises BadRequest for what is no list of texts."""
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
    """The texts that end the answer; empty ones end nothing. Raises BadRequest for too many."""
    stops = tuple(filter(None, [given] if isinstance(given, str) else given))
    if len(stops) > MAX_STOPS or any(len(stop) > MAX_STOP_LETTERS for stop in stops):
        longest = max(len(stop) for stop in stops)
        raise BadRequest(
            f"stop has {len(stops)} texts, the longest of {longest} letters: at most {MAX_STOPS} "
            f"of {MAX_STOP_LETTERS} letters are looked for"
        )
    return stops


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
