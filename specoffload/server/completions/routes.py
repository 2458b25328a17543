"""/v1/completions: several prompts, several answers to each, whole or streamed."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from fastapi import APIRouter, Request
from starlette.responses import Response

from offload.sampling.probabilities import ChosenLogprob
from specoffload.server.access.clients import client_of
from specoffload.server.api.context import Context
from specoffload.server.api.parameters import generate_options
from specoffload.server.api.wire import (
    DONE,
    CompletionRequest,
    TextChoice,
    TextCompletion,
    Usage,
    server_sent,
    server_sent_error,
    sum_usage,
    timings_of,
)
from specoffload.server.body.reading import ignore
from specoffload.server.completions.probabilities import (
    Placed,
    TokenPlaces,
    openai_logprobs,
    placed_in,
)
from specoffload.server.completions.prompts import completion_jobs
from specoffload.server.engine.messages import Problem, Started
from specoffload.server.telling.group import TicketGroup
from specoffload.server.telling.text_line import MARK, TextLine
from specoffload.server.telling.told import Told
from specoffload.session.generation import FinishReason, GenerationStats, Piece


def completions_router(context: Context) -> APIRouter:
    """The route of /v1/completions."""

    async def completions(request: Request) -> Response:
        """Continues each prompt `n` times."""
        body = await context.read(request, CompletionRequest)
        options, idle = generate_options(body, context.defaults)
        ignore(request, idle)
        prompts, jobs = completion_jobs(body, options)
        # Before the teller is made, so that the engine begins meanwhile.
        group = TicketGroup(context.engine, jobs, client_of(request))
        teller = CompletionTeller(
            context.card().name,
            len(prompts),
            n_per_prompt=body.n or 1,
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            n_logprobs=body.logprobs or 0 if options.n_probs else None,
        )
        return Told(group, teller, stream=bool(body.stream))

    router = APIRouter(tags=["completions"])
    router.add_api_route("/v1/completions", completions, methods=["POST"], response_model=None)
    return router


class CompletionTeller:
    """OpenAI's text_completion, whole and in chunks: the first prompt's answers, then the next's.
    The text of a prompt is told before each of its answers where the engine gives it."""

    def __init__(
        self,
        model: str,
        n_prompts: int,
        *,
        n_per_prompt: int = 1,
        include_usage: bool = False,
        n_logprobs: int | None = None,
    ) -> None:
        """`n_logprobs` is how many tokens are told beside each; None: no logprobs at all."""
        n_answers = n_prompts * n_per_prompt
        self._model = model
        self._created = int(time.time())
        self._id = "cmpl-" + secrets.token_hex(16)
        self._n_per_prompt = n_per_prompt
        self._include_usage = include_usage
        self._n_logprobs = n_logprobs
        self._places = [TokenPlaces() for _ in range(n_answers)]
        self._logprobs: list[list[Placed]] = [[] for _ in range(n_answers)]
        self._lines: dict[int, TextLine] = {}
        self._texts: list[list[str]] = [[] for _ in range(n_answers)]
        self._echoes = [""] * n_answers
        self._has_begun = [False] * n_answers
        self._prompt_logprobs: list[list[ChosenLogprob]] = [[] for _ in range(n_prompts)]
        self._reasons: list[FinishReason] = ["stop"] * n_answers
        self._stats = [GenerationStats()] * n_answers
        self._line(0)  # now, and not when the first token is there

    def started(self, index: int, started: Started) -> None:
        first = index * self._n_per_prompt
        self._echoes[first : first + self._n_per_prompt] = [started.text or ""] * self._n_per_prompt

    def piece(self, index: int, piece: Piece) -> bytes:
        self._prompt_logprobs[index] += piece.prompt_logprobs
        read = self._prompt_logprobs[index]
        index = index * self._n_per_prompt + piece.index
        text, found = piece.text, self._found(index, piece)
        if not self._has_begun[index] and (text or piece.finish_reason):
            self._has_begun[index] = True
            text = self._echoes[index] + text
            found = placed_in(self._echoes[index], read) + found
        self._texts[index].append(text)
        told = self._text(index, text, found)
        if piece.finish_reason is None or piece.stats is None:
            return told
        self._reasons[index], self._stats[index] = piece.finish_reason, piece.stats
        ending = self._completion(index, "", piece.finish_reason)
        ending.timings = timings_of(piece.stats)
        return told + server_sent(ending.to_json())

    def _found(self, index: int, piece: Piece) -> list[Placed]:
        """The tokens that a piece's text shows, placed behind the prompt where that is told."""
        if self._n_logprobs is None:
            return []
        start = len(self._echoes[index])
        return [(start + at, token) for at, token in self._places[index].take(piece)]

    def _text(self, index: int, text: str, found: Sequence[Placed]) -> bytes:
        """A chunk of text, with the tokens that it has shown."""
        if self._n_logprobs is None:
            return self._line(index).sent(text) if text else b""
        self._logprobs[index] += found
        if not text and not found:
            return b""
        chunk = self._completion(index, text)
        chunk.choices[0].logprobs = openai_logprobs(found, self._n_logprobs)
        return server_sent(chunk.to_json())

    def end(self) -> bytes:
        if not self._include_usage:
            return DONE
        usage = self._completion(0, "")
        usage.choices = []
        usage.usage = self._usage()
        return server_sent(usage.to_json()) + DONE

    def failed(self, problem: Problem) -> bytes:
        return server_sent_error(problem)

    def whole(self) -> bytes:
        completion = self._completion(0, "")
        completion.choices = [
            TextChoice(
                index=i,
                text="".join(texts),
                logprobs=None
                if self._n_logprobs is None
                else openai_logprobs(self._logprobs[i], self._n_logprobs),
                finish_reason=self._reasons[i],
            )
            for i, texts in enumerate(self._texts)
        ]
        completion.usage = self._usage()
        if len(self._stats) == 1:
            completion.timings = timings_of(self._stats[0])
        return completion.to_json().encode()

    def _line(self, index: int) -> TextLine:
        if index not in self._lines:
            self._lines[index] = TextLine(self._completion(index, MARK).to_json())
        return self._lines[index]

    def _usage(self) -> Usage:
        return sum_usage(self._stats, self._n_per_prompt)

    def _completion(
        self, index: int, text: str, reason: FinishReason | None = None
    ) -> TextCompletion:
        choice = TextChoice(index=index, text=text, logprobs=None, finish_reason=reason)
        return TextCompletion(
            id=self._id,
            object="text_completion",
            created=self._created,
            model=self._model,
            choices=[choice],
        )
