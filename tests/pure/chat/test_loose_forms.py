"""Shapes of JSON that programs write in place of the one that an API describes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings, Conversation, Named
from specoffload.server.api import loose_forms, message_input, response_input
from specoffload.server.api.body import checked
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest
from specoffload.server.engine.messages import RequestFailed

USER = {"role": "user", "content": "Find it."}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
NESTED = {"type": "function", "function": FUNCTION}


def chat(**fields: Any) -> Conversation:
    body = {"messages": [USER], **fields}
    return conversation_of(checked(body, ConversationRequest), ChatSettings())


def responses(*items: Any, **fields: Any) -> Conversation:
    body = {"input": [*(items or [USER])], **fields}
    request = checked(body, response_input.ResponsesRequest)
    return chat(**response_input.as_chat(request)[0])


def messages(*turns: Any, **fields: Any) -> Conversation:
    body = {"messages": [*(turns or [USER])], **fields}
    return chat(**message_input.as_chat(checked(body, message_input.CountRequest))[0])


def every(*turns: Any) -> list[Conversation]:
    return [chat(messages=[*turns]), responses(*turns), messages(*turns)]


@pytest.mark.parametrize(
    ("content", "text"),
    [({"type": "text", "text": "Go."}, "Go."), (["Go."], "Go."), ([{"text": "Go."}], "Go."),
     ([None, {"type": "text", "text": "Go."}], "Go.")],
)  # fmt: skip
def test_content_may_be_one_part_or_texts(content: Any, text: str) -> None:
    for asked in every({"role": "user", "content": content}):
        assert asked.messages[-1]["content"] == text
    assert messages(USER, system=content).messages[0]["content"] == text


def test_an_earlier_question_may_be_null_in_every_api() -> None:
    for asked in every({"role": "user", "content": None}, USER):
        assert asked.messages == (USER,)
    for ask in (lambda *m: chat(messages=[*m]), responses, messages):
        with pytest.raises(BadRequest, match="content is missing"):
            ask(USER, {"role": "user", "content": None})


def test_calls_may_be_numbered() -> None:
    function = {"name": "f", "arguments": "{}"}
    turn = {"role": "assistant", "tool_calls": [{"id": 7, "function": function}]}
    asked = [chat(messages=[USER, turn, {"role": "tool", "tool_call_id": 7, "content": "r"}])]
    call = {"type": "function_call", "call_id": 7, **function}
    result = {"type": "function_call_output", "call_id": 7, "output": "r"}
    asked.append(responses(USER, call, result))
    use = {"type": "tool_use", "id": 7, "name": "f", "input": {}}
    block = {"type": "tool_result", "tool_use_id": 7, "content": {"type": "text", "text": "r"}}
    turns = ({"role": "assistant", "content": [use]}, {"role": "user", "content": [block]})
    asked.append(messages(USER, *turns))
    for one in asked:
        assert one.messages[1]["tool_calls"][0]["id"] == "7"
        assert one.messages[2]["tool_call_id"] == "7"
        assert one.messages[2]["content"] == "r"
    with pytest.raises(RequestFailed, match="id"):
        chat(messages=[{"role": "assistant", "tool_calls": [{"id": True, "function": function}]}])


def test_a_call_of_a_chat_may_be_flat() -> None:
    call = {"id": "c", "name": "f", "arguments": '{"x": "a"}'}
    made = chat(messages=[USER, {"role": "assistant", "tool_calls": [call]}]).messages[1]
    wanted = {"name": "f", "arguments": '{"x": "a"}'}
    assert made["tool_calls"] == [{"id": "c", "type": "function", "function": wanted}]


@pytest.mark.parametrize(
    "tool",
    [
        {"function": FUNCTION},
        FUNCTION,
        {"type": "function", **FUNCTION},
        {"name": "f", "description": "d", "input_schema": SCHEMA},
        {"type": None, "name": "f", "description": "d", "input_schema": SCHEMA},
        {"name": "f", "description": "d", "parameters": '{"type": "object", "properties": '
         '{"x": {"type": "string"}}}'},
    ],
)  # fmt: skip
def test_a_tool_may_have_the_form_of_another_api_or_lack_its_type(tool: Any) -> None:
    wanted = chat(tools=[NESTED]).tools
    assert chat(tools=[tool]).tools == wanted
    assert responses(tools=[tool]).tools == wanted
    assert messages(tools=[tool]).tools == wanted
    assert messages(tools=[NESTED]).tools == wanted
    custom = {"type": "custom", "name": "f", "description": "d", "input_schema": SCHEMA}
    assert messages(tools=[custom]).tools == wanted


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        ("auto", "auto"),
        ("none", "none"),
        ("any", "required"),
        ("required", "required"),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "required"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "function", "function": {"name": "f"}}, Named("f")),
        ({"type": "function", "name": "f"}, Named("f")),
        ({"type": "tool", "name": "f"}, Named("f")),
    ],
)
def test_a_choice_of_tools_may_have_the_form_of_any_api(choice: Any, wanted: Any) -> None:
    assert chat(tools=[NESTED], tool_choice=choice).tool_choice == wanted
    assert responses(tools=[NESTED], tool_choice=choice).tool_choice == wanted
    assert messages(tools=[NESTED], tool_choice=choice).tool_choice == wanted


def test_a_choice_keeps_its_other_fields() -> None:
    choice = {"type": "required", "disable_parallel_tool_use": True}
    assert not messages(tools=[NESTED], tool_choice=choice).parallel_tool_calls
    with pytest.raises(RequestFailed, match="tool_choice"):
        messages(tools=[NESTED], tool_choice={"type": "best"})


@pytest.mark.parametrize("mark", [True, "ephemeral", {"type": "ephemeral", "ttl": 3600}, {}])
def test_no_form_of_a_mark_is_refused(mark: Any) -> None:
    part = {"type": "text", "text": "Go.", "cache_control": mark}
    for asked in (chat(messages=[{"role": "user", "content": [part]}]),
                  messages({"role": "user", "content": [part]})):  # fmt: skip
        assert len(asked.cache_points) == 1
    unmarked = {**part, "cache_control": False}
    assert not messages({"role": "user", "content": [unmarked]}).cache_points


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning": {"text": "Hm."}},
        {"reasoning_content": ["Hm."]},
        {"reasoning_details": {"type": "reasoning.text", "text": "Hm."}},
        {"thinking_blocks": {"type": "thinking", "thinking": "Hm."}},
    ],
)
def test_the_reasoning_of_an_answer_may_be_an_object(fields: Any) -> None:
    turn = {"role": "assistant", "content": "x", **fields}
    assert chat(messages=[USER, turn, USER]).messages[1]["reasoning_content"] == "Hm."


def test_a_summary_may_be_a_text_and_instructions_parts() -> None:
    thought = {"type": "reasoning", "summary": "Hm."}
    answer = {"role": "assistant", "content": "x"}
    asked = responses(USER, thought, answer, USER, instructions=[{"type": "text", "text": "Be."}])
    assert asked.messages[0] == {"role": "system", "content": "Be."}
    assert asked.messages[2]["reasoning_content"] == "Hm."
    turn = {"role": "developer", "content": [{"type": "input_text", "text": "Be."}]}
    assert responses(USER, instructions=[turn]).messages[0]["content"] == "Be."


def test_the_input_may_have_messages_of_chats() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turn = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    wanted = chat(messages=[USER, turn, result]).messages
    assert responses("Find it.", turn, result).messages == wanted
    request = checked({"input": USER}, response_input.ResponsesRequest)
    assert chat(**response_input.as_chat(request)[0]).messages == (USER,)


def test_variables_and_stops_may_be_texts() -> None:
    asked = chat(chat_template_kwargs='{"enable_thinking": false}')
    assert asked.reasoning.enabled is False
    with pytest.raises(RequestFailed, match="chat_template_kwargs"):
        chat(chat_template_kwargs="{")
    body = {"messages": [USER], "max_tokens": 1, "stop_sequences": "."}
    request = checked(body, message_input.MessagesRequest)
    assert message_input.as_chat(request)[0]["stop"] == ["."]


def test_a_schema_of_the_responses_api_may_have_the_form_of_chats() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    body = {"input": "x", "text": {"format": form}}
    request = checked(body, response_input.ResponsesRequest)
    assert response_input.as_chat(request)[0]["response_format"] == form


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                ["type", "text", "content", "name", "function", "role", "tool_calls", "id"]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


@given(_JSON)
def test_any_json_is_read_or_returned(value: Any) -> None:
    readers = (
        *("parts_of", "text_of", "text_or_parts", "arguments_text", "objects_of", "texts_of"),
        *("object_of", "id_text", "mark_of", "flat_tool", "anthropic_tool", "nested_call"),
        *("flat_choice", "anthropic_choice", "items_of"),
    )
    for name in readers:
        getattr(loose_forms, name)(value)
    loose_forms.nested_tool(value, ("name", "parameters"))
