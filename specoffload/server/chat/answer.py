"""Words the answers to a chat: chat.completion, and chat.completion.chunk as they come. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from offload.sampling.probabilities import ChosenLogprob, TokenLogprob
from specoffload.chat.deltas import CallPiece, Content, Delta, Message, Reasoning
from specoffload.chat.format import ChatPrompt
from specoffload.server.api import wire
from specoffload.server.api.wire import (
    DONE,
    ChatFinishReason,
    ChatMessage,
    server_sent,
    server_sent_error,
)
from specoffload.server.engine.messages import Problem, Started
from specoffload.server.telling.text_line import MARK, TextLine
from specoffload.session.generation import FinishReason, GenerationStats, Piece

_LEAST_LOGPROB = -9999.0  # OpenAI's, of a token that cannot be: JSON has no infinity


class _Choice:
    """One of the answers as far as it has come."""

    def __init__(self, prompt: ChatPrompt) -> None:
        self.message = Message()
        self.stats: GenerationStats | None = None
        self.reason: ChatFinishReason | None = None
        self.logprobs: list[ChosenLogprob] = []
        self.n_reasoning = 0  # tokens; those of the round in which it ends count as the answer's
        self._parser = prompt.parser()

    def add(self, piece: Piece) -> list[Delta]:
        deltas = self._parser.feed(piece.text)
        self.logprobs += piece.logprobs
        if self._parser.is_reasoning:
            self.n_reasoning += len(piece.tokens)
        if piece.finish_reason is not None:
            deltas += self._parser.finish(cut=piece.finish_reason == "length")
            self.stats = piece.stats
            self.reason = self._reason(piece.finish_reason)
        for delta in deltas:
            self.message.add(delta)
        return deltas

    def _reason(self, reason: FinishReason) -> ChatFinishReason:
        return "tool_calls" if reason == "stop" and self._parser.n_calls else reason


class ChatTeller:
    """One request's answers, `n` of them; with `include_usage` a stream's last chunk has the usage.
    `created` is in Unix seconds."""

    def __init__(
        self,
        prompt: ChatPrompt,
        model: str,
        created: int,
        *,
        n: int = 1,
        include_usage: bool = False,
        top_logprobs: int | None = None,
    ) -> None:
        """`top_logprobs` is how many tokens are told beside each; None: no logprobs at all."""
        self._model = model
        self._created = created
        self._include_usage = include_usage
        self._top_logprobs = top_logprobs
        self._n_logprobs_told = [0] * n
        self._has_begun = False  # the chunks with the role are told
        self._id = "chatcmpl-" + secrets.token_hex(16)
        self._choices = [_Choice(prompt) for _ in range(n)]
        self._content: dict[int, TextLine] = {}
        self._reasoning: dict[int, TextLine] = {}

    def started(self, index: int, started: Started) -> None:
        pass

    def piece(self, index: int, piece: Piece) -> bytes:
        choice = self._choices[piece.index]
        deltas = choice.add(piece)
        is_full = piece.so_far is not None or self._top_logprobs is not None
        told = []
        if not self._has_begun and (deltas or choice.stats is not None):
            self._has_begun = True
            first = wire.Delta(role="assistant", content="")
            told = [_sent(self._chunk(i, first)) for i in range(len(self._choices))]
        told += [self._delta(piece.index, delta) for delta in (deltas[:-1] if is_full else deltas)]
        if is_full and deltas:
            told.append(_sent(self._full_delta(piece, deltas[-1])))
        if choice.stats is not None:
            ending = self._chunk(piece.index, wire.Delta(), choice.reason)
            ending.timings = wire.timings_of(choice.stats)
            told.append(_sent(ending))
        return b"".join(told)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        told = self._chunk(0, wire.Delta())
        told.choices = []
        told.usage = self._usage()
        return _sent(told) + DONE

    def failed(self, problem: Problem) -> bytes:
        return server_sent_error(problem)

    def whole(self) -> bytes:
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        assert len(stats) == len(self._choices)  # the engine process checks the last pieces
        completion = wire.ChatCompletion(
            id=self._id,
            object="chat.completion",
            created=self._created,
            model=self._model,
            choices=[
                _worded(i, choice, self._logprobs(choice.logprobs))
                for i, choice in enumerate(self._choices)
            ],
            usage=self._usage(),
            timings=wire.timings_of(stats[-1]),
        )
        return completion.to_json().encode()

    def _usage(self) -> wire.Usage:
        """Of all answers; the prompt counts once, as its evaluation does."""
        stats = [choice.stats for choice in self._choices if choice.stats is not None]
        usage = wire.usage_of(stats[0])
        usage.completion_tokens = sum(s.n_tokens for s in stats)
        usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
        n_reasoning = sum(choice.n_reasoning for choice in self._choices)
        usage.completion_tokens_details = wire.CompletionTokensDetails(reasoning_tokens=n_reasoning)
        return usage

    def _delta(self, index: int, delta: Delta) -> bytes:
        """The short way: most chunks differ in a text alone."""
        if isinstance(delta, Content):
            if index not in self._content:
                self._content[index] = self._line(index, wire.Delta(content=MARK))
            return self._content[index].sent(delta.text)
        if isinstance(delta, Reasoning):
            if index not in self._reasoning:
                self._reasoning[index] = self._line(index, wire.Delta(reasoning_content=MARK))
            return self._reasoning[index].sent(delta.text)
        return _sent(self._chunk(index, _delta(delta)))

    def _full_delta(self, piece: Piece, delta: Delta) -> wire.ChatChunk:
        """With the timings so far, and the logprobs of all tokens since they were last told."""
        chunk = self._chunk(piece.index, _delta(delta))
        if piece.so_far is not None:
            chunk.timings = wire.timings_of(piece.so_far)
        if self._top_logprobs is not None:
            known = self._choices[piece.index].logprobs
            n_told = self._n_logprobs_told[piece.index]
            self._n_logprobs_told[piece.index] = len(known)
            chunk.choices[0].logprobs = self._logprobs(known[n_told:])
        return chunk

    def _logprobs(self, told: Sequence[ChosenLogprob]) -> wire.ChatLogprobs | None:
        if self._top_logprobs is None:
            return None
        return wire.ChatLogprobs(
            content=[_logprob(one.chosen, one.top[: self._top_logprobs]) for one in told],
            refusal=None,
        )

    def _line(self, index: int, delta: wire.Delta) -> TextLine:
        return TextLine(self._chunk(index, delta).to_json())

    def _chunk(
        self, index: int, delta: wire.Delta, reason: ChatFinishReason | None = None
    ) -> wire.ChatChunk:
        choice = wire.ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=reason)
        return wire.ChatChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=[choice],
        )


def _sent(chunk: wire.ChatChunk) -> bytes:
    return server_sent(chunk.to_json())


def _logprob(token: TokenLogprob, top: Sequence[TokenLogprob] = ()) -> wire.TokenLogprobs:
    return wire.TokenLogprobs(
        token=token.piece.decode(errors="replace"),
        logprob=max(token.logprob, _LEAST_LOGPROB),
        bytes=list(token.piece),
        top_logprobs=[_logprob(other) for other in top],
    )


def _delta(delta: Delta) -> wire.Delta:
    if isinstance(delta, Content):
        return wire.Delta(content=delta.text)
    if isinstance(delta, Reasoning):
        return wire.Delta(reasoning_content=delta.text)
    return wire.Delta(tool_calls=[_called(delta)])


def _called(piece: CallPiece) -> wire.CalledDelta:
    function = wire.CalledFunctionDelta(arguments=piece.arguments)
    if piece.name is None:
        return wire.CalledDelta(index=piece.index, function=function)
    function.name = piece.name
    return wire.CalledDelta(index=piece.index, id=piece.id, type="function", function=function)


def _worded(index: int, choice: _Choice, logprobs: wire.ChatLogprobs | None) -> wire.ChatChoice:
    assert choice.reason is not None
    given = choice.message
    content = given.content if given.content or not given.calls else None
    message = ChatMessage(role="assistant", content=content)
    if given.reasoning:
        message.reasoning_content = given.reasoning
    if given.calls:
        message.tool_calls = [
            wire.Called(
                id=call.id,
                type="function",
                function=wire.CalledFunction(name=call.name, arguments=call.arguments),
            )
            for call in given.calls
        ]
    return wire.ChatChoice(
        index=index, message=message, logprobs=logprobs, finish_reason=choice.reason
    )
