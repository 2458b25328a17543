"""A conversation: its messages, and the operations on them. This module shows nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from specdec.whole_file import read_text, write_json
from specoffload.chat.conversation import (
    CallPiece,
    Content,
    Conversation,
    Delta,
    Message,
    Reasoning,
)
from specoffload.errors import UsageError
from specoffload.session.generation import Piece
from specoffload.session.statistics import GenerationStats

_ROLES = ("system", "user", "assistant")
Answer = Callable[[Conversation], Iterator[Delta | Piece]]


class Talk:
    """Messages in OpenAI's form, oldest first, and the statistics of the last answer."""

    def __init__(self, answer: Answer, system: str = "") -> None:
        self.messages: list[dict[str, str]] = []
        self.stats: GenerationStats | None = None
        self._answer = answer
        self.set_system(system)

    @property
    def system(self) -> str:
        """The system message; "" if there is none."""
        first = self.messages[:1]
        return first[0]["content"] if first and first[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        if self.system:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = self.messages[:1] if self.system else []

    def ask(self, text: str) -> Iterator[Delta | Piece]:
        """Ask a question and yield the answer while it is written.

        A partial answer stays in the conversation. A question without any answer is removed.
        """
        self.messages.append({"role": "user", "content": text})
        so_far = Message()
        try:
            for part in self._answer(Conversation(tuple(self.messages))):
                if isinstance(part, Content | Reasoning | CallPiece):
                    so_far.add(part)
                else:
                    self.stats = part.stats or self.stats
                yield part
        finally:
            if so_far.content or so_far.reasoning:
                said = {"role": "assistant", "content": so_far.content}
                if so_far.reasoning:
                    said["reasoning_content"] = so_far.reasoning
                self.messages.append(said)
            else:
                self.messages.pop()

    def retry(self) -> Iterator[Delta | Piece]:
        """Answer the last question again. Raises UsageError if there was none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UsageError("nothing was asked yet")
        text = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        return self.ask(text)

    def save(self, path: Path) -> None:
        """Write the conversation as JSON. Raises UsageError if the file cannot be written."""
        try:
            write_json(path, {"messages": self.messages})
        except OSError as e:
            raise UsageError(f"{path}: cannot be written ({e.strerror})") from e

    def load(self, path: Path) -> None:
        """Replace the messages by those in a file of `save`, or in a JSON list of messages.

        Raises UsageError if the file cannot be used; the messages are then unchanged.
        """
        try:
            found = json.loads(read_text(path))
        except (OSError, ValueError) as e:
            raise UsageError(f"{path}: cannot be read as a conversation ({e})") from e
        messages = found.get("messages") if isinstance(found, dict) else found
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UsageError(
                f"{path}: is no conversation: a list of messages with role and content"
            )
        self.messages = messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    return all(isinstance(v, str) for v in value.values()) and "content" in value
