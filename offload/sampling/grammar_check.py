"""Compiles a grammar without a vocabulary, so that its time is known before an engine does it."""

from __future__ import annotations

from llguidance import LLMatcher

from offload.sampling.gbnf import lark_of_gbnf
from offload.sampling.json_schema import ignored_places, read_schema
from offload.sampling.schema_check import fault_of_schema


def compile_once(gbnf: str | None, json_schema: str | None) -> tuple[str, ...]:
    """Compile one of the two; returns the places of a schema's keywords without effect.

    It takes about as long as with a vocabulary, and is not limited here. Raises BadRequest for
    GBNF that does not parse and a schema that cannot be read. Other faults are for the engine to
    say, which knows the model's tokens.
    """
    if gbnf is not None:
        LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(lark_of_gbnf(gbnf, _any_token)))
    if json_schema is None:
        return ()
    places = ignored_places(json_schema)
    fault_of_schema(read_schema(json_schema))
    return places


def _any_token(words: str) -> int:
    return 0
