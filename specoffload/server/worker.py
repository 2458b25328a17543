"""Listens for the clients of a worker, and lets one at a time use ggml's RPC server.

The port (specoffload/server/worker_gate.py) passes connections that speak ggml's protocol on to the
process that computes (offload/worker/serving.py).

This process never loads the native library, so a failed assertion there does not end it.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace

from offload.remote.hello import (
    HEARTBEAT_S,
    Admit,
    AskCounters,
    LayersAsked,
    WorkerFacts,
    WorkerState,
    WorkerStatus,
)
from offload.remote.passing import pass_on
from offload.remote.probe import GREETING, greeting_answer
from offload.schedule.division import DeviceCosts
from offload.stream.bell_use import BELLS, NoDoorbell
from offload.worker.door import LOOPBACK
from offload.worker.serving import GraphRefusal, ProcessMessage, WorkerOptions, serve_layers
from specoffload.kept import today
from specoffload.server.spawned import Spawned

_TURN_S = 3.0  # longest wait for the previous connection of the same machine to end
LAST_S = 60.0  # longest wait for the computation of a client that has left
_COUNT_S = 0.25  # longest wait for newer counters of the computing process
_ADMIT_S = 20.0  # longest wait until the computing process admits a connection


class Computing:
    """Runs the process that holds layers and computes them. `close` ends the process."""

    def __init__(
        self,
        options: WorkerOptions,
        on_state: Callable[[WorkerState], None],
        on_refusal: Callable[[GraphRefusal], None] = lambda _: None,
        on_costs: Callable[[DeviceCosts], None] = lambda _: None,
    ) -> None:
        """Start the process. `on_state` is called with its states, on a thread of its own.

        On the same thread `on_refusal` is called when the client's graph was refused, and
        `on_costs` with costs that the process has measured.
        """
        self._on_refusal, self._on_costs = on_refusal, on_costs
        self.asked: LayersAsked | None = None
        self.state = WorkerState(doing="opening the device")
        self.device = WorkerState()  # the first state, which names the device; empty until then
        self.is_spent = False  # True: the next client needs another process
        self._on_state = on_state
        self._asking, self._sending = threading.Lock(), threading.Lock()
        self._admitted: Admit | None = None  # answer to the last Admit, None until it comes
        self._counters: dict[str, float] = {}  # last answer to a Count
        self._is_counting = False  # True: a Count is not answered yet
        self._changed = threading.Condition()
        self._is_closed = False
        self._line, theirs = multiprocessing.get_context("spawn").Pipe()
        self._process = Spawned("worker", serve_layers, theirs, options, BELLS.why_not)
        self._reader = threading.Thread(target=self._read, name="worker reader", daemon=True)
        self._reader.start()

    def load(self, asked: LayersAsked) -> None:
        """Let the process load these layers. Call it once."""
        self.asked = asked
        self._line.send(asked)

    def states(self) -> Iterator[WorkerState]:
        """Yield states until the process is ready or has failed, at least one per HEARTBEAT_S."""
        while True:
            with self._changed:
                state = self.state
            yield state
            if state.is_ready or state.error:
                return
            with self._changed:
                if self.state is state:
                    self._changed.wait(HEARTBEAT_S)

    def wait_for_device(self) -> WorkerState:
        """Return the first state of the process, or the state with the error that ended it."""
        with self._changed:
            self._changed.wait_for(lambda: self.device.device or self.state.error)
            return self.state if self.state.error else self.device

    def counters(self) -> dict[str, float]:
        """Return the counters of streaming by name, or {} if no layers are ready.

        They are those of the last answer if the process does not answer at once, for example while
        it computes.
        """
        with self._changed:
            if not self.state.is_ready or self.state.error:
                return {}
            is_first, self._is_counting = not self._is_counting, True
        if is_first and not self._send(AskCounters()):
            return {}
        with self._changed:
            self._changed.wait_for(lambda: not self._is_counting or self.state.error, _COUNT_S)
            return {} if self.state.error else dict(self._counters)

    def _send(self, question: Admit | AskCounters) -> bool:
        """Send a question to the process. Returns False if it has just ended."""
        try:
            with self._sending:
                self._line.send(question)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """End the process. No state is reported from now on."""
        with self._changed:
            self._is_closed = True
        self._end()

    def _end(self) -> None:
        """End the process, and wait until its end has been reported."""
        self._process.kill()
        self._reader.join()  # this thread joins the process; only one thread gets its exit code

    @contextlib.contextmanager
    def connection(self) -> Iterator[socket.socket]:
        """Yield a connection to ggml's server, which admits no other one. Raises OSError."""
        with socket.socket() as server:
            server.bind((LOOPBACK, 0))
            try:
                self._admit(server.getsockname()[1])
                server.connect((LOOPBACK, self.state.port))
                yield server
            finally:
                with contextlib.suppress(ConnectionAbortedError):
                    self.is_spent = self._admit(0).is_spent

    def _admit(self, port: int) -> Admit:
        """Let ggml's server admit only this port. Raises ConnectionAbortedError if it fails.

        Then the process is ended, because its server might admit a port that others can get.
        """
        with self._asking:
            self._admitted = None
            if self.state.is_ready and self._send(Admit(port)):
                with self._changed:
                    self._changed.wait_for(lambda: self._admitted or self.state.error, _ADMIT_S)
                    if self._admitted is not None and not self.state.error:
                        return self._admitted
        self.is_spent = True
        self._end()
        raise ConnectionAbortedError(errno.ECONNABORTED, "the worker does not answer")

    def _read(self) -> None:
        try:
            while True:
                self._set(self._line.recv())
        except (EOFError, OSError):
            code = self._process.join()
        if not self.state.error:
            how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
            self._set(WorkerState(error=f"the computing process ended ({how})"))

    def _set(self, answer: ProcessMessage) -> None:
        if isinstance(answer, GraphRefusal):
            self._on_refusal(answer)
            return
        if isinstance(answer, NoDoorbell):
            BELLS.refuse(answer.reason)  # for the next process; a note of it says why
            return
        if isinstance(answer, DeviceCosts):
            self._on_costs(answer)
            return
        with self._changed:
            if isinstance(answer, WorkerState):
                self.state = answer
                if answer.device:
                    self.device = answer
            elif isinstance(answer, Admit):
                self._admitted = answer
            else:
                self._counters, self._is_counting = answer, False
            is_reported = isinstance(answer, WorkerState) and not self._is_closed
            self._changed.notify_all()
        if is_reported:
            self._on_state(self.state)


class Worker:
    """Serves one client at a time. Each connection calls it on a thread of its own."""

    def __init__(
        self,
        options: WorkerOptions,
        facts: WorkerFacts,
        say: Callable[[str], None],
        progress: Callable[[str, float], None],
        *,
        n_layers: int,
        keep: Callable[[DeviceCosts], None] = lambda _: None,
    ) -> None:
        """`say` gets lines for the user, and `progress` a step of loading and its fraction.

        `n_layers`: layers of the model that clients can ask for. `keep` gets costs of split layers
        that were measured.
        """
        self._keep = keep
        self.n_layers = n_layers
        self._options, self._facts, self.say, self._progress = options, facts, say, progress
        self._lock = threading.RLock()
        self._free = threading.Condition(self._lock)
        self._client: str | None = None  # address of the client that is served
        self._loader: str | None = None  # address of the client whose layers are being loaded
        self._is_closed = False
        self._sockets: list[socket.socket] = []  # both ends of the connection that is passed on
        self._is_open = False
        self._computing = self._started()

    def _started(self) -> Computing:
        return Computing(self._options, self._on_state, self._on_refusal, self._on_costs)

    def _on_costs(self, costs: DeviceCosts) -> None:
        """Keep measured costs, so that the next process need not measure."""
        costs = replace(costs, date=today())
        kept = (costs, *self._options.kept_splits)
        self._options = replace(self._options, kept_splits=kept)
        self._keep(costs)

    def open_device(self) -> WorkerState:
        """Wait for the device. Returns a state with the device, or with the error if it failed."""
        state = self._computing.wait_for_device()
        self._is_open = not state.error
        return state

    def close(self) -> None:
        with self._lock:
            self._is_closed = True  # a connection's thread may be about to start another process
            self._computing.close()

    def status(self) -> WorkerStatus:
        """Return the answer for a client that asks before it connects."""
        device, asked = self._computing.device, self._computing.asked
        return WorkerStatus(
            **asdict(self._facts),
            device=device.device,
            free_bytes=device.free_bytes,
            total_bytes=device.total_bytes,
            serving=self._client,
            layers=None if asked is None else (asked.first, asked.end),
            counters=self._computing.counters(),
        )

    def load(self, asked: LayersAsked, client: str) -> Iterator[WorkerState]:
        """Load layers for a client, unless they are loaded. Yields states, the last one ready.

        If another client is served or loads other layers, or if loading fails, the last state has
        the error. Clients that want the same layers wait together.
        """
        with self._lock:
            if not self._waits_for_turn(client, asked):
                yield WorkerState(error=self._busy(), is_busy=True)
                return
            computing = self._holding(asked, client)
            self._loader = self._loader or client
            is_first = self._loader == client
        try:
            yield from computing.states()
        finally:
            if is_first:
                with self._lock:
                    self._loader = None
                    self._free.notify_all()

    def _holding(self, asked: LayersAsked, client: str) -> Computing:
        """Return a process that holds these layers or is loading them.

        A process that has failed, is spent or has other layers is replaced. Raises OSError if the
        worker is closed.
        """
        if self._is_closed:
            raise ConnectionAbortedError(errno.ECONNABORTED, "the worker ends")
        computing = self._computing
        if computing.asked not in (None, asked) or computing.state.error or computing.is_spent:
            computing.close()
            computing = self._computing = self._started()
        if computing.asked is None:
            self.say(f"{client}: loading {asked.words}")
            computing.load(asked)
        return computing

    def refuses(self, client: str) -> bool:
        """True if another machine's client is served. Reports that `client` was refused."""
        with self._lock:
            if self._client is None or host_of(client) == host_of(self._client):
                return False
            self.say(f"{client} was refused: {self._busy()}")
            return True

    def serve(self, connection: socket.socket, client: str, first: bytes) -> None:
        """Pass a connection on to ggml's server until one of the two ends it.

        The client has been greeted, and has sent `first`, its first command.
        """
        with self._lock:
            if not self._waits_for_turn(client):
                self.refuses(client)  # retries of the same machine are not reported
                return
            self._client = client
        try:
            # A stock client asks for no layers, because it sends the weights itself.
            with self._lock:
                computing = self._holding(self._computing.asked or LayersAsked(), client)
            for state in computing.states():
                if state.error:
                    return
            with computing.connection() as server:
                self._sockets = [connection, server]
                begin(server, first)
                if not pass_on(connection, server, LAST_S):
                    self.say(
                        f"error: a computation for {client} has not ended {LAST_S:g} s after it "
                        "left; the next client gets a new computing process"
                    )
                    computing.close()
        except OSError as e:
            self.say(f"{client}: the connection ended ({e.strerror or e})")
        finally:
            with self._lock:
                self._client, self._sockets = None, []
                self._free.notify_all()

    def _waits_for_turn(self, client: str, asked: LayersAsked | None = None) -> bool:
        """Return True if no other client needs the computing process, which may load `asked`.

        Waits for the other client for _TURN_S seconds if it is on the same machine.
        """
        other = self._in_the_way(asked)
        if other is None or host_of(client) != host_of(other):
            return other is None
        return self._free.wait_for(lambda: self._in_the_way(asked) is None, _TURN_S)

    def _in_the_way(self, asked: LayersAsked | None) -> str | None:
        """Return the client that is served or loads other layers than `asked`, or None.

        If `asked` is None, no layers are to be loaded.
        """
        if self._client is None and asked not in (None, self._computing.asked):
            return self._loader
        return self._client

    def _busy(self) -> str:
        does = f"serves {self._client} already"
        if self._client is None and self._computing.asked is not None:
            does = f"is loading {self._computing.asked.words} for {self._loader}"
        return f"this worker {does}, and it serves one client at a time"

    def _on_state(self, state: WorkerState) -> None:
        """Report a state to the user.

        If the process has failed, the client's connection is closed, so that the client asks again.
        """
        if state.doing:
            self._progress(state.doing, state.done)
        if state.is_ready:
            self.say(f"ready: {'; '.join(state.notes) or 'no layers yet'}")
        if not state.error or not self._is_open:
            return
        self.say(f"error: {state.error}")
        self._disconnect()

    def _on_refusal(self, refusal: GraphRefusal) -> None:
        """Say why the client's graph was refused, and close its connection."""
        if self._disconnect():  # only the first of a connection's graphs is reported
            self.say(f"error: a graph of {self._client} was refused: {refusal.reason}")

    def _disconnect(self) -> bool:
        """Close the client's connection. Returns False if it has none."""
        ends, self._sockets = self._sockets, []
        for one in ends:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        return bool(ends)


def host_of(client: str) -> str:
    return client.rpartition(":")[0]


def begin(server: socket.socket, first: bytes) -> None:
    """Greet ggml's server for a client, and pass its first command on. Raises OSError."""
    n_bytes = len(greeting_answer((0, 0, 0)))
    server.settimeout(_ADMIT_S)
    server.sendall(GREETING)
    while n_bytes:
        if not (piece := server.recv(n_bytes)):
            raise ConnectionAbortedError(errno.ECONNABORTED, "the worker does not answer")
        n_bytes -= len(piece)
    server.settimeout(None)
    server.sendall(first)
