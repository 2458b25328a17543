"""A request's sampling in libllama's terms; JSON schemas become grammars."""

from __future__ import annotations

import json
import math
from typing import Any

from offload.errors import BadRequest
from offload.sampling import (
    DEEPEST_GRAMMAR,
    MOST_GRAMMAR_BYTES,
    MOST_REPEATED,
    SamplingOptions,
)
from specoffload.session.generation import GenerateOptions

_HOTTEST = 1000.0
_LIMITS = (("minLength", "maxLength"), ("minItems", "maxItems"))


def sampling_of(options: GenerateOptions, n_ctx: int) -> SamplingOptions:
    """Raises BadRequest for a parameter out of range, a schema that is none, or one beside a
    grammar."""
    _check_numbers(options)
    if options.grammar is not None and options.json_schema is not None:
        raise BadRequest("a grammar and a JSON schema exclude each other: send one of them")
    grammar = options.grammar
    if options.json_schema is not None:
        grammar = grammar_of_schema(options.json_schema)
    last_n = options.repeat_last_n
    return SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        repeat_last_n=n_ctx if last_n < 0 else min(last_n, n_ctx),
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        seed=0xFFFFFFFF if options.seed is None else options.seed,
        grammar=grammar,
    )


def _check_numbers(options: GenerateOptions) -> None:
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repeat_penalty",
        "frequency_penalty",
        "presence_penalty",
    ):
        value = getattr(options, name)
        if not math.isfinite(value) or abs(value) > _HOTTEST:
            raise BadRequest(f"{name} {value}: must be a number up to {_HOTTEST:g}")
    if options.repeat_penalty <= 0:
        raise BadRequest(f"repeat_penalty {options.repeat_penalty}: must be over 0, 1 is off")


def grammar_of_schema(text: str) -> str:
    """GBNF of a JSON schema, by llama-cpp-python's converter. Raises BadRequest."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    if len(text) > MOST_GRAMMAR_BYTES:
        raise BadRequest(
            f"the JSON schema has {len(text)} characters; at most {MOST_GRAMMAR_BYTES} are read"
        )
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadRequest(f"the JSON schema is no JSON: {e}") from e
    if not isinstance(schema, dict):
        raise BadRequest("the JSON schema is no JSON object")
    _check_schema(schema, 0)
    try:
        return str(json_schema_to_gbnf(text))
    except Exception as e:  # a converter of others' making, on input of anybody's
        raise BadRequest(f"the JSON schema cannot be made a grammar: {e!r}") from e


def _check_schema(node: Any, depth: int) -> None:
    """The bounds that would make a grammar too large to follow."""
    if depth > DEEPEST_GRAMMAR:
        raise BadRequest(f"the JSON schema is nested over {DEEPEST_GRAMMAR} deep")
    if isinstance(node, list):
        for item in node:
            _check_schema(item, depth + 1)
    if not isinstance(node, dict):
        return
    if "type" in node or "items" in node or "pattern" in node:
        for low, high in _LIMITS:
            _check_limits(node, low, high)
    for value in node.values():
        _check_schema(value, depth + 1)


def _check_limits(node: dict[str, Any], low: str, high: str) -> None:
    for name in (low, high):
        value = node.get(name, 0)
        if not isinstance(value, int) or not 0 <= value <= MOST_REPEATED:
            raise BadRequest(
                f"the JSON schema's {name} is {value!r}: it must be a whole number up to "
                f"{MOST_REPEATED}"
            )
    if high in node and node[high] < node.get(low, 0):
        raise BadRequest(f"the JSON schema's {low} {node[low]} is over its {high} {node[high]}")
