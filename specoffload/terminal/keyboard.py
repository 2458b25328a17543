"""The messages that are typed into a chat: several lines each, with a history that outlives it."""

from __future__ import annotations

import contextlib
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.formatted_text import HTML
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

from specoffload.terminal.orders import ORDERS


def _keys() -> KeyBindings:
    """Enter sends; Alt-Enter, or a backslash before Enter, begins another line."""
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
    """Asks for one message after the other."""

    def __init__(self, history_file: Path) -> None:
        """A history that cannot be written is kept in memory alone."""
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
        """A message, without the space around it. Raises EOFError at Ctrl-D, KeyboardInterrupt at
        Ctrl-C."""
        return self._session.prompt(HTML("<b>&gt; </b>")).strip()
