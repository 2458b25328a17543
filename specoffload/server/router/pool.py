"""Opens and closes models as requests ask for them. Each model has an engine process of its own.

`decision.py` decides; this module does it, and lets requests wait. Everything runs on the event
loop's thread, but for the resolution of a model's configuration.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from starlette.types import ASGIApp

from offload.errors import DoesNotFit
from specoffload.errors import meaning_of
from specoffload.report import bytes_text
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.messages import (
    Event,
    Loading,
    Outputs,
    Problem,
    RequestFailed,
    problem_of,
    unavailable,
)
from specoffload.server.engine.supervisor import SHUTTING_DOWN, State
from specoffload.server.router.decision import Decision, Phase, Standing, decide
from specoffload.server.router.sharing import Share, Sharing
from specoffload.server.router.shelves import ModelShelf

DEFAULT_STOP_TIMEOUT_S = 10.0  # DEFAULT_STOP_TIMEOUT in tools/server/server-models.cpp
_RETRY_AFTER_S = 5


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
    """A model's engine, and the application that answers its requests."""

    engine: EngineClient
    app: ASGIApp


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
class Model:
    """A model of the pool. Times are of time.monotonic()."""

    entry: Entry
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
            return "sleeping" if self.rests else "unloaded"
        return "loaded" if self.is_ready or self.phase is Phase.CLOSING else "loading"

    @property
    def loading(self) -> Loading | None:
        """The progress of loading, if it is loading and has told any."""
        return self.served.engine.loading if self.served and self.status == "loading" else None

    @property
    def exit_code(self) -> int:
        return 0 if self.failure is None else meaning_of(self.failure).exit_code


class Wish:
    """A request's wait for its model, and then its use. `end` must be called in every case."""

    def __init__(self, pool: ModelPool, model: Model) -> None:
        self.model = model
        self.asked_s = time.monotonic()
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
            self.model.used_s = time.monotonic()
        self._pool.change()


class ModelPool:
    """The models of one server. The caller must await `start`, and `close` in every case."""

    def __init__(
        self,
        entries: Sequence[Entry],
        make: Callable[[Entry, Share | None], Served],
        *,
        plan: Callable[[Sequence[Entry]], Sharing] | None = None,
        most: int = 1,
        idle_s: float | None = None,
        most_waiting: int = 17,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`most`: models that are open at once; 0: as many as fit. `idle_s`: seconds without a
        request after which a model is closed. `make` is called in a thread when a model is first
        opened, with the model's share of the memory, if it shares it with others. `plan` decides
        these shares, in a thread, before a model is opened. At most `most_waiting` requests wait
        for each model.
        """
        self.failed = asyncio.Event()  # never set: the server goes on without a model
        self.failure: Exception | None = None
        self.most = most
        self.models = {entry.name: Model(entry) for entry in entries}
        self.on_status: Callable[[Model], None] = lambda model: None
        self.on_stop: Callable[[], None] = lambda: None
        self._make = make
        self._plan = plan if most != 1 else None
        self._planning: asyncio.Task[None] | None = None
        self._sharing: Sharing | None = None
        self._idle_s = idle_s
        self._most_waiting = most_waiting
        self._say = say
        self._apart: set[frozenset[str]] = set()  # pairs that did not fit together
        self._draining = False
        self._is_changed = False
        self._timer: asyncio.TimerHandle | None = None
        self._told: dict[str, str] = {}  # statuses that were reported

    # ---- what routes ask

    def find(self, name: str) -> Model | None:
        """Return the model of this name or alias, or None."""
        found = self.models.get(name)
        return found or next((m for m in self.models.values() if name in m.entry.aliases), None)

    def ask(self, model: Model) -> Wish:
        """Return a wish for a model, which is granted when it can take the request.

        Raises RequestFailed (503) if the server stops, or too many requests wait for the model.
        """
        if self._draining:
            raise RequestFailed(SHUTTING_DOWN)
        if len(model.wishes) >= self._most_waiting:
            words = f"{len(model.wishes)} requests wait for {model.name} to be loaded"
            raise RequestFailed(unavailable(words, _RETRY_AFTER_S, Event.QUEUE_FULL))
        wish = Wish(self, model)
        model.wishes.append(wish)
        self._grant(model)
        self.change()
        return wish

    def load(self, model: Model) -> None:
        """Open a model as soon as there is room for it."""
        model.load_asked_s = time.monotonic()
        self.change()

    def unload(self, model: Model) -> None:
        """Close a model. Its requests have the seconds of its entry to end."""
        model.load_asked_s = None
        self._close(model, model.entry.stop_timeout_s)

    async def replace(self, entries: Sequence[Entry]) -> None:
        """Take another list of models. Models that changed or are gone are closed."""
        new = {entry.name: entry for entry in entries}
        gone = [m for m in self.models.values() if new.get(m.name) != m.entry]
        for model in gone:
            self._refuse_all(model, unavailable(f"the model {model.name} has changed: ask again"))
            if model.is_running:
                self._say(f"closing {model.name}, which has changed or is gone")
                self.unload(model)
        await asyncio.gather(*(m.doing for m in gone if m.doing is not None))
        for model in gone:
            del self.models[model.name]
            self._told.pop(model.name, None)
        kept = self.models
        self.models = {name: kept.get(name) or Model(entry) for name, entry in new.items()}
        if gone or len(new) > len(kept):
            self._plan_again()
        self.change()

    # ---- life, as `serve_until` needs it

    async def start(self) -> None:
        """Begin to open the models that are opened at the start."""
        self._plan_again()
        for model in self.models.values():
            if model.entry.loads_on_startup:
                self.load(model)

    async def drain(self, grace_s: float) -> None:
        """Refuse requests that wait and new ones; give running ones `grace_s` seconds to end."""
        self._draining = True
        self.on_stop()
        for model in self.models.values():
            self._refuse_all(model, SHUTTING_DOWN)
        engines = [m.served.engine for m in self.models.values() if m.served and m.is_ready]
        await asyncio.gather(*(engine.drain(grace_s) for engine in engines))

    async def close(self) -> None:
        """End all engine processes, and wait for their ends."""
        self._draining = True
        if self._timer is not None:
            self._timer.cancel()
        for model in self.models.values():
            self._refuse_all(model, SHUTTING_DOWN)
            if model.is_running:
                self._close(model, 0.0)
        doing = [m.doing for m in self.models.values() if m.doing is not None]
        if self._planning is not None:
            doing.append(self._planning)  # its process ends by itself
        await asyncio.gather(*doing, return_exceptions=True)

    # ---- changes

    def _plan_again(self) -> None:
        if self._plan is not None and self._planning is None:
            self._planning = asyncio.get_running_loop().create_task(self._plan_shares(self._plan))

    async def _plan_shares(self, plan: Callable[[Sequence[Entry]], Sharing]) -> None:
        planned: list[Entry] | None = None
        while planned != (entries := [model.entry for model in self.models.values()]):
            planned = entries
            self._sharing = await asyncio.to_thread(plan, entries)
        for model in self.models.values():
            if not model.is_running:
                model.served = None  # made again with its share
        self._planning = None
        self.change()

    def change(self) -> None:
        """Decide again, after what happens now."""
        if not self._is_changed:
            self._is_changed = True
            asyncio.get_running_loop().call_soon(self._decide)

    def _decide(self) -> None:
        self._is_changed = False
        for model in self.models.values():
            self._follow(model)
        if not self._draining and self._planning is None:
            now_s = time.monotonic()
            found = decide([*map(_standing, self.models.values())], self._fits, now_s, self._idle_s)
            self._do(found, now_s)
        for model in self.models.values():
            if self._told.get(model.name, "unloaded") != model.status:
                self._told[model.name] = model.status
                self.on_status(model)

    def _do(self, found: Decision, now_s: float) -> None:
        for name in found.rest:
            self._say(f"closing {name}, which nobody has used for {self._idle_s:g} s")
            self._close(self.models[name], 0.0, rests=True)
        for name in found.close:
            self._say(f"closing {name}, whose room another model needs")
            self._close(self.models[name], 0.0)
        for name in found.open:
            self._open(self.models[name])
        for name, model in self.models.items():  # the closed ones take no requests any more
            model.is_held = name in found.hold
            self._grant(model)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if found.look_again_s is not None:
            after_s = max(0.0, found.look_again_s - now_s)
            self._timer = asyncio.get_running_loop().call_later(after_s, self.change)

    def _fits(self, names: Sequence[str]) -> bool:
        if self.most and len(names) > self.most:
            return False
        if self._sharing is not None and not self._sharing.fits(names):
            return False
        return not any(pair <= set(names) for pair in self._apart)

    def _follow(self, model: Model) -> None:
        """Take the state of the model's engine."""
        if model.served is None or model.phase not in (Phase.OPENING, Phase.OPEN):
            return
        engine = model.served.engine
        if engine.state is State.FAILED:
            assert engine.failure is not None
            self._end(model, engine.failure)
        elif engine.state is State.READY and model.phase is Phase.OPENING:
            now_s = time.monotonic()
            model.phase = Phase.OPEN
            model.used_s, model.keeps_until_s = now_s, 2 * now_s - model.began_s
            model.load_asked_s = model.failure = None
            self._grant(model)

    def _grant(self, model: Model) -> None:
        while model.wishes and model.is_ready and not model.is_held:
            model.wishes.pop(0).grant()

    def _refuse_all(self, model: Model, problem: Problem) -> None:
        while model.wishes:
            model.wishes.pop(0).refuse(problem)

    def _open(self, model: Model) -> None:
        model.phase, model.rests, model.began_s = Phase.OPENING, False, time.monotonic()
        self._start(model, self._opening(model))

    async def _opening(self, model: Model) -> None:
        try:
            if model.served is None:
                sharing = self._sharing
                share = None if sharing is None else sharing.share_of(model.name)
                served = await asyncio.to_thread(self._make, model.entry, share)
                if isinstance(served.engine, RoutedEngine):
                    served.engine.on_change = self.change
                model.served = served
            await model.served.engine.start()
        except Exception as e:
            self._end(model, e)
        self.change()

    def _end(self, model: Model, why: Exception) -> None:
        """Record that a model was not opened, or has ended for good."""
        others = [m.name for m in self.models.values() if m.is_running and m is not model]
        if model.phase is Phase.OPENING and others and _is_lack_of_memory(model, why):
            # The start plans with the memory that is free. Alone, the model may fit.
            self._apart |= {frozenset({model.name, other}) for other in others}
            self._say(f"{model.name} does not fit beside {', '.join(others)}: {why}")
        else:
            self._say(f"{model.name} failed: {why}")
            model.failure, model.load_asked_s = why, None
            problem = problem_of(why)
            words = f"model name={model.name} failed to load: {problem.message}"
            kind = "server_error"  # as llama-server says
            self._refuse_all(model, Problem(problem.name, words, 500, kind, can_retry=False))
        self._close(model, 0.0)

    def _close(self, model: Model, grace_s: float, *, rests: bool = False) -> None:
        if model.phase in (Phase.CLOSED, Phase.CLOSING):
            return
        was_ready = model.is_ready
        model.phase, model.rests = Phase.CLOSING, rests
        current = asyncio.current_task()
        opening = model.doing if model.doing is not current else None
        self._start(model, self._closing(model, grace_s if was_ready else 0.0, opening))

    async def _closing(
        self, model: Model, grace_s: float, opening: asyncio.Task[None] | None
    ) -> None:
        if opening is not None:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        if model.served is not None:
            if grace_s:
                await model.served.engine.drain(grace_s)
            await model.served.engine.close(is_for_now=not self._draining)
        model.phase = Phase.CLOSED
        self.change()

    def _start(self, model: Model, work: Coroutine[Any, Any, None]) -> None:
        model.doing = asyncio.get_running_loop().create_task(work)


def _standing(model: Model) -> Standing:
    phase = model.phase
    if phase is Phase.OPEN and not model.is_ready:
        phase = Phase.OPENING  # its engine process died, and is started again
    times = [wish.asked_s for wish in model.wishes]
    if model.load_asked_s is not None:
        times.append(model.load_asked_s)
    return Standing(
        model.name,
        phase,
        model.is_busy,
        model.used_s,
        None if phase is Phase.OPEN else min(times, default=None),
        model.keeps_until_s,
    )


def _is_lack_of_memory(model: Model, why: Exception) -> bool:
    refused = None if model.served is None else model.served.engine.load_problem
    return isinstance(why, DoesNotFit) or (
        refused is not None and refused.name == DoesNotFit.__name__
    )
