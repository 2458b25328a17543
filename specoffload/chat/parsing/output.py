"""Where parsers put what they have read: content and reasoning without the white space of a
template's layout, and numbered tool calls."""

from __future__ import annotations

from collections.abc import Callable

from specoffload.chat.deltas import CallPiece, Content, Delta, Reasoning


class Output:
    """Deltas in the order of the text.

    White space before a tool call and after reasoning or a call belongs to the layout and is
    dropped; at the end of a text without these it is kept.
    """

    def __init__(self, new_id: Callable[[], str], most_calls: int | None = None) -> None:
        """Calls past `most_calls` are not given out."""
        self.n_calls = 0
        self._most_calls = most_calls
        self._new_id = new_id
        self._deltas: list[Delta] = []
        self._held = ""  # white space that is dropped if a call follows
        self._at_start = False  # white space that comes now is layout
        self._thinking = False
        self._thought = ""  # white space that is dropped if the reasoning ends here
        self._has_arguments = False

    @property
    def is_reasoning(self) -> bool:
        """True within the reasoning, once some of it was read."""
        return self._thinking

    def take(self) -> list[Delta]:
        """The deltas since the last time."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def content(self, text: str) -> None:
        text = self._held + (text.lstrip() if self._at_start else text)
        if not text:
            return
        self._at_start = False
        shown = text.rstrip()
        self._held = text[len(shown) :]
        self._add(Content, shown)

    def reasoning(self, text: str) -> None:
        if not self._thinking:
            text = text.lstrip()
            if not text:
                return
            self._thinking = True
        text = self._thought + text
        shown = text.rstrip()
        self._thought = text[len(shown) :]
        self._add(Reasoning, shown)

    def end_reasoning(self) -> None:
        """Content follows, after white space that is layout."""
        self._thinking, self._thought, self._at_start = False, "", True

    def begin_call(self, name: str, call_id: str | None = None) -> None:
        self._held, self._at_start = "", True
        self._has_arguments = False
        if self._most_calls is None or self.n_calls < self._most_calls:
            self._deltas.append(CallPiece(self.n_calls, call_id or self._new_id(), name, ""))
        self.n_calls += 1

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if self._most_calls is not None and self.n_calls > self._most_calls:
            return
        if text:
            self._has_arguments = True
            last = self._deltas[-1] if self._deltas else None
            if isinstance(last, CallPiece):
                self._deltas[-1] = CallPiece(last.index, last.id, last.name, last.arguments + text)
            else:
                self._deltas.append(CallPiece(self.n_calls - 1, None, None, text))

    def end_call(self) -> None:
        """The call is whole; one without arguments has the empty object."""
        if not self._has_arguments:
            self.arguments("{}")

    def end(self) -> None:
        """No text follows."""
        if self._held:
            self._deltas.append(Content(self._held))
        self._held = ""

    def _add(self, kind: type[Content] | type[Reasoning], text: str) -> None:
        if not text:
            return
        last = self._deltas[-1] if self._deltas else None
        if isinstance(last, Content | Reasoning) and type(last) is kind:
            self._deltas[-1] = kind(last.text + text)
        else:
            self._deltas.append(kind(text))
