"""Lists JSON Schema's keywords, and checks and rewrites patterns for llguidance. Pure.

https://json-schema.org/draft/2020-12/json-schema-validation
"""

from __future__ import annotations

import re
from collections.abc import Iterator

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})

# Keywords whose value is a schema, a list of schemas, or an object of schemas.
OF_SCHEMA = frozenset({"additionalProperties", "additionalItems", "items"})
OF_SCHEMAS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
OF_NAMES = frozenset({"properties", "patternProperties", "$defs", "definitions"})
DATA = frozenset({"const", "enum", "default", "examples"})
BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})

ANNOTATIONS = frozenset({"title", "description", "default", "examples", "deprecated"})

# Keywords that restrict values, and that llguidance ignores. Each comes with values that restrict
# nothing. `then` and `else` do nothing without `if`, and so do the bounds on `contains`.
IGNORED: dict[str, tuple[object, ...]] = {
    "$dynamicRef": (),
    "$recursiveRef": (),
    "contains": (),
    "contentEncoding": (),
    "contentMediaType": (),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "if": (),
    "not": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "uniqueItems": (False,),
}
# Formats of the specification that llguidance does not know. Other names are notes for the reader.
UNKNOWN_FORMATS = frozenset(
    {
        *("idn-email", "idn-hostname", "iri", "iri-reference", "json-pointer", "regex"),
        *("relative-json-pointer", "uri-reference", "uri-template"),
    }
)

LEAP_YEAR = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = rf"(?:[0-9]{{4}}-(?:0[13-9]|1[0-2]|02-(?:[01]|2[0-8]))|{LEAP_YEAR}-02-29)"
_TIME = r"[0-9]{2}:[0-9]{2}:[0-5]|23:59:60(?:\.[0-9]+)?(?:[zZ]|[+-]00:00)$"
# What llguidance's formats miss: only leap years have a 29th of February, and a leap second ends a
# day of UTC. A leap second is allowed only with an offset of zero.
FORMAT_PATTERNS = {
    "date": f"^{_DATE}",
    "date-time": f"^(?:{_DATE})[^tT]*[tT](?:{_TIME})",
    "time": f"^(?:{_TIME})",
}

_OUTSIDE = re.compile(r"\\c[A-Za-z]|\\k<|\\.|\(\?(?:<?[=!])|\[\^?|.", re.DOTALL)
_IN_CLASS = re.compile(r"\\c[A-Za-z]|\\.|.", re.DOTALL)


def pattern_tokens(pattern: str) -> Iterator[tuple[str, bool]]:
    """Yield each token, and whether it is in a class of characters or ends one.

    Brackets that open a class, `[` and `[^`, are outside of it. In a class, `[` is a character.
    """
    at, in_class = 0, False
    while match := (_IN_CLASS if in_class else _OUTSIDE).match(pattern, at):
        token, at = match[0], match.end()
        yield token, in_class
        in_class = token != "]" if in_class else token in ("[", "[^")


def fault_of_pattern(pattern: str) -> str | None:
    """Return why llguidance cannot follow a pattern, or None. It finds common reasons only."""
    for token, in_class in pattern_tokens(pattern):
        if in_class:
            continue
        if token.startswith("(?"):
            return "look-ahead and look-behind cannot be followed"
        if token == "\\k<" or re.fullmatch(r"\\[1-9]", token):
            return "references back to a group cannot be followed"
        if token in ("\\b", "\\B"):
            return "borders of words (\\b) cannot be followed"
    return None


# In a class, Rust's `regex` reads these characters, or two of them, as operators.
_OPERATORS = frozenset("[&~")
_EMPTY_CLASSES = {"[": "[^\\s\\S]", "[^": "[\\s\\S]"}


def translated_pattern(pattern: str) -> str:
    r"""Return a pattern of ECMA 262 as Rust's `regex` reads it.

    ECMA's white space includes U+FEFF. `\cC`, `\0` and, in a class, `\b` are control characters.
    `[]` matches nothing, `[^]` matches every character, and classes have no operators but ranges.
    """
    parts: list[str] = []
    for token, in_class in pattern_tokens(pattern):
        if token.startswith("\\c") and len(token) == 3:
            token = f"\\x{ord(token[2]) % 32:02x}"
        elif token == "\\s":
            token = "\\s\\uFEFF" if in_class else "[\\s\\uFEFF]"
        elif token == "\\S":
            token = "[^\\s\\uFEFF]"
        elif token == "\\0" or (in_class and token == "\\b"):
            token = "\\x00" if token == "\\0" else "\\x08"
        elif in_class and token == "]" and parts[-1] in _EMPTY_CLASSES:
            token = _EMPTY_CLASSES[parts.pop()]
        elif in_class and (token in _OPERATORS or (token == parts[-1] == "-")):
            token = f"\\{token}"
        parts.append(token)
    return "".join(parts)
