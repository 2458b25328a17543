"""Request bodies are read into GenerateOptions, without a server."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from offload.errors import BadRequest
from offload.sampling.json_schema import ignored_places
from specoffload.config.flag import Flag
from specoffload.config.sampling_flags import SAMPLING
from specoffload.generation.generation import GenerateOptions
from specoffload.server.api.body import renamed
from specoffload.server.api.parameters import MAX_STOPS, generate_options, structure_name
from specoffload.server.api.requests import ChatRequest, CompletionRequest

DEFAULTS = GenerateOptions(temperature=0.75, n_predict=9)


def _options(**fields: Any) -> GenerateOptions:
    return generate_options(CompletionRequest(prompt="x", **fields), DEFAULTS)[0]


def test_minus_one_asks_for_the_rest_of_the_context_and_for_a_random_seed() -> None:
    assert _options(max_tokens=-1).n_predict is None
    assert _options(seed=-1).seed is None


def test_limits_of_drafts_are_read_under_llama_servers_names() -> None:
    body = {"prompt": "x", "speculative.n_max": 5, "speculative.n_min": 2, "speculative.p_min": 0.5}
    request = CompletionRequest(**renamed(body, CompletionRequest.model_fields))
    got = generate_options(request, DEFAULTS)[0]
    assert (got.draft_max, got.draft_min, got.draft_p_min) == (5, 2, 0.5)
    for wrong in ({"draft_min": -1}, {"draft_p_min": 1.5}):
        with pytest.raises(ValidationError):
            _options(**wrong)


@given(st.integers(-(2**63), 2**63 - 1).filter(lambda seed: seed != -1))
def test_a_seed_becomes_one_that_libllama_does_not_take_for_random(seed: int) -> None:
    got = _options(seed=seed).seed
    assert got is not None
    assert 0 <= got < 0xFFFFFFFF
    assert got == seed % 0xFFFFFFFF


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},  # llama-server's
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


def test_an_empty_grammar_and_a_text_format_ask_for_nothing() -> None:
    assert _options(grammar="", json_schema={}, response_format={"type": "text"}) == DEFAULTS


@pytest.mark.parametrize("flag", [f for f in SAMPLING if f.request], ids=lambda f: f.request)
def test_a_request_has_every_sampling_flag_with_its_range(flag: Flag) -> None:
    assert flag.request in CompletionRequest.model_fields
    if flag.least is not None and flag.most is not None:
        for outside in (flag.least - 1, flag.most + 1):
            with pytest.raises(ValidationError):
                CompletionRequest(prompt="x", **{flag.request: outside})
        assert getattr(_options(**{flag.request: flag.most}), flag.field) == flag.most


def test_samplers_biases_and_breakers_are_read_in_each_form_that_is_sent() -> None:
    assert _options(samplers=["top-k", "temp"]).samplers == ("top_k", "temperature")
    assert _options(samplers="kt").samplers == ("top_k", "temperature")
    request = CompletionRequest(prompt="x", samplers=["tfs_z", "top_k", "magic"])
    found, ignored = generate_options(request, DEFAULTS)
    assert found.samplers == ("top_k",)
    assert ignored == ("samplers[0]", "samplers[2]")
    assert _options(logit_bias={"7": -1, "Hello": False}).logit_bias == (
        (7, -1.0),
        ("Hello", -math.inf),
    )
    assert _options(dry_sequence_breakers=["a"]).dry_sequence_breakers == ("a",)
    assert _options(dry_sequence_breakers='["a", "b"]').dry_sequence_breakers == ("a", "b")
    for bad in ("a", "[1]", "[" * 100_000):
        with pytest.raises(BadRequest, match="must be a list of texts"):
            _options(dry_sequence_breakers=bad)
    with pytest.raises(BadRequest, match="at most 64"):
        _options(samplers="k" * 65)


def test_the_form_that_a_request_asks_for_stands_instead_of_the_default_one() -> None:
    defaults = GenerateOptions(grammar='root ::= "a"')
    request = CompletionRequest(prompt="x", json_schema={"type": "object"})
    found, _ = generate_options(request, defaults)
    assert (found.grammar, found.json_schema) == (None, '{"type": "object"}')
    assert generate_options(CompletionRequest(prompt="x"), defaults) == (defaults, ())


def test_empty_stops_end_nothing_and_too_many_or_too_long_ones_are_refused() -> None:
    assert _options(stop=["", "a", ""]).stop == ("a",)
    assert _options(stop="").stop == ()
    assert len(_options(stop=["a"] * MAX_STOPS).stop) == MAX_STOPS
    for stops in (["a"] * (MAX_STOPS + 1), ["a" * 1025]):
        with pytest.raises(BadRequest, match="at most 256"):
            _options(stop=stops)


@pytest.mark.parametrize(
    ("value", "ok"), [(4.0, True), (4, True), (4.5, False), (True, False), ("4", False)]
)
def test_a_whole_number_may_be_written_as_json_may_write_it(value: object, ok: bool) -> None:
    if ok:
        assert _options(top_k=value).top_k == 4
    else:
        with pytest.raises(ValidationError):
            _options(top_k=value)


@pytest.mark.parametrize(("given", "budget"), [(5, 5), (0, 0), (-1, None), (None, 9)])
def test_a_request_may_limit_its_reasoning(given: int | None, budget: int | None) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "thinking_budget_tokens": given}
    request = ChatRequest.model_validate(body)
    options, idle = generate_options(request, GenerateOptions(reasoning_budget=9))
    assert (options.reasoning_budget, idle) == (budget, ())


def test_a_server_that_keeps_no_prompts_keeps_those_of_requests_that_ask() -> None:
    defaults = GenerateOptions(cache_prompt=False)
    for asked, kept in ((None, False), (True, True), (False, False)):
        request = CompletionRequest(prompt="x", cache_prompt=asked)
        assert generate_options(request, defaults)[0].cache_prompt is kept


def test_keywords_of_a_schema_without_effect_are_named() -> None:
    schema = {"type": "array", "items": {"not": {"const": 1}}, "uniqueItems": True}
    for fields, name in (
        ({"json_schema": schema}, "json_schema"),
        ({"response_format": {"type": "json_schema", "schema": schema}}, "response_format"),
    ):
        request = CompletionRequest.model_validate({"prompt": "x", **fields})
        options, ignored = generate_options(request, DEFAULTS)
        assert (ignored, structure_name(request)) == ((), name)
        assert set(ignored_places(options.json_schema or "")) == {"#/items/not", "#/uniqueItems"}
