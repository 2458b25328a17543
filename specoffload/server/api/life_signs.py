"""Events of a stream that say that its answer is still coming, in the form of each API.

Clients give up a stream in which no event comes for a while, and their parsers drop comments:

    Codex                300 s (`stream_idle_timeout_ms`; people set 15 s): counts every event
    Claude Code          300 s: counts every event but `ping`
    Anthropic's, others  timeouts of reading, mostly 60 s and more: count every byte

So a stream has an event at least every 5 s. Claude Code also gets one that it counts every 100 s.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from specoffload.server.api.answers import server_sent
from specoffload.server.api.refusals import Json

SIGN_S = 5.0  # seconds of silence after which an event is sent; a third of 15
N_PINGS = 20  # pings after which Claude Code gets an event that it counts: 100 s, a third of 300
CHAT_CHUNK, TEXT_CHUNK = "chat.completion.chunk", "text_completion"  # kinds of chunks
_CLAUDE_CODE = "claude-cli/"
STREAM_START = "stream_start"  # key of a `StreamStart` in a request's state


@dataclass
class StreamStart:
    """The id and the time of a stream, and the number of events that opened it already."""

    id: str
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    n_events: int = 0


def new_start(prefix: str) -> StreamStart:
    return StreamStart(prefix + secrets.token_hex(16))


def start_of(scope: MutableMapping[str, Any]) -> StreamStart | None:
    """Return what a stream said before its model took the request, or None if it said nothing."""
    start: StreamStart | None = scope.get("state", {}).get(STREAM_START)
    return start


def chunk_head(start: StreamStart, kind: str, model: str) -> Json:
    """Return what all chunks of a chat or of completions have."""
    return {"id": start.id, "object": kind, "created": start.created, "model": model}


def chunk_sign(start: StreamStart, kind: str, model: str) -> bytes:
    """Return a chunk without text of a chat or of completions."""
    part: Json = {"delta": {}} if kind == CHAT_CHUNK else {"text": ""}
    choice = {"index": 0, **part, "logprobs": None, "finish_reason": None}
    return server_sent(chunk_head(start, kind, model) | {"choices": [choice]})


def native_sign(n_prompt: int = 0) -> bytes:
    """Return a chunk without text in llama-server's form."""
    counts = {"tokens_predicted": 0, "tokens_evaluated": n_prompt}
    return server_sent(
        {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1, **counts}
    )


def message_head(start: StreamStart, model: str) -> Json:
    """Return a message of the Messages API without content."""
    return {
        "id": start.id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": 0, "output_tokens": 0},
    }


def opening_of_message(start: StreamStart, message: Json) -> list[Json]:
    """Return the event that opens a stream of the Messages API; empty if it is open already."""
    if start.n_events:
        return []
    start.n_events = 1
    return [{"type": "message_start", "message": {**message, "content": []}}]


class Pings:
    """The signs of one stream of the Messages API.

    Claude Code counts no pings. Now and then it gets a `message_delta` that ends nothing. LiteLLM
    would take that for the end of the answer, so other clients get pings only.
    """

    def __init__(self, user_agent: str) -> None:
        self._needs_more = user_agent.startswith(_CLAUDE_CODE)
        self._n_pings = 0

    def next(self, opening: Callable[[], list[Json]]) -> list[Json]:
        """Return the next sign. `opening` opens the stream, and is empty if it is open."""
        self._n_pings += 1
        if not self._needs_more or self._n_pings % N_PINGS:
            return [{"type": "ping"}]
        delta = {"stop_reason": None, "stop_sequence": None}
        return opening() or [
            {"type": "message_delta", "delta": delta, "usage": {"output_tokens": 0}}
        ]
