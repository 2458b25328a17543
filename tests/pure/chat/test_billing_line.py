"""Claude Code's billing line is no part of a prompt, whichever API it comes by."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import chat_format

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings, Conversation
from specoffload.server.api import message_input, response_input
from specoffload.server.api.billing_line import billing_chars, has_billing_line
from specoffload.server.api.body import checked
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest

LINES = (
    "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=fa690;",
    "x-anthropic-billing-header: cc_version=2.1.197.2f2; cc_entrypoint=sdk-cli;",
    "x-anthropic-billing-header: cc_version=2.2.0.aaa; cc_entrypoint=cli; cch=00000; new_field=7",
)
TEXTS = ("You are an agent.", "\nYou read code.")
ASK = {"role": "user", "content": "hello"}
MARK = {"cache_control": {"type": "ephemeral"}}


def _blocks(line: str | None, **last: Any) -> list[dict[str, Any]]:
    texts = [*([line] if line else []), *TEXTS]
    blocks: list[dict[str, Any]] = [{"type": "text", "text": text} for text in texts]
    blocks[-1] |= last
    return blocks


def _messages(line: str | None) -> list[dict[str, Any]]:
    """Bodies of the Messages API with the line in blocks, in marked blocks, and in one text."""
    text = "\n".join(block["text"] for block in _blocks(line))
    systems = [_blocks(line), _blocks(line, **MARK), text]
    return [{"system": system, "messages": [ASK]} for system in systems]


def _chats(line: str | None) -> list[dict[str, Any]]:
    """Bodies of chats, as proxies write them: one text, parts, or a message for each block."""
    blocks = _blocks(line)
    text = "\n".join(block["text"] for block in blocks)
    apart = [{"role": "system", "content": block["text"]} for block in blocks]
    parts = [{"type": "text", "text": block["text"] + "\n"} for block in blocks]
    return [
        {"messages": [{"role": "system", "content": text}, ASK]},
        {"messages": [{"role": "developer", "content": parts}, ASK]},
        {"messages": [*apart, ASK]},
    ]


def _responses(line: str | None) -> list[dict[str, Any]]:
    text = "\n".join(block["text"] for block in _blocks(line))
    parts = [{"type": "input_text", "text": text}]
    return [
        {"instructions": text, "input": "hello"},
        {"input": [{"type": "message", "role": "developer", "content": parts}, ASK]},
    ]


def _requests(line: str | None) -> list[ConversationRequest]:
    chats = [
        *(
            message_input.as_chat(checked(b, message_input.CountRequest))[0]
            for b in _messages(line)
        ),
        *(
            response_input.as_chat(checked(b, response_input.ResponsesRequest))[0]
            for b in _responses(line)
        ),
        *_chats(line),
    ]
    return [checked(body, ConversationRequest) for body in chats]


def _asked(line: str | None) -> list[Conversation]:
    return [conversation_of(request, ChatSettings()) for request in _requests(line)]


@pytest.mark.parametrize("line", LINES)
def test_a_conversation_with_the_line_is_that_without_it(line: str) -> None:
    assert _asked(line) == _asked(None)
    assert all(map(has_billing_line, _requests(line)))
    assert not any(map(has_billing_line, _requests(None)))


def test_a_marked_place_is_the_same_place_in_the_prompt() -> None:
    form = chat_format("Qwen-Qwen3-0.6B")
    for line, without in zip(_asked(LINES[0]), _asked(None), strict=True):
        found, wanted = form.prepare(line), form.prepare(without)
        assert (found.text, found.cache_ends) == (wanted.text, wanted.cache_ends)
    assert any(form.prepare(asked).cache_ends for asked in _asked(LINES[0]))


def test_the_line_alone_is_no_message() -> None:
    alone = {"role": "system", "content": LINES[0]}
    request = checked({"messages": [alone, ASK]}, ConversationRequest)
    assert conversation_of(request, ChatSettings()).messages == (ASK,)
    with pytest.raises(BadRequest, match="messages is empty"):
        conversation_of(checked({"messages": [alone]}, ConversationRequest), ChatSettings())


@given(st.text(max_size=60), st.sampled_from(LINES[:2]))
def test_the_text_behind_the_line_is_kept(text: str, line: str) -> None:
    rest = text.lstrip(" \t\r\n")
    for between in ("", " ", "\n", "\r\n\n"):
        whole = line + between + rest
        kept = whole[billing_chars("system", whole) :]
        # Text that has the form of another field belongs to the line.
        assert kept == rest or "=" in rest


@pytest.mark.parametrize(
    "text",
    [
        "Explain what x-anthropic-billing-header: cch=1; means.",
        "x-anthropic-billing-header is a header.",
        "x-anthropic-billing-header: what is it?",
        " x-anthropic-billing-header: cch=1;",
    ],
)
def test_text_about_the_line_stays(text: str) -> None:
    assert billing_chars("system", text) == 0
    assert billing_chars("user", LINES[0]) == 0, "a user may ask about it"
