"""From a chat's prompt to the options of its answer, for server and terminal alike. Pure."""

from __future__ import annotations

from dataclasses import replace

from offload.errors import BadRequest
from offload.sampling.reasoning_limit import ReasoningLimit
from specoffload.chat.calls import HarmonyCalls
from specoffload.chat.conversation import ChatSettings, Conversation
from specoffload.chat.families import HARMONY_REASONING
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.parser import AnswerForm
from specoffload.session.card import ModelCard
from specoffload.session.generation import GenerateOptions


def format_of(card: ModelCard, settings: ChatSettings) -> ChatFormat:
    """By the template of `settings`, else by the file's own; ChatML where there is neither."""
    begin = card.bos if card.adds_bos else ""
    if settings.template is not None:
        templates = {"default": settings.template}
        return ChatFormat(templates, card.bos, card.eos, settings.template_name, begin)
    if card.chat_template and card.tool_use_template:
        templates = {"default": card.chat_template, "tool_use": card.tool_use_template}
        return ChatFormat(templates, card.bos, card.eos)
    return ChatFormat.of(card.chat_template, bos=card.bos, eos=card.eos, begin=begin)


def check_options(conversation: Conversation, options: GenerateOptions) -> None:
    """Raises BadRequest for two forms that the answer cannot have at once."""
    if conversation.must_call and options.grammar is not None:
        raise BadRequest("grammar and a tool_choice that forces a call exclude each other")


def _limit(form: AnswerForm, n_tokens: int | None, message: str) -> ReasoningLimit | None:
    """None without a budget, and for a format that has no reasoning of its own."""
    if n_tokens is None:
        return None
    if isinstance(form.family.calls, HarmonyCalls):
        opens, closes, ending = HARMONY_REASONING
        return ReasoningLimit(n_tokens, opens, closes, message + ending)
    if form.reasoning is None:
        return None
    opens, closes = form.reasoning
    return ReasoningLimit(n_tokens, opens, closes, message + closes, form.thinking)


def answer_options(prompt: ChatPrompt, options: GenerateOptions) -> GenerateOptions:
    """`options` with what the model's format adds: stops, markers to show, and the grammar of
    calls, or of an answer in JSON after reasoning. A grammar of the request's own comes first."""
    found = replace(
        options,
        stop=(*options.stop, *prompt.stops),
        shown=(*options.shown, *prompt.shown),
        reasoning_limit=_limit(
            prompt.form, options.reasoning_budget, options.reasoning_budget_message
        ),
    )
    if prompt.grammar is None or options.grammar is not None:
        return found
    return replace(found, grammar=prompt.grammar, json_schema=None)
