"""Parameters that change the kind of an answer are read in each API, or refused with their name."""

from __future__ import annotations

from typing import Any

import pytest

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings
from specoffload.server.api import message_input, response_input
from specoffload.server.api.body import checked
from specoffload.server.api.parameters import conversation_of, wish_of
from specoffload.server.api.requests import ConversationRequest

FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"n": {}}}}
USER = [{"role": "user", "content": "?"}]


def chat_of_anthropic(**fields: Any) -> dict[str, Any]:
    request = {"messages": USER, "max_tokens": 9, **fields}
    return message_input.as_chat(message_input.MessagesRequest.model_validate(request))[0]


def chat_of_responses(**fields: Any) -> dict[str, Any]:
    request = {"input": "?", **fields}
    return response_input.as_chat(response_input.ResponsesRequest.model_validate(request))[0]


@pytest.mark.parametrize(
    "fields", [{"output_config": {"format": FORM}}, {"output_format": FORM},
               {"output_config": {"format": FORM}, "output_format": FORM}]
)  # fmt: skip
def test_anthropics_form_of_the_answer_is_that_of_a_chat(fields: dict[str, Any]) -> None:
    named = {"name": "answer", "schema": FORM["schema"]}
    expected = {"type": "json_schema", "json_schema": named}
    assert chat_of_anthropic(**fields)["response_format"] == expected
    counted = message_input.CountRequest.model_validate({"messages": USER, **fields})
    assert "response_format" not in message_input.as_chat(counted)[0]


def test_anthropics_effort_is_that_of_a_chat() -> None:
    body = chat_of_anthropic(output_config={"effort": "low"})
    assert wish_of(checked(body, ConversationRequest)).effort == "low"
    assert "response_format" not in body


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"output_format": {"type": "grammar"}}, "output_format: type 'grammar' is not"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format: type"),
        ({"output_config": {"format": FORM}, "output_format": {**FORM, "schema": {}}}, "differ"),
    ],
)
def test_another_form_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        chat_of_anthropic(**fields)


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_allow_some_tools(mode: str) -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("f", "g")]
    for listed in ({"type": "function", "function": {"name": "g"}},
                   {"type": "function", "name": "g"}):  # fmt: skip
        allowed = {"mode": mode, "tools": [listed]}
        request = ConversationRequest.model_validate(
            {
                "messages": [{"role": "user", "content": "?"}],
                "tools": tools,
                "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed},
            }
        )
        conversation = conversation_of(request, ChatSettings())
        assert [tool.name for tool in conversation.callable_tools] == ["g"]
        assert [tool.name for tool in conversation.tools] == ["f", "g"]
        assert conversation.must_call == (mode == "required")


def test_the_responses_api_may_allow_some_tools() -> None:
    listed = [{"type": "function", "name": "f"}]
    choice = {"type": "allowed_tools", "mode": "required", "tools": listed}
    body = chat_of_responses(tools=listed, tool_choice=choice)
    allowed = {"mode": "required", "tools": listed}
    assert body["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}
    with pytest.raises(BadRequest, match="tool_choice: type 'mcp' is not supported"):
        chat_of_responses(tools=listed, tool_choice={"type": "mcp", "server_label": "f"})
