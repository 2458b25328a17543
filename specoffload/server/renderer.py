"""Renders chat templates in a separate process that can be killed.

A template is a program from a model file. It may loop for ever, or make a string of a gigabyte.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import math
import multiprocessing
import os
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from offload.errors import BadRequest, DeviceFailed
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.engine.child import start_shielded
from specoffload.server.engine.health import describe_exit
from specoffload.server.engine.process import IGNORED_SIGNALS

_TIME_LIMIT_S = 5.0  # processor time of one conversation; published templates take milliseconds
_PATIENCE_S = 5.0
_START_LIMIT_S = 60.0
_TRIES = 2
_MEMORY_BYTES = 2**30  # address space, of which the interpreter takes a tenth
_MOST_PROMPT_CHARS = 64 * 2**20

log = logging.getLogger("specoffload.server")


_Reply = ChatPrompt | str
"""The prompt, or the sentence of a BadRequest."""


# ---- in the rendering process


def _render_main(connection: Connection, time_limit_s: float) -> None:
    """Entry point: sends None when it is ready, then answers until the pipe is closed.

    A conversation that takes more than `time_limit_s` of processor time ends the process by
    SIGXCPU. As in the engine process, IGNORED_SIGNALS are ignored, because the API process decides
    when this process ends.
    """
    for sig in IGNORED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    form = ChatFormat.of(None)
    try:
        connection.send(None)
        while True:
            new_form, conversation = connection.recv()
            _limit_processor_time(time_limit_s)
            form = new_form or form
            connection.send(_rendered(form, conversation))
    except (EOFError, OSError):
        os._exit(0)


def _limit_processor_time(more_s: float) -> None:
    """Have the kernel end this process after `more_s` more seconds of processor time.

    The limit counts whole seconds.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    most_s = math.ceil(used.ru_utime + used.ru_stime + more_s)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_CPU, (most_s, hard))


def _rendered(form: ChatFormat, conversation: Conversation) -> _Reply:
    try:
        prompt = form.prepare(conversation)
    except BadRequest as e:
        return str(e)
    except MemoryError:
        return f"chat template {form.name} takes more memory than {_MEMORY_BYTES} bytes"
    n_chars = len(prompt.text)
    if n_chars > _MOST_PROMPT_CHARS:
        return (
            f"chat template {form.name} made {n_chars} characters of these messages; at most "
            f"{_MOST_PROMPT_CHARS} are taken"
        )
    return prompt


# ---- in the API process


class Renderer:
    """Renders conversations one at a time in a process of its own.

    One thread talks to the process. If a template takes too much time or memory, the request is
    refused. If the process ends or stops in another way, the conversation is retried in a new
    process.
    """

    def __init__(
        self, time_limit_s: float = _TIME_LIMIT_S, patience_s: float = _PATIENCE_S
    ) -> None:
        """`time_limit_s` limits the processor time of one conversation.

        A process that neither answers nor computes for `patience_s` is replaced.
        """
        self._time_limit_s = time_limit_s
        self._patience_s = patience_s
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._form: ChatFormat | None = None  # the format that was sent to the process last

    def warm(self) -> None:
        """Start the process ahead of the first request. Returns at once."""
        self._thread.submit(self._start)

    async def prepare(self, form: ChatFormat, conversation: Conversation) -> ChatPrompt:
        """Return the result of `form.prepare(conversation)`.

        Raises BadRequest, also for a template that takes too long, and DeviceFailed if the process
        fails repeatedly.
        """
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._thread, self._ask, form, conversation)
        if isinstance(reply, str):
            raise BadRequest(reply)
        return reply

    def close(self) -> None:
        """End the process. May be called again."""
        self._is_closed = True
        self._end()  # a thread that waits for the process then continues
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    # ---- on the thread

    def _ask(self, form: ChatFormat, conversation: Conversation) -> _Reply:
        end = ""
        for _ in range(_TRIES):
            connection = self._start()
            is_silent = False
            try:
                # None stands for the format that was sent last.
                connection.send((None if form is self._form else form, conversation))
                self._form = form
                if self._answers(connection):
                    reply: _Reply = connection.recv()
                    return reply
                is_silent = True
            except (EOFError, OSError):
                pass  # the process has ended
            exit_code = self._end()
            if exit_code == -signal.SIGXCPU:
                seconds = f"{self._time_limit_s:g} s of processor time"
                return f"chat template {form.name} takes over {seconds} on these messages"
            silent = f"did nothing for {self._patience_s:g} s"
            end = silent if is_silent else describe_exit(exit_code)
            log.warning("the process that renders chat template %s %s", form.name, end)
        raise DeviceFailed(
            f"the process that renders chat template {form.name} {end}, {_TRIES} times in a row"
        )

    def _answers(self, connection: Connection) -> bool:
        """Wait for an answer. Returns False if the process stops computing without one."""
        used_s = self._processor_s()
        while not connection.poll(self._patience_s):
            before_s, used_s = used_s, self._processor_s()
            if used_s <= before_s:
                return False
        return True

    def _processor_s(self) -> float:
        """Return the seconds of processor time that the process has used."""
        process = self._process
        if process is None:
            return 0.0  # the server is closing
        try:
            used = psutil.Process(process.pid).cpu_times()
        except psutil.Error:
            return 0.0  # the process has ended
        return float(used.user + used.system)

    def _start(self) -> Connection:
        """Return the pipe to the process, and start one if none runs. Raises DeviceFailed."""
        if self._connection is not None:
            return self._connection
        if self._is_closed:
            raise DeviceFailed("the server is shutting down")
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(
            target=_render_main, args=(theirs, self._time_limit_s), name="templates", daemon=True
        )
        try:
            start_shielded(process)
            theirs.close()  # otherwise the pipe stays open when the process ends
            if not connection.poll(_START_LIMIT_S):
                process.kill()
                raise EOFError
            connection.recv()
        except (EOFError, OSError) as e:
            connection.close()
            raise DeviceFailed(
                f"the process that renders chat templates does not start: {e}"
            ) from e
        self._process, self._connection, self._form = process, connection, None
        atexit.register(process.kill)
        return connection

    def _end(self) -> int | None:
        """End the process if there is one. Returns its exit code, or None if there is none."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            atexit.unregister(process.kill)
            process.kill()
            process.join()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
        return None if process is None else process.exitcode
