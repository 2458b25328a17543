"""State and functions that all routes share: reading bodies, rendering chats, generating."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from offload.errors import BadRequest
from specoffload.chat.conversation import ChatSettings
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.tool_schemas import SchemaNote
from specoffload.generation.generation import AskedOptions, GenerateOptions, ModelCard
from specoffload.server.access import client_of
from specoffload.server.api.billing_line import BILLING_LINE, has_billing_line
from specoffload.server.api.body import (
    MOST_BYTES,
    ignore,
    ignored_names,
    read_json,
)
from specoffload.server.api.chat_messages import left_out_places
from specoffload.server.api.image_reading import (
    ImageReader,
    ImageText,
    needed_images,
)
from specoffload.server.api.images import (
    MOST_FETCHES,
    MOST_IMAGES,
    OMITTED,
    ConversationImages,
    MediaRules,
    TakenImage,
)
from specoffload.server.api.kept import STREAM_ID
from specoffload.server.api.leaving import until_left
from specoffload.server.api.parameters import (
    conversation_of,
    generate_options,
    prompts_of,
    structure_name,
    wish_of,
)
from specoffload.server.api.requests import (
    ChatRequest,
    ConversationRequest,
    GenerationRequest,
)
from specoffload.server.api.shared import SharedParts
from specoffload.server.api.streaming import GenerationResponse, TicketGroup, Wording
from specoffload.server.cache_salt import salt_of
from specoffload.server.engine.calls import count_tokens
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.messages import (
    ChatJob,
    Event,
    GeneratingJob,
    Problem,
    Prompt,
    RequestFailed,
    TextWithImages,
    unavailable,
)
from specoffload.server.log import add_words
from specoffload.server.renderer import Renderer, Structure
from specoffload.session.chat import answer_options, check_options, format_of
from specoffload.session.images import PromptImages

_OVERHEAD_BYTES = 2**20  # room for tools, schemas, and the JSON around a prompt
_MOST_LOGGED = 1000
_MOST_NAME_CHARS = 80
_N_BYTES = "specoffload.body_bytes"  # key in a request's scope

log = logging.getLogger("specoffload.server")


class ServerContext:
    """What the routes share for a model. `defaults` and `chat` fill in for a request.

    With `strict_model`, requests that name another model are refused. Otherwise each such name is
    logged once.
    """

    def __init__(
        self,
        engine: EngineClient,
        renderer: Renderer,
        defaults: GenerateOptions | None = None,
        chat: ChatSettings | None = None,
        *,
        strict_model: bool = False,
        shared: SharedParts | None = None,
        media: MediaRules | None = None,
        name: str = "",
    ) -> None:
        """`media` says which images requests may name. `shared` has the parts that all models of a
        server share. `name` is the model's, if it is known before the model is loaded."""
        self.engine = engine
        self.defaults = defaults or AskedOptions()
        self.shared = shared or SharedParts()
        self.created = int(time.time())  # Unix seconds
        self._name = name
        self._renderer = renderer
        self._chat = chat or ChatSettings()
        self._format: tuple[ModelCard, ChatFormat] | None = None
        self._strict_model = strict_model
        self.media = media or MediaRules()
        self._fetches = asyncio.Semaphore(MOST_FETCHES)
        self._reader = ImageReader(engine)
        self._logged: set[str] = set()  # notes that were logged

    @property
    def card(self) -> ModelCard:
        """The model's card. Raises RequestFailed (503) until the model is loaded once."""
        if self.engine.card is None:
            loading = unavailable("Loading model", event=Event.LOADING)
            raise RequestFailed(self.engine.unavailable() or loading)
        return self.engine.card

    @property
    def name(self) -> str:
        """The model's name. Raises RequestFailed (503) if it is not known yet."""
        return self._name if self.engine.card is None and self._name else self.card.name

    @property
    def most_body_bytes(self) -> int:
        """The size of the largest body whose prompt may fit the context."""
        # Text may take twice as many bytes when JSON escapes it.
        longest_bytes = _OVERHEAD_BYTES + 2 * self.card.n_ctx * self.card.longest_token_bytes
        # The size of images says nothing about their tokens.
        return MOST_BYTES if self.card.reads_images else min(longest_bytes, MOST_BYTES)

    # ---- requests

    async def json_of(self, request: Request, held: ExitStack) -> dict[str, Any]:
        """Read the request's body and return it as a JSON object.

        The body counts as held until `held` is closed. Raises RequestFailed: 413 for a body
        over the limit, 503 while too many bytes of bodies are held, and 400 for anything but a
        JSON object.
        """
        limit_bytes = self.most_body_bytes
        n_ctx = self.card.n_ctx if limit_bytes < MOST_BYTES else None
        reading = self.shared.bodies.read(request.stream(), limit_bytes, n_ctx)
        async with reading as data:
            held.enter_context(self.shared.bodies.hold(len(data)))
            request.scope[_N_BYTES] = len(data)
            return read_json(data)

    async def options(self, request: Request, body: GenerationRequest) -> GenerateOptions:
        """Return the request's options, and record fields without effect.

        Raises BadRequest, also for a grammar that takes too long to compile, and RequestFailed
        (404) as `check_model` does.
        """
        options = self._options(request, body)
        await self._check_structure(request, body, options)
        return options

    def _options(self, request: Request, body: GenerationRequest) -> GenerateOptions:
        """Return the request's options, and record fields without effect.

        Raises BadRequest, and RequestFailed (404) as `check_model` does.
        """
        self.check_model(body.model)
        options, idle = generate_options(body, self.defaults)
        ignore(request, [*ignored_names(body), *idle])
        return replace(options, cache_salt=salt_of(request.scope, body.cache_salt))

    async def _check_structure(
        self, request: Request, body: GenerationRequest, options: GenerateOptions
    ) -> None:
        """Have the grammar of a request compiled, and record its keywords without effect."""
        if (name := structure_name(body)) is not None:
            structure = Structure(options.grammar, options.json_schema)
            places = await self._renderer.check(structure, *_turn_of(request))
            ignore(request, [name + place for place in places])

    def check_model(self, name: str | None) -> None:
        """Raise RequestFailed (404) if `name` is another model's and --strict-model is set.

        Without that flag the name is logged, because the answer is another model's than asked for.
        """
        own = self.card.name
        if not name or name == own:
            return
        shown = name[:_MOST_NAME_CHARS]
        if self._strict_model:
            message = f"no model {shown!r} here (--strict-model): this server has {own!r}"
            kind, event = "not_found_error", Event.UNKNOWN_MODEL
            raise RequestFailed(Problem("NotFound", message, 404, kind, event=event))
        self._log_once([f"a request for the model {shown!r} is answered by {own!r}"])

    # ---- chats

    async def question(self, request: Request, body: ChatRequest) -> tuple[ChatJob, ChatPrompt]:
        """Return the job of a chat request, and the prompt. Raises BadRequest."""
        options = self._options(request, body)
        images = self._images()
        conversation = conversation_of(body, self._chat, images, options.json_schema)
        check_options(conversation, options)
        await self._check_structure(request, body, options)
        turn = _turn_of(request)
        prompt = await self._renderer.prepare(self._chat_format(), conversation, *turn)
        ignore(request, [f"tools.{note.tool}{note.place}" for note in prompt.notes])
        self._note_thinking(request, body, prompt)
        self._log_once(prompt.notes)
        self._note_omitted(request, body, images)
        asked = answer_options(prompt, options)
        text = ImageText(prompt.text, images.marker, prompt.cache_ends)
        taken = await images.fetched(self._fetches)
        ((text, pixels),) = await self._images_read(request, [(text, taken)], add_special=False)
        self._note_left_out(request, [*images.left_out, *text.left_out])
        return ChatJob(text.text, asked, pixels, text.ends), prompt

    def _images(self, marker: str | None = None) -> ConversationImages:
        return ConversationImages(self.media, are_read=self.card.reads_images, marker=marker)

    async def prompts(self, request: Request, given: object) -> list[Prompt]:
        """Return the prompts in the field `prompt`, and read their images. Raises BadRequest."""
        prompts = prompts_of(given, media=self.media, are_read=self.card.reads_images)
        asked = [prompt for prompt in prompts if isinstance(prompt, TextWithImages)]
        if sum(len(prompt.images.files) for prompt in asked) > MOST_IMAGES:
            raise BadRequest(f"the prompts of a request may have {MOST_IMAGES} images together")
        wanted = [
            (ImageText(prompt.text, prompt.images.marker), needed_images(prompt.images))
            for prompt in asked
        ]
        read = iter(await self._images_read(request, wanted, add_special=True))
        return [
            TextWithImages(prompt.text, next(read)[1] or prompt.images)
            if isinstance(prompt, TextWithImages)
            else prompt
            for prompt in prompts
        ]

    async def _images_read(
        self,
        request: Request,
        wanted: Sequence[tuple[ImageText, Sequence[TakenImage]]],
        *,
        add_special: bool,
    ) -> list[tuple[ImageText, PromptImages | None]]:
        decoder = self.card.image_decoder
        if decoder is None or not any(images for _, images in wanted):
            return [(text, None) for text, _ in wanted]
        reader, client = self._reader, client_of(request)
        read = reader.read(wanted, decoder, client, add_special=add_special)
        decoded = await until_left(request.receive, read)
        if decoded is None:
            raise RequestFailed(unavailable("the client has left"))  # which nobody hears
        return decoded

    def _note_left_out(self, request: Request, names: Sequence[str]) -> None:
        """Tell client and operator which images could not be read and are left out."""
        if not names:
            return
        ignore(request, names)
        add_words(request.scope, f"images left out: {len(names)}")
        self._log_once(
            ["an image of a tool or of an earlier turn cannot be read: the model gets "
             f"{OMITTED} in its place"]
        )  # fmt: skip

    def _note_thinking(
        self, request: Request, body: ConversationRequest, prompt: ChatPrompt
    ) -> None:
        """Record wishes about thinking, and variables of the template, that have no effect."""
        wish = wish_of(body)
        switches = wish.switches if "enabled" in prompt.unheeded else ()
        efforts = wish.efforts if "effort" in prompt.unheeded else ()
        own = body.chat_template_kwargs or {}
        unused = [f"chat_template_kwargs.{name}" for name in prompt.unused if name in own]
        ignore(request, list(dict.fromkeys([*wish.ignored, *switches, *efforts, *unused])))

    def _note_omitted(
        self, request: Request, body: ConversationRequest, images: ConversationImages
    ) -> None:
        """Tell client and operator which parts of messages the model does not get."""
        if has_billing_line(body):
            ignore(request, [BILLING_LINE])
        ignore(request, left_out_places(body))
        if not images.omitted:
            return
        ignore(request, [f"{kind} in {place}" for kind, place in images.omitted])
        kinds = Counter(kind for kind, _ in images.omitted)
        counted = ", ".join(f"{kind} ({n})" for kind, n in sorted(kinds.items()))
        add_words(request.scope, f"omitted: {counted}")
        self._log_once(
            [
                f"a tool or an earlier turn has a part of type {kind}, which this server cannot "
                f"read: the model gets [{kind} omitted] in its place"
                for kind in sorted(kinds)
            ]
        )

    def _log_once(self, notes: Sequence[SchemaNote | str]) -> None:
        """Log each note that was not logged before. Clients send the same tools again and again."""
        for words in map(str, notes):
            if words not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(words)
                log.warning(words)  # the log holds back lines of equal format

    async def rendered(
        self, request: Request, body: ConversationRequest, marker: str | None = None
    ) -> tuple[str, ConversationImages]:
        """Return the prompt text of a conversation, and its images. Raises BadRequest.

        `marker` stands for each image. Without it, each call makes a new one.
        """
        self.check_model(body.model)
        ignore(request, ignored_names(body))
        images = self._images(marker)
        conversation = replace(conversation_of(body, self._chat, images), cache_points=())
        self._note_omitted(request, body, images)
        turn = _turn_of(request)
        prompt = await self._renderer.prepare(self._chat_format(), conversation, *turn)
        self._note_thinking(request, body, prompt)
        return prompt.text, images

    async def n_tokens(self, request: Request, body: ConversationRequest) -> int:
        """Return the number of a conversation's tokens. Images are counted, and not decoded."""
        rendered, images = await self.rendered(request, body)
        taken = await images.fetched(self._fetches)
        text, sized = ImageText(rendered, images.marker), None
        if taken and self.card.image_decoder is not None:
            text, sized = await self._reader.sized(text, taken, self.card.image_decoder)
        self._note_left_out(request, [*images.left_out, *text.left_out])
        return int(await self.engine.call(count_tokens, text.text, sized))

    async def counted(self, request: Request, body: ConversationRequest) -> dict[str, Any]:
        """Return the number of a conversation's tokens in the form of OpenAI's /responses API."""
        n_tokens = await self.n_tokens(request, body)
        return {"object": "response.input_tokens", "input_tokens": n_tokens}

    def _chat_format(self) -> ChatFormat:
        card = self.card
        if self._format is None or self._format[0] is not card:
            self._format = card, format_of(card, self._chat)
        return self._format[1]

    # ---- answers

    def generate(
        self,
        request: Request,
        jobs: Sequence[GeneratingJob],
        wording: Wording,
        *,
        stream: bool | None,
    ) -> Response:
        """Submit `jobs`; return their response. Raises RequestFailed if the first is refused.

        A stream of a request with X-Stream-Id is kept for clients that come back.
        """

        def begin() -> Response:
            group = TicketGroup(self.engine, jobs, client_of(request))
            return GenerationResponse(group, wording, stream=bool(stream))

        stream_id = request.headers.get(STREAM_ID)
        return self.shared.streams.keep(stream_id, begin) if stream and stream_id else begin()


def _turn_of(request: Request) -> tuple[str, int]:
    """Return a request's client and the bytes of its body, by which rendering takes turns."""
    return client_of(request), request.scope.get(_N_BYTES, 0)
