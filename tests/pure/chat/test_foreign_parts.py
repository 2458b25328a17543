"""Parts of messages that other servers' APIs have: read as text, or left out and named."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings
from specoffload.server.api import message_input, response_input
from specoffload.server.api.body import checked
from specoffload.server.api.chat_messages import left_out_places
from specoffload.server.api.images import ConversationImages
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest

USER = {"role": "user", "content": "Find it."}
TEXT = {"type": "text", "text": "ok"}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"type": "tool_use", "id": "t1", "name": "find", "input": {}}
DOCUMENT = {"type": "text", "media_type": "text/plain", "data": "needle"}


def told(body: dict[str, Any]) -> tuple[tuple[Any, ...], list[str]]:
    """The messages of a chat request as templates get them, and the places left out of it."""
    request = checked(body, ConversationRequest)
    return conversation_of(request, ChatSettings()).messages, left_out_places(request)


def told_of_messages(*messages: Any, **more: Any) -> tuple[tuple[Any, ...], list[str]]:
    request = checked({"messages": list(messages), **more}, message_input.CountRequest)
    chat, ignored = message_input.as_chat(request)
    found, places = told(chat)
    assert places == [], "all blocks are decided before"
    return found, ignored


def told_of_items(*items: Any) -> tuple[tuple[Any, ...], list[str]]:
    request = checked({"input": list(items)}, response_input.ResponsesRequest)
    chat, ignored = response_input.as_chat(request)
    found, places = told(chat)
    assert places == []
    return found, ignored


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def result(*blocks: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t1", "content": list(blocks)}


# Blocks of a turn at Anthropic, with fields of types that our own blocks do not have.
ELSEWHERE: list[dict[str, Any]] = [
    {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "x"}},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": [{"type": "w", "url": "u"}]},
    {"type": "web_search_tool_result", "tool_use_id": "s1", "content": {"error_code": "busy"}},
    {"type": "code_execution_tool_result", "tool_use_id": "s1", "content": {"stdout": "1\n"}},
    {"type": "mcp_tool_use", "id": "m1", "name": "q", "server_name": "s", "input": {}},
    {"type": "mcp_tool_result", "tool_use_id": "m1", "is_error": False, "content": [TEXT]},
    {"type": "redacted_thinking", "data": "abc"},
    {"type": "of_next_year", "id": 7, "name": None, "source": "x", "content": 3.5, "text": None},
]


@pytest.mark.parametrize("block", ELSEWHERE, ids=lambda block: block["type"])
def test_a_block_of_a_tool_that_ran_elsewhere_is_left_out_and_named(block: dict[str, Any]) -> None:
    turn = assistant(TEXT, block)
    (_, answer, _), ignored = told_of_messages(USER, turn, USER)
    assert answer == {"role": "assistant", "content": "ok"}
    assert ignored == [f"messages[1].content[1] ({block['type']})"]
    found, places = told({"messages": [USER, turn, USER]})
    assert found[1] == answer
    assert places == ignored
    alone, _ = told_of_messages(USER, assistant(block), USER)
    assert alone[1] == {"role": "assistant", "content": ""}


READ: list[tuple[dict[str, Any], str]] = [
    ({"type": "document", "source": DOCUMENT}, "needle"),
    ({"type": "document", "title": "T", "context": "C", "source": DOCUMENT}, "T\nC\nneedle"),
    (
        {"type": "document", "source": {"type": "content", "content": [TEXT, {"type": "image"}]}},
        "ok",
    ),
    ({"type": "document", "source": {"type": "content", "content": "needle"}}, "needle"),
    (
        {
            "type": "document",
            "source": {
                "type": "base64",
                "media_type": "text/markdown",
                "data": base64.b64encode("nädel".encode()).decode(),
            },
        },
        "nädel",
    ),
    (
        {"type": "search_result", "source": "a.md", "title": "A", "content": [TEXT, TEXT]},
        "A\na.md\nok\nok",
    ),
    ({"type": "tool_reference", "tool_name": "Read"}, "Read"),
    ({"type": "of_next_year", "text": "needle", "source": 4}, "needle"),
]


@pytest.mark.parametrize(("block", "text"), READ)
def test_a_block_with_text_is_read_in_messages_and_in_results(
    block: dict[str, Any], text: str
) -> None:
    turn = {"role": "user", "content": [block, TEXT]}
    messages, ignored = told_of_messages(turn)
    assert messages == ({"role": "user", "content": f"{text}\nok"},)
    assert ignored == []
    messages, ignored = told_of_messages(
        USER, assistant(CALL), {"role": "user", "content": [result(TEXT, block)]}
    )
    assert messages[2] == {"role": "tool", "tool_call_id": "t1", "content": f"ok\n{text}"}
    assert ignored == []
    messages, _ = told_of_messages(USER, system=[block, TEXT])
    assert messages[0] == {"role": "system", "content": f"{text}\nok"}
    messages, places = told({"messages": [turn]})
    assert messages == ({"role": "user", "content": f"{text}ok"},)
    assert places == []
    items = [{"type": "function_call", "call_id": "t1", "name": "f", "arguments": "{}"}]
    items += [{"type": "function_call_output", "call_id": "t1", "output": [block]}]  # type: ignore[dict-item]
    messages, _ = told_of_items(USER, *items)
    assert messages[2]["content"] == text


def test_a_block_of_another_role_is_left_out_and_named() -> None:
    thinking = {"type": "thinking", "thinking": "t", "signature": "s"}
    messages, ignored = told_of_messages(
        {"role": "user", "content": [CALL, thinking, TEXT]},
        assistant(TEXT, result(TEXT)),
        USER,
        system=[thinking, TEXT],
    )
    assert [message["content"] for message in messages] == ["ok", "ok", "ok", "Find it."]
    assert ignored == [
        "system[0] (thinking)",
        "messages[0].content[0] (tool_use)",
        "messages[0].content[1] (thinking)",
        "messages[1].content[1] (tool_result)",
    ]


def test_thinking_of_anthropics_api_may_be_a_list_or_null() -> None:
    for thinking, text in (([{"type": "text", "text": "deep"}], "deep"), (None, None)):
        block = {"type": "thinking", "thinking": thinking, "signature": "s"}
        messages, ignored = told_of_messages(USER, assistant(block, TEXT), USER)
        assert messages[1].get("reasoning_content") == text
        assert ignored == []


def test_a_summary_of_the_conversation_is_read() -> None:
    messages, ignored = told_of_messages(
        USER, assistant({"type": "compaction", "content": "needle"}, TEXT), USER
    )
    assert messages[1]["content"] == "needle\nok"
    assert ignored == []
    _, ignored = told_of_messages(USER, assistant({"type": "compaction", "content": None}), USER)
    assert ignored == ["messages[1].content[0] (compaction)"]


@pytest.mark.parametrize(
    "source",
    [
        {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="},
        {"type": "base64", "media_type": "text/plain", "data": "4"},
        {"type": "url", "url": "https://example.org/a.pdf"},
        {"type": "file", "file_id": "f1"},
        None,
    ],
)
def test_a_document_without_text_is_refused_from_the_user_and_omitted_from_a_result(
    source: Any,
) -> None:
    document = {"type": "document", "source": source}
    with pytest.raises(BadRequest, match="document"):
        told_of_messages({"role": "user", "content": [document, TEXT]})
    with pytest.raises(BadRequest, match="document"):
        told({"messages": [{"role": "user", "content": [document, TEXT]}]})
    turns = [USER, assistant(CALL), {"role": "user", "content": [result(document)]}]
    messages, _ = told_of_messages(*turns)
    assert messages[2]["content"] == "[document omitted]"
    part = {"role": "tool", "tool_call_id": "t1", "content": [document]}
    images = ConversationImages(are_read=False)
    turn = checked({"messages": [part]}, ConversationRequest)
    conversation_of(turn, ChatSettings(), images)
    assert images.omitted == [("document", "the result of t1")]


@pytest.mark.parametrize("kind", ["document", "file", "input_file", "input_audio", "video_url"])
def test_a_file_of_an_earlier_turn_that_cannot_be_read_does_not_end_the_session(kind: str) -> None:
    """A client sends it again with each later request, after the refusal or a change of server."""
    part = {"type": kind, "file_id": "f1"}
    asked = {"role": "user", "content": [part, {"type": "text", "text": "See."}]}
    name = kind.removeprefix("input_").removesuffix("_url")
    for ask in (told_of_messages, lambda *m: told({"messages": list(m)}), told_of_items):
        with pytest.raises(BadRequest, match=f"messages.0.: a part|{name} input is not supported"):
            ask(asked)
        for later in ([USER], [{"role": "assistant", "content": "No."}, USER]):
            messages, _ = ask(asked, *later)
            assert messages[0]["content"] == f"[{name} omitted]See."
    images = ConversationImages(are_read=True)
    turns = checked({"messages": [asked, USER]}, ConversationRequest)
    conversation_of(turns, ChatSettings(), images)
    assert images.omitted == [(name, "messages[0]")]


def test_an_image_that_another_server_keeps_is_refused_in_a_question_only() -> None:
    asked = {"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}
    with pytest.raises(BadRequest, match="keeps no files"):
        told_of_items(asked)
    assert told_of_items(asked, USER)[0][0]["content"] == "[image omitted]"


def test_a_question_of_which_nothing_can_be_read_is_refused_and_an_earlier_one_is_not() -> None:
    upload = {"type": "container_upload", "file_id": "f1"}
    for ask in (told_of_messages, lambda *m: told({"messages": list(m)}), told_of_items):
        asked = {"role": "user", "content": [upload]}
        with pytest.raises(BadRequest, match=r"\[1\]: nothing of it can be read"):
            ask(USER, asked)
        messages, ignored = ask(asked, USER)
        assert messages == (USER,)
        assert len(ignored) == 1
        assert "[0].content[0] (container_upload)" in ignored[0]
        beside = {"role": "user", "content": [upload, {"type": "text", "text": "So?"}]}
        assert ask(beside)[0] == ({"role": "user", "content": "So?"},)


def test_a_mark_of_a_block_that_is_left_out_goes_to_the_block_before_it() -> None:
    block = {"type": "container_upload", **MARK}
    request = {"messages": [{"role": "user", "content": [TEXT, block]}]}
    chat, _ = message_input.as_chat(checked(request, message_input.CountRequest))
    assert chat["messages"][0]["content"] == [{**TEXT, **MARK}]


ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "action": {}},
    {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
    {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": ""}]},
    {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "create_file"}},
    {"type": "apply_patch_call_output", "call_id": "c", "output": {"status": "failed"}},
    {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
    {"type": "compaction", "encrypted_content": "x"},
    {"type": "compaction_summary", "encrypted_content": "x"},
    {"type": "of_next_year", "content": 7, "arguments": {}, "name": [], "role": None},
]


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item["type"])
def test_an_item_of_a_tool_that_ran_elsewhere_is_left_out_and_named(item: dict[str, Any]) -> None:
    messages, ignored = told_of_items(USER, item, USER)
    assert messages == (USER, USER)
    assert ignored == ["input[1]"]


THOUGHTS: list[dict[str, Any]] = [
    {"type": "thinking", "thinking": "deep", "signature": "s"},
    {"type": "thinking", "thinking": [{"type": "text", "text": "deep"}]},
    {"type": "reasoning", "text": "deep", "providerOptions": {}},
    {"type": "reasoning", "reasoning": "deep"},
    {"type": "reasoning", "summary": [{"type": "summary_text", "text": "deep"}]},
    {"type": "reasoning.text", "text": "deep", "format": "unknown", "index": 0},
    {"type": "reasoning.summary", "summary": "deep"},
]


@pytest.mark.parametrize("part", THOUGHTS)
def test_thinking_in_a_chat_is_the_reasoning_of_the_answer(part: dict[str, Any]) -> None:
    wanted = {"role": "assistant", "content": "ok", "reasoning_content": "deep"}
    turns = [
        assistant(part, TEXT),
        {"role": "assistant", "content": "ok", "thinking_blocks": [part]},
        {"role": "assistant", "content": "ok", "reasoning_details": [part]},
        {**assistant(part, TEXT), "reasoning_content": "deep"},
    ]
    for turn in turns:
        messages, places = told({"messages": [USER, turn, USER]})
        assert messages[1] == wanted
        assert places == []


@pytest.mark.parametrize("kind", ["redacted_thinking", "reasoning.encrypted", "thinking"])
def test_thinking_that_cannot_be_read_is_named(kind: str) -> None:
    messages, places = told({"messages": [USER, assistant({"type": kind, "data": "x"}, TEXT)]})
    assert messages[1] == {"role": "assistant", "content": "ok"}
    assert places == [f"messages[1].content[0] ({kind})"]


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": []}, {"content": ""}])
def test_a_tool_may_return_nothing(content: dict[str, Any]) -> None:
    function = {"name": "f", "arguments": "{}"}
    calls = [{"id": "t1", "type": "function", "function": function}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    messages, _ = told(
        {"messages": [USER, turn, {"role": "tool", "tool_call_id": "t1", **content}]}
    )
    assert messages[2] == {"role": "tool", "tool_call_id": "t1", "content": ""}
    blocks = [{"type": "tool_result", "tool_use_id": "t1", **content}]
    messages, _ = told_of_messages(USER, assistant(CALL), {"role": "user", "content": blocks})
    assert messages[2]["content"] == ""
    output = {"output" if name == "content" else name: value for name, value in content.items()}
    items = [{"type": "function_call", "call_id": "t1", "name": "f"}]
    items += [{"type": "function_call_output", "call_id": "t1", **output}]
    assert told_of_items(USER, *items)[0][2]["content"] == ""


@pytest.mark.parametrize("part", [{"type": "text"}, {"type": "text", "text": None}])
def test_a_text_may_be_missing(part: dict[str, Any]) -> None:
    blocks = [{"type": "tool_result", "tool_use_id": "t1", "content": [part]}]
    messages, _ = told_of_messages(USER, assistant(CALL, part), {"role": "user", "content": blocks})
    assert (messages[1]["content"], messages[2]["content"]) == ("", "")
    items = [{"type": "function_call_output", "call_id": "t1", "output": [part]}]
    assert told_of_items(USER, *items)[0][1]["content"] == ""


def test_a_call_of_a_custom_tool_in_a_chat_is_a_call_with_its_text() -> None:
    call = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": "a\nb"}}
    messages, _ = told({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]})
    function = {"name": "patch", "arguments": '{"input": "a\\nb"}'}
    assert messages[1]["tool_calls"] == [{"id": "c", "type": "function", "function": function}]


def test_a_set_of_tools_elsewhere_needs_no_name_and_a_choice_of_it_is_named() -> None:
    tools = [{"type": "mcp_toolset", "mcp_server_name": "s"}, {"type": "web_search_20250305"}]
    choice = {"type": "any"}
    assert told_of_messages(USER, tools=tools, tool_choice=choice)[1] == [
        "tools[0]",
        "tools[1]",
        "tool_choice",
    ]
    with pytest.raises(BadRequest, match=r"tools\[0\]: a tool needs a name"):
        told_of_messages(USER, tools=[{"input_schema": {}}])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["type", "text", "content", "source", "data", "thinking", "title"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=10,
)


@given(st.dictionaries(st.sampled_from(["text", "content", "source", "summary"]), _JSON))
def test_no_field_of_an_unknown_part_ends_a_session(fields: dict[str, Any]) -> None:
    for kind in ("of_next_year", "thinking", "search_result", "tool_reference", "compaction"):
        part = {**fields, "type": kind}
        told({"messages": [USER, assistant(part), USER]})
        told_of_items(USER, part if kind == "of_next_year" else USER)
        if kind != "thinking":  # a type that Anthropic's API defines
            told_of_messages(USER, assistant(part), USER)
