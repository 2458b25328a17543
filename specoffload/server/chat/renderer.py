"""The API process's side of the process that renders chat templates: kept warm, ended when late."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import multiprocessing
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from offload.errors import BadRequest, DeviceFailed
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.chat.render_process import Asked, Refused, Reply, render_main
from specoffload.server.engine.child import start_shielded
from specoffload.server.engine.engine_process import IGNORED_SIGNALS

TIME_LIMIT_S = 5.0  # published templates take milliseconds
_START_LIMIT_S = 60.0

log = logging.getLogger("specoffload.server")


class Renderer:
    """One process and one thread that speaks with it; conversations take their turn."""

    def __init__(self, time_limit_s: float = TIME_LIMIT_S) -> None:
        self._time_limit_s = time_limit_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._form: ChatFormat | None = None  # that the process has

    def warm(self) -> None:
        """Start the process, so that the first request need not wait for it. Returns at once."""
        self._thread.submit(self._start)

    async def prepare(self, form: ChatFormat, conversation: Conversation) -> ChatPrompt:
        """`form.prepare(conversation)`. Raises BadRequest, also for a template that takes too
        long, and DeviceFailed where there can be no process."""
        loop = asyncio.get_running_loop()
        reply = await loop.run_in_executor(self._thread, self._ask, form, conversation)
        if isinstance(reply, Refused):
            raise BadRequest(reply.words)
        return reply

    def close(self) -> None:
        """End the process. May be called again."""
        self._end()  # a template under way sees the end of its process
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    # ---- on the thread

    def _ask(self, form: ChatFormat, conversation: Conversation) -> Reply:
        connection = self._start()
        try:
            connection.send(Asked(None if form is self._form else form, conversation))
            self._form = form
            if connection.poll(self._time_limit_s):
                reply: Reply = connection.recv()
                return reply
            why = f"takes over {self._time_limit_s:g} s on these messages"
        except (EOFError, OSError):
            why = "ended the process that renders it, by these messages"
        log.warning("chat template %s %s", form.name, why)
        self._end()
        return Refused(f"chat template {form.name} {why}")

    def _start(self) -> Connection:
        """The running process's pipe. Raises DeviceFailed."""
        if self._connection is not None:
            return self._connection
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(
            target=render_main, args=(theirs, IGNORED_SIGNALS), name="templates", daemon=True
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

    def _end(self) -> None:
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        if process is not None:
            atexit.unregister(process.kill)
            process.kill()
            process.join()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
