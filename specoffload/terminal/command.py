"""`specoffload chat`, and the parts of it that `specoffload run` uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from specoffload import report
from specoffload.chat.conversation import Conversation, Delta, Message
from specoffload.chat.format import ChatFormat
from specoffload.chat.thinking import ThinkingWish
from specoffload.config.options import ChatOptions
from specoffload.config.resolution import DEMO_WORDS, Config, chat_settings
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.session.chat import answer, format_of, missing_template_words
from specoffload.session.session import Session
from specoffload.session.startup_lines import always_shown
from specoffload.terminal.chat import Keyboard, Talk, converse, limit_words
from specoffload.terminal.screen import show_answer

_SomePart = TypeVar("_SomePart")


@contextmanager
def opened(config: Config) -> Iterator[Session]:
    """Open a session with a progress bar, and close it at the end of the block.

    Start-up lines are shown with --verbose, and those that every command shows always. News that
    comes during answers is shown at the end.
    """
    if config.is_demo:
        report.note(DEMO_WORDS)
    news: list[str] = []
    with report.steps(config.alias or config.model.name) as on_progress:
        session = Session(config, on_progress, on_news=news.append)
    with session:
        shown = always_shown(session.notes)
        for words in session.notes:
            if words in config.notes:
                continue
            say = report.note if words in shown else report.detail
            say(words)
        yield session
    for words in news:
        report.note(words)


def with_bar(parts: Iterable[_SomePart], n_prompt: int, session: Session) -> Iterator[_SomePart]:
    """Yield the parts of an answer. Parts without text move the prompt's progress bar instead."""
    with ExitStack() as shown:
        show: Callable[[float], None] | None = None
        for part in parts:
            if not isinstance(part, TextPiece) or part.text or part.stats is not None:
                shown.close()
                yield part
                continue
            if show is None:
                show = shown.enter_context(report.progress(f"reading {n_prompt} tokens"))
            n_held = max(slot.n_tokens for slot in session.slots())
            show(min(1.0, n_held / max(1, n_prompt)))


def say_how_it_went(last: TextPiece) -> None:
    """Show an answer's statistics on standard error; with --verbose, those of drafts as well."""
    if last.stats is None:
        return
    for words in report.summary(last.stats):
        report.note(words)
    for words in report.spec_lines(last.stats):
        report.detail(words)


def as_data(session: Session, message: Message, last: TextPiece) -> dict[str, Any]:
    """An answer as data for scripts (--json)."""
    stats = last.stats
    return {
        "model": session.card.name,
        "content": message.content,
        "reasoning_content": message.reasoning,
        "finish_reason": last.finish_reason,
        "tokens_per_s": stats.tokens_per_s if stats else 0.0,
        "acceptance_rate": stats.acceptance_rate if stats else None,
        "stats": asdict(stats) if stats else {},
    }


def chat(
    config: Config,
    options: GenerateOptions,
    own: ChatOptions,
    history_file: Path,
) -> None:
    """Converse until Ctrl-D."""
    with opened(config) as session:
        form = _format(session, own)
        talk = _talk(session, form, options, own)
        report.note(f"{session.card.name}, {session.target.n_ctx} tokens of context · /help")
        keyboard = Keyboard(history_file, session.use_idle_time)
        converse(talk, keyboard.ask, report.console())


def answer_text(
    session: Session, question: str, options: GenerateOptions, own: ChatOptions, *,
    has_limit: bool = False,
) -> TextPiece:  # fmt: skip
    """Answer one message in the model's chat format, and show two lines of statistics.

    Also says so if a token limit ended the answer, unless the user set that limit (`has_limit`).
    Returns the last piece.
    """
    talk = _talk(session, _format(session, own), options, own)
    message, last = Message(), TextPiece("")

    def kept() -> Iterator[Delta | TextPiece]:
        nonlocal last
        for part in talk.ask(question):
            if isinstance(part, TextPiece):
                last = part
            else:
                message.add(part)
            yield part

    show_answer(kept(), report.console(), as_markdown=talk.is_markdown)
    if last.finish_reason == "length" and not has_limit:
        report.note(limit_words(last, options))
    say_how_it_went(last)
    report.data(as_data(session, message, last))
    return last


def _format(session: Session, own: ChatOptions) -> ChatFormat:
    card, settings = session.card, chat_settings(own)
    if words := missing_template_words(card, settings):
        report.note(words)
    return format_of(card, settings)


def _talk(session: Session, form: ChatFormat, options: GenerateOptions, own: ChatOptions) -> Talk:
    settings = chat_settings(own)

    def answered(conversation: Conversation) -> Iterator[Delta | TextPiece]:
        asked = replace(
            conversation,
            reasoning=settings.reasoning_for(ThinkingWish()),
            template_kwargs=settings.kwargs_with({}),
        )
        n_prompt, parts = answer(session, form, asked, options)
        return with_bar(parts, n_prompt, session)

    return Talk(
        answered,
        own.system or "",
        options,
        is_markdown=not session.card.only_continues,
        reads_images=session.card.reads_images,
    )
