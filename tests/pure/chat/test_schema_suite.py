"""The JSON-Schema-Test-Suite: no schema is enforced wrongly without a word.

Each test of the suite has one of four outcomes: the answer is allowed and valid, or refused and
invalid; the schema is refused, or a keyword without effect is named; or the answer is valid and
refused for a reason of `NARROWER`.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from byte_grammars import tokens
from llguidance import LLMatcher

from offload.errors import BadRequest
from offload.sampling.grammar import Grammar
from offload.sampling.json_schema import adapted

ROOT = Path(__file__).parents[3]
SUITE = ROOT / "tests/fixtures/json_schema_suite/suite.jsonl.gz"
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}

# Valid answers that are refused, by file: parts of their groups' descriptions. A model can write
# each of these values in another way, or never needs it.
NARROWER = {
    "allOf": ("allOf",),  # properties come in the order of the schema
    "const": ("matches integer", "match true", "zero-like", "with object", "float and integers"),
    "enum": ("match false", "match true", "match [false]", "match [true]"),  # 1.0 for 1
    "type": ("integer type",),  # 1.0 for 1
    "format": ("format",),  # formats are enforced, not only noted
    "optional/bignum": ("integer comparison",),  # numbers beyond 10^18
    "optional/float-overflow": ("multiples of 0.5",),
    "optional/format/date-time": ("date-time strings",),  # leap seconds with an offset
    "optional/format/time": ("time strings",),
    "optional/format/email": ("e-mail",),  # quoted names
    "optional/format/ipv6": ("IPv6",),  # with an IPv4 address at the end
    "unevaluatedProperties": ("with anyOf", "annotations from if without"),
}


@cache
def groups() -> dict[str, list[Any]]:
    """The groups of tests by draft and file."""
    found = defaultdict(list)
    with gzip.open(SUITE, "rt", encoding="utf-8") as lines:
        for line in lines:
            draft, file, description, schema, tests = json.loads(line)
            if draft == "draft7" and isinstance(schema, dict):
                schema = DRAFT_7 | schema
            found[f"{draft}/{file}"].append((description, schema, tests))
    return found


def allows(grammar: Grammar, text: str) -> bool:
    matcher = grammar._matcher.deep_copy()
    found = list(text.encode())
    if matcher.validate_tokens(found) < len(found):
        return False
    matcher.consume_tokens(found)
    return bool(matcher.is_accepting())


def outcomes(case: str, *, closes: bool = False) -> tuple[Counter[str], list[str]]:
    """The number of tests by outcome, and the descriptions of wrong ones."""
    counts: Counter[str] = Counter()
    wrong = []
    narrower = NARROWER.get(case.partition("/")[2], ())
    for description, schema, tests in groups()[case]:
        ignored: tuple[str, ...] = ()
        grammar = None
        try:
            if not isinstance(schema, dict):
                raise BadRequest("the JSON schema must be a JSON object")
            found = adapted(schema, closes=closes)
            ignored = found.ignored
            source = LLMatcher.grammar_from_json_schema(json.dumps(found.schema))
            grammar = Grammar(tokens(), source, "JSON schema")
        except BadRequest:
            pass  # said
        for name, value, is_valid in tests:
            if grammar is None:
                counts["said"] += 1
            elif allows(grammar, json.dumps(value, ensure_ascii=False)) == is_valid:
                counts["accepted" if is_valid else "refused"] += 1
            elif ignored:
                counts["said"] += 1
            elif is_valid and any(part in description for part in narrower):
                counts["narrower"] += 1
            else:
                wrong.append(f"{description}: {name}")
    return counts, wrong


@pytest.mark.parametrize("case", sorted(groups()))
def test_no_schema_is_enforced_wrongly_without_a_word(case: str) -> None:
    counts, wrong = outcomes(case)
    assert wrong == []
    assert counts.total() == sum(len(tests) for _, _, tests in groups()[case])


def test_closed_objects_allow_nothing_that_the_schema_forbids() -> None:
    """As requests read schemas. Only objects with other properties are refused in addition."""
    n_refused = 0
    for case in sorted(groups()):
        if case.startswith("draft2020-12/"):
            _, wrong = outcomes(case, closes=True)
            n_refused += len(wrong)
            for group in groups()[case]:
                valid = {f"{group[0]}: {name}" for name, _, is_valid in group[2] if is_valid}
                mine = [w for w in wrong if w.startswith(f"{group[0]}: ")]
                assert set(mine) <= valid
    assert n_refused == 6


def table() -> list[str]:
    """The rows of the table in docs/sampling.md."""
    rows = defaultdict(Counter)
    for case in groups():
        draft, _, file = case.partition("/")
        name = "draft 7" if draft == "draft7" else f"`{file}`"
        if file.startswith("optional/"):
            name = f"{'draft 7, ' if draft == 'draft7' else ''}optional tests"
            name = "optional tests of formats" if "format" in file and draft != "draft7" else name
        rows[name] += outcomes(case)[0]
    return [
        f"| {name} | "
        + " | ".join(str(row[key]) for key in ("accepted", "refused", "said", "narrower"))
        + " |"
        for name, row in rows.items()
    ]


def test_the_page_has_the_outcomes() -> None:
    page = (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    part = re.search(r"<!-- schema suite -->\n+(.*?)\n+<!-- end -->", page, re.DOTALL)
    assert part is not None
    assert part[1].splitlines()[2:] == table()
