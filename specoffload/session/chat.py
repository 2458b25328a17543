"""Answers chats: adapts options to the model's chat format, and splits content from reasoning."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.errors import BadRequest
from offload.sampling.answers import ReasoningLimit
from specoffload.chat.conversation import ChatSettings, Conversation, Delta
from specoffload.chat.families import HARMONY_ANSWER, HARMONY_CALL, HARMONY_REASONING
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.chat.grammar import after_reasoning
from specoffload.chat.parser import AnswerForm
from specoffload.generation.generation import GenerateOptions, ModelCard, TextPiece
from specoffload.session.images import PromptImages

if TYPE_CHECKING:  # the API process has no engine
    from specoffload.session.session import Session


def format_of(card: ModelCard, settings: ChatSettings) -> ChatFormat:
    """The chat format for the model in `card`.

    Its template is the one in `settings`, else the model file's, else ChatML. A model that only
    continues text gets the messages' text.
    """
    begin = card.bos if card.adds_bos else ""
    if settings.template is not None:
        templates = {"default": settings.template}
        return ChatFormat(templates, card.bos, card.eos, settings.template_name, begin)
    if card.only_continues:
        return ChatFormat.continuing()
    if card.chat_template and card.tool_use_template:
        templates = {"default": card.chat_template, "tool_use": card.tool_use_template}
        return ChatFormat(templates, card.bos, card.eos, begin=begin)
    return ChatFormat.of(card.chat_template, bos=card.bos, eos=card.eos, begin=begin)


def missing_template_words(card: ModelCard, settings: ChatSettings) -> str:
    """The sentence for a user whose model file has no chat template, or "" if none is missing."""
    if settings.template is not None or card.chat_template or card.only_continues:
        return ""
    return (
        "the model file has no chat template: chats use ChatML, which the model may not know "
        "(--chat-template)"
    )


def check_options(conversation: Conversation, options: GenerateOptions) -> None:
    """Raises BadRequest for a grammar together with a forced tool call."""
    if conversation.must_call and options.grammar is not None:
        raise BadRequest("grammar and a tool_choice that forces a call exclude each other")


def _limit(form: AnswerForm, n_tokens: int | None, message: str) -> ReasoningLimit | None:
    """A limit of `n_tokens` on reasoning; None if it is None or the answer cannot reason."""
    if n_tokens is None or form.in_answer:
        return None
    if form.family.layout.is_harmony:
        opens, closes, start = HARMONY_REASONING
        branches = (HARMONY_ANSWER, HARMONY_CALL) if form.schemas else (HARMONY_ANSWER,)
        return ReasoningLimit(
            n_tokens, opens, closes, message + start, form.thinking, branches, reopens=True
        )
    if form.reasoning is None:
        return None
    opens, closes = form.reasoning
    return ReasoningLimit(n_tokens, opens, closes, message + closes, form.thinking)


def answer_options(prompt: ChatPrompt, options: GenerateOptions) -> GenerateOptions:
    """Returns `options` with what the model's chat format adds.

    It adds stop sequences, special tokens to show, the reasoning limit, and the grammar of tool
    calls or of a JSON answer. A grammar in `options` has priority. It begins after the reasoning.
    Stop sequences do not count within calls.
    """
    answering = replace(
        options,
        end_texts=prompt.stops,
        reasoning_span=prompt.form.span,
        call_span=prompt.form.call_span,
        shown=(*options.shown, *prompt.shown),
        reasoning_limit=_limit(
            prompt.form, options.reasoning_budget, options.reasoning_budget_message
        ),
    )
    if options.grammar is not None:
        return _with_own_grammar(answering, options.grammar, prompt.form)
    if prompt.grammar is None:
        return answering
    return replace(answering, grammar=prompt.grammar, json_schema=None)


def _with_own_grammar(options: GenerateOptions, gbnf: str, form: AnswerForm) -> GenerateOptions:
    """Let a client's grammar begin after the reasoning, unless that is a part of the answer."""
    if form.span is None:
        return options
    gbnf, root = after_reasoning(gbnf, form.family, form.reasoning, thinking=form.thinking)
    return replace(options, grammar=gbnf, grammar_root=root)


def answer(
    session: Session, form: ChatFormat, conversation: Conversation, options: GenerateOptions
) -> tuple[int, Iterator[Delta | TextPiece]]:
    """Returns the number of prompt tokens and an iterator over the answer's deltas.

    The iterator also yields pieces without text: one for each evaluated part of the prompt, and a
    last one with the finish reason and the statistics. A JSON schema in `options` applies to the
    answer after any reasoning. A message's content may be a list of OpenAI's parts of text and of
    images as data URLs. Raises BadRequest or DoesNotFit.
    """
    asked, images = _with_markers(replace(conversation, schema=options.json_schema))
    check_options(asked, options)
    prompt = form.prepare(asked)
    tokens: list[int]
    if images is None:
        tokens = session.tokenize(prompt.text, add_special=False, parse_special=True)
    else:
        tokens = session.image_prompt(images.parts(prompt.text), add_special=False)
    pieces = session.generate(tokens, answer_options(prompt, options))
    return len(tokens), _read(pieces, prompt)


def _with_markers(conversation: Conversation) -> tuple[Conversation, PromptImages | None]:
    """Return the conversation with text only, and its images, None if there are none."""
    marker, files, messages = f"<__media_{secrets.token_hex(16)}__>", [], []
    for message in conversation.messages:
        content = message["content"]
        if isinstance(content, str):
            messages.append(message)
            continue
        texts = []
        for part in content:
            if part["type"] == "text":
                texts.append(part["text"])
                continue
            texts.append(marker)
            files.append(base64.b64decode(part["image_url"]["url"].partition(",")[2]))
        messages.append({**message, "content": "".join(texts)})
    images = PromptImages(marker, tuple(files)) if files else None
    return replace(conversation, messages=tuple(messages)), images


def _read(pieces: Iterator[TextPiece], prompt: ChatPrompt) -> Iterator[Delta | TextPiece]:
    parser = prompt.parser()
    for piece in pieces:
        yield from parser.feed(piece.text)
        if piece.stats is not None:
            yield from parser.finish(cut=piece.finish_reason == "length")
        if not piece.text or piece.stats is not None:
            yield replace(piece, text="")
