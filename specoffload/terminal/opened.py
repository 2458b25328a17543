"""A session for one person: opened with a bar, and what is said of it and of an answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from specoffload import report
from specoffload.chat.conversation import Message
from specoffload.config.resolution import Config
from specoffload.session.generation import Piece
from specoffload.session.session import Session

_Part = TypeVar("_Part")


@contextmanager
def opened(config: Config, remarks: Sequence[str] = ()) -> Iterator[Session]:
    """`remarks` on the command line are always said; what else there is to say, with --verbose.
    What changes while it answers is said at the end, not within an answer."""
    for words in remarks:
        report.note(words)
    news: list[str] = []
    with report.steps(config.alias or config.model.name) as on_progress:
        session = Session(config, on_progress, on_news=news.append)
    with session:
        for words in session.notes:
            if words not in remarks:
                report.detail(words)
        yield session
    for words in news:
        report.note(words)


class PromptBar:
    """A bar while a prompt is being evaluated, for which pieces without text stand."""

    def __init__(self, session: Session, n_prompt: int) -> None:
        self._session, self._n_prompt = session, max(1, n_prompt)
        self._shown = ExitStack()
        self._show: Callable[[float], None] | None = None

    def takes(self, part: object) -> bool:
        """True for a part that is the bar's; the first that is not ends it."""
        if not isinstance(part, Piece) or part.text or part.stats is not None:
            self.close()
            return False
        if self._show is None:
            bar = report.progress(f"reading {self._n_prompt} tokens")
            self._show = self._shown.enter_context(bar)
        n_held = max(slot.n_tokens for slot in self._session.slots())
        self._show(min(1.0, n_held / self._n_prompt))
        return True

    def close(self) -> None:
        self._shown.close()

    def __enter__(self) -> PromptBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def with_bar(parts: Iterable[_Part], n_prompt: int, session: Session) -> Iterator[_Part]:
    """The parts that are not the bar's."""
    with PromptBar(session, n_prompt) as bar:
        yield from (part for part in parts if not bar.takes(part))


def say_how_it_went(last: Piece) -> None:
    """Two lines on standard error; with --verbose, all that is known of the speculation."""
    if last.stats is None:
        return
    for words in report.summary(last.stats):
        report.note(words)
    for words in report.spec_lines(last.stats):
        report.detail(words)


def as_data(session: Session, message: Message, last: Piece) -> dict[str, Any]:
    """An answer for a script to read."""
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
