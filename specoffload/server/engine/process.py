"""The engine process: opens the model and works on jobs that come over the channel.

It holds libllama, so a failed assertion or a device error ends this process and not the API
process. The main thread computes, and reads the channel between two steps. A second thread accepts
jobs during a long step (`engine/acceptance.py`). A third reports every second that this process
runs, also during a step of minutes, and ends this process when the API process is gone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from offload.errors import BadModel, ModelChanged
from offload.ggml.library import interrupt
from offload.ggml.library import log as native_log
from offload.ggml.library.log import EndCause
from offload.notes import OnProgress
from offload.stream.bell_use import BELLS, NoDoorbell
from specoffload.errors import KNOWN
from specoffload.generation.generation import TextPiece
from specoffload.server.engine.acceptance import Acceptance, Accepted, accept, refusal
from specoffload.server.engine.compiling import CompilingFirst
from specoffload.server.engine.health import HEARTBEAT_S
from specoffload.server.engine.messages import (
    Alive,
    Cancel,
    EngineCall,
    Finished,
    FromEngine,
    JobEvent,
    JobOutput,
    LoadFailed,
    Loading,
    Outputs,
    Ready,
    Result,
    Shutdown,
    Stopping,
    Submit,
    ToEngine,
    problem_of,
)

if TYPE_CHECKING:
    from specoffload.session.session import Session
    from specoffload.slots.request import Request

Factory = Callable[[OnProgress], "Session"]
"""Opens the model and reports progress. Must be picklable, because the process is spawned."""


log = logging.getLogger("specoffload.engine")

_PREPARING = "preparing the vocabulary for grammars"


def _last_words(reason: str, cause: EndCause) -> LoadFailed | Stopping:
    """Return what the API process gets when libllama ends this process."""
    if cause is EndCause.FILE:
        return LoadFailed(problem_of(BadModel(reason)))
    return Stopping(reason, cause is EndCause.WORKER)


class _Line:
    """The channel to the API process. Any thread may send, and one at a time may take."""

    def __init__(self, channel: Channel[FromEngine, ToEngine]) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self._woken = os.eventfd(0, os.EFD_NONBLOCK)
        self._arrivals = select.poll()
        self._arrivals.register(channel.fileno(), select.POLLIN)
        self._arrivals.register(self._woken, select.POLLIN)
        threading.Thread(target=self._watch, name="channel watch", daemon=True).start()

    def send(self, message: FromEngine) -> None:
        """Send a message. Raises OSError if the API process is gone."""
        with self._sending:
            self._channel.send(message)

    def take(self, wait: bool) -> list[ToEngine]:
        """Return all messages that have arrived; with `wait`, wait for one or for `wake`.

        Exits this process if the API process is gone.
        """
        if wait:
            self._arrivals.poll()
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._woken)
        try:
            return self._channel.received()
        except (EOFError, OSError):
            os._exit(0)

    def wake(self) -> None:
        """End the wait of `take`, or the next one. Any thread may call it."""
        os.eventfd_write(self._woken, 1)

    def _watch(self) -> None:
        """Send heartbeats until the other end closes, then exit the process at once.

        The main thread may be inside libllama, where no exception reaches it. The kernel frees the
        memory.
        """
        end = select.poll()
        end.register(self._channel.fileno(), 0)  # hang-ups are always reported; nothing else is
        with contextlib.suppress(OSError):
            while not end.poll(1000 * HEARTBEAT_S):
                self.send(Alive())
        os._exit(0)


def engine_main(
    channel: Channel[FromEngine, ToEngine], factory: Factory, no_doorbell: str = ""
) -> None:
    """Entry point of the spawned process; returns after Shutdown or a failed load.

    `no_doorbell`: why an earlier process has used no doorbell any more, "" if none has said so.

    The API process lets requests end, and ends this process by Shutdown, SIGKILL or closing the
    channel.
    """
    line = _Line(channel)
    interrupt.allow_stops()
    BELLS.refuse(no_doorbell)
    BELLS.listeners.append(lambda reason: line.send(NoDoorbell(reason)))
    native_log.listeners.append(lambda reason, cause: line.send(_last_words(reason, cause)))
    tell = _in_percent(line.send)
    try:
        session = factory(tell)
    except Exception as error:
        problem = problem_of(error)
        if problem.http_status >= 500 and not isinstance(error, KNOWN):
            log.exception("the model could not be loaded")
        line.send(LoadFailed(problem))
        return
    tell(_PREPARING, 0.0)
    session.prepare()  # before requests can come, the first of which would wait for it
    gc.freeze()  # later collections skip the objects that exist now
    line.send(Ready(session.card))
    try:
        Service(session, line).run()
    except OSError:
        os._exit(0)  # the API process is gone
    finally:
        session.close()


def _in_percent(send: Callable[[FromEngine], None]) -> OnProgress:
    """Return a callback that sends each per cent of each loading step once."""
    told: set[tuple[str, int]] = set()

    def tell(step: str, done: float) -> None:
        percent = (step, int(100 * done))
        if percent not in told:
            told.add(percent)
            send(Loading(step, done))

    return tell


class Service:
    """Runs jobs on the session and reports their events."""

    def __init__(self, session: Session, line: _Line) -> None:
        self._session, self._line = session, line
        compiling = CompilingFirst(
            line.take, line.wake, self._tell_now, session.is_compiled, session.compile_grammar
        )
        self._arriving = Acceptance(
            session, compiling.receive, self._tell_now, self._is_worth_stopping
        )
        self._running: dict[int, list[Request]] = {}  # unfinished answers by job id
        self._answers: dict[int, tuple[int, int]] = {}  # job id and answer's number, by id(Request)
        self._n_prompts: dict[int, int] = {}  # prompt tokens by job id
        self._outputs: list[JobOutput] = []
        self._changed: ModelChanged | None = None  # after which nothing can be computed

    def run(self) -> None:
        """Work until Shutdown, or until the model's file has changed.

        Messages are read before each step, so a cancelled job ends within one step. A step that
        reads its prompt is stopped for that.
        """
        while True:
            has_work = bool(self._running) or self._session.use_idle_time()
            for message in self._arriving.take(wait=not has_work):
                if isinstance(message, Shutdown):
                    if message.shelves_prompts:
                        self._session.shelve_prompts()
                    return
                if isinstance(message, Cancel):
                    self._cancel(message.job_id)
                elif isinstance(message, Accepted):
                    self._begin(message)
                else:
                    self._submit(message)
            self._send()  # before the step, because the first one reads a prompt for a long time
            if self._running:
                self._step()
            self._send()
            if self._changed is not None:
                self._line.send(Stopping(str(self._changed), changed=self._changed.path))
                return

    def _send(self) -> None:
        """Send the events that were collected since the last call, if any."""
        if self._outputs:
            self._line.send(Outputs(tuple(self._outputs), monotonic()))
            self._outputs.clear()

    def _submit(self, submit: Submit) -> None:
        job_id, job = submit.job_id, submit.job
        try:
            if isinstance(job, EngineCall):
                self._tell(job_id, Result(job.function(self._session, *job.arguments)))
                self._tell(job_id, Finished())
            else:
                accepted = accept(self._session, job_id, job)
                self._begin(accepted)
                self._tell(job_id, accepted.started)
        except Exception as error:
            self._fail(job_id, error)

    def _begin(self, accepted: Accepted) -> None:
        job_id = accepted.job_id
        self._n_prompts[job_id] = accepted.started.n_prompt_tokens
        self._running[job_id] = list(accepted.answers)
        for index, answer in enumerate(accepted.answers):
            self._session.enqueue(answer)
            self._answers[id(answer)] = job_id, index

    def _step(self) -> None:
        try:
            with self._arriving.during_step():
                news = self._session.step()
        except Exception as error:  # all running jobs fail, but later ones may work
            for job_id in list(self._running):
                self._fail(job_id, error)
            return
        for running in news:
            known = self._answers.get(id(running))
            if known is not None:
                self._report(*known, running)

    def _report(self, job_id: int, index: int, running: Request) -> None:
        last: TextPiece | None = None
        while running.pieces:
            last = running.pieces.popleft()
            self._tell(job_id, replace(last, index=index) if index else last)
        if not running.is_over:
            return
        if running.error is not None:
            self._fail(job_id, running.error)
        elif last is None or last.finish_reason is None or last.stats is None:
            ended = RuntimeError("the generation ended without a finish reason and statistics")
            self._fail(job_id, ended)
        else:
            del self._answers[id(running)]
            self._running[job_id].remove(running)
            if not self._running[job_id]:
                self._cancel(job_id)

    def _cancel(self, job_id: int) -> None:
        if job_id in self._running:
            self._forget(job_id)
            self._tell(job_id, Finished())

    def _is_worth_stopping(self, job_id: int) -> bool:
        answers = self._running.get(job_id, ())
        return any(self._session.is_worth_stopping(answer) for answer in answers)

    def _fail(self, job_id: int, error: Exception) -> None:
        problem = refusal(self._session, job_id, error, self._n_prompts.get(job_id))
        if isinstance(error, ModelChanged):
            self._changed = error
        self._forget(job_id)
        self._tell(job_id, problem)

    def _forget(self, job_id: int) -> None:
        self._n_prompts.pop(job_id, None)
        for answer in self._running.pop(job_id, ()):
            self._session.cancel(answer)  # no effect on an answer that has failed
            del self._answers[id(answer)]

    def _tell(self, job_id: int, event: JobEvent) -> None:
        self._outputs.append(JobOutput(job_id, event))

    def _tell_now(self, output: JobOutput) -> None:
        # If the API process is gone, the main thread learns it when it sends or takes.
        with contextlib.suppress(OSError):
            self._line.send(Outputs((output,), monotonic()))


# -- the channel

# It carries pickled messages, each after its length, over a pair of sockets. multiprocessing's pipe
# needs threads on both sides, and waking a thread costs as much as all other work for a token. The
# API process reads and writes on its event loop, and the engine process between two steps.

_LENGTH = struct.Struct("!Q")
_READ_BYTES = 1 << 18
_Sent = TypeVar("_Sent")
_Received = TypeVar("_Received")


def packed(message: object) -> bytes:
    body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Splits bytes, which arrive in any portions, into messages."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add `data`, and return the messages that are now complete.

        Raises what pickle raises for bytes that are no message.
        """
        self._rest += data
        messages: list[Any] = []
        at = 0
        while len(self._rest) >= at + _LENGTH.size:
            end = at + _LENGTH.size + _LENGTH.unpack_from(self._rest, at)[0]
            if len(self._rest) < end:
                break
            messages.append(pickle.loads(self._rest[at + _LENGTH.size : end]))
            at = end
        del self._rest[:at]
        return messages


class Channel(Generic[_Sent, _Received]):
    """One end of a connection. One thread may send, and one may receive."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._frames = Frames()
        self.fileno = end.fileno
        self.close = end.close

    def send(self, message: _Sent) -> None:
        """Send a message. Blocks while the other end is slow. Raises OSError if it is gone."""
        self._socket.sendall(packed(message))

    def send_some(self, data: bytearray) -> int:
        """Send packed messages without waiting; returns the number of bytes that were taken. Raises
        OSError when the other end is gone."""
        try:
            return self._socket.send(data, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return 0

    def received(self) -> list[_Received]:
        """Return the messages that have arrived, if any. Raises EOFError at the end, or OSError."""
        try:
            data = self._socket.recv(_READ_BYTES, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        return self._frames.feed(data)


def channels() -> tuple[Channel[Any, Any], Channel[Any, Any]]:
    """Return both ends of a new connection."""
    a, b = socket.socketpair()
    return Channel(a), Channel(b)
