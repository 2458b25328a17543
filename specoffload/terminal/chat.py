"""The loop of a chat: a message, its answer, and the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from rich.console import Console

from offload.errors import OffloadError
from specoffload import report
from specoffload.chat.conversation import Delta
from specoffload.errors import UsageError
from specoffload.session.generation import Piece
from specoffload.terminal.orders import ORDERS, Order, message_of, read_order
from specoffload.terminal.screen import show_answer
from specoffload.terminal.talk import Talk


class Asks(Protocol):
    """Whoever asks for the next message."""

    def ask(self) -> str: ...


def converse(talk: Talk, keyboard: Asks, console: Console) -> None:
    """Until Ctrl-D or /exit. Ctrl-C ends an answer, never the conversation."""
    while True:
        try:
            text = keyboard.ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            report.note("Ctrl-D or /exit leaves")
            continue
        try:
            order = read_order(text)
            if order is not None and order.name == "exit":
                return
            if order is not None:
                _obey(order, talk, console)
            elif text:
                _show(talk.ask(message_of(text)), console)
        except KeyboardInterrupt:
            report.note("stopped")
        except (OffloadError, UsageError) as e:
            report.error(str(e))


def _show(parts: Iterator[Delta | Piece], console: Console) -> None:
    show_answer(parts, console)
    console.print()


def _obey(order: Order, talk: Talk, console: Console) -> None:
    orders: dict[str, Callable[[], None]] = {
        "help": _help,
        "system": lambda: _system(talk, order.argument),
        "clear": lambda: _clear(talk),
        "retry": lambda: _show(talk.retry(), console),
        "save": lambda: _save(talk, Path(order.argument)),
        "load": lambda: _load(talk, Path(order.argument)),
        "stats": lambda: _stats(talk),
    }
    orders[order.name]()


def _help() -> None:
    for name, words in ORDERS.items():
        report.line(f"/{name:7} {words}")
    report.paragraph(
        "Alt-Enter, or a backslash before Enter, begins another line; Ctrl-C stops an answer"
    )


def _system(talk: Talk, text: str) -> None:
    if text:
        talk.set_system(text)
    report.note(f"system: {talk.system or 'none'}")


def _clear(talk: Talk) -> None:
    talk.clear()
    report.note("forgotten")


def _save(talk: Talk, path: Path) -> None:
    talk.save(path)
    report.note(f"{len(talk.messages)} messages in {path}")


def _load(talk: Talk, path: Path) -> None:
    talk.load(path)
    report.note(f"{len(talk.messages)} messages from {path}")


def _stats(talk: Talk) -> None:
    if talk.stats is None:
        report.note("nothing was answered yet")
        return
    for words in (*report.summary(talk.stats), *report.spec_lines(talk.stats)):
        report.paragraph(words)
