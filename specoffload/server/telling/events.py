"""Tellers of APIs whose streams are named events, of the parts that an answer is read into."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from specoffload.chat.deltas import Delta
from specoffload.server.engine.messages import Problem, Started
from specoffload.session.generation import FinishReason, GenerationStats, Piece

Event = Mapping[str, Any]


class Parser(Protocol):
    """Reads an answer's text into its parts."""

    @property
    def is_reasoning(self) -> bool: ...

    def feed(self, text: str) -> list[Delta]: ...

    def finish(self, *, cut: bool) -> list[Delta]: ...


class Story(Protocol):
    """One answer in the words of one API: each method returns the events that it makes, and the
    first of them the events that open the stream before these."""

    @property
    def result(self) -> Mapping[str, Any]:
        """The whole answer so far."""
        ...

    def started(self, n_prompt_tokens: int) -> None: ...

    def add(self, delta: Delta) -> Iterable[Event]: ...

    def end(
        self,
        reason: FinishReason,
        stats: GenerationStats,
        *,
        stopping_word: str | None,
        n_reasoning: int,
    ) -> Iterable[Event]:
        """`stopping_word` is the stop sequence that ended it, `n_reasoning` counts tokens."""
        ...

    def fail(self, problem: Problem) -> Iterable[Event]: ...


class EventTeller:
    """A `Teller` of one answer."""

    def __init__(self, story: Story, parser: Parser) -> None:
        self._story = story
        self._parser = parser
        self._n_reasoning = 0

    def started(self, index: int, started: Started) -> None:
        self._story.started(started.n_prompt_tokens)

    def piece(self, index: int, piece: Piece) -> bytes:
        deltas = self._parser.feed(piece.text)
        if self._parser.is_reasoning:
            self._n_reasoning += len(piece.tokens)
        if piece.finish_reason is not None:
            deltas += self._parser.finish(cut=piece.finish_reason == "length")
        told = b"".join(_sent(self._story.add(delta)) for delta in deltas)
        if piece.finish_reason is None or piece.stats is None:
            return told
        ending = self._story.end(
            piece.finish_reason,
            piece.stats,
            stopping_word=piece.stopping_word,
            n_reasoning=self._n_reasoning,
        )
        return told + _sent(ending)

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return _sent(self._story.fail(problem))

    def whole(self) -> bytes:
        return json.dumps(self._story.result, ensure_ascii=False).encode()


def _sent(events: Iterable[Event]) -> bytes:
    return b"".join(
        b"event: %b\ndata: %b\n\n"
        % (event["type"].encode(), json.dumps(event, ensure_ascii=False).encode())
        for event in events
    )
