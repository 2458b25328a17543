"""An answer as Anthropic's Messages API tells it: whole, and in events. Pure.

https://docs.anthropic.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import json
import secrets
from typing import Any

from specoffload.chat.deltas import Content, Delta, Reasoning
from specoffload.server.anthropic.errors import anthropic_error
from specoffload.server.engine.messages import Problem
from specoffload.session.generation import FinishReason, GenerationStats

Event = dict[str, Any]


class MessageStory:
    """One answer, delta by delta. Each method returns the events that it makes; `result` is the
    whole message so far. The first method that makes an event opens the stream."""

    def __init__(self, model: str) -> None:
        self.result: dict[str, Any] = {
            "id": "msg_" + secrets.token_hex(12),
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        self._call: int | None = None  # the index of the call that is open
        self._arguments = ""
        self._is_open = False
        self._has_started = False

    def started(self, n_prompt_tokens: int) -> None:
        """`message_start` tells of the prompt's tokens."""
        self.result["usage"]["input_tokens"] = n_prompt_tokens

    def add(self, delta: Delta) -> list[Event]:
        opened = self._opening()
        if isinstance(delta, Content):
            opened += self._opened("text", {"type": "text", "text": ""})
            self._blocks[-1]["text"] += delta.text
            return [*opened, self._delta({"type": "text_delta", "text": delta.text})]
        if isinstance(delta, Reasoning):
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            opened += self._opened("thinking", empty)
            self._blocks[-1]["thinking"] += delta.text
            return [*opened, self._delta({"type": "thinking_delta", "thinking": delta.text})]
        if delta.name is not None:
            opened += self._closed()
            self._call = delta.index
            call: dict[str, Any] = {
                "type": "tool_use",
                "id": delta.id,
                "name": delta.name,
                "input": {},
            }
            opened += self._open(call)
        self._arguments += delta.arguments
        if not delta.arguments:
            return opened
        return [
            *opened,
            self._delta({"type": "input_json_delta", "partial_json": delta.arguments}),
        ]

    def end(
        self,
        reason: FinishReason,
        stats: GenerationStats,
        *,
        stopping_word: str | None = None,
        n_reasoning: int = 0,
    ) -> list[Event]:
        events = [*self._opening(), *self._closed()]
        self.result["stop_reason"] = self._stop_reason(reason, stopping_word)
        self.result["stop_sequence"] = stopping_word
        self.result["usage"] = {
            "input_tokens": stats.n_prompt_tokens - stats.n_cached_tokens,
            "cache_read_input_tokens": stats.n_cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.n_tokens,
        }
        ending = {"stop_reason": self.result["stop_reason"], "stop_sequence": stopping_word}
        usage = self.result["usage"]
        return [
            *events,
            {"type": "message_delta", "delta": ending, "usage": usage},
            {"type": "message_stop"},
        ]

    def fail(self, problem: Problem) -> list[Event]:
        return [anthropic_error(problem)]

    def _opening(self) -> list[Event]:
        """The event that opens the stream; none if it is open."""
        if self._has_started:
            return []
        self._has_started = True
        return [{"type": "message_start", "message": {**self.result, "content": []}}]

    @property
    def _blocks(self) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = self.result["content"]
        return blocks

    def _stop_reason(self, reason: FinishReason, stopping_word: str | None) -> str:
        if reason == "length":
            return "max_tokens"
        if any(block["type"] == "tool_use" for block in self._blocks):
            return "tool_use"
        return "end_turn" if stopping_word is None else "stop_sequence"

    def _opened(self, kind: str, empty: dict[str, Any]) -> list[Event]:
        """A block of this kind, the one before ended; nothing where it is open already."""
        if self._is_open and self._blocks[-1]["type"] == kind:
            return []
        return [*self._closed(), *self._open(empty)]

    def _open(self, block: dict[str, Any]) -> list[Event]:
        self._is_open = True
        self._blocks.append(block)
        index = len(self._blocks) - 1
        return [{"type": "content_block_start", "index": index, "content_block": dict(block)}]

    def _closed(self) -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
            self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _object(arguments: str) -> dict[str, Any]:
    """Of a call that the token limit cut short, nothing is known for sure."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
