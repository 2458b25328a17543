"""A request's sampling in libllama's terms; JSON schemas become grammars."""

from __future__ import annotations

import json

from offload.errors import BadRequest
from offload.ggml.sampler import SamplingOptions
from specoffload.generation import GenerateOptions


def sampling_of(options: GenerateOptions) -> SamplingOptions:
    """Raises BadRequest for a schema that is none, or one beside a grammar."""
    if options.grammar is not None and options.json_schema is not None:
        raise BadRequest("a grammar and a JSON schema exclude each other: send one of them")
    grammar = options.grammar
    if options.json_schema is not None:
        grammar = grammar_of_schema(options.json_schema)
    return SamplingOptions(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repeat_penalty=options.repeat_penalty,
        repeat_last_n=options.repeat_last_n,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        seed=0xFFFFFFFF if options.seed is None else options.seed,
        grammar=grammar,
    )


def grammar_of_schema(text: str) -> str:
    """GBNF of a JSON schema, by llama-cpp-python's converter. Raises BadRequest."""
    from llama_cpp.llama_grammar import json_schema_to_gbnf

    try:
        if not isinstance(json.loads(text), dict):
            raise ValueError("it is no JSON object")
        return str(json_schema_to_gbnf(text))
    except (ValueError, TypeError, KeyError, AssertionError, RecursionError) as e:
        raise BadRequest(f"the JSON schema cannot be made a grammar: {e}") from e
