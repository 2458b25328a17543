"""An answer as OpenAI's Responses API tells it: whole, and in events. Pure.

https://platform.openai.com/docs/api-reference/responses-streaming
"""

from __future__ import annotations

import copy
import secrets
from typing import Any

from specoffload.chat.deltas import CallPiece, Content, Delta, Reasoning
from specoffload.server.engine.messages import Problem
from specoffload.server.responses.request import ResponsesRequest
from specoffload.session.generation import FinishReason, GenerationStats

Event = dict[str, Any]


class ResponseStory:
    """One answer, delta by delta. Each method returns the events that it makes; `result` is the
    whole response so far.

        (nothing) -> created, in_progress -> items, one after the other -> completed, incomplete
                                                                           or failed

    An item is added, gets its deltas, and is done before the next one is added. The first method
    that makes an event opens the stream, so no caller can put events before `response.created`.
    """

    def __init__(self, request: ResponsesRequest, model: str, created_at: int) -> None:
        given = request.model_dump(exclude_unset=True)
        self.result: dict[str, Any] = {
            "id": "resp_" + secrets.token_hex(16),
            "object": "response",
            "created_at": created_at,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": given.get("metadata") or {},
            "model": model,
            "output": [],
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": given.get("reasoning") or {},
            "store": False,
            "temperature": given.get("temperature"),
            "text": given.get("text") or {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools") or [],
            "top_p": given.get("top_p"),
            "truncation": "disabled",
            "usage": None,
        }
        self._n_events = 0
        self._is_open = False

    def started(self, n_prompt_tokens: int) -> None:
        """The response tells of its tokens at its end alone."""

    def add(self, delta: Delta) -> list[Event]:
        events = self._opening()
        if isinstance(delta, CallPiece):
            return events + self._add_call(delta)
        kind = "message" if isinstance(delta, Content) else "reasoning"
        if not self._is_open_as(kind):
            events += [*self._closed(), *self._open_text(delta)]
        self._item["content"][0]["text"] += delta.text
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        name = f"response.{self._item['content'][0]['type']}.delta"
        return [*events, self._in_part(name, delta=delta.text, **more)]

    def end(
        self,
        reason: FinishReason,
        stats: GenerationStats,
        *,
        stopping_word: str | None = None,
        n_reasoning: int = 0,
    ) -> list[Event]:
        events = self._opening()
        events += self._closed("incomplete" if reason == "length" else "completed")
        self.result["status"] = "incomplete" if reason == "length" else "completed"
        if reason == "length":
            self.result["incomplete_details"] = {"reason": "max_output_tokens"}
        self.result["usage"] = {
            "input_tokens": stats.n_prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": stats.n_cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": stats.n_tokens,
            "output_tokens_details": {"reasoning_tokens": n_reasoning},
            "total_tokens": stats.n_prompt_tokens + stats.n_tokens,
        }
        name = f"response.{self.result['status']}"
        return [*events, self._event(name, response=copy.deepcopy(self.result))]

    def fail(self, problem: Problem) -> list[Event]:
        """The events of an answer that broke off."""
        events = [*self._opening(), *self._closed("incomplete")]
        self.result["status"] = "failed"
        self.result["error"] = {"code": "server_error", "message": problem.message}
        return [*events, self._event("response.failed", response=copy.deepcopy(self.result))]

    def _opening(self) -> list[Event]:
        """The events that open the stream; none if it is open."""
        if self._n_events:
            return []
        return [
            self._event("response.created", response=copy.deepcopy(self.result)),
            self._event("response.in_progress", response=copy.deepcopy(self.result)),
        ]

    @property
    def _item(self) -> dict[str, Any]:
        item: dict[str, Any] = self.result["output"][-1]
        return item

    def _is_open_as(self, kind: str) -> bool:
        return self._is_open and self._item["type"] == kind

    def _event(self, kind: str, /, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _in_item(self, kind: str, /, **fields: Any) -> Event:
        index = len(self.result["output"]) - 1
        return self._event(kind, item_id=self._item["id"], output_index=index, **fields)

    def _in_part(self, kind: str, /, **fields: Any) -> Event:
        return self._in_item(kind, content_index=0, **fields)

    def _open(self, item: dict[str, Any]) -> Event:
        self._is_open = True
        self.result["output"].append(item)
        index = len(self.result["output"]) - 1
        name = "response.output_item.added"
        return self._event(name, output_index=index, item=copy.deepcopy(item))

    def _open_text(self, delta: Content | Reasoning) -> list[Event]:
        item: dict[str, Any] = {"status": "in_progress", "content": []}
        if isinstance(delta, Content):
            item |= {"id": "msg_" + secrets.token_hex(12), "type": "message", "role": "assistant"}
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": []}
            part["logprobs"] = []
        else:
            item |= {"id": "rs_" + secrets.token_hex(12), "type": "reasoning", "summary": []}
            part = {"type": "reasoning_text", "text": ""}
        added = self._open(item)
        item["content"].append(part)
        return [added, self._in_part("response.content_part.added", part=dict(part))]

    def _add_call(self, piece: CallPiece) -> list[Event]:
        events = []
        if piece.name is not None:
            call = {
                "id": "fc_" + secrets.token_hex(12),
                "type": "function_call",
                "status": "in_progress",
                "call_id": piece.id,
                "name": piece.name,
                "arguments": "",
            }
            events = [*self._closed(), self._open(call)]
        if piece.arguments:
            self._item["arguments"] += piece.arguments
            name = "response.function_call_arguments.delta"
            events.append(self._in_item(name, delta=piece.arguments))
        return events

    def _closed(self, status: str = "completed") -> list[Event]:
        if not self._is_open:
            return []
        self._is_open = False
        item = self._item
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            name = "response.function_call_arguments.done"
            events = [self._in_item(name, name=item["name"], arguments=item["arguments"])]
        else:
            part = item["content"][0]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            events = [
                self._in_part(f"response.{part['type']}.done", text=part["text"], **more),
                self._in_part("response.content_part.done", part=dict(part)),
            ]
        index = len(self.result["output"]) - 1
        done = self._event(
            "response.output_item.done", output_index=index, item=copy.deepcopy(item)
        )
        return [*events, done]
