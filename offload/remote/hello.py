"""The messages of a client and a worker of ours before ggml connects them.

ggml's greeting has only the version of its protocol. A worker of ours (`specoffload worker`) also
answers HTTP on the same port. A stock rpc-server closes a connection that begins without ggml's
greeting.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from http.client import HTTPException
from time import monotonic
from typing import TYPE_CHECKING, Any

from offload import __version__
from offload.errors import DeviceUnavailable, WorkerUnavailable
from offload.ggml.library import abi
from offload.model import ModelFacts, layer_of
from offload.model_file import model_hash
from offload.remote.address import Address
from offload.remote.deadline import BoundedHttp
from offload.remote.probe import greet, silent
from offload.remote.secret import FLAG, VARIABLE

if TYPE_CHECKING:
    from pydantic import TypeAdapter

HEARTBEAT_S = 1.0  # a worker that loads layers sends a line at least this often
_CONNECT_S = 3.0
_ANSWER_S = 20.0  # longest wait for a line of a worker that loads layers
# A worker whose disk hangs, or that only pretends to load, still sends a line every second.
_STALLED_S = 600.0  # longest time without another step or fraction
_LEAST_READ_BYTES_PER_S = 10e6  # a tenth of a hard disk's rate
_MOST_STATUS_BYTES = 1 << 16
_MOST_LINE_BYTES = 1 << 16
_MOST_BYTES = 1 << 62  # more memory than a machine has, and still a number that C can hold
_SHOWN_CHARS = 400


@dataclass(frozen=True)
class WorkerFacts:
    """The build and the model file of a worker, or of the client that asks it."""

    version: str  # version of specoffload
    library: str  # version of llama-cpp-python
    file: str
    hash: str

    @classmethod
    def of(cls, facts: ModelFacts) -> WorkerFacts:
        """Return this program's build, and the model's file."""
        return cls(__version__, abi.PACKAGE_VERSION, facts.path.name, model_hash(facts))

    def difference(self, other: WorkerFacts, worker: Address) -> str:
        """Return why a client with these facts refuses a worker with `other`, or ""."""
        for mine, theirs, what in (
            (self.version, other.version, "specoffload"),
            (self.library, other.library, "llama-cpp-python"),
        ):
            if mine != theirs:
                return (
                    f"the worker at {worker} runs {what} {theirs}, and this machine {mine}: "
                    "install the same version on both"
                )
        if self.hash != other.hash:
            return (
                f"the worker at {worker} has another file: its {other.file} has hash {other.hash}, "
                f"and {self.file} here has {self.hash}; start it with a copy of this file"
            )
        return ""


@dataclass(frozen=True)
class LayersAsked:
    """The layers that a client asks a worker to compute. `first` and `end` are 0 for no layers."""

    first: int = 0
    end: int = 0  # the layer after the last one
    head: bool = False  # True: the worker also holds the output matrix
    reserve_bytes: int = 0  # memory of the worker's device for the client's caches and buffers

    @property
    def words(self) -> str:
        head = " and the head" if self.head else ""
        return f"layers {self.first} to {self.end - 1}{head}" if self.end else "no layers"

    @property
    def pattern(self) -> str:
        """A regular expression that matches the names of this part's weights."""
        numbers = "|".join(map(str, range(self.first, self.end)))
        return rf"^(blk\.({numbers})\.{'|output' if self.head else ''})"

    def of(self, facts: ModelFacts) -> ModelFacts:
        """Return the header with only this part's weights."""
        part = range(self.first, self.end)
        kept = {
            name: place
            for name, place in facts.weights.items()
            if layer_of(name) in part or (self.head and name.startswith("output"))
        }
        return replace(facts, weights=kept, part_layers=part)


@dataclass(frozen=True)
class Admit:
    """Tells the computing process which of this machine's ports may connect to ggml's server."""

    port: int  # 0: none
    is_spent: bool = False  # in an answer, True: the process must not compute for another client


class AskCounters:
    """Asks the computing process for its counters."""


@dataclass(frozen=True)
class WorkerState:
    """The current step of a worker, or the sentence of the error that stopped it."""

    doing: str = ""
    done: float = 0.0  # finished fraction of the step
    device: str = ""  # set in the first state alone, with the device's memory
    free_bytes: int = 0
    total_bytes: int = 0
    notes: tuple[str, ...] = ()
    is_ready: bool = False
    error: str = ""
    is_busy: bool = False  # True: the error is that it serves another client
    port: int = 0  # of ggml's server on loopback, when it is ready


@dataclass(frozen=True)
class WorkerStatus(WorkerFacts):
    """The answer of a worker to a client that has not connected yet."""

    device: str = ""
    free_bytes: int = 0
    total_bytes: int = 0
    serving: str | None = None  # address of its client
    layers: tuple[int, int] | None = None  # the layers that it holds
    counters: dict[str, float] = field(default_factory=dict)  # counts of streaming since loading
    needs_secret: bool = False  # True: all else is hidden from a client without the secret

    @classmethod
    def hidden(cls) -> WorkerStatus:
        """Return the answer for a client that has not proved that it knows the secret.

        Clients that know nothing of secrets show the version, as it differs from their own.
        """
        version = f"{__version__} with a secret ({FLAG})"
        return cls(version, abi.PACKAGE_VERSION, "", "", needs_secret=True)


@functools.cache
def _reader(kind: type) -> TypeAdapter[Any]:
    """Returns pydantic's reader of a message. Its errors are ValueErrors."""
    from pydantic import TypeAdapter  # takes long, and most programs have no worker

    return TypeAdapter(kind)


def _read(kind: type, text: bytes) -> Any:
    """Read the JSON of a worker's message. Raises ValueError.

    Its texts are shown to the user, so control characters are replaced, and long texts are cut.
    """
    hello = _reader(kind).validate_json(text)
    changes: dict[str, Any] = {}
    for name, value in vars(hello).items():
        if isinstance(value, str):
            changes[name] = _shown(value)
        elif isinstance(value, float) and not 0 <= value <= 1:  # a fraction; False for NaN
            changes[name] = 0.0
        elif isinstance(value, tuple) and all(isinstance(each, str) for each in value):
            changes[name] = tuple(map(_shown, value))
    return replace(hello, **changes)


def _shown(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text[:_SHOWN_CHARS])


def read_asked(text: bytes, n_layers: int) -> LayersAsked:
    """Read the JSON of a request for layers of a model with `n_layers`. Raises ValueError."""
    asked: LayersAsked = _reader(LayersAsked).validate_json(text)
    if not 0 <= asked.first <= asked.end:
        raise ValueError(f"layers {asked.first} to {asked.end} are none")
    if asked.end > n_layers:
        raise ValueError(
            f"layers {asked.first} to {asked.end - 1} are asked for, and the model has {n_layers}"
        )
    if not 0 <= asked.reserve_bytes < _MOST_BYTES:
        raise ValueError(f"{asked.reserve_bytes} bytes of memory cannot be reserved")
    return asked


def status_of(worker: Address, timeout_s: float = _CONNECT_S) -> WorkerStatus | None:
    """Ask a worker for its status. Returns None if it is no worker of ours, or cannot be reached.

    `greet` then finds out whether it is a stock rpc-server. Raises WorkerUnavailable if the worker
    does not answer: a slow worker of ours must not count as a stock one, which gets all weights.
    Also raises it if the worker has a secret and this client has not, or the other way round.
    """
    try:
        http = BoundedHttp(worker, timeout_s)
    except OSError:
        return None
    with closing(http):
        try:
            http.end_in(timeout_s)
            http.request("GET", "/")
            status: WorkerStatus = _read(WorkerStatus, http.read(_MOST_STATUS_BYTES))
        except TimeoutError:
            raise silent(worker, timeout_s) from None
        except (OSError, HTTPException, ValueError):
            return None
        if status.needs_secret:
            raise WorkerUnavailable(
                f"the worker at {worker} has a secret: {FLAG} FILE, or the variable {VARIABLE}, "
                "gives the same one here"
            )
        return status


def look_for(worker: Address) -> None:
    """Raise WorkerUnavailable if the worker does not answer in a few seconds, or has a client."""
    # A worker of ours is not greeted, because a greeting would make it load a part without layers.
    status = status_of(worker, 1.0)
    if status is None:
        greet(worker, connect_s=1.0, answer_s=2.0)
    elif status.serving:
        raise WorkerUnavailable(
            f"the worker at {worker} serves {status.serving} already, and it serves one client at "
            "a time"
        )


def check(worker: Address, status: WorkerStatus, mine: WorkerFacts) -> None:
    """Raise DeviceUnavailable if the worker has another file or build."""
    if reason := mine.difference(status, worker):
        raise DeviceUnavailable(reason)


class _LoadingWait:
    """Ends the wait for a worker that makes no progress, or takes too long in all."""

    def __init__(self, worker: Address, asked: LayersAsked, n_bytes: int) -> None:
        self._who = f"the worker at {worker} answers, but"
        self._what = asked.words
        self._most_s = _STALLED_S + n_bytes / _LEAST_READ_BYTES_PER_S
        self._begin_s = self._moved_s = monotonic()
        self._last = ("", -1.0)  # step and its finished fraction

    def check(self, state: WorkerState) -> None:
        """Note a state that is not ready. Raises WorkerUnavailable after a limit."""
        now_s = monotonic()
        if (state.doing, state.done) != self._last:
            self._last, self._moved_s = (state.doing, state.done), now_s
        step = f" (its step is {state.doing!r}, {state.done:.0%} done)"
        if now_s - self._moved_s > _STALLED_S:
            raise WorkerUnavailable(
                f"{self._who} has made no progress in loading {self._what} for "
                f"{_STALLED_S:g} s{step}: look at its disk and its log"
            )
        if now_s - self._begin_s > self._most_s:
            raise WorkerUnavailable(
                f"{self._who} has not loaded {self._what} within {self._most_s:.0f} s{step}: its "
                "disk is too slow, or it hangs; look at its log"
            )


def ask_for(worker: Address, asked: LayersAsked, n_bytes: int = 0) -> Iterator[WorkerState]:
    """Let a worker load layers. Yields its states until it is ready.

    `n_bytes`: bytes of the layers' weights, for which the worker gets more time.
    Raises WorkerUnavailable if it serves another client, goes away, makes no progress for
    _STALLED_S seconds or reads less than _LEAST_READ_BYTES_PER_S, and DeviceUnavailable if it
    cannot hold the layers.
    """
    gone = f"the worker at {worker} went away while it was loading {asked.words}"
    loading = _LoadingWait(worker, asked, n_bytes)
    try:
        with closing(BoundedHttp(worker, _ANSWER_S)) as http:
            http.end_in(_ANSWER_S)
            http.request("POST", "/layers", json.dumps(asdict(asked)))
            while line := http.readline(_MOST_LINE_BYTES):
                state: WorkerState = _read(WorkerState, line)
                if state.error:
                    kind = WorkerUnavailable if state.is_busy else DeviceUnavailable
                    raise kind(f"the worker at {worker}: {state.error}")
                if not state.is_ready:
                    loading.check(state)
                yield state
                if state.is_ready:
                    return
                http.end_in(_ANSWER_S)
    except TimeoutError as e:
        raise WorkerUnavailable(
            f"the worker at {worker} has been silent for {_ANSWER_S:g} s while it was loading "
            f"{asked.words}: it hangs or its network is down"
        ) from e
    except (OSError, HTTPException, ValueError) as e:
        raise WorkerUnavailable(gone) from e
    raise WorkerUnavailable(gone)
