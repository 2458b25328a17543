"""Thinking has a signature, so that clients send it back with their next request."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from told_answers import answers, ended, no_parser

from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning, joined
from specoffload.server.api.anthropic import AnthropicWording, MessagesRequest, as_chat


def _told(deltas: list[Delta], reason: Any = "stop") -> tuple[list[dict[str, Any]], Any]:
    told = AnthropicWording(no_parser(), "m")
    events = [event for delta in deltas for event in told.add(delta)]
    events += told.finish(ended(reason), 0)
    return events, told.result["content"]


@given(answers)
def test_each_block_of_thinking_is_signed_once_before_it_ends(deltas: list[Delta]) -> None:
    events, blocks = _told(deltas)
    signed = []
    for event, following in zip(events, events[1:], strict=False):
        if event.get("delta", {}).get("type") != "signature_delta":
            continue
        assert following == {"type": "content_block_stop", "index": event["index"]}
        signed.append((event["index"], event["delta"]["signature"]))
    assert signed == [
        (at, block["signature"]) for at, block in enumerate(blocks) if block["type"] == "thinking"
    ]
    assert all(signature for _, signature in signed)
    began = [e["content_block"] for e in events if e["type"] == "content_block_start"]
    assert all(block["signature"] == "" for block in began if block["type"] == "thinking")


def test_thinking_that_a_limit_or_a_call_ends_is_signed() -> None:
    for deltas in ([Reasoning("hm")], [Reasoning("hm"), CallPiece(0, "c", "t", "{}")]):
        assert _told(deltas, "length")[1][0]["signature"]


def test_signatures_differ_between_texts() -> None:
    first, second = (_told([Reasoning(text), Content("a")])[1][0] for text in ("one", "two"))
    assert first["signature"] != second["signature"]


@given(answers)
def test_signed_thinking_comes_back_as_it_was(deltas: list[Delta]) -> None:
    _, blocks = _told(deltas)
    said = {"role": "assistant", "content": json.loads(json.dumps(blocks))}
    messages = [{"role": "user", "content": "?"}, said, {"role": "user", "content": "!"}]
    asked = MessagesRequest.model_validate({"max_tokens": 9, "messages": messages})
    assert as_chat(asked)[0]["messages"][1].get("reasoning_content", "") == joined(deltas).reasoning


@pytest.mark.parametrize("signature", ["EqQBCkYIBRgCKkBx", "", "x" * 5000, None])
def test_signatures_of_other_servers_are_accepted(signature: str | None) -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": signature}
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": [block]}]
    asked = MessagesRequest.model_validate({"max_tokens": 9, "messages": messages})
    assert as_chat(asked)[0]["messages"][1]["reasoning_content"] == "hm"
