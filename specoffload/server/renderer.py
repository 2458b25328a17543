"""Renders chat templates and compiles grammars in separate processes that can be killed.

A template is a program from a model file. It may loop for ever, or make a string of a gigabyte. A
schema of 600 bytes can take llguidance minutes: it intersects the patterns of an allOf. So each
grammar is compiled here first, and the engine only gets those that take it less than a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import NamedTuple

import psutil

from offload.errors import BadRequest, DeviceFailed
from specoffload.chat.conversation import Conversation
from specoffload.chat.format import ChatFormat, ChatPrompt
from specoffload.server.engine.health import describe_exit
from specoffload.server.rendering_turns import Turns
from specoffload.server.spawned import Spawned

_TIME_LIMIT_S = 5.0  # processor time of one conversation; published templates take milliseconds
_PATIENCE_S = 5.0
_START_LIMIT_S = 60.0
_GRAMMAR_LIMIT_S = 1.0  # processor time; the engine compiles for as long, and answers nobody then
_QUICK_S = 0.25  # after which a process counts as slow
_SLOW_NICE = 10  # what is added to a slow process's niceness, so that quick ones go first
_TRIES = 2
_MEMORY_BYTES = 2**30  # address space, of which the interpreter takes a tenth
_MOST_PROMPT_CHARS = 64 * 2**20

log = logging.getLogger("specoffload.server")


class Structure(NamedTuple):
    """What the form of an answer follows, one of the two: GBNF, or a JSON schema as text."""

    grammar: str | None = None
    json_schema: str | None = None


_Asked = Conversation | Structure
_Reply = ChatPrompt | tuple[str, ...] | str
"""The prompt, or the places of a schema's keywords without effect, or a BadRequest's sentence."""


# ---- in the rendering process


def _render_main(connection: Connection, time_limit_s: float) -> None:
    """Entry point: sends None when it is ready, then answers until the pipe is closed.

    A conversation that takes more than `time_limit_s` of processor time ends the process by
    SIGXCPU.
    """
    with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    form = ChatFormat.of(None)
    try:
        connection.send(None)
        while True:
            new_form, asked = connection.recv()
            _limit_processor_time(time_limit_s)
            form = new_form or form
            connection.send(_answered(form, asked, connection))
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


def _answered(form: ChatFormat, asked: _Asked, connection: Connection) -> _Reply:
    try:
        if isinstance(asked, Structure):
            return _checked(asked, connection)
        prompt = form.prepare(asked)
        if prompt.grammar is not None:
            _checked(Structure(prompt.grammar), connection)
    except BadRequest as e:
        return str(e)
    except MemoryError:
        what = "the grammar" if isinstance(asked, Structure) else f"chat template {form.name}"
        return f"{what} takes more memory than {_MEMORY_BYTES} bytes"
    n_chars = len(prompt.text)
    if n_chars > _MOST_PROMPT_CHARS:
        return (
            f"chat template {form.name} made {n_chars} characters of these messages; at most "
            f"{_MOST_PROMPT_CHARS} are taken"
        )
    return prompt


def _checked(structure: Structure, connection: Connection) -> tuple[str, ...]:
    """Compile a grammar. Returns the places of its schema's keywords without effect.

    Raises BadRequest. A grammar that takes over `_GRAMMAR_LIMIT_S` of processor time ends the
    process by SIGPROF.
    """
    from offload.sampling.grammar_check import compile_once  # loads llguidance

    connection.send(None)  # tells what takes the time from now on
    signal.setitimer(signal.ITIMER_PROF, _GRAMMAR_LIMIT_S)
    try:
        return compile_once(structure.grammar, structure.json_schema)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# ---- in the API process


class _RenderProcess:
    """One rendering process, and the thread that talks to it.

    If a template takes too much time or memory, the request is refused. If the process ends or
    stops in another way, the conversation is retried in a new process.
    """

    def __init__(self, time_limit_s: float, patience_s: float) -> None:
        self._time_limit_s = time_limit_s
        self._patience_s = patience_s
        self._is_closed = False
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="renderer")
        self.is_slow = False  # as the event loop counts it
        self._process: Spawned | None = None
        self._connection: Connection | None = None
        self._form: ChatFormat | None = None  # the format that was sent to the process last

    @property
    def is_started(self) -> bool:
        """True while there is a process that can be asked."""
        return self._connection is not None

    def warm(self) -> None:
        """Start the process ahead of its next request. Returns at once."""
        self.thread.submit(self._start)

    def close(self) -> None:
        """End the process. May be called again."""
        self._is_closed = True
        self._end()  # a thread that waits for the process then continues
        self.thread.shutdown(wait=True, cancel_futures=True)
        self._end()

    # ---- on the thread

    def ask(self, form: ChatFormat | None, asked: _Asked, on_slow: Callable[[], None]) -> _Reply:
        """Return the process's reply. `on_slow` is called once if it takes over `_QUICK_S`.

        Without `form`, the process keeps the one it has. Raises DeviceFailed.
        """
        end = ""
        for _ in range(_TRIES):
            connection = self._start()
            is_silent = is_compiling = False
            try:
                # None stands for the format that was sent last.
                connection.send((None if form is self._form else form, asked))
                self._form = form or self._form
                while self._answers(connection, on_slow):
                    reply = connection.recv()
                    if reply is None:
                        is_compiling = True
                        continue
                    self._hurry_again()
                    answer: _Reply = reply
                    return answer
                is_silent = True
            except (EOFError, OSError):
                pass  # the process has ended
            exit_code = self._end()
            if exit_code == -signal.SIGPROF or (is_compiling and exit_code == -signal.SIGXCPU):
                return (
                    f"the grammar takes over {_GRAMMAR_LIMIT_S:g} s of processor time to compile: "
                    "simplify it or its schemas"
                )
            if is_compiling and exit_code == -signal.SIGABRT:  # llguidance ends without memory so
                return (
                    f"the grammar takes over {_MEMORY_BYTES >> 20} MiB of memory to compile: "
                    "simplify it or its schemas"
                )
            if exit_code == -signal.SIGXCPU:
                seconds = f"{self._time_limit_s:g} s of processor time"
                return f"chat template {_name(form)} takes over {seconds} on these messages"
            silent = f"did nothing for {self._patience_s:g} s"
            end = silent if is_silent else describe_exit(exit_code)
            log.warning("the process that renders chat template %s %s", _name(form), end)
        raise DeviceFailed(
            f"the process that renders chat template {_name(form)} {end}, {_TRIES} times in a row"
        )

    def _answers(self, connection: Connection, on_slow: Callable[[], None]) -> bool:
        """Wait for an answer. Returns False if the process stops computing without one."""
        if connection.poll(_QUICK_S):
            return True
        self._slow_down()
        on_slow()
        used_s = self._processor_s()
        while not connection.poll(self._patience_s):
            before_s, used_s = used_s, self._processor_s()
            if used_s <= before_s:
                return False
        return True

    def _slow_down(self) -> None:
        process = self._process
        if process is not None:
            nice = os.getpriority(os.PRIO_PROCESS, 0) + _SLOW_NICE
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)

    def _hurry_again(self) -> None:
        """Give the process its niceness back. Ends it if that is not permitted."""
        process, nice = self._process, os.getpriority(os.PRIO_PROCESS, 0)
        if process is None:
            return
        try:
            if os.getpriority(os.PRIO_PROCESS, process.pid) > nice:
                os.setpriority(os.PRIO_PROCESS, process.pid, nice)
        except OSError:
            self._end()

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
        connection, theirs = multiprocessing.get_context("spawn").Pipe()
        try:
            process = Spawned("templates", _render_main, theirs, self._time_limit_s)
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
        return connection

    def _end(self) -> int | None:
        """End the process if there is one. Returns its exit code, or None if there is none."""
        process, self._process = self._process, None
        connection, self._connection = self._connection, None
        exit_code = None
        if process is not None:
            process.kill()
            exit_code = process.join()
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()
        return exit_code


def _name(form: ChatFormat | None) -> str:
    return "of the model file" if form is None else form.name


class _RenderJob(NamedTuple):
    """What waits for a process: a conversation with its format, or a grammar."""

    form: ChatFormat | None
    asked: _Asked
    reply: asyncio.Future[_Reply]


class Renderer:
    """Renders conversations and checks grammars in processes of their own.

    Two processes work side by side. One that takes long becomes a slow one: it gets less of the
    processors, and another takes its place, up to MOST_PROCESSES. Clients take turns. The methods
    are for the event loop's thread.
    """

    def __init__(
        self, time_limit_s: float = _TIME_LIMIT_S, patience_s: float = _PATIENCE_S
    ) -> None:
        """`time_limit_s` limits the processor time of one conversation.

        A process that neither answers nor computes for `patience_s` is replaced.
        """
        self._limits = (time_limit_s, patience_s)
        self._is_closed = False
        self._turns: Turns[_RenderJob] = Turns()
        self._idle: list[_RenderProcess] = []
        self._workers: set[_RenderProcess] = set()

    def warm(self) -> None:
        """Start a process ahead of the next request. Returns at once."""
        worker = self._new_worker()
        worker.warm()
        self._idle.append(worker)

    async def prepare(
        self, form: ChatFormat, conversation: Conversation, client: str = "", n_bytes: int = 0
    ) -> ChatPrompt:
        """Return the result of `form.prepare(conversation)`.

        `n_bytes` is the size of the request, by which a client's conversations take turns. Raises
        BadRequest, also for a template or a grammar that takes too long, and DeviceFailed if the
        process fails repeatedly.
        """
        reply = await self._asked(form, conversation, client, n_bytes)
        assert isinstance(reply, ChatPrompt)
        return reply

    async def check(
        self, structure: Structure, client: str = "", n_bytes: int = 0
    ) -> tuple[str, ...]:
        """Compile a grammar; returns the places of its schema's keywords without effect.

        Raises BadRequest and DeviceFailed as `prepare` does.
        """
        reply = await self._asked(None, structure, client, n_bytes)
        assert isinstance(reply, tuple)
        return reply

    def close(self) -> None:
        """End the processes. May be called again."""
        self._is_closed = True
        self._turns.clear()
        for worker in list(self._workers):
            worker.close()

    async def _asked(
        self, form: ChatFormat | None, asked: _Asked, client: str, n_bytes: int
    ) -> _Reply:
        if self._is_closed:
            raise DeviceFailed("the server is shutting down")
        reply: asyncio.Future[_Reply] = asyncio.get_running_loop().create_future()
        self._turns.enter(client, n_bytes, _RenderJob(form, asked, reply), time.monotonic())
        self._dispatch()
        answer = await reply
        if isinstance(answer, str):
            raise BadRequest(answer)
        return answer

    def _dispatch(self) -> None:
        """Give waiting conversations to processes, as long as there are any for them."""
        while len(self._turns) and (self._idle or self._turns.may_start):
            turn = self._turns.next(time.monotonic())
            assert turn is not None
            client, wish = turn
            if wish.reply.done():  # its client has left
                self._turns.ended(client)
                continue
            self._give(self._idle.pop() if self._idle else self._new_worker(), client, wish)

    def _give(self, worker: _RenderProcess, client: str, wish: _RenderJob) -> None:
        loop = wish.reply.get_loop()

        def later(what: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(what)

        job = worker.thread.submit(
            worker.ask, wish.form, wish.asked, lambda: later(lambda: self._on_slow(worker))
        )
        job.add_done_callback(lambda job: later(lambda: self._on_reply(worker, client, wish, job)))

    def _new_worker(self) -> _RenderProcess:
        worker = _RenderProcess(*self._limits)
        self._workers.add(worker)
        self._turns.n_quick += 1
        return worker

    def _on_slow(self, worker: _RenderProcess) -> None:
        if not worker.is_slow:
            worker.is_slow = True
            self._turns.n_quick -= 1
            self._turns.n_slow += 1
            self._dispatch()
            if not self._idle and self._turns.may_start and not self._is_closed:
                self.warm()  # so that the next request need not wait for a start

    def _on_reply(
        self, worker: _RenderProcess, client: str, wish: _RenderJob, job: Future[_Reply]
    ) -> None:
        self._turns.ended(client)
        if worker.is_slow:
            worker.is_slow = False
            self._turns.n_slow -= 1
            self._turns.n_quick += 1
        if self._turns.is_one_too_many:
            self._turns.n_quick -= 1
            self._workers.discard(worker)
            worker.close()
        elif worker.is_started:
            self._idle.append(worker)
        else:  # its process was ended: the next request takes another one, if there is one
            worker.warm()
            self._idle.insert(0, worker)
        if not wish.reply.done():
            error = job.exception()
            if error is not None:
                wish.reply.set_exception(error)
            else:
                wish.reply.set_result(job.result())
        self._dispatch()
