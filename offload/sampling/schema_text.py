"""Turns a schema of strings into regular expressions of the bare text, without quotes. Pure.

Models that write arguments between tags write strings as they are. There a JSON grammar cannot hold
them to their schema. The formats are those of RFC 3339 (dates and times, also durations), RFC 5321
(email, without quotes), RFC 1123 (hostname), RFC 4291 (ipv6, without dots), RFC 3986 (uri) and RFC
9562 (uuid). Some are narrower than their standard: a valid text may be refused, never the reverse.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from offload.sampling.schema_places import at_pointer
from offload.sampling.schema_words import ANNOTATIONS, LEAP_YEAR, pattern_tokens, translated_pattern

Rule = str | tuple[Literal["and", "or"], tuple["Rule", ...]]
"""A regular expression of the whole text as Rust's `regex` reads it; or rules that all hold, or of
which one holds."""

NEVER: Rule = "[^\\s\\S]"
_DEEPEST = 12  # most schemas within each other, or references one after another
_MOST_PARTS = 2000
_VALUES_OF_TYPE: dict[str, list[Any]] = {"null": [None], "boolean": [True, False]}
_LONGEST_ENUM = 500  # most constants beside other keywords

_MONTH_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:[0-9]{{4}}-{_MONTH_DAY}|{LEAP_YEAR}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:[zZ]|[+-]{_HOUR_MINUTE})"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_SECONDS = "T(?:[0-9]+S|[0-9]+M(?:[0-9]+S)?|[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?)"
_LABEL = "[A-Za-z0-9](?:-?[A-Za-z0-9]){0,31}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,2}}"
_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_{|}~-]{1,32}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_H = "[0-9A-Fa-f]{1,4}"
_COMPRESSED = [f"(?:{_H}:){{1,{7 - n}}}(?::{_H}){{1,{n}}}" for n in range(1, 7)]
_HEX = "[0-9A-Fa-f]"
_UNIT = f"(?:[A-Za-z0-9._~!$&'()*+,;=-]|%{_HEX}{{2}})"
_PCHAR = f"(?:{_UNIT}|[:@])"
_PATH = f"(?:/{_PCHAR}*)*"
FORMATS = {
    "date": _DATE,
    "date-time": f"{_DATE}[tT]{_TIME}",
    "time": _TIME,
    "duration": f"P(?:[0-9]+W|{_DAYS}(?:{_SECONDS})?|{_SECONDS})",
    "email": rf"{_ATOM}(?:\.{_ATOM})?@{_HOST}",
    "hostname": _HOST,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": "|".join(
        [f"(?:{_H}:){{7}}{_H}", f"(?:{_H}:){{1,7}}:", *_COMPRESSED, f":(?:(?::{_H}){{1,7}}|:)"]
    ),  # fmt: skip
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*:(?://{_UNIT}+(?::[0-9]{{1,5}})?{_PATH}|{_PCHAR}+{_PATH})"
    rf"(?:\?(?:{_PCHAR}|[/?])*)?(?:#(?:{_PCHAR}|[/?])*)?",
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
}


class BareText:
    """Reads the schemas of strings in one document. `faults` has places and reasons.

    A keyword with a fault is not a part of the rule.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.faults: dict[str, str] = {}
        self._root = root
        self._n_parts = 0

    def rule(self, node: Any, where: str, depth: int = 0) -> Rule | None:
        """Return the rule for strings that the schema `node` allows. None: any string."""
        self._n_parts += 1
        if not isinstance(node, Mapping):
            return NEVER if node is False else None
        if depth > _DEEPEST or self._n_parts > _MOST_PARTS:
            self.faults[where] = "it is nested too deeply or has too many parts for bare text"
            return None
        parts = [self._pattern(node, where), _length(node), self._enum(node, where)]
        form = FORMATS.get(str(node.get("format")))
        parts.append(None if form is None else f"(?:{form})")
        ref = node.get("$ref")
        if isinstance(ref, str):
            target = target_of(self._root, ref)
            if target is None:
                self.faults[f"{where}/$ref"] = "its target was not found"
            parts.append(self.rule(target, ref or "#", depth + 1))
        parts += [self.rule(p, f"{where}/allOf/{i}", depth + 1) for i, p in _listed(node, "allOf")]
        for name in ("anyOf", "oneOf"):
            branches = [
                self.rule(p, f"{where}/{name}/{i}", depth + 1)
                for i, p in _listed(node, name)
                if _may_be_text(p)
            ]
            if name in node and None not in branches:
                parts.append(joined("or", [b for b in branches if b is not None]))
        kept = [part for part in parts if part is not None]
        return joined("and", kept) if kept else None

    def choices(self, node: Any, depth: int = 0) -> list[Any] | None:
        """Return the JSON values that `node` lists; None if it has other rules or lists none."""
        if not isinstance(node, Mapping) or depth > _DEEPEST:
            return None
        words = set(node) - ANNOTATIONS - {"$defs", "definitions"}
        if words == {"type"}:
            return _VALUES_OF_TYPE.get(str(node["type"]))
        words -= {"type"}
        if len(words) != 1:
            return None
        (word,) = words
        if word == "const":
            return _of_type([node["const"]], node.get("type"))
        if word == "enum":
            return _of_type(node["enum"], node.get("type"))
        parts = [part for _, part in _listed(node, word)]
        if word == "$ref":
            parts = [target_of(self._root, str(node["$ref"]))]
        is_choice = word in ("$ref", "anyOf", "oneOf") or (word == "allOf" and len(parts) == 1)
        if not is_choice or not parts:
            return None
        every: list[Any] = []
        for part in parts:
            choices = self.choices(part, depth + 1)
            if choices is None:
                return None
            every += choices
        return _of_type(every, node.get("type"))

    def _pattern(self, node: Mapping[str, Any], where: str) -> Rule | None:
        pattern = node.get("pattern")
        if not isinstance(pattern, str):
            return None
        rule = searching(pattern)
        if rule is None:
            self.faults[f"{where}/pattern"] = "^ and $ can only stand at its ends"
        return rule

    def _enum(self, node: Mapping[str, Any], where: str) -> Rule | None:
        listed = [node["const"]] if "const" in node else node.get("enum")
        if not isinstance(listed, list):
            return None
        texts = [literal(value) for value in listed if isinstance(value, str)]
        if len(texts) > _LONGEST_ENUM:
            self.faults[f"{where}/enum"] = f"it has over {_LONGEST_ENUM} values beside other rules"
            return None
        return joined("or", texts)


def _of_type(values: Sequence[Any], kind: object) -> list[Any] | None:
    """Return the values, if `kind`, a schema's `type`, says no more than that they may be text."""
    if kind is None:
        return list(values)
    if kind == "string":
        return [value for value in values if isinstance(value, str)]
    return None


def _length(node: Mapping[str, Any]) -> Rule | None:
    least, most = node.get("minLength"), node.get("maxLength")
    least = int(least) if isinstance(least, int | float) else 0
    if isinstance(most, int | float):
        return f"(?s:.{{{least},{int(most)}}})" if least <= most else NEVER
    return f"(?s:.{{{least},}})" if least else None


def joined(kind: Literal["and", "or"], rules: Sequence[Rule]) -> Rule:
    """Return a rule of several. An empty `or` never holds."""
    if len(rules) == 1:
        return rules[0]
    return (kind, tuple(rules)) if rules else NEVER


def literal(text: str) -> str:
    """Return a regular expression that matches exactly `text`."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def searching(pattern: str) -> Rule | None:
    """Return the rule for texts in which a pattern of ECMA 262 is found.

    Returns None if `^` or `$` stands elsewhere than at the ends of the pattern's alternatives.
    """
    alternatives: list[list[str]] = [[]]
    depth = 0
    for token, in_class in pattern_tokens(translated_pattern(pattern)):
        if not in_class and token in ("(", ")"):
            depth += 1 if token == "(" else -1
        if token == "|" and depth == 0 and not in_class:
            alternatives.append([])
        else:
            alternatives[-1].append(token if in_class or token not in ("^", "$") else f"\0{token}")
    rules: list[Rule] = []
    for tokens in alternatives:
        begins, ends = tokens[:1] == ["\0^"], tokens[-1:] == ["\0$"]
        inner = tokens[begins : len(tokens) - ends]
        if any(token.startswith("\0") for token in inner):
            return None
        before, after = ("" if is_fixed else "(?s:.*)" for is_fixed in (begins, ends))
        rules.append(f"{before}(?:{''.join(inner)}){after}")
    return joined("or", rules)


def target_of(root: Mapping[str, Any], ref: str) -> Any:
    """Return the schema at a place that a reference names; None if there is none."""
    if ref in ("", "#"):
        return root
    target = at_pointer(root, ref) if ref.startswith("#/") else None
    return target if isinstance(target, Mapping | bool) else None


def lark_of_text(rule: Rule | None, end: str, marker: str, without: Sequence[str]) -> str:
    """Return a terminal of Lark: text by the rule up to `end`.

    The text has no `marker`, and matches none of the expressions `without`.
    """
    parts = [] if rule is None else [_lark(rule)]
    parts += [f"~{_regex(w)}" for w in (f"(?s:.*){literal(marker)}(?s:.*)", *without)]
    return f"({' & '.join(parts)}) {_regex(literal(end))}"


def _lark(rule: Rule) -> str:
    if isinstance(rule, str):
        return _regex(rule)
    kind, rules = rule
    return f"({(' & ' if kind == 'and' else ' | ').join(map(_lark, rules))})"


def _regex(pattern: str) -> str:
    """Return Lark's form of a regular expression, in which a slash ends it."""
    escaped = re.sub(
        r"\\.|/|\n", lambda m: {"/": "\\/", "\n": "\\n"}.get(m[0], m[0]), pattern, flags=re.DOTALL
    )
    return f"/{escaped}/"


def _listed(node: Mapping[str, Any], name: str) -> list[tuple[int, Any]]:
    value = node.get(name)
    return list(enumerate(value)) if isinstance(value, list) else []


def _may_be_text(node: Any) -> bool:
    """False for a schema whose `type` excludes strings."""
    kinds = node.get("type", "string") if isinstance(node, Mapping) else "string"
    return "string" in kinds
