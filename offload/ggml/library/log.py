"""Sends libllama's log to a Python logger, and keeps the last error lines for messages."""

from __future__ import annotations

import collections
import ctypes
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from offload.ggml.library import interrupt
from offload.ggml.library.callback import Pending, guard


class EndCause(Enum):
    """Why the process ends itself."""

    WORKER = 1  # a lost worker
    FILE = 2  # a model's file, which is being opened
    OTHER = 3


_LEVELS = {1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR}
_CONTINUE = 5
_logger = logging.getLogger("offload.llama")
_logger.addHandler(logging.NullHandler())  # silent unless the program configures logging
_errors: collections.deque[str] = collections.deque(maxlen=8)
_last_level = logging.INFO
_unfinished = ""  # a line that came in pieces
_UNUSED = "model has unused tensor"
_OVERRIDE = re.compile(r"Using metadata override \([ \w]+\) '(.*)' = ")
_OVERFLOW = "possible training context overflow"
_overridden: set[str] = set()  # keys of the metadata that the library read from overrides
_has_spare_cells = False  # True while a context is opened that is longer than its texts
pending = Pending()  # a Ctrl-C that arrived while a line was being logged
_opening: str | None = None  # the model file that is being opened
_kept: list[Any] = []  # C keeps a pointer to the callback for the life of the process
# Functions that get the words of a failed assertion. The first that returns a sentence, not None,
# ends the process with it.
explainers: list[Callable[[str], str | None]] = []
# Functions that get the last sentence of the process and its cause.
listeners: list[Callable[[str, EndCause], None]] = []


def _on_text(level: int, text: bytes | None, _: Any) -> None:
    """Collect a line or a piece of a line. The first piece's level holds for the whole line."""
    global _last_level, _unfinished
    words = (text or b"").decode("utf-8", "replace")
    if level != _CONTINUE:
        _end_line()
        _last_level = _LEVELS.get(level, logging.INFO)
    _unfinished += words
    if words.endswith("\n"):
        _end_line()


def _end_line() -> None:
    """Log the collected line. Drop lines of dots: they are the library's progress bar."""
    global _unfinished
    line, _unfinished = _unfinished.strip("\n"), ""
    if not line.strip(". "):
        return
    if override := _OVERRIDE.search(line):
        _overridden.add(override[1])
    if interrupt.is_stopped():  # the library reports the stopped decode as a failure
        _logger.debug("%s", line)
        return
    if _last_level >= logging.ERROR:
        _errors.append(line.strip())
    # Layers for multi-token prediction are not loaded, and the library logs a line for each weight.
    idle = line.startswith(_UNUSED) or (_has_spare_cells and _OVERFLOW in line)
    level = logging.DEBUG if idle else _last_level
    _logger.log(level, "%s", line)


def capture(lib: Any) -> None:
    """Route the library's log into the logger `offload.llama` and keep the last error lines."""
    callback, _ = guard(lib.structs.llama_log_callback, pending, None, _on_text)
    _kept.append(callback)
    lib.llama_log_set(callback, None)


def route(set_log: Callable[[Any, None], None]) -> None:
    """Route another library's log to where libllama's goes. `set_log` takes the callback."""
    set_log(_kept[0], None)


def pass_through(lib: Any, to_python: Callable[[int], None], function: int) -> None:
    """Let a native function get each line first. `to_python` tells it the address of ours."""
    callback, address = guard(lib.structs.llama_log_callback, pending, None, _on_text)
    to_python(address)
    native = lib.structs.llama_log_callback(function)
    _kept.extend((callback, native))
    lib.llama_log_set(native, None)


@contextmanager
def spare_cells(longest_text: int, n_trained: int) -> Iterator[None]:
    """Do not warn in the block that a context is longer than the model was trained for.

    It warns all the same if a text of `longest_text` tokens is. The context may also have cells for
    drafted tokens and for several texts.
    """
    global _has_spare_cells
    _has_spare_cells = longest_text <= n_trained
    try:
        yield
    finally:
        _has_spare_cells = False


@contextmanager
def opening(path: Path) -> Iterator[None]:
    """Name this model file in the message of an assertion that fails in the block."""
    global _opening
    _opening = str(path)
    try:
        yield
    finally:
        _opening = None


def stop_in_one_sentence(lib: Any) -> None:
    """Make a failed assertion in ggml end the process with one line and our exit code.

    While a model is being opened, the cause is the file, so the exit code is that of bad input.
    """

    def on_abort(message: bytes | None) -> None:
        words = (message or b"").decode("utf-8", "replace").rsplit("/", 1)[-1]
        for explain in explainers:
            if (sentence := explain(words)) is not None:
                stop(sentence)
        if words.endswith("CUDA error") and (reasons := take_errors()[-3:]):
            # The later lines name the place in the library and the call.
            words += f" ({reasons[0]})"
            words += (
                "; lower --vram" if re.search("out of memory|allocation failed", reasons[0]) else ""
            )
        where = f"cannot open {_opening}, " if _opening else ""
        sentence = f"{where}the library stopped at an assertion: {words}"
        _stop(sentence, EndCause.FILE if _opening else EndCause.OTHER)

    prototype = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    thunk, address = guard(prototype, pending, None, on_abort)
    _kept.append(thunk)
    lib.ggml_set_abort_callback(address)


def end(sentence: str) -> NoReturn:
    """End the process with this sentence for the user, because a device hangs."""
    _stop(sentence, EndCause.OTHER)


def stop(sentence: str) -> NoReturn:
    """End the process because a worker is lost, with this sentence for the user."""
    _stop(sentence, EndCause.WORKER)


def _stop(sentence: str, cause: EndCause) -> NoReturn:
    sentence = "".join(c if c.isprintable() else "\ufffd" for c in sentence)
    for listen in listeners:
        with suppress(Exception):  # the process ends in any case
            listen(sentence, cause)
    if not listeners or cause is EndCause.OTHER:  # otherwise the listeners tell the user
        os.write(2, f"specoffload: {sentence}\n".encode())
    os._exit(2 if cause is EndCause.FILE else 1)


def take_reason() -> str:
    """Return why the last call failed: its distinct error lines, joined."""
    return "; ".join(dict.fromkeys(take_errors())) or "no reason given"


def take_overridden() -> frozenset[str]:
    """Return the keys of the metadata that the library read from overrides since the last call."""
    _end_line()
    keys = frozenset(_overridden)
    _overridden.clear()
    return keys


def take_errors() -> list[str]:
    """Return the error lines since the last call, oldest first, without the function's name."""
    _end_line()
    lines = [line.split(": ", 1)[-1] for line in _errors]
    _errors.clear()
    return lines
