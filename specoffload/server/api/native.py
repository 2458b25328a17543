"""Serves llama-server's own /completion and /infill, which its page and editors' plug-ins use.

llama.cpp tools/server/README.md, "POST /completion".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.server.api.answers import timings_of
from specoffload.server.api.life_signs import native_sign
from specoffload.server.api.parameters import settings_of
from specoffload.server.api.probabilities import Placed, TokenPlaces, native_probabilities
from specoffload.server.api.refusals import Json
from specoffload.server.api.requests import InfillRequest, NativeRequest
from specoffload.server.api.routes import BodyRoute, context_of
from specoffload.server.api.streaming import Wording
from specoffload.server.engine.messages import (
    CompletionJob,
    InfillJob,
    Prompt,
    Started,
    TextWithImages,
)
from specoffload.session.infill import Fill

_STOP_TYPES = {"length": "limit", "stop": "eos"}


def native_router() -> APIRouter:
    router = APIRouter(tags=["llama-server"], route_class=BodyRoute)

    @router.post("/completion")
    @router.post("/completions")
    async def completion(request: Request, body: NativeRequest) -> Response:
        """Continues each prompt; several prompts are answered with a list."""
        context = context_of(request)
        options = await context.options(request, body)
        prompts = await context.prompts(request, body.prompt)
        jobs = [CompletionJob(prompt, options) for prompt in prompts]

        wording = NativeWording(context.card.name, options, prompts, body)
        return context.generate(request, jobs, wording, stream=body.stream)

    @router.post("/infill")
    async def infill(request: Request, body: InfillRequest) -> Response:
        """Writes the text between two others; 501 for a model that was not trained to."""
        context = context_of(request)
        options = await context.options(request, body)
        extra = tuple((part.filename, part.text) for part in body.input_extra or ())
        fill = Fill(body.input_prefix, body.input_suffix, body.prompt, extra)

        wording = NativeWording(context.card.name, options, [body.prompt], body)
        return context.generate(request, [InfillJob(fill, options)], wording, stream=body.stream)

    return router


class _NativeAnswer:
    """The parts of one answer that are known so far."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.n_prompt = 0
        self.last: TextPiece | None = None
        self.probabilities: list[Placed] = []
        self.places = TokenPlaces()


class NativeWording(Wording):
    """Writes answers in llama-server's form, whole and in chunks."""

    def __init__(
        self,
        model: str,
        options: GenerateOptions,
        prompts: Sequence[Prompt],
        body: NativeRequest | InfillRequest,
    ) -> None:
        self._model = model
        self._settings = settings_of(options)
        self._post_sampling = options.post_sampling_probs
        self._prompts = prompts
        self._with_tokens = bool(body.return_tokens)
        self._fields = body.response_fields
        self._answers = [_NativeAnswer() for _ in prompts]

    def started(self, job: int, started: Started) -> None:
        self._answers[job].n_prompt = started.n_prompt_tokens

    def sign(self) -> bytes:
        return native_sign(self._answers[0].n_prompt)

    def piece(self, job: int, piece: TextPiece) -> bytes:
        answer = self._answers[job]
        answer.texts.append(piece.text)
        answer.tokens += piece.tokens
        placed = answer.places.take(piece)
        answer.probabilities += placed
        if piece.finish_reason is not None:
            answer.last = piece
            chunk = self._final(job, "", piece.tokens)
        elif not piece.text and not piece.tokens:
            return b""
        else:
            chunk = {
                "index": job,
                "content": piece.text,
                "tokens": list(piece.tokens),
                "stop": False,
                "id_slot": piece.id_slot,
                "tokens_predicted": len(answer.tokens),
                "tokens_evaluated": answer.n_prompt,
            }
            if piece.so_far is not None:
                chunk["timings"] = timings_of(piece.so_far)
        if placed:
            chunk["completion_probabilities"] = self._probabilities(placed)
        # Write ASCII only, because some clients take U+2028 for the end of a line.
        return b"data: " + json.dumps(chunk).encode() + b"\n\n"

    def whole(self) -> bytes:
        answers = []
        for job, answer in enumerate(self._answers):
            tokens = answer.tokens if self._with_tokens else ()
            placed = answer.probabilities if self._settings["n_probs"] else None
            answers.append(self._final(job, "".join(answer.texts), tokens, placed))
        return json.dumps(answers[0] if len(answers) == 1 else answers).encode()

    def _probabilities(self, tokens: Sequence[Placed]) -> list[Json]:
        return native_probabilities(tokens, post_sampling=self._post_sampling)

    def _final(
        self,
        job: int,
        content: str,
        tokens: Sequence[int],
        probabilities: Sequence[Placed] | None = None,
    ) -> Json:
        """Return the whole answer, or the last chunk of a stream with the rest of the text."""
        answer, prompt = self._answers[job], self._prompts[job]
        last = answer.last
        assert last is not None
        assert last.finish_reason is not None
        assert last.stats is not None
        word = last.stopping_word
        final: Json = {
            "index": job,
            "content": content if content else last.text,
            "tokens": list(tokens),
            "id_slot": last.id_slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": last.stats.n_tokens,
            "tokens_evaluated": last.stats.n_prompt_tokens,
            "generation_settings": self._settings,
            "prompt": _shown(prompt),
            "has_new_line": any("\n" in text for text in answer.texts),
            "truncated": last.fills_context,
            "stop_type": "word" if word is not None else _STOP_TYPES[last.finish_reason],
            "stopping_word": word or "",
            "tokens_cached": last.stats.n_cached_tokens,
            "timings": timings_of(last.stats),
        }
        if probabilities is not None:
            final["completion_probabilities"] = self._probabilities(probabilities)
        if not self._fields:
            return final
        return {name: value for name in self._fields if (value := _at(final, name)) is not None}


def _shown(prompt: Prompt) -> str | list[int | str]:
    """Return a prompt for JSON, without its images."""
    if isinstance(prompt, TextWithImages):
        return prompt.text
    return prompt if isinstance(prompt, str) else list(prompt)


def _at(answer: Json, path: str) -> Any:
    """Return the value at a path such as `generation_settings/n_predict`, or None."""
    value: Any = answer
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value
