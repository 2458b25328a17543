"""Words one generation for /v1/chat/completions. Pure."""

from __future__ import annotations

import json
import secrets
from typing import Protocol

from specoffload.server.api.wire import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatMessage,
    ChunkChoice,
    Delta,
    timings_of,
    usage_of,
)
from specoffload.session.generation import FinishReason, GenerationStats


class Shape(Protocol):
    """Each method returns JSON text. `created` is in Unix seconds."""

    def opening(self) -> str | None:
        """The chunk before the first piece, where there is one."""
        ...

    def delta(self, text: str) -> str: ...

    def ending(self, reason: FinishReason, stats: GenerationStats) -> str: ...

    def usage(self, stats: GenerationStats) -> str:
        """The chunk that stream_options.include_usage asks for."""
        ...

    def whole(self, text: str, reason: FinishReason, stats: GenerationStats) -> str: ...


MARK = "‡"  # stands in for a text


class TextLine:
    """JSON that differs in one text: made once by pydantic, cut where the text is, filled in."""

    def __init__(self, json_with_mark: str) -> None:
        """`json_with_mark` is the JSON where the text is MARK, once."""
        self._head, self._tail = json_with_mark.rsplit(f'"{MARK}"', 1)

    def fill(self, text: str) -> str:
        return f"{self._head}{json.dumps(text, ensure_ascii=False)}{self._tail}"


class ChatShape:
    """chat.completion and chat.completion.chunk."""

    def __init__(self, model: str, created: int) -> None:
        self._model = model
        self._created = created
        self._id = "chatcmpl-" + secrets.token_hex(16)
        self._line = TextLine(self._chunk(Delta(content=MARK)).to_json())

    def opening(self) -> str | None:
        return self._chunk(Delta(role="assistant", content="")).to_json()

    def delta(self, text: str) -> str:
        return self._line.fill(text)

    def ending(self, reason: FinishReason, stats: GenerationStats) -> str:
        chunk = self._chunk(Delta(), reason)
        chunk.timings = timings_of(stats)
        return chunk.to_json()

    def usage(self, stats: GenerationStats) -> str:
        chunk = self._chunk(Delta())
        chunk.choices = []
        chunk.usage = usage_of(stats)
        return chunk.to_json()

    def whole(self, text: str, reason: FinishReason, stats: GenerationStats) -> str:
        message = ChatMessage(role="assistant", content=text)
        choice = ChatChoice(index=0, message=message, logprobs=None, finish_reason=reason)
        return ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[choice],
            usage=usage_of(stats),
            timings=timings_of(stats),
        ).to_json()

    def _chunk(self, delta: Delta, reason: FinishReason | None = None) -> ChatChunk:
        choice = ChunkChoice(index=0, delta=delta, logprobs=None, finish_reason=reason)
        return ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=[choice],
        )
