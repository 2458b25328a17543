"""A chat request as the engine gets it: its conversation rendered, its answer's form settled."""

from __future__ import annotations

from dataclasses import dataclass, replace

from offload.errors import BadRequest
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.settings import ChatSettings
from specoffload.server.api.parameters import generate_options
from specoffload.server.api.wire import ChatRequest, ConversationRequest
from specoffload.server.chat.renderer import Renderer
from specoffload.server.chat.request import conversation_of
from specoffload.server.engine.messages import ChatJob
from specoffload.session.generation import GenerateOptions, ModelCard


@dataclass(frozen=True)
class Question:
    """`job` is for the engine, `prompt` reads the answers, `idle` are parameters without effect."""

    job: ChatJob
    prompt: ChatPrompt
    idle: tuple[str, ...]


class Asking:
    """Makes questions of chat requests, by the model's template or the one of `settings`."""

    def __init__(
        self, renderer: Renderer, settings: ChatSettings, defaults: GenerateOptions
    ) -> None:
        """`defaults` is what a request gets that does not say."""
        self.renderer = renderer
        self._settings = settings
        self._defaults = defaults
        self._made: tuple[ModelCard, ChatFormat] | None = None

    async def question(self, request: ChatRequest, card: ModelCard) -> Question:
        """Raises BadRequest."""
        options, idle = generate_options(request, self._defaults)
        conversation = conversation_of(request, self._settings, options.json_schema)
        if conversation.must_call and options.grammar is not None:
            raise BadRequest("grammar and a tool_choice that forces a call exclude each other")
        prompt = await self.renderer.prepare(self._format(card), conversation)
        options = replace(
            options, stop=(*options.stop, *prompt.stops), shown=(*options.shown, *prompt.shown)
        )
        if prompt.grammar is not None and options.grammar is None:
            options = replace(options, grammar=prompt.grammar, json_schema=None)
        return Question(ChatJob(prompt.text, options), prompt, idle)

    async def text(self, request: ConversationRequest, card: ModelCard) -> str:
        """The prompt that a conversation becomes. Raises BadRequest."""
        conversation: Conversation = conversation_of(request, self._settings)
        return (await self.renderer.prepare(self._format(card), conversation)).text

    def _format(self, card: ModelCard) -> ChatFormat:
        if self._made is None or self._made[0] is not card:
            self._made = card, _format_of(card, self._settings)
        return self._made[1]


def _format_of(card: ModelCard, settings: ChatSettings) -> ChatFormat:
    if settings.template is not None:
        templates = {"default": settings.template}
        return ChatFormat(templates, card.bos, card.eos, settings.template_name)
    if card.chat_template and card.tool_use_template:
        templates = {"default": card.chat_template, "tool_use": card.tool_use_template}
        return ChatFormat(templates, card.bos, card.eos)
    return ChatFormat.of(card.chat_template, bos=card.bos, eos=card.eos)
