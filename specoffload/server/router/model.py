"""What the pool knows of a model: its entry in the list, its engine, and waiting requests."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from specoffload.errors import meaning_of
from specoffload.report import bytes_text
from specoffload.server.api.context import ServerContext
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.messages import Loading, Outputs, Problem, RequestFailed
from specoffload.server.engine.supervisor import State
from specoffload.server.router.decision import Phase
from specoffload.server.router.shelves import ModelShelf

DEFAULT_STOP_TIMEOUT_S = 10.0  # DEFAULT_STOP_TIMEOUT in tools/server/server-models.cpp
_versions = itertools.count()


def now_s() -> float:
    """Return the time of the event loop's clock, in seconds."""
    return asyncio.get_running_loop().time()


@dataclass(frozen=True)
class Entry:
    """A model that requests may name.

    `source` is llama-server's word for where it was found: preset, models_dir, or cache. `words`
    are the arguments of `serve` that its own server would have, and `preset` is the preset as text,
    both as users may see them. `line` is the whole command line. Entries differ if theirs do.
    """

    name: str
    words: tuple[str, ...]
    source: str = "preset"
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    preset: str = ""  # "": none
    loads_on_startup: bool = False
    stop_timeout_s: float = DEFAULT_STOP_TIMEOUT_S
    reads_images: bool = False
    line: object = field(default=None, hash=False, repr=False)


class Served(NamedTuple):
    """A model's engine, and the context with which routes answer its requests."""

    engine: EngineClient
    context: ServerContext


class RoutedEngine(EngineClient):
    """An engine that reports each change of its state, and the end of its work.

    `on_change` is set before `start`. `shelf` keeps the model's prompts while it is closed.
    """

    on_change: Callable[[], None]
    shelf: ModelShelf | None = None

    async def start(self) -> None:
        if self.shelf is not None:
            self.shelf.lend()
        await super().start()

    async def close(self, *, is_for_now: bool = False) -> None:
        try:
            await super().close(is_for_now=is_for_now)
        finally:
            if self.shelf is not None:
                self.shelf.take_back()
        if self.shelf is not None and (n_bytes := self.shelf.file.size_bytes):
            self._say(f"its prompts stay in RAM: {bytes_text(n_bytes)} (--cache-ram)")

    def on_ready(self) -> None:
        super().on_ready()
        self.on_change()

    def on_outputs(self, message: Outputs) -> None:
        was_working = self.is_working
        super().on_outputs(message)
        if was_working and not self.is_working:
            self.on_change()

    def on_lost(self, problem: Problem) -> None:
        super().on_lost(problem)
        self.on_change()

    def on_closed(self, problem: Problem) -> None:
        super().on_closed(problem)
        if self.state is State.FAILED and self.shelf is not None:  # its process has ended
            self.shelf.take_back()
        self.on_change()


@dataclass(eq=False)
class PoolModel:
    """A version of a model of the pool. Times are of the event loop's clock.

    The version is old if the list of models has another one now, or none of this name.
    """

    entry: Entry
    version: int = field(default_factory=lambda: next(_versions))
    is_old: bool = False
    is_checked: bool = False  # its file was read and planned since it was closed
    checking: asyncio.Task[None] | None = None
    displaced: list[PoolModel] = field(default_factory=list)  # models closed for its start
    phase: Phase = Phase.CLOSED
    served: Served | None = None  # made when the model is first opened
    rests: bool = False  # True: it was closed because nobody used it
    failure: Exception | None = None  # why it was not opened, or has ended
    load_asked_s: float | None = None  # time of POST /models/load, if it waits
    n_uses: int = 0  # requests that it answers
    used_s: float = 0.0  # time of the last request
    began_s: float = 0.0  # time of the last start
    keeps_until_s: float = 0.0
    is_held: bool = False
    wishes: list[Wish] = field(default_factory=list)  # requests that wait for it
    doing: asyncio.Task[None] | None = None  # opens or closes it

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def names(self) -> tuple[str, ...]:
        return (self.entry.name, *self.entry.aliases)

    @property
    def key(self) -> str:
        """The name by which the decision tells versions apart."""
        return f"{self.name}, version {self.version}"

    @property
    def is_ready(self) -> bool:
        return (
            self.phase is Phase.OPEN
            and self.served is not None
            and self.served.engine.state is State.READY
        )

    @property
    def is_running(self) -> bool:
        """True if it has an engine process, or will have one without another request."""
        return self.phase is not Phase.CLOSED

    @property
    def is_busy(self) -> bool:
        engine = None if self.served is None else self.served.engine
        return bool(self.n_uses or (engine and (engine.is_working or engine.n_waiting)))

    @property
    def status(self) -> str:
        """The state in llama-server's words."""
        if self.phase is Phase.CLOSED:
            if self.checking is not None:
                return "loading"  # its file is read before others are closed
            return "sleeping" if self.rests else "unloaded"
        return "loaded" if self.is_ready or self.phase is Phase.CLOSING else "loading"

    @property
    def has_failed(self) -> bool:
        """True after a failure, until the model is asked for again."""
        is_asked = bool(self.wishes) or self.load_asked_s is not None
        return self.failure is not None and self.status == "unloaded" and not is_asked

    @property
    def loading(self) -> Loading | None:
        """The progress of loading, if it is loading and has told any."""
        if self.served is None or self.phase is Phase.CLOSED or self.status != "loading":
            return None
        return self.served.engine.loading

    @property
    def exit_code(self) -> int:
        return 0 if self.failure is None else meaning_of(self.failure).exit_code


class Changing(Protocol):
    """A pool, which decides again after a change."""

    def change(self) -> None: ...


class Wish:
    """A request's wait for its model, and then its use. `end` must be called in every case."""

    def __init__(self, pool: Changing, model: PoolModel) -> None:
        self.model = model
        self.asked_s = now_s()
        self.granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pool = pool

    def grant(self) -> None:
        self.model.n_uses += 1
        self.granted.set_result(None)

    def refuse(self, problem: Problem) -> None:
        self.granted.set_exception(RequestFailed(problem))
        self.granted.exception()  # the client may have left, so that nobody awaits it

    def end(self) -> None:
        """Stop waiting, or record that the request has ended."""
        if self in self.model.wishes:
            self.model.wishes.remove(self)
        elif self.granted.done() and self.granted.exception() is None:
            self.model.n_uses -= 1
            self.model.used_s = now_s()
        self._pool.change()
