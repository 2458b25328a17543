"""OpenAI's /v1/completions: several prompts, several answers to each, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request
from starlette.responses import Response

from offload.errors import BadRequest
from offload.sampling.probabilities import ChosenLogprob
from specoffload.server.api.answers import (
    DONE,
    MARK,
    Json,
    TextLine,
    server_sent,
    timings_of,
    to_json,
    usage_of,
)
from specoffload.server.api.context import ServerContext
from specoffload.server.api.parameters import MAX_ANSWERS, prompts_of
from specoffload.server.api.probabilities import (
    Placed,
    TokenPlaces,
    completion_logprobs,
    placed_in,
)
from specoffload.server.api.requests import CompletionRequest
from specoffload.server.api.streaming import Wording
from specoffload.server.engine.messages import (
    CompletionJob,
    GeneratingJob,
    InfillJob,
    Prompt,
    Started,
)
from specoffload.session.generation import FinishReason, GenerateOptions, Piece
from specoffload.session.infill import Fill


def completions_router(context: ServerContext) -> APIRouter:
    router = APIRouter(tags=["completions"])

    @context.post(router, "/v1/completions", body=CompletionRequest)
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continues each prompt `n` times."""
        options = context.options(request, body)
        prompts = prompts_of(body.prompt)
        n = body.n or 1
        if n * len(prompts) > MAX_ANSWERS:
            raise BadRequest(f"{len(prompts)} prompts times n {n}: at most {MAX_ANSWERS} answers")
        asked = replace(options, n=n)
        jobs = [_job(body, prompt, asked) for prompt in prompts]

        def wording() -> Wording:
            n_logprobs = body.logprobs or 0 if options.n_probs else None
            return CompletionWording(context.card.name, len(prompts), body, n_logprobs)

        return context.generate(request, jobs, wording, stream=body.stream)

    return router


def _job(body: CompletionRequest, prompt: Prompt, options: GenerateOptions) -> GeneratingJob:
    if not body.suffix:
        return CompletionJob(prompt, options, with_text=bool(body.echo))
    if not isinstance(prompt, str):
        raise BadRequest("suffix needs the prompt as text, not as token ids")
    if body.echo:
        raise BadRequest("suffix and echo exclude each other: send one of them")
    return InfillJob(Fill(prompt, body.suffix), options)


class _EchoedAnswer:
    """One answer so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.echo = ""  # the prompt's text, which comes first if asked for
        self.has_begun = False
        self.logprobs: list[Placed] = []
        self.places = TokenPlaces()
        self.line: TextLine | None = None
        self.last: Piece | None = None


class CompletionWording(Wording):
    """text_completion, whole and in chunks: the answers to the first prompt, then to the next."""

    def __init__(
        self, model: str, n_prompts: int, body: CompletionRequest, n_logprobs: int | None
    ) -> None:
        """`n_logprobs` tokens are told beside each; None: no logprobs."""
        self._n = body.n or 1
        self._n_logprobs = n_logprobs
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head: Json = {
            "id": "cmpl-" + secrets.token_hex(16),
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._answers = [_EchoedAnswer() for _ in range(n_prompts * self._n)]
        self._of_prompts: list[list[ChosenLogprob]] = [[] for _ in range(n_prompts)]

    def started(self, job: int, started: Started) -> None:
        for answer in self._answers[job * self._n : (job + 1) * self._n]:
            answer.echo = started.text or ""

    def piece(self, job: int, piece: Piece) -> bytes:
        self._of_prompts[job] += piece.prompt_logprobs
        at = job * self._n + piece.index
        answer = self._answers[at]
        text, found = piece.text, []
        if self._n_logprobs is not None:
            start = len(answer.echo)
            found = [(start + place, token) for place, token in answer.places.take(piece)]
        if not answer.has_begun and (text or piece.finish_reason):
            answer.has_begun = True
            text = answer.echo + text
            found = placed_in(answer.echo, self._of_prompts[job]) + found
        answer.texts.append(text)
        told = self._told(at, text, found)
        if piece.finish_reason is None or piece.stats is None:
            return told
        answer.last = piece
        ending = self._chunk(at, "", piece.finish_reason) | {"timings": timings_of(piece.stats)}
        return told + server_sent(ending)

    def _told(self, at: int, text: str, found: Sequence[Placed]) -> bytes:
        """A chunk with a text and the tokens that it shows."""
        answer = self._answers[at]
        if self._n_logprobs is None:
            if answer.line is None:
                answer.line = TextLine(self._chunk(at, MARK))
            return answer.line.sent(text) if text else b""
        answer.logprobs += found
        if not text and not found:
            return b""
        chunk = self._chunk(at, text)
        chunk["choices"][0]["logprobs"] = completion_logprobs(found, self._n_logprobs)
        return server_sent(chunk)

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        return server_sent(self._head | {"choices": [], "usage": self._usage()}) + DONE

    def whole(self) -> bytes:
        choices = []
        for at, answer in enumerate(self._answers):
            assert answer.last is not None  # the engine process checks the last pieces
            choice = _choice(at, "".join(answer.texts), answer.last.finish_reason)
            if self._n_logprobs is not None:
                choice["logprobs"] = completion_logprobs(answer.logprobs, self._n_logprobs)
            choices.append(choice)
        body = self._head | {"choices": choices, "usage": self._usage()}
        only = self._answers[0].last
        if len(choices) == 1 and only is not None and only.stats is not None:
            body["timings"] = timings_of(only.stats)
        return to_json(body).encode()

    def _usage(self) -> Json:
        pieces = [answer.last for answer in self._answers]
        stats = [p.stats for p in pieces if p is not None and p.stats is not None]
        return usage_of(stats, self._n)

    def _chunk(self, at: int, text: str, reason: FinishReason | None = None) -> Json:
        return self._head | {"choices": [_choice(at, text, reason)]}


def _choice(at: int, text: str, reason: FinishReason | None) -> Json:
    return {"index": at, "text": text, "logprobs": None, "finish_reason": reason}
