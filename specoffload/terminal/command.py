"""`specoffload chat`, and `specoffload run` where it is given no text to continue."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from specoffload import report
from specoffload.chat.conversation import Conversation, Delta, Message
from specoffload.chat.format import ChatFormat
from specoffload.config.options import ChatOptions
from specoffload.config.resolution import Config, chat_settings
from specoffload.session.chat import answer, format_of
from specoffload.session.generation import GenerateOptions, Piece
from specoffload.session.session import Session
from specoffload.terminal.chat import converse
from specoffload.terminal.keyboard import Keyboard
from specoffload.terminal.opened import as_data, opened, say_how_it_went, with_bar
from specoffload.terminal.screen import show_answer
from specoffload.terminal.talk import Talk


def chat(
    config: Config,
    options: GenerateOptions,
    own: ChatOptions,
    history_file: Path,
    remarks: Sequence[str] = (),
) -> None:
    """Converse until Ctrl-D."""
    with opened(config, remarks) as session:
        form = _format(session, own)
        talk = _talk(session, form, options, own)
        report.note(f"{session.card.name}, {session.target.n_ctx} tokens of context · /help")
        keyboard = Keyboard(history_file, session.use_idle_time)
        converse(talk, keyboard, report.console())


def answer_once(
    config: Config,
    question: str,
    options: GenerateOptions,
    own: ChatOptions,
    remarks: Sequence[str] = (),
) -> None:
    """Answer one message, and say in two lines how it went."""
    with opened(config, remarks) as session:
        answer_text(session, question, options, own)


def answer_text(
    session: Session, question: str, options: GenerateOptions, own: ChatOptions
) -> Piece:
    """Answer one message by the model's template, and say in two lines how it went. Returns the
    last piece."""
    talk = _talk(session, _format(session, own), options, own)
    message, last = Message(), Piece("")

    def kept() -> Iterator[Delta | Piece]:
        nonlocal last
        for part in talk.ask(question):
            if isinstance(part, Piece):
                last = part
            else:
                message.add(part)
            yield part

    show_answer(kept(), report.console())
    say_how_it_went(last)
    report.data(as_data(session, message, last))
    return last


def _format(session: Session, own: ChatOptions) -> ChatFormat:
    form = format_of(session.card, chat_settings(own))
    if own.template is None and not session.target.chat_template:
        report.note("the model file has no chat template: ChatML is used (--chat-template)")
    return form


def _talk(session: Session, form: ChatFormat, options: GenerateOptions, own: ChatOptions) -> Talk:
    settings = chat_settings(own)

    def answered(conversation: Conversation) -> Iterator[Delta | Piece]:
        asked = replace(
            conversation,
            reasoning=settings.reasoning_with(settings.template_kwargs),
            template_kwargs=settings.template_kwargs,
        )
        n_prompt, parts = answer(session, form, asked, options)
        return with_bar(parts, n_prompt, session)

    return Talk(answered, own.system or "")
