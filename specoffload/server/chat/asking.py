"""A chat request as the engine gets it: its conversation rendered, its answer's form settled."""

from __future__ import annotations

from dataclasses import dataclass

from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.settings import ChatSettings
from specoffload.server.api.parameters import generate_options
from specoffload.server.api.wire import ChatRequest, ConversationRequest
from specoffload.server.chat.renderer import Renderer
from specoffload.server.chat.request import conversation_of
from specoffload.server.engine.messages import ChatJob
from specoffload.session.chat_options import answer_options, check_options, format_of
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
        check_options(conversation, options)
        prompt = await self.renderer.prepare(self._format(card), conversation)
        options = answer_options(prompt, options)
        return Question(ChatJob(prompt.text, options), prompt, idle)

    async def text(self, request: ConversationRequest, card: ModelCard) -> str:
        """The prompt that a conversation becomes. Raises BadRequest."""
        conversation: Conversation = conversation_of(request, self._settings)
        return (await self.renderer.prepare(self._format(card), conversation)).text

    def _format(self, card: ModelCard) -> ChatFormat:
        if self._made is None or self._made[0] is not card:
            self._made = card, format_of(card, self._settings)
        return self._made[1]
