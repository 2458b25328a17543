"""Asks llguidance whether it can follow a JSON schema, without a vocabulary. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher

_MOST_WORDS = 200


def fault_of_schema(schema: Mapping[str, Any]) -> str | None:
    """Return why an adapted schema cannot be followed, or None. Takes a few milliseconds."""
    try:
        fault = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    except ValueError as e:  # a number beyond a float's range, or half a character
        fault = str(e)
    return " ".join(fault.partition("<state>")[0].split())[:_MOST_WORDS] or None
