"""One answer of a chat, from its messages to content and reasoning, for whoever holds a session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from specoffload.chat.conversation import Conversation, Delta
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.session.chat_options import answer_options, check_options
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.session import Session


def answer(
    session: Session, form: ChatFormat, conversation: Conversation, options: GenerateOptions
) -> tuple[int, Iterator[Delta | Piece]]:
    """The prompt's tokens, and the answer's deltas as they come. Pieces among them are without
    text: one for each part of the prompt that was evaluated, and the last with the finish reason
    and the statistics.

    A JSON schema of `options` is the answer's, after whatever reasoning the format has.

    Raises BadRequest or DoesNotFit.
    """
    asked = replace(conversation, schema=options.json_schema)
    check_options(asked, options)
    prompt = form.prepare(asked)
    tokens = session.tokenize(prompt.text, add_special=False, parse_special=True)
    pieces = session.generate(tokens, answer_options(prompt, options))
    return len(tokens), _read(pieces, prompt)


def _read(pieces: Iterator[Piece], prompt: ChatPrompt) -> Iterator[Delta | Piece]:
    parser = prompt.parser()
    for piece in pieces:
        yield from parser.feed(piece.text)
        if piece.stats is not None:
            yield from parser.finish(cut=piece.finish_reason == "length")
        if not piece.text or piece.stats is not None:
            yield replace(piece, text="")
