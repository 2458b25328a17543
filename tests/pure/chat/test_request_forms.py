"""Forms of requests that other servers take: flat tools, older names, JSON in place of text."""

from __future__ import annotations

from typing import Any

import pytest
from published import chat_format

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings, Conversation, Named
from specoffload.server.api import message_input, response_input
from specoffload.server.api.body import checked
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest

USER = {"role": "user", "content": "Find it."}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
NESTED = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION}


def chat(**fields: Any) -> Conversation:
    body = {"messages": [USER], **fields}
    return conversation_of(checked(body, ConversationRequest), ChatSettings())


def responses(**fields: Any) -> Conversation:
    request = checked({"input": [USER], **fields}, response_input.ResponsesRequest)
    return chat(**response_input.as_chat(request)[0])


def messages(**fields: Any) -> Conversation:
    request = checked({"messages": [USER], **fields}, message_input.CountRequest)
    return chat(**message_input.as_chat(request)[0])


def test_a_tool_may_be_flat_or_nested_in_both_of_openais_apis() -> None:
    """Cursor sends flat tools to /v1/chat/completions (litellm #34029)."""
    wanted = chat(tools=[NESTED]).tools
    assert wanted[0].description == "d"
    assert chat(tools=[FLAT]).tools == responses(tools=[FLAT]).tools == wanted
    assert responses(tools=[NESTED]).tools == wanted
    marked = {**FLAT, "cache_control": {"type": "ephemeral"}}
    assert len(chat(tools=[marked]).cache_points) == 1
    with pytest.raises(BadRequest, match=r"tools\[0\]: type 'function' is not supported; define"):
        chat(tools=[{"type": "function"}])


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ({"type": "function", "name": "f"}, Named("f")),
        ({"type": "tool", "name": "f"}, Named("f")),
        ({"type": "function", "function": {"name": "f"}}, Named("f")),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "required"}, "required"),
        ({"type": "none"}, "none"),
    ],
)
def test_a_choice_of_tools_may_have_the_form_of_another_api(choice: Any, wanted: Any) -> None:
    """one-api #1461"""
    assert chat(tools=[NESTED], tool_choice=choice).tool_choice == wanted


def test_a_history_with_functions_is_one_with_tools() -> None:
    """shell_gpt #717, litellm #5344: OpenAI's form before tools."""
    call = {"name": "f", "arguments": '{"x": "a"}'}
    asked = chat(
        messages=[
            USER,
            {"role": "assistant", "content": None, "function_call": call},
            {"role": "function", "name": "f", "content": "needle"},
        ]
    )
    prompt = chat_format("Qwen-Qwen3-0.6B").prepare(asked).text
    assert '{"name": "f", "arguments": {"x": "a"}}' in prompt
    assert "<tool_response>\nneedle\n</tool_response>" in prompt
    assert "tool_result" not in prompt, "the result is that of the call"


@pytest.mark.parametrize(
    ("content", "text"),
    [({"t": "ä"}, '{"t": "ä"}'), (12, "12"), (False, "false"), ([{"t": 1}], '[{"t": 1}]'),
     (["a", "b"], '["a", "b"]')],
)  # fmt: skip
def test_json_as_a_tools_result_is_its_text(content: Any, text: str) -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turn = {"role": "assistant", "tool_calls": calls}
    result = {"role": "tool", "tool_call_id": "c", "content": content}
    assert chat(messages=[USER, turn, result]).messages[2]["content"] == text
    items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "c", "output": content}]
    assert responses(input=[USER, *items]).messages[2]["content"] == text
    use = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
    block = {"type": "tool_result", "tool_use_id": "c", "content": content}
    turns = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [block]}]
    assert messages(messages=[USER, *turns]).messages[2]["content"] == text


@pytest.mark.parametrize(
    ("given", "text"),
    [({"x": "ä"}, '{"x": "ä"}'), ('{"x": 1', '{"x": 1'), ([], "{}"), ({}, "{}"), (None, None)],
)  # fmt: skip
def test_arguments_may_be_text_or_an_object_and_php_writes_a_list(given: Any, text: Any) -> None:
    """claude-code #6696, prism-php #659"""
    wanted = "{}" if text is None else text
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}]
    turn = {"role": "assistant", "tool_calls": calls}
    made = [chat(messages=[USER, turn]).messages[1]]
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": given}
    made.append(responses(input=[USER, item]).messages[1])
    use = {"type": "tool_use", "id": "c", "name": "f", "input": given}
    made.append(messages(messages=[USER, {"role": "assistant", "content": [use]}]).messages[1])
    for message in made:
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert (arguments or "{}") == wanted, "a call without arguments may have none"


def test_an_empty_schema_may_be_a_list() -> None:
    empty = chat(tools=[{"type": "function", "function": {"name": "f"}}]).tools
    tool = {"name": "f", "parameters": []}
    assert chat(tools=[{"type": "function", "function": tool}]).tools == empty
    assert chat(tools=[{"type": "function", **tool}]).tools == empty
    assert responses(tools=[{"type": "function", **tool}]).tools == empty
    assert messages(tools=[{"name": "f", "input_schema": []}]).tools == empty


def test_a_call_of_the_responses_api_may_have_its_id_alone() -> None:
    call = {"type": "function_call", "id": "c", "name": "f", "arguments": "{}"}
    made = responses(input=[USER, call]).messages[1]["tool_calls"]
    assert made[0]["id"] == "c"


def test_a_message_without_content_is_none_but_a_question_needs_it() -> None:
    """langchain4j #1958: a client that sends null for every role."""
    for role in ("system", "developer", "user"):
        assert chat(messages=[{"role": role, "content": None}, USER]).messages == (USER,)
        with pytest.raises(BadRequest, match=r"messages\[1\]: content is missing"):
            chat(messages=[USER, {"role": role, "content": None}])


def test_a_refusal_without_content_is_what_the_answer_said() -> None:
    turn = {"role": "assistant", "content": None, "refusal": "I can't."}
    assert chat(messages=[USER, turn, USER]).messages[1]["content"] == "I can't."
