"""Requests of real clients, and messages in any order, become prompts by every template."""

from __future__ import annotations

import json
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from published import NAMES, WEATHER, chat_format

from specoffload.chat.conversation import ChatSettings, Conversation
from specoffload.chat.families import BUILT_IN
from specoffload.chat.format import ChatFormat
from specoffload.server.api import message_input, response_input
from specoffload.server.api.body import checked
from specoffload.server.api.parameters import conversation_of
from specoffload.server.api.requests import ConversationRequest

FOLDER = Path(__file__).parents[2] / "fixtures" / "requests"
KINDS = {"chat": ConversationRequest, "messages": message_input.CountRequest,
         "responses": response_input.ResponsesRequest}  # fmt: skip


@cache
def requests() -> dict[str, tuple[Conversation, str]]:
    """Conversations of the recorded requests by file name, each with the path's kind of API."""
    found = {}
    for file in sorted(FOLDER.glob("*.json")):
        request = json.loads(file.read_text(encoding="utf-8"))
        path = request["path"]
        kind = next((kind for kind in KINDS if f"/{kind}" in path), None)
        if kind is None or "status" in request:
            continue  # it has no conversation, or is refused
        body: Any = KINDS[kind].model_validate(request["body"])
        if kind != "chat":
            module = message_input if kind == "messages" else response_input
            body = checked(module.as_chat(body)[0], ConversationRequest)  # type: ignore[arg-type]
        found[file.stem] = conversation_of(body, ChatSettings()), kind
    return found


def is_told(text: str, prompt: str) -> bool:
    """True if the prompt has the text, as it is or as JSON, with other blanks at its ends."""
    text = text.strip()
    forms = [text]
    for ascii_only in (False, True):
        once = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        forms += [once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]]
    return any(form in prompt for form in forms)


def test_every_api_and_the_newest_clients_are_there() -> None:
    kinds = [kind for _, kind in requests().values()]
    assert set(kinds) == set(KINDS)
    assert {"claude_code_tools", "codex_tools", "anthropic_tools", "openai_tools"} <= set(
        requests()
    )


@pytest.mark.parametrize("name", [*NAMES, *sorted(BUILT_IN)])
def test_every_client_is_answered_with_every_template_and_nothing_it_says_is_lost(
    name: str,
) -> None:
    form = chat_format(name) if name in NAMES else ChatFormat({"default": BUILT_IN[name]})
    for client, (conversation, _) in requests().items():
        if "tool_use" in name and not conversation.tools:
            continue  # this template is for conversations with tools
        prompt = form.prepare(conversation).text
        for message in conversation.messages:
            assert is_told(message["content"], prompt), client
            for call in message.get("tool_calls", ()):
                assert call["function"]["name"] in prompt, client
                for value in json.loads(call["function"]["arguments"]).values():
                    values = value if isinstance(value, list) else [value]
                    assert all(is_told(v, prompt) for v in values), client
        if conversation.tool_choice != "none":
            assert all(tool.name in prompt for tool in conversation.tools), client


def in_order(roles: str) -> Conversation:
    """Messages with texts of their own. C calls two tools, and T is the next call's result."""
    messages: list[dict[str, Any]] = []
    names = {"S": "system", "U": "user", "A": "assistant", "C": "assistant", "T": "tool"}
    ids: list[str] = []
    for at, role in enumerate(roles):
        message: dict[str, Any] = {"role": names[role], "content": f"text{at}x"}
        if role == "C":
            calls = [{"id": f"call_{at}_{n}", "type": "function",
                      "function": {"name": "get_weather", "arguments": f'{{"city": "c{at}{n}x"}}'}}
                     for n in (0, 1)]  # fmt: skip
            message["tool_calls"] = calls
            ids += [call["id"] for call in calls]
        if role == "T":
            message["tool_call_id"] = ids.pop(0) if ids else "call_unknown"
        messages.append(message)
    return Conversation(tuple(messages), (WEATHER,))


def assert_all_is_told(name: str, roles: str) -> None:
    prompt = chat_format(name).prepare(in_order(roles)).text
    for at, role in enumerate(roles):
        texts = [f"c{at}{n}x" for n in (0, 1) if role == "C"]
        # gpt-oss's template writes text beside a call as reasoning, which a later answer ends.
        if role != "C" or "A" not in roles[at:] or "gpt-oss" not in name:
            texts.append(f"text{at}x")
        assert all(text in prompt for text in texts), roles


@pytest.mark.parametrize(
    "roles", ["UAUS", "SUASU", "SSUAS", "AU", "S", "SA", "UU", "UAAU", "UCTTU", "UCTU", "UACTTCTTA"]
)
def test_messages_in_orders_that_clients_send(roles: str) -> None:
    """llama.cpp #27367, ollama #17774: a system message may stand anywhere."""
    for name in NAMES:
        assert_all_is_told(name, roles)


@pytest.mark.parametrize("first", "SUACT")
@pytest.mark.parametrize("name", NAMES)
def test_messages_in_any_order(name: str, first: str) -> None:
    for n in range(4):
        for more in product("SUACT", repeat=n):
            assert_all_is_told(name, first + "".join(more))
