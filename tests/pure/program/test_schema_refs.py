"""References of a JSON schema: what they name, and what their steps may cost."""

from __future__ import annotations

from typing import Any

import pytest

from offload.errors import BadRequest
from offload.sampling.json_schema import adapted
from offload.sampling.schema_places import at_pointer
from offload.sampling.schema_refs import References, StepLimit


def test_an_anchor_names_the_first_part_that_has_it() -> None:
    first, second = {"$anchor": "a", "type": "string"}, {"$anchor": "a", "type": "null"}
    found = References({"allOf": [{"not": first}, second], "items": {"$anchor": "b"}})
    assert found.resolved("#a") is first
    assert found.resolved("#b") == {"$anchor": "b"}
    assert found.resolved("#c") is None


def test_a_reference_may_begin_with_the_documents_own_identifier() -> None:
    root: dict[str, Any] = {"$id": "https://example.org/s", "$defs": {"a": {"type": "null"}}}
    found = References(root)
    assert found.resolved("https://example.org/s#/$defs/a") == {"type": "null"}
    assert found.resolved("#") is root
    assert found.resolved("https://example.org/other#/$defs/a") is None


def test_a_document_with_other_identifiers_resolves_nothing() -> None:
    assert References({"items": {"$id": "x", "$anchor": "a"}}).resolved("#a") is None


@pytest.mark.parametrize("index", ["²", "9" * 5000, "-1", "01", "1_0", ""])
def test_a_pointer_with_a_strange_index_names_nothing(index: str) -> None:
    assert at_pointer({"a": [True, False]}, f"#/a/{index}") is None


def test_a_required_that_is_a_truth_value_breaks_no_proof() -> None:
    branches = [
        {"type": "object", "properties": {"a": True}, "required": ["b"]},
        {"type": "object", "properties": {"a": True}, "required": True},
    ]
    assert adapted({"oneOf": branches}).ignored == ()


def test_steps_are_counted_up_to_their_limit() -> None:
    steps = StepLimit(3)
    steps.take(3)
    with pytest.raises(BadRequest, match="over 3 steps"):
        steps.take()
