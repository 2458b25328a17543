"""Serves OpenAI's /v1/chat/completions and /v1/completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from offload.errors import BadRequest
from offload.sampling.answers import ChosenLogprob
from specoffload.chat.conversation import CallPiece, Content, Delta, Reasoning
from specoffload.chat.format import ChatPrompt
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.server.api.answers import (
    DONE,
    MARK,
    ParsedAnswer,
    TextLine,
    server_sent,
    timings_of,
    to_json,
    usage_of,
)
from specoffload.server.api.life_signs import (
    CHAT_CHUNK,
    TEXT_CHUNK,
    StreamStart,
    chunk_head,
    chunk_sign,
    new_start,
    start_of,
)
from specoffload.server.api.parameters import MAX_ANSWERS
from specoffload.server.api.probabilities import (
    ContentTokens,
    Placed,
    TokenPlaces,
    chat_logprobs,
    completion_logprobs,
    placed_in,
)
from specoffload.server.api.refusals import Api, Json
from specoffload.server.api.requests import ChatRequest, CompletionRequest, ConversationRequest
from specoffload.server.api.routes import BodyRoute, context_of
from specoffload.server.api.streaming import Wording
from specoffload.server.engine.messages import (
    CompletionJob,
    GeneratingJob,
    InfillJob,
    Prompt,
    Started,
    TextWithImages,
)
from specoffload.session.infill import Fill


def openai_router() -> APIRouter:
    router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)

    @router.post("/v1/chat/completions")
    @router.post("/chat/completions")
    async def chat(request: Request, body: ChatRequest) -> Response:
        """The model's next message, `n` times."""
        context = context_of(request)
        job, prompt = await context.question(request, body)
        wording = ChatWording(prompt, context.card.name, body, start_of(request.scope))
        return context.generate(request, [job], wording, stream=body.stream)

    @router.post("/apply-template")
    async def apply_template(request: Request, body: ConversationRequest) -> Response:
        """The prompt that a conversation becomes."""
        context = context_of(request)
        text, _ = await context.rendered(request, body, context.media.marker)
        if context.card.adds_bos:  # /completion puts it before the text
            text = text.removeprefix(context.card.bos)
        return JSONResponse({"prompt": text})

    @router.post("/v1/chat/completions/input_tokens")
    @router.post("/chat/completions/input_tokens")
    async def input_tokens(request: Request, body: ConversationRequest) -> Response:
        """The number of tokens that a conversation takes as a prompt."""
        context = context_of(request)
        return JSONResponse(await context.counted(request, body))

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continues each prompt `n` times."""
        context = context_of(request)
        options = await context.options(request, body)
        prompts = await context.prompts(request, body.prompt)
        n = body.n or 1
        if n * len(prompts) > MAX_ANSWERS:
            raise BadRequest(f"{len(prompts)} prompts times n {n}: at most {MAX_ANSWERS} answers")
        asked = replace(options, n=n)
        jobs = [_job(body, prompt, asked) for prompt in prompts]
        n_logprobs = body.logprobs or 0 if options.n_probs else None
        start = start_of(request.scope)
        wording = CompletionWording(context.card.name, len(prompts), body, n_logprobs, start)
        return context.generate(request, jobs, wording, stream=body.stream)

    return router


def _job(body: CompletionRequest, prompt: Prompt, options: GenerateOptions) -> GeneratingJob:
    if isinstance(prompt, TextWithImages) and body.echo:
        raise BadRequest("echo needs a prompt without images")
    if not body.suffix:
        return CompletionJob(prompt, options, with_text=bool(body.echo))
    if not isinstance(prompt, str):
        raise BadRequest("suffix needs the prompt as text, not as token ids")
    if body.echo:
        raise BadRequest("suffix and echo exclude each other: send one of them")
    return InfillJob(Fill(prompt, body.suffix), options)


class _ChoicesWording(Wording):
    """Writes answers as numbered choices, whole or in chunks. A chunk has a part of one choice."""

    api = Api.OPENAI

    def __init__(
        self,
        kind: str,
        start: StreamStart,
        model: str,
        body: ChatRequest | CompletionRequest,
    ) -> None:
        self._start, self._kind, self._model = start, kind, model
        self._head = chunk_head(start, kind, model)
        self._n = body.n or 1  # answers to each prompt
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._lasts: dict[int, TextPiece] = {}  # last pieces by number of the answer
        self._lines: dict[tuple[int, str], TextLine] = {}

    def sign(self) -> bytes:
        return chunk_sign(self._start, self._kind, self._model)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return server_sent(self._head | {"choices": [], "usage": self._usage()}) + DONE

    def _usage(self) -> Json:
        lasts = [self._lasts[at] for at in sorted(self._lasts)]
        return usage_of([last.stats for last in lasts if last.stats is not None], self._n)

    def _chunk(self, choice: Json) -> Json:
        return self._head | {"choices": [choice]}

    def _ending(self, at: int, piece: TextPiece, choice: Json) -> bytes:
        """Record the last piece of answer `at`, and return its last chunk."""
        self._lasts[at] = piece
        assert piece.stats is not None  # the engine process checks last pieces
        return server_sent(self._chunk(choice) | {"timings": timings_of(piece.stats)})


class ChatWording(_ChoicesWording):
    """Writes a chat.completion, or the chat.completion.chunk objects of a stream."""

    def __init__(
        self,
        prompt: ChatPrompt,
        model: str,
        body: ChatRequest,
        start: StreamStart | None = None,
    ) -> None:
        """`start` is what the stream said before, None for a new stream."""
        super().__init__(CHAT_CHUNK, start or new_start("chatcmpl-"), model, body)
        self._n_top = (body.top_logprobs or 0) if body.logprobs else None  # None: no logprobs
        self._answers = [ParsedAnswer(prompt.parser()) for _ in range(self._n)]
        self._content_tokens = [ContentTokens(prompt.form.span) for _ in range(self._n)]
        self._logprobs: list[list[Any]] = [[] for _ in range(self._n)]
        self._n_logprobs_told = [0] * self._n
        self._has_begun = False  # True after the chunks with the role

    def opening(self) -> bytes:
        if self._has_begun:
            return b""
        self._has_begun = True
        first = {"role": "assistant", "content": ""}
        return b"".join(server_sent(self._chunk(_delta(at, first))) for at in range(self._n))

    def piece(self, job: int, piece: TextPiece) -> bytes:
        at = piece.index
        deltas = self._answers[at].add(piece)
        if self._n_top is not None:
            self._logprobs[at] += self._content_tokens[at].take(piece)
        told = [self.opening()] if deltas or piece.stats is not None else []
        if deltas and (piece.so_far is not None or self._n_top is not None):
            told += [self._told(at, delta) for delta in deltas[:-1]]
            told.append(self._told_in_full(piece, deltas[-1]))
        else:
            told += [self._told(at, delta) for delta in deltas]
        if piece.stats is not None:
            choice = _delta(at, {}, self._reason(at, piece))
            if self._n_logprobs_told[at] < len(self._logprobs[at]):
                choice["logprobs"] = self._untold_logprobs(at)
            told.append(self._ending(at, piece, choice))
        return b"".join(told)

    def whole(self) -> bytes:
        stats = self._lasts[self._n - 1].stats
        assert stats is not None
        body = self._head | {
            "object": "chat.completion",
            "choices": [self._choice(at) for at in range(self._n)],
            "usage": self._usage(),
            "timings": timings_of(stats),
        }
        return to_json(body).encode()

    def _choice(self, at: int) -> Json:
        given = self._answers[at].message
        message: Json = {"role": "assistant", "content": given.content}
        if given.reasoning:
            message["reasoning_content"] = given.reasoning
        if given.calls:
            message["content"] = given.content or None
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in given.calls
            ]
        return {
            "index": at,
            "message": message,
            "logprobs": self._logprobs_from(at, 0),
            "finish_reason": self._reason(at, self._lasts[at]),
        }

    def _reason(self, at: int, last: TextPiece) -> str | None:
        reason = last.finish_reason
        return "tool_calls" if reason == "stop" and self._answers[at].message.calls else reason

    def _usage(self) -> Json:
        n_reasoning = sum(answer.n_reasoning for answer in self._answers)
        return super()._usage() | {"completion_tokens_details": {"reasoning_tokens": n_reasoning}}

    def _told(self, at: int, delta: Delta) -> bytes:
        """Return a chunk with one delta. Most chunks are a prepared line with a new text."""
        if isinstance(delta, CallPiece):
            return server_sent(self._chunk(_delta(at, _worded(delta))))
        key = at, _name(delta)
        if key not in self._lines:
            self._lines[key] = TextLine(self._chunk(_delta(at, {key[1]: MARK})))
        return self._lines[key].sent(delta.text)

    def _told_in_full(self, piece: TextPiece, delta: Delta) -> bytes:
        """Return a chunk with the timings so far, and with the logprobs that no chunk had yet."""
        at = piece.index
        choice = _delta(at, _worded(delta))
        choice["logprobs"] = self._untold_logprobs(at)
        so_far = {} if piece.so_far is None else {"timings": timings_of(piece.so_far)}
        return server_sent(self._chunk(choice) | so_far)

    def _untold_logprobs(self, at: int) -> Json | None:
        start, self._n_logprobs_told[at] = self._n_logprobs_told[at], len(self._logprobs[at])
        return self._logprobs_from(at, start)

    def _logprobs_from(self, at: int, start: int) -> Json | None:
        if self._n_top is None:
            return None
        return chat_logprobs(self._logprobs[at][start:], self._n_top)


def _delta(at: int, delta: Json, reason: str | None = None) -> Json:
    return {"index": at, "delta": delta, "logprobs": None, "finish_reason": reason}


def _name(delta: Content | Reasoning) -> str:
    return "content" if isinstance(delta, Content) else "reasoning_content"


def _worded(delta: Delta) -> Json:
    if not isinstance(delta, CallPiece):
        return {_name(delta): delta.text}
    call: Json = {"index": delta.index}
    function: Json = {"arguments": delta.arguments}
    if delta.name is not None:
        call |= {"id": delta.id, "type": "function"}
        function = {"name": delta.name, "arguments": delta.arguments}
    return {"tool_calls": [call | {"function": function}]}


class _EchoedAnswer:
    """The parts of one answer that are known so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.echo = ""  # the prompt's text if requested; it comes first
        self.has_begun = False
        self.logprobs: list[Placed] = []
        self.places = TokenPlaces()


class CompletionWording(_ChoicesWording):
    """Writes a text_completion, whole or in chunks: answers to the first prompt, then the next."""

    def __init__(
        self,
        model: str,
        n_prompts: int,
        body: CompletionRequest,
        n_logprobs: int | None,
        start: StreamStart | None = None,
    ) -> None:
        """`n_logprobs`: number of likely tokens to list for each token (None: no logprobs).

        `start` is what the stream said before, None for a new stream.
        """
        super().__init__(TEXT_CHUNK, start or new_start("cmpl-"), model, body)
        self._n_logprobs = n_logprobs
        self._answers = [_EchoedAnswer() for _ in range(n_prompts * self._n)]
        self._of_prompts: list[list[ChosenLogprob]] = [[] for _ in range(n_prompts)]

    def started(self, job: int, started: Started) -> None:
        for answer in self._answers[job * self._n : (job + 1) * self._n]:
            answer.echo = started.text or ""

    def piece(self, job: int, piece: TextPiece) -> bytes:
        self._of_prompts[job] += piece.prompt_logprobs
        at = job * self._n + piece.index
        answer = self._answers[at]
        text, placed = piece.text, []
        if self._n_logprobs is not None:
            start = len(answer.echo)
            placed = [(start + place, token) for place, token in answer.places.take(piece)]
        if not answer.has_begun and (text or piece.finish_reason):
            answer.has_begun = True
            text = answer.echo + text
            placed = placed_in(answer.echo, self._of_prompts[job]) + placed
        answer.texts.append(text)
        told = self._told(at, text, placed)
        if piece.stats is None:
            return told
        return told + self._ending(at, piece, _text(at, "", piece.finish_reason))

    def _told(self, at: int, text: str, placed: Sequence[Placed]) -> bytes:
        """Return a chunk with a text and the logprobs of its tokens."""
        if self._n_logprobs is None:
            if (at, "text") not in self._lines:
                self._lines[at, "text"] = TextLine(self._chunk(_text(at, MARK)))
            return self._lines[at, "text"].sent(text) if text else b""
        self._answers[at].logprobs += placed
        if not text and not placed:
            return b""
        logprobs = completion_logprobs(placed, self._n_logprobs)
        return server_sent(self._chunk(_text(at, text) | {"logprobs": logprobs}))

    def whole(self) -> bytes:
        choices = []
        for at, answer in enumerate(self._answers):
            choice = _text(at, "".join(answer.texts), self._lasts[at].finish_reason)
            if self._n_logprobs is not None:
                choice["logprobs"] = completion_logprobs(answer.logprobs, self._n_logprobs)
            choices.append(choice)
        body = self._head | {"choices": choices, "usage": self._usage()}
        stats = self._lasts[0].stats
        if len(choices) == 1 and stats is not None:
            body["timings"] = timings_of(stats)
        return to_json(body).encode()


def _text(at: int, text: str, reason: str | None = None) -> Json:
    return {"index": at, "text": text, "logprobs": None, "finish_reason": reason}
