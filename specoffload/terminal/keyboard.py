"""Reads chat messages of one or more lines from the keyboard, and keeps a history in a file."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from specoffload.terminal.chat import ORDERS


def _keys() -> KeyBindings:
    """Key bindings: Enter sends; Alt-Enter, or a backslash before Enter, begins another line."""
    keys = KeyBindings()

    @keys.add("enter")
    def _send(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _newline(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class Keyboard:
    """Reads messages, one per call of `ask`."""

    def __init__(self, history_file: Path, meanwhile: Callable[[], bool] = lambda: False) -> None:
        """Keep the history in memory if `history_file` cannot be written.

        While the user types, `meanwhile` is called on another thread until it returns False. `ask`
        returns after the last call of `meanwhile` has ended.
        """
        self._meanwhile = meanwhile
        history: History = InMemoryHistory()
        with contextlib.suppress(OSError):
            history_file.parent.mkdir(parents=True, exist_ok=True)
            history_file.touch()
            history = FileHistory(str(history_file))
        self._session: PromptSession[str] = PromptSession(
            history=history,
            key_bindings=_keys(),
            multiline=True,
            completer=WordCompleter([f"/{name}" for name in ORDERS], sentence=True),
            complete_while_typing=False,
            prompt_continuation=lambda width, line, wrapped: "  ",
        )

    def ask(self) -> str:
        """Read a message, without blanks around it.

        Raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C.
        """
        with _beside(self._meanwhile):
            return self._session.prompt(HTML("<b>&gt; </b>")).strip()


@contextlib.contextmanager
def _beside(work: Callable[[], bool]) -> Iterator[None]:
    """Call `work` repeatedly on another thread, until it returns False or the block ends."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.is_set() and work():
            pass

    thread = threading.Thread(target=repeat, name="idle time", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
