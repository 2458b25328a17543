"""From request bodies to GenerateOptions, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from offload.errors import BadRequest
from specoffload.config.flags import sampling
from specoffload.config.flags.flag import Flag
from specoffload.server.parameters import INERT, REFUSED, generate_options
from specoffload.server.wire import ChatRequest, CompletionRequest
from specoffload.session.generation import GenerateOptions

DEFAULTS = GenerateOptions(temperature=0.75, n_predict=9)


def _options(**fields: Any) -> GenerateOptions:
    return generate_options(CompletionRequest(prompt="x", **fields), DEFAULTS)


def test_what_is_not_said_is_the_default() -> None:
    assert _options() == DEFAULTS


def test_minus_one_asks_for_the_rest_of_the_context_and_for_a_random_seed() -> None:
    assert _options(max_tokens=-1).n_predict is None
    assert _options(seed=-1).seed is None


@given(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1))
def test_a_seed_becomes_one_that_libllama_does_not_take_for_random(seed: int) -> None:
    got = _options(seed=seed).seed
    assert got is not None
    assert 0 <= got < 0xFFFFFFFF
    assert got == seed % 0xFFFFFFFF


def test_both_names_of_the_token_limit_may_say_the_same() -> None:
    request = ChatRequest(messages=[], max_tokens=3, max_completion_tokens=3)
    assert generate_options(request, DEFAULTS).n_predict == 3


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_each_refused_parameter_is_refused_when_set_and_accepted_when_off(name: str) -> None:
    for off in (None, *REFUSED[name]):
        assert _options(**{name: off}) == DEFAULTS
    for value in ("something", 7, [1], {"a": 1}, not REFUSED[name][0] if REFUSED[name] else True):
        with pytest.raises(BadRequest, match=f"^{name} is not supported"):
            _options(**{name: value})


@pytest.mark.parametrize("name", sorted(INERT))
def test_parameters_that_cannot_change_the_answer_are_accepted(name: str) -> None:
    assert _options(**{name: "anything"}) == DEFAULTS


@given(st.text("abcdefghijklmnopqrstuvwxyz_", min_size=1, max_size=20))
def test_a_parameter_nobody_knows_is_refused_by_its_name(name: str) -> None:
    known = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *INERT, *REFUSED}
    if name in known or hasattr(CompletionRequest, name):
        return
    with pytest.raises(BadRequest, match=f"unknown parameter {name}"):
        _options(**{name: 1})


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": SCHEMA},
            }
        },
    ],
)
def test_every_way_to_send_a_schema_means_the_same(fields: dict[str, Any]) -> None:
    got = _options(**fields)
    assert got.json_schema is not None
    assert json.loads(got.json_schema) == SCHEMA
    assert got.grammar is None


def test_penalties_and_grammar_reach_the_generator() -> None:
    got = _options(
        grammar='root ::= "a"', presence_penalty=0.5, frequency_penalty=-0.5, repeat_last_n=-1
    )
    assert got.grammar == 'root ::= "a"'
    assert (got.presence_penalty, got.frequency_penalty, got.repeat_last_n) == (0.5, -0.5, -1)


def test_an_empty_grammar_and_a_text_format_ask_for_nothing() -> None:
    assert _options(grammar="", json_schema={}, response_format={"type": "text"}) == DEFAULTS


@pytest.mark.parametrize("flag", [f for f in sampling.FLAGS if f.request], ids=lambda f: f.request)
def test_a_request_has_every_sampling_flag_with_its_range(flag: Flag) -> None:
    assert flag.request in CompletionRequest.model_fields
    if flag.least is not None and flag.most is not None:
        for outside in (flag.least - 1, flag.most + 1):
            with pytest.raises(ValidationError):
                CompletionRequest(prompt="x", **{flag.request: outside})
        assert getattr(_options(**{flag.request: flag.most}), flag.field) == flag.most


def test_the_form_that_a_request_asks_for_stands_instead_of_the_default_one() -> None:
    defaults = GenerateOptions(grammar='root ::= "a"')
    request = CompletionRequest(prompt="x", json_schema={"type": "object"})
    found = generate_options(request, defaults)
    assert (found.grammar, found.json_schema) == (None, '{"type": "object"}')
    assert generate_options(CompletionRequest(prompt="x"), defaults) == defaults
