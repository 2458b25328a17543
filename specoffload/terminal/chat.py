"""The loop of a chat, which reads messages and orders from the keyboard, and shows answers."""

from __future__ import annotations

import base64
import contextlib
import difflib
import json
import mimetypes
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from offload.errors import OffloadError
from offload.images.decoding import MOST_FILE_BYTES
from offload.regular_file import check_regular
from specdec.whole_file import read_text, write_json
from specoffload import report
from specoffload.chat.conversation import (
    CallPiece,
    Content,
    Conversation,
    Delta,
    Message,
    Reasoning,
)
from specoffload.errors import UsageError
from specoffload.generation.generation import GenerateOptions, TextPiece
from specoffload.generation.statistics import GenerationStats
from specoffload.terminal.screen import show_answer

if TYPE_CHECKING:
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

ORDERS = {
    "help": "this list",
    "system": "TEXT: set the instructions for the model; without TEXT, show them",
    "clear": "forget the conversation, keep the instructions",
    "image": "FILE: show the model an image with the next message",
    "retry": "answer the last question again",
    "save": "FILE: write the conversation as JSON",
    "load": "FILE: continue a saved conversation",
    "stats": "speed of the last answer, accepted drafts, and copies to the GPU",
    "exit": "leave; so does Ctrl-D",
}
_ALIASES = {"quit": "exit", "bye": "exit", "?": "help", "regen": "retry", "reset": "clear"}


def read_order(text: str) -> tuple[str, str] | None:
    """The name and the argument of the order in `text`; None if `text` is a message.

    `//` begins a message that starts with `/`. Raises UsageError for an order that does not exist
    or lacks its file.
    """
    if not text.startswith("/") or text.startswith("//"):
        return None
    word, _, argument = text[1:].strip().partition(" ")
    name = _ALIASES.get(word, word)
    if name not in ORDERS:
        near = difflib.get_close_matches(word, [*ORDERS, *_ALIASES], 1)
        hint = f"; did you mean /{near[0]}?" if near else "; /help lists them"
        raise UsageError(f"there is no /{word}{hint}")
    if name in ("image", "save", "load") and not argument.strip():
        raise UsageError(
            f"/{name} needs a file: /{name} {'photo.png' if name == 'image' else 'talk.json'}"
        )
    return name, argument.strip()


def converse(talk: Talk, ask: Callable[[], str], console: Console) -> None:
    """Converse until Ctrl-D or /exit. Ctrl-C ends an answer, never the conversation.

    `ask` returns the next line. It raises EOFError at Ctrl-D and KeyboardInterrupt at Ctrl-C.
    """
    while True:
        try:
            text = ask()
        except EOFError:
            return
        except KeyboardInterrupt:
            report.note("Ctrl-D or /exit leaves")
            continue
        try:
            order = read_order(text)
            if order is not None and order[0] == "exit":
                return
            if order is not None:
                _obey(*order, talk, console)
            elif text:
                _show(
                    talk.ask(text.removeprefix("/") if text.startswith("//") else text),
                    talk,
                    console,
                )
        except KeyboardInterrupt:
            report.note("stopped")
        except (OffloadError, UsageError) as e:
            report.error(str(e))


def _show(parts: Iterator[Delta | TextPiece], talk: Talk, console: Console) -> None:
    show_answer(parts, console, as_markdown=talk.is_markdown)
    console.print()
    if talk.last.finish_reason == "length":
        report.note(limit_words(talk.last, talk.options))


def limit_words(last: TextPiece, options: GenerateOptions) -> str:
    """Say which limit ended an answer whose last piece has the finish reason "length"."""
    most = options.n_predict
    n_tokens = (most or 0) if last.stats is None else last.stats.n_tokens
    stopped = f"stopped after {report.plural(n_tokens, 'token')}"
    if most is not None and 0 <= most <= n_tokens:
        return f"{stopped}; -n N writes N, -n -1 to the end"
    return f"{stopped}: the context is full (--ctx-size)"


def _obey(name: str, argument: str, talk: Talk, console: Console) -> None:
    match name:
        case "help":
            for order, words in ORDERS.items():
                report.line(f"/{order:7} {words}")
            report.paragraph(
                "Alt-Enter, or a backslash before Enter, begins another line; Ctrl-C stops an "
                "answer"
            )
        case "system":
            if argument:
                talk.set_system(argument)
            report.note(f"system: {talk.system or 'none'}")
        case "clear":
            talk.clear()
            report.note("forgotten")
        case "image":
            n = talk.attach(Path(argument))
            report.note(f"{report.plural(n, 'image')} for the next message")
        case "retry":
            _show(talk.retry(), talk, console)
        case "save":
            talk.save(Path(argument))
            report.note(f"{len(talk.messages)} messages in {argument}")
        case "load":
            talk.load(Path(argument))
            report.note(f"{len(talk.messages)} messages from {argument}")
        case "stats":
            stats = talk.stats
            if stats is None:
                report.note("nothing was answered yet")
                return
            for words in (*report.summary(stats), *report.spec_lines(stats)):
                report.paragraph(words)


# -- the keyboard


def _keys() -> KeyBindings:
    """Key bindings: Enter sends; Alt-Enter, or a backslash before Enter, begins another line."""
    from prompt_toolkit.key_binding import KeyBindings

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
        # Only conversations import prompt_toolkit, because it slows down a start.
        from prompt_toolkit import HTML, PromptSession
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.history import FileHistory, History, InMemoryHistory

        self._meanwhile = meanwhile
        history: History = InMemoryHistory()
        with contextlib.suppress(OSError):
            history_file.parent.mkdir(parents=True, exist_ok=True)
            history_file.touch()
            history = FileHistory(str(history_file))
        self._prompt = HTML("<b>&gt; </b>")
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
            return self._session.prompt(self._prompt).strip()


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


# -- the conversation

_DATA_URL = re.compile(r"data:image/[\w.+-]+;base64,[A-Za-z0-9+/]+={0,2}")
_ROLES = ("system", "user", "assistant")
StreamAnswer = Callable[[Conversation], Iterator[Delta | TextPiece]]


class Talk:
    """Messages in OpenAI's form, oldest first, and the statistics of the last answer."""

    def __init__(
        self,
        answer: StreamAnswer,
        system: str = "",
        options: GenerateOptions | None = None,
        *,
        is_markdown: bool = True,
        reads_images: bool = False,
    ) -> None:
        """`options` has the limit of answers, for the words if one reaches it.

        `is_markdown` is False if answers are shown as they are, such as continued code.
        `reads_images`: the model has a projector."""
        self.messages: list[dict[str, Any]] = []
        self.images: list[str] = []  # data URLs for the next question
        self._reads_images = reads_images
        self.stats: GenerationStats | None = None
        self.last = TextPiece("")  # of the last answer
        self.options = GenerateOptions() if options is None else options
        self.is_markdown = is_markdown
        self._answer = answer
        self.set_system(system)

    @property
    def system(self) -> str:
        """The system message; "" if there is none."""
        first = self.messages[:1]
        return str(first[0]["content"]) if first and first[0]["role"] == "system" else ""

    def set_system(self, text: str) -> None:
        if self.system:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def clear(self) -> None:
        """Forget everything but the system message."""
        self.messages = self.messages[:1] if self.system else []
        self.images = []

    def attach(self, path: Path) -> int:
        """Add an image to the next question. Returns the number of its images.

        Raises UsageError if the model reads none, or the file cannot be read.
        """
        if not self._reads_images:
            raise UsageError("this model reads no images: start with --mmproj FILE")
        try:
            if check_regular(path) > MOST_FILE_BYTES:
                raise UsageError(f"{path}: an image may have {MOST_FILE_BYTES} bytes")
            data = base64.b64encode(path.read_bytes()).decode()
        except OSError as e:
            raise UsageError(f"{path}: cannot be read ({e.strerror})") from e
        kind = mimetypes.guess_type(path.name)[0] or "image/png"
        self.images.append(f"data:{kind};base64,{data}")
        return len(self.images)

    def ask(self, text: str) -> Iterator[Delta | TextPiece]:
        """Ask a question, with the attached images, and yield the answer while it is written.

        A partial answer stays in the conversation. A question without any answer is removed.
        """
        images, self.images = self.images, []
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        return self._ask([*parts, {"type": "text", "text": text}] if parts else text)

    def _ask(self, content: str | list[dict[str, Any]]) -> Iterator[Delta | TextPiece]:
        self.messages.append({"role": "user", "content": content})
        so_far, self.last = Message(), TextPiece("")
        try:
            for part in self._answer(Conversation(tuple(self.messages))):
                if isinstance(part, Content | Reasoning | CallPiece):
                    so_far.add(part)
                else:
                    self.stats = part.stats or self.stats
                    self.last = part
                yield part
        finally:
            if so_far.content or so_far.reasoning:
                said = {"role": "assistant", "content": so_far.content}
                if so_far.reasoning:
                    said["reasoning_content"] = so_far.reasoning
                self.messages.append(said)
            else:
                self.messages.pop()

    def retry(self) -> Iterator[Delta | TextPiece]:
        """Answer the last question again. Raises UsageError if there was none."""
        asked = [i for i, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            raise UsageError("nothing was asked yet")
        content = self.messages[asked[-1]]["content"]
        del self.messages[asked[-1] :]
        return self._ask(content)

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
            talk = json.loads(read_text(path))
        except (OSError, ValueError) as e:
            raise UsageError(f"{path}: cannot be read as a conversation ({e})") from e
        messages = talk.get("messages") if isinstance(talk, dict) else talk
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise UsageError(
                f"{path}: is no conversation: a list of messages with role and content"
            )
        self.messages = messages


def _is_message(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("role") not in _ROLES:
        return False
    content = value.get("content")
    others = [v for name, v in value.items() if name != "content"]
    return all(isinstance(v, str) for v in others) and (
        isinstance(content, str)
        or (isinstance(content, list) and bool(content) and all(map(_is_part, content)))
    )


def _is_part(part: Any) -> bool:
    """True for text, and for an image as a data URL."""
    if not isinstance(part, dict):
        return False
    if part.get("type") == "text":
        return isinstance(part.get("text"), str)
    image = part.get("image_url")
    url = image.get("url") if part.get("type") == "image_url" and isinstance(image, dict) else None
    return isinstance(url, str) and _DATA_URL.fullmatch(url) is not None
