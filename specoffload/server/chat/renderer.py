"""The API process's side of the process that renders chat templates: kept warm, ended when late."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
import signal
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import psutil

from offload.errors import BadRequest, DeviceFailed
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.chat.render_process import Asked, Refused, Reply, render_main
from specoffload.server.engine.child import start_shielded
from specoffload.server.engine.engine_process import IGNORED_SIGNALS
from specoffload.server.engine.restart import describe_exit

TIME_LIMIT_S = 5.0  # of processor time; published templates take milliseconds
_PATIENCE_S = 5.0
_START_LIMIT_S = 60.0
_TRIES = 2

log = logging.getLogger("specoffload.server")


class Renderer:
    """One process and one thread that speaks with it; conversations take their turn.

    A template that takes too much processor time or memory is the request's fault. A process that
    ends or falls silent otherwise is ours: the conversation is tried again in a new one.
    """

    def __init__(self, time_limit_s: float = TIME_LIMIT_S, patience_s: float = _PATIENCE_S) -> None:
        """`time_limit_s` of processor time are for one conversation. A process that neither
        answers nor computes for `patience_s` is taken for stopped."""
        self._time_limit_s = time_limit_s
        self._patience_s = patience_s
        self._is_closed = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._form: ChatFormat | None = None  # that the process has

    def warm(self) -> None:
        """Start the process, so that the first request need not wait for it. Returns at once."""
        self._thread.submit(self._start)

    async def prepare(self, form: ChatFormat, conversation: Conversation) -> ChatPrompt:
        """`form.prepare(conversation)`. Raises BadRequest, also for a template that takes too
        long, and DeviceFailed where no process renders it."""
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._thread, self._ask, form, conversation)
        if isinstance(reply, Refused):
            raise BadRequest(reply.words)
        return reply

    def close(self) -> None:
        """End the process. May be called again."""
        self._is_closed = True
        self._end()  # a template under way sees the end of its process
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    # ---- on the thread

    def _ask(self, form: ChatFormat, conversation: Conversation) -> Reply:
        end = ""
        for _ in range(_TRIES):
            connection = self._start()
            is_silent = False
            try:
                connection.send(Asked(None if form is self._form else form, conversation))
                self._form = form
                if self._answers(connection):
                    reply: Reply = connection.recv()
                    return reply
                is_silent = True
            except (EOFError, OSError):
                pass  # it has ended
            exit_code = self._end()
            if exit_code == -signal.SIGXCPU:
                seconds = f"{self._time_limit_s:g} s of processor time"
                return Refused(f"chat template {form.name} takes over {seconds} on these messages")
            silent = f"did nothing for {self._patience_s:g} s"
            end = silent if is_silent else describe_exit(exit_code)
            log.warning("the process that renders chat template %s %s", form.name, end)
        raise DeviceFailed(
            f"the process that renders chat template {form.name} {end}, {_TRIES} times in a row"
        )

    def _answers(self, connection: Connection) -> bool:
        """Wait for an answer while the process computes, however slowly; False if it does not."""
        used_s = self._processor_s()
        while not connection.poll(self._patience_s):
            before_s, used_s = used_s, self._processor_s()
            if used_s <= before_s:
                return False
        return True

    def _processor_s(self) -> float:
        """The processor time that the process has used."""
        process = self._process
        if process is None:
            return 0.0  # the server is closing
        try:
            used = psutil.Process(process.pid).cpu_times()
        except psutil.Error:
            return 0.0  # it has ended
        return float(used.user + used.system)

    def _start(self) -> Connection:
        """The running process's pipe. Raises DeviceFailed."""
        if self._connection is not None:
            return self._connection
        if self._is_closed:
            raise DeviceFailed("the server is shutting down")
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(
            target=render_main,
            args=(theirs, IGNORED_SIGNALS, self._time_limit_s),
            name="templates",
            daemon=True,
        )
        try:
            start_shielded(process)
            theirs.close()  # else the end of the process would not be seen
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
        """End the process; its exit code, also if it had ended before."""
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
