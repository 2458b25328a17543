"""Requests of other programs are served, and a header names their fields without effect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from fake_generator import FakeFactory
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict
from running import Running, StartServer, http

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings
from specoffload.server.api.billing_line import BILLING_LINE
from specoffload.server.api.body import (
    ALIASES,
    REFUSED,
    REMEDIES,
    header_value,
    ignored_names,
    renamed,
)
from specoffload.server.api.message_input import CountRequest, MessagesRequest
from specoffload.server.api.requests import ChatRequest, CompletionRequest
from specoffload.server.api.response_input import ResponsesRequest

FOLDER = Path(__file__).parents[1] / "fixtures" / "requests"
REQUESTS = sorted(FOLDER.glob("*.json"))
KINDS = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
}
HEADER = "x-ignored-parameters"


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    """A server whose context has room for agents' tool descriptions. Each byte is a token."""
    running = Running(FakeFactory(n_ctx=32768))
    running.wait_until_healthy()
    yield running
    running.stop()


def _ignored(answer: Any) -> set[str]:
    return set(filter(None, answer.headers.get(HEADER, "").split(", ")))


@pytest.mark.parametrize("file", REQUESTS, ids=lambda file: file.stem)
def test_requests_of_other_programs_are_served(server: Running, file: Path) -> None:
    """Requests were recorded, or written by hand if `origin` says so."""
    request = json.loads(file.read_text(encoding="utf-8"))
    assert request["origin"].startswith("recorded: ") != ("not recorded" in request["origin"])
    answer = http.post(server.url + request["path"], json=request["body"])
    assert answer.status_code == request.get("status", 200), answer.text
    named = {re.split(r"[.\[]", name)[0] for name in _ignored(answer)} - {BILLING_LINE}
    assert named <= set(request["body"])
    kind = KINDS[request["path"].partition("?")[0]]
    assert _ignored(answer).isdisjoint(kind.model_fields)


def test_a_parameter_without_effect_is_named_and_one_that_is_off_is_not(server: Running) -> None:
    body = {"prompt": "x", "temprature": 1, "top_a": 0, "user": "me", "tfs": 0.5, "mode": None}
    answer = http.post(server.url + "/v1/completions", json=body)
    assert answer.status_code == 200
    assert _ignored(answer) == {"temprature", "tfs"}
    assert HEADER not in http.post(server.url + "/v1/completions", json={"prompt": "x"}).headers


def test_a_stream_and_an_error_name_them_too(server: Running) -> None:
    for body in ({"prompt": "x", "stream": True}, {"prompt": "[refuse]"}):
        answer = http.post(server.url + "/v1/completions", json={**body, "no_such_thing": 5})
        assert _ignored(answer) == {"no_such_thing"}


def test_stream_options_of_an_answer_in_one_piece_are_named(server: Running) -> None:
    body = {"prompt": "x", "stream_options": {"include_usage": True}}
    assert _ignored(http.post(server.url + "/v1/completions", json=body)) == {"stream_options"}


def test_of_two_token_limits_the_newer_name_counts(server: Running) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    answer = http.post(
        server.url + "/v1/chat/completions", json={**body, "max_completion_tokens": 4}
    )
    assert answer.json()["usage"]["completion_tokens"] == 4
    assert _ignored(answer) == {"max_tokens"}


class _Any(BaseModel):
    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_would_change_the_kind_of_the_answer_is_refused_unless_it_is_off(name: str) -> None:
    for off in (None, *REFUSED[name]):
        assert ignored_names(_Any(**{name: off})) == ()
    with pytest.raises(BadRequest, match=f"^{name} is not supported"):
        ignored_names(_Any(**{name: "something"}))


@pytest.mark.parametrize(("name", "remedy"), sorted(REMEDIES.items()))
def test_a_refusal_sends_to_the_api_that_reads_the_parameter(name: str, remedy: str) -> None:
    """Its words would be wrong if they said that this server supports no tools."""
    with pytest.raises(BadRequest, match=f"^{name} is not supported by this API: {remedy}$"):
        ignored_names(_Any(**{name: "something"}))
    read = {"functions": "tools", "function_call": "tool_choice"}.get(name, name)
    assert read in ChatRequest.model_fields
    assert read in remedy or read == name


@given(st.lists(st.text(max_size=150), max_size=80))
@example(["N", ""])
@example([" N", "n"])
@example(["", " "])
def test_a_header_of_names_is_plain_ascii_of_bounded_length(names: list[str]) -> None:
    value = header_value(tuple(names))
    assert len(value) < 6000
    assert value.decode("ascii").isprintable() or value == b""
    h11.Response(status_code=200, headers=[(HEADER, value)])  # raises if an end is blank


@pytest.mark.parametrize("other", sorted(ALIASES))
def test_other_names_mean_the_one_used_here_which_counts_if_both_are_given(other: str) -> None:
    name = ALIASES[other]
    assert renamed({other: 2}, {name}) == {name: 2}
    assert renamed({other: 2, name: None}, {name}) == {name: 2}
    assert renamed({other: 2, name: 2}, {name}) == {name: 2}
    assert renamed({other: 2, name: 3}, {name}) == {other: 2, name: 3}
    assert renamed({other: 2}, set()) == {other: 2}
    assert renamed({other: 2}, {name, other}) == {other: 2}


def test_a_switch_of_thinking_that_the_template_does_not_have_is_named(
    start_server: StartServer,
) -> None:
    template = FOLDER.parent / "templates" / "openai-gpt-oss-120b.jinja"
    settings = ChatSettings(template.read_text(encoding="utf-8"))
    server = start_server(FakeFactory(n_ctx=32768), chat=settings)
    messages = [{"role": "user", "content": "x"}]
    thinking = {"type": "disabled"}
    kwargs = {"chat_template_kwargs": {"thinking": False, "mine": 1}, "reasoning_effort": "low"}
    for path, fields, names in (
        ("/v1/chat/completions", {"think": False}, {"think"}),
        ("/apply-template", {"enable_thinking": False}, {"enable_thinking"}),
        (
            "/v1/chat/completions/input_tokens",
            kwargs,
            {"chat_template_kwargs.thinking", "chat_template_kwargs.mine"},
        ),
        ("/v1/messages", {"thinking": thinking, "max_tokens": 9}, {"thinking.type"}),
        ("/v1/responses", {"reasoning": {"effort": "none"}}, {"reasoning.effort"}),
        ("/v1/chat/completions", {"think": True}, set()),
    ):
        body = {"input" if "responses" in path else "messages": messages, **fields}
        answer = http.post(server.url + path, json=body)
        assert answer.status_code == 200, answer.text
        assert _ignored(answer) == names, path
