"""One answer of a chat, from its messages to content and reasoning, for whoever holds a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specoffload.chat.conversation import Conversation
from specoffload.chat.deltas import Delta
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.session import Session


def chat_format(session: Session, template: str | None = None) -> ChatFormat:
    """By the model's own template, unless one is given; ChatML where there is neither."""
    model = session.target.model
    bos = model.token_text(model.bos) if model.bos >= 0 else ""
    eos = model.token_text(model.eos) if model.eos >= 0 else ""
    return ChatFormat.of(template or session.target.chat_template, bos=bos, eos=eos)


def answer(
    session: Session, form: ChatFormat, conversation: Conversation, options: GenerateOptions
) -> tuple[int, Iterator[Delta | Piece]]:
    """The prompt's tokens, and the answer's deltas as they come. Pieces among them are without
    text: one for each part of the prompt that was evaluated, and the last with the finish reason
    and the statistics.

    Raises BadRequest or DoesNotFit.
    """
    prompt = form.prepare(conversation)
    tokens = session.tokenize(prompt.text, add_special=False, parse_special=True)
    wanted = replace(options, stop=(*options.stop, *prompt.stops), shown=prompt.shown)
    return len(tokens), _read(session.generate(tokens, wanted), prompt)


def _read(pieces: Iterator[Piece], prompt: ChatPrompt) -> Iterator[Delta | Piece]:
    parser = prompt.parser()
    for piece in pieces:
        yield from parser.feed(piece.text)
        if piece.stats is not None:
            yield from parser.finish()
        if not piece.text or piece.stats is not None:
            yield replace(piece, text="")
