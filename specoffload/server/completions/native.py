"""llama-server's own /completion and /infill, as its page and editors' plug-ins use them.

llama.cpp tools/server/README.md, "POST /completion".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from specoffload.server.access.clients import client_of
from specoffload.server.api.context import Context
from specoffload.server.api.parameters import generate_options
from specoffload.server.api.settings import settings_of
from specoffload.server.api.wire import (
    InfillRequest,
    NativeRequest,
    server_sent,
    server_sent_error,
    timings_of,
)
from specoffload.server.body.reading import ignore
from specoffload.server.completions.probabilities import (
    Placed,
    TokenPlaces,
    native_probabilities,
)
from specoffload.server.completions.prompts import Prompt, prompts_of
from specoffload.server.engine.messages import (
    CompletionJob,
    GeneratingJob,
    InfillJob,
    Problem,
    Started,
)
from specoffload.server.telling.group import TicketGroup
from specoffload.server.telling.told import Told
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.infill import Fill

_STOP_TYPES = {"length": "limit", "stop": "eos"}


class NativeRoutes:
    """See the module."""

    def __init__(self, context: Context) -> None:
        self._context = context

    def router(self) -> APIRouter:
        router = APIRouter(tags=["llama-server"])
        for path, route in (
            ("/completion", self.completion),
            ("/completions", self.completion),
            ("/infill", self.infill),
        ):
            router.add_api_route(path, route, methods=["POST"], response_model=None)
        return router

    async def completion(self, request: Request) -> Response:
        """Continues each prompt; several are answered with a list."""
        body = await self._context.read(request, NativeRequest)
        options, idle = generate_options(body, self._context.defaults)
        ignore(request, idle)
        prompts = prompts_of(body.prompt)
        jobs = [CompletionJob(prompt, options) for prompt in prompts]
        return self._told(request, body, options, prompts, jobs)

    async def infill(self, request: Request) -> Response:
        """Writes what stands between two texts; 501 for a model that was not trained to."""
        body = await self._context.read(request, InfillRequest)
        options, idle = generate_options(body, self._context.defaults)
        ignore(request, idle)
        extra = tuple((part.filename, part.text) for part in body.input_extra or ())
        fill = Fill(body.input_prefix, body.input_suffix, body.prompt, extra)
        return self._told(request, body, options, [body.prompt], [InfillJob(fill, options)])

    def _told(
        self,
        request: Request,
        body: NativeRequest | InfillRequest,
        options: GenerateOptions,
        prompts: Sequence[Prompt],
        jobs: Sequence[GeneratingJob],
    ) -> Response:
        teller = NativeTeller(self._context.card().name, options, prompts, body)
        group = TicketGroup(self._context.engine, jobs, client_of(request))
        return Told(group, teller, stream=bool(body.stream))


class NativeTeller:
    """llama-server's form of an answer, whole and in chunks."""

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
        self._told = [_Told() for _ in prompts]

    def started(self, index: int, started: Started) -> None:
        self._told[index].n_prompt = started.n_prompt_tokens

    def piece(self, index: int, piece: Piece) -> bytes:
        told = self._told[index]
        told.add(piece)
        if piece.finish_reason is not None:
            return self._rest(index, piece)
        if not piece.text and not piece.tokens:
            return b""
        chunk = {
            "index": index,
            "content": piece.text,
            "tokens": list(piece.tokens),
            "stop": False,
            "id_slot": piece.id_slot,
            "tokens_predicted": len(told.tokens),
            "tokens_evaluated": told.n_prompt,
        }
        if piece.so_far is not None:
            chunk["timings"] = timings_of(piece.so_far).model_dump(exclude_unset=True)
        if found := told.new_probabilities:
            chunk["completion_probabilities"] = self._worded(found)
        return server_sent(json.dumps(chunk))

    def _rest(self, index: int, piece: Piece) -> bytes:
        """A stream's last chunk, with the probabilities of tokens whose text was held back."""
        final = self._final(index, "", piece.tokens)
        if found := self._told[index].new_probabilities:
            final["completion_probabilities"] = self._worded(found)
        return server_sent(json.dumps(final))

    def _worded(self, tokens: Sequence[Placed]) -> list[dict[str, Any]]:
        return native_probabilities(tokens, post_sampling=self._post_sampling)

    def end(self) -> bytes:
        return b""

    def failed(self, problem: Problem) -> bytes:
        return server_sent_error(problem)

    def whole(self) -> bytes:
        answers = [self._whole(i, told) for i, told in enumerate(self._told)]
        return json.dumps(answers[0] if len(answers) == 1 else answers).encode()

    def _whole(self, index: int, told: _Told) -> dict[str, Any]:
        tokens = told.tokens if self._with_tokens else ()
        probabilities = self._worded(told.probabilities) if self._settings["n_probs"] else None
        return self._final(index, "".join(told.texts), tokens, probabilities)

    def _final(
        self,
        index: int,
        content: str,
        tokens: Sequence[int],
        probabilities: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """The whole answer, or a stream's last chunk, whose text has been told."""
        told, prompt = self._told[index], self._prompts[index]
        last = told.last
        assert last is not None
        assert last.finish_reason is not None
        assert last.stats is not None
        word = last.stopping_word
        answer = {
            "index": index,
            "content": content if content else last.text,
            "tokens": list(tokens),
            "id_slot": last.id_slot,
            "stop": True,
            "model": self._model,
            "tokens_predicted": last.stats.n_tokens,
            "tokens_evaluated": last.stats.n_prompt_tokens,
            "generation_settings": self._settings,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "has_new_line": any("\n" in text for text in told.texts),
            "truncated": False,
            "stop_type": "word" if word is not None else _STOP_TYPES[last.finish_reason],
            "stopping_word": word or "",
            "tokens_cached": last.stats.n_cached_tokens,
            "timings": timings_of(last.stats).model_dump(exclude_unset=True),
        }
        if probabilities is not None:
            answer["completion_probabilities"] = probabilities
        if not self._fields:
            return answer
        return {name: found for name in self._fields if (found := _at(answer, name)) is not None}


class _Told:
    """An answer as far as it has come."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.n_prompt = 0
        self.last: Piece | None = None
        self.probabilities: list[Placed] = []
        self.new_probabilities: list[Placed] = []  # that the last piece brought
        self._places = TokenPlaces()

    def add(self, piece: Piece) -> None:
        self.texts.append(piece.text)
        self.tokens += piece.tokens
        self.new_probabilities = self._places.take(piece)
        self.probabilities += self.new_probabilities
        if piece.finish_reason is not None:
            self.last = piece


def _at(answer: dict[str, Any], path: str) -> Any:
    """The value at `generation_settings/n_predict`; None where there is none."""
    found: Any = answer
    for name in path.split("/"):
        found = found.get(name) if isinstance(found, dict) else None
    return found
