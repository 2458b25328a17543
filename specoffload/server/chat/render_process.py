"""The process that renders chat templates: whatever they do, it can be ended, and it alone.

A template is a program from a model file: it may loop for ever, or ask for a string of a gigabyte.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection

from offload.errors import BadRequest
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt

MEMORY_BYTES = 2**30  # of addresses: the interpreter takes a tenth
MOST_PROMPT_CHARS = 64 * 2**20


@dataclass(frozen=True)
class Asked:
    """`form` is None where it is the one asked with before."""

    form: ChatFormat | None
    conversation: Conversation


@dataclass(frozen=True)
class Refused:
    """A BadRequest's words."""

    words: str


Reply = ChatPrompt | Refused


def render_main(
    connection: Connection, ignored_signals: frozenset[signal.Signals], time_limit_s: float
) -> None:
    """Entry point: says None when it is ready, then answers until the pipe ends.

    A conversation that takes more than `time_limit_s` of processor time ends the process by
    SIGXCPU. As in the engine process, ending is the API process's to decide, so signals are
    ignored.
    """
    for sig in ignored_signals:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ignored_signals)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        connection.send(None)
        _answer_all(connection, time_limit_s)
    except (EOFError, OSError):
        os._exit(0)


def _answer_all(connection: Connection, time_limit_s: float) -> None:
    form = ChatFormat.of(None)
    while True:
        asked: Asked = connection.recv()
        _limit_processor_time(time_limit_s)
        form = asked.form or form
        connection.send(_reply(form, asked.conversation))


def _limit_processor_time(more_s: float) -> None:
    """The kernel ends this process once it has used so much more. It counts in whole seconds."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = math.ceil(used.ru_utime + used.ru_stime + more_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, hard))


def _reply(form: ChatFormat, conversation: Conversation) -> Reply:
    try:
        prompt = form.prepare(conversation)
    except BadRequest as e:
        return Refused(str(e))
    except MemoryError:
        return Refused(f"chat template {form.name} takes more memory than {MEMORY_BYTES} bytes")
    n_chars = len(prompt.text)
    if n_chars > MOST_PROMPT_CHARS:
        return Refused(
            f"chat template {form.name} made {n_chars} characters of these messages; at most "
            f"{MOST_PROMPT_CHARS} are taken"
        )
    return prompt
