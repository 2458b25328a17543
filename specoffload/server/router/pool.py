"""Opens and closes models as requests ask for them. Each model has an engine process of its own.

`decision.py` decides; this module does it, and lets requests wait. Everything runs on the event
loop's thread, but for the resolution of a model's configuration.

The pool changes its state only between two awaits, and `_turn` alone changes a model's phase. So
whatever happens during an await, each request waits for a model that the pool knows, and each
engine that runs belongs to one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from typing import Any

from offload.errors import DoesNotFit
from specoffload.server.engine.messages import (
    Event,
    Problem,
    RequestFailed,
    problem_of,
    unavailable,
)
from specoffload.server.engine.supervisor import SHUTTING_DOWN, State
from specoffload.server.router.decision import (
    EngineEvent,
    Phase,
    PoolChanges,
    Standing,
    after,
    decide,
)
from specoffload.server.router.model import Entry, PoolModel, RoutedEngine, Served, Wish, now_s
from specoffload.server.router.sharing import Share, SharedBytes

_RETRY_AFTER_S = 5
_LATEST = ":latest"  # ollama's clients add it to names that they read in /api/tags


class ModelPool:
    """The models of one server. The caller must await `start`, and `close` in every case."""

    def __init__(
        self,
        entries: Sequence[Entry],
        make: Callable[[Entry, Share | None], Served],
        *,
        plan: Callable[[Sequence[Entry]], SharedBytes] | None = None,
        check: Callable[[Entry], None] | None = None,
        most: int = 1,
        idle_s: float | None = None,
        most_waiting: int = 17,
        say: Callable[[str], None] = lambda line: None,
        in_thread: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        """`most`: models that are open at once; 0: as many as fit. `idle_s`: seconds without a
        request after which a model is closed. `make` is called in a thread when a model is first
        opened, with the model's share of the memory, if it shares it with others. `plan` decides
        these shares, in a thread, before a model is opened. `check` raises, in a thread, if a model
        cannot be opened even alone. It is called before others are closed for the model. At most
        `most_waiting` requests wait for each model. `in_thread` calls these functions.
        """
        self.failed = asyncio.Event()  # never set: the server goes on without a model
        self.failure: Exception | None = None
        self.most = most
        self.models = {entry.name: PoolModel(entry) for entry in entries}
        self.on_status: Callable[[PoolModel], None] = lambda model: None
        self.on_stop: Callable[[], None] = lambda: None
        self._old: list[PoolModel] = []  # versions that are not in the list any more, and still run
        self._make = make
        self._check = check
        self._in_thread = in_thread
        self._plan = plan if most != 1 else None
        self._planning: asyncio.Task[None] | None = None
        self._sharing: SharedBytes | None = None
        self._idle_s = idle_s
        self._most_waiting = most_waiting
        self._say = say
        self._apart: set[frozenset[str]] = set()  # pairs that did not fit together
        self._draining = False
        self._is_changed = False
        self._timer: asyncio.TimerHandle | None = None
        self._told: dict[str, str] = {}  # statuses that were reported

    # ---- what routes ask

    def find(self, name: str) -> PoolModel | None:
        """Return the model of this name or alias, or None.

        As in ollama, `NAME:latest` is NAME, and capital letters only tell models apart whose names
        are equal otherwise.
        """
        wanted = (name, name.removesuffix(_LATEST), name + _LATEST)
        for one in wanted:
            model = self.models.get(one)
            model = model or next((m for m in self.models.values() if one in m.entry.aliases), None)
            if model is not None:
                return model
        folded = {one.casefold() for one in wanted}
        alike = [m for m in self.models.values() if folded & set(map(str.casefold, m.names))]
        return alike[0] if len(alike) == 1 else None

    def ask(self, model: PoolModel) -> Wish:
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

    def load(self, model: PoolModel) -> None:
        """Open a model as soon as there is room for it."""
        model.load_asked_s = now_s()
        self.change()

    def unload(self, model: PoolModel) -> None:
        """Close a model. Its requests have the seconds of its entry to end."""
        model.load_asked_s = None
        self._close(model, model.entry.stop_timeout_s)

    def replace(self, entries: Sequence[Entry]) -> None:
        """Take another list of models.

        Models that changed or are gone end their requests, and are closed then. Requests that wait
        for a changed model wait for its new version; those for one that is gone are refused.
        """
        new = {entry.name: entry for entry in entries}
        before = self.models
        self.models = {
            name: before[name]
            if name in before and before[name].entry == entry
            else PoolModel(entry)
            for name, entry in new.items()
        }
        for name, model in before.items():
            if self.models.get(name) is not model:
                self._supersede(model, self.models.get(name))
        if self.models != before:
            self._plan_again()
        self.change()

    def _supersede(self, model: PoolModel, successor: PoolModel | None) -> None:
        if model.is_running:
            self._say(f"closing {model.name} after its requests: it has changed or is gone")
            model.is_old = True
            self._old.append(model)
        if successor is None:
            words = f"the model {model.name} is gone; GET /models lists those that are served"
            self._refuse_all(model, unavailable(words))
            self._told.pop(model.name, None)
            return
        successor.load_asked_s, model.load_asked_s = model.load_asked_s, None
        successor.wishes, model.wishes = model.wishes, []
        for wish in successor.wishes:
            wish.model = successor
        self._apart = {pair for pair in self._apart if model.name not in pair}

    # ---- life, as `serve_until` needs it

    async def start(self) -> None:
        """Begin to open the models that are opened at the start."""
        self._plan_again()
        for model in self.models.values():
            if model.entry.loads_on_startup:
                self.load(model)

    @property
    def _all(self) -> Iterator[PoolModel]:
        """All models of the list, and old versions that still run."""
        yield from self.models.values()
        yield from [*self._old]

    async def drain(self, grace_s: float) -> None:
        """Refuse requests that wait and new ones; give running ones `grace_s` seconds to end."""
        self._draining = True
        self.on_stop()
        for model in self.models.values():
            self._refuse_all(model, SHUTTING_DOWN)
        engines = [m.served.engine for m in self._all if m.served and m.is_ready]
        await asyncio.gather(*(engine.drain(grace_s) for engine in engines))

    async def close(self) -> None:
        """End all engine processes, and wait for their ends."""
        self._draining = True
        if self._timer is not None:
            self._timer.cancel()
        for model in self._all:
            self._refuse_all(model, SHUTTING_DOWN)
            if model.checking is not None:
                model.checking.cancel()
            if model.is_running:
                self._close(model, 0.0)
        tasks = [task for m in self._all for task in (m.doing, m.checking) if task is not None]
        if self._planning is not None:
            tasks.append(self._planning)  # its process ends by itself
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- changes

    def _plan_again(self) -> None:
        if self._plan is not None and self._planning is None:
            self._planning = asyncio.get_running_loop().create_task(self._plan_shares(self._plan))

    async def _plan_shares(self, plan: Callable[[Sequence[Entry]], SharedBytes]) -> None:
        planned: list[Entry] | None = None
        try:
            while planned != (entries := [model.entry for model in self.models.values()]):
                planned = entries
                self._sharing = await self._in_thread(plan, entries)
        except Exception as e:
            self._say(f"the memory is not divided among the models: {e}")
            self._sharing = None
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
        for model in self._all:
            self._follow(model)
        if not self._draining and self._planning is None:
            at_s = now_s()
            standings = [self._standing(model) for model in self._all]
            self._do(decide(standings, self._fits, at_s, self._idle_s), at_s)
        for model in self.models.values():
            if self._told.get(model.name, "unloaded") != model.status:
                self._told[model.name] = model.status
                self.on_status(model)

    def _standing(self, model: PoolModel) -> Standing:
        phase = model.phase
        if phase is Phase.OPEN and not model.is_ready:
            phase = Phase.OPENING  # its engine process died, and is started again
        times = [wish.asked_s for wish in model.wishes]
        if model.load_asked_s is not None:
            times.append(model.load_asked_s)
        return Standing(
            model.key,
            phase,
            model.is_busy,
            model.used_s,
            None if phase is Phase.OPEN else min(times, default=None),
            model.keeps_until_s,
            is_old=model.is_old,
            is_blocked=any(old.name == model.name for old in self._old if old is not model),
            is_checked=model.is_checked or self._check is None,
        )

    def _do(self, changes: PoolChanges, at_s: float) -> None:
        models = {model.key: model for model in self._all}
        for key in changes.rest:
            self._say(f"closing {models[key].name}, which nobody has used for {self._idle_s:g} s")
            self._close(models[key], 0.0, rests=True)
        for key in changes.retire:
            self._close(models[key], 0.0)
        for key in changes.close:
            self._say(f"closing {models[key].name}, whose room another model needs")
            if changes.room_for is not None:
                models[changes.room_for].displaced.append(models[key])
            self._close(models[key], 0.0)
        for key in changes.open:
            self._open(models[key])
        if changes.check is not None and models[changes.check].checking is None:
            model = models[changes.check]
            model.checking = asyncio.get_running_loop().create_task(self._checking(model))
        for key, model in models.items():  # the closed ones take no requests any more
            model.is_held = key in changes.hold
            self._grant(model)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if changes.look_again_s is not None:
            after_s = max(0.0, changes.look_again_s - at_s)
            self._timer = asyncio.get_running_loop().call_later(after_s, self.change)

    def _fits(self, keys: Sequence[str]) -> bool:
        if self.most and len(keys) > self.most:
            return False
        names = {model.key: model.name for model in self.models.values()}
        if not names.keys() >= set(keys):
            # Old versions still have their shares, which the plan of the new list does not know.
            return self._sharing is None
        current = [names[key] for key in keys]
        if self._sharing is not None and not self._sharing.fits(current):
            return False
        return not any(pair <= set(current) for pair in self._apart)

    async def _checking(self, model: PoolModel) -> None:
        assert self._check is not None
        try:
            await self._in_thread(self._check, model.entry)
            model.is_checked = True
        except Exception as e:
            self._fail(model, e)
        model.checking = None
        self.change()

    def _follow(self, model: PoolModel) -> None:
        """Take the state of the model's engine."""
        if model.served is None or model.phase not in (Phase.OPENING, Phase.OPEN):
            return
        engine = model.served.engine
        if engine.state is State.FAILED:
            assert engine.failure is not None
            self._end(model, engine.failure)
        elif engine.state is State.READY and model.phase is Phase.OPENING:
            self._turn(model, EngineEvent.IS_READY)
            model.used_s = now_s()
            model.keeps_until_s = 2 * model.used_s - model.began_s
            model.load_asked_s = model.failure = None
            model.displaced.clear()
            self._grant(model)

    def _turn(self, model: PoolModel, event: EngineEvent) -> None:
        model.phase = after(model.phase, event)

    def _grant(self, model: PoolModel) -> None:
        while model.wishes and model.is_ready and not model.is_held:
            model.wishes.pop(0).grant()

    def _refuse_all(self, model: PoolModel, problem: Problem) -> None:
        while model.wishes:
            model.wishes.pop(0).refuse(problem)

    def _open(self, model: PoolModel) -> None:
        self._turn(model, EngineEvent.OPENS)
        model.rests, model.began_s = False, now_s()
        self._start(model, self._opening(model))

    async def _opening(self, model: PoolModel) -> None:
        try:
            if model.served is None:
                sharing = self._sharing
                share = None if sharing is None else sharing.share_of(model.name)
                served = await self._in_thread(self._make, model.entry, share)
                if isinstance(served.engine, RoutedEngine):
                    served.engine.on_change = self.change
                model.served = served
            await model.served.engine.start()
        except Exception as e:
            self._end(model, e)
        self.change()

    def _end(self, model: PoolModel, error: Exception) -> None:
        """Record that a model was not opened, or has ended for good."""
        others = [m.name for m in self._all if m.is_running and m.name != model.name]
        if model.phase is Phase.OPENING and others and _is_lack_of_memory(model, error):
            # The start plans with the memory that is free. Alone, the model may fit.
            self._apart |= {frozenset({model.name, other}) for other in others}
            self._say(f"{model.name} does not fit beside {', '.join(others)}: {error}")
        else:
            self._fail(model, error)
        self._close(model, 0.0)

    def _fail(self, model: PoolModel, error: Exception) -> None:
        """Refuse the requests for a model, and open again what was closed for its start."""
        self._say(f"{model.name} failed: {error}")
        model.failure, model.load_asked_s = error, None
        problem = problem_of(error)
        words = f"model name={model.name} failed to load: {problem.message}"
        kind = "server_error"  # as llama-server says
        self._refuse_all(model, Problem(problem.name, words, 500, kind, can_retry=False))
        for other in model.displaced:
            if not other.is_old and other.failure is None and other.phase is not Phase.OPEN:
                self._say(f"opening {other.name} again")
                self.load(other)
        model.displaced.clear()

    def _close(self, model: PoolModel, grace_s: float, *, rests: bool = False) -> None:
        if model.phase in (Phase.CLOSED, Phase.CLOSING):
            return
        was_ready = model.is_ready
        self._turn(model, EngineEvent.IS_CLOSED)
        model.rests = rests
        current = asyncio.current_task()
        opening = model.doing if model.doing is not current else None
        self._start(model, self._closing(model, grace_s if was_ready else 0.0, opening))

    async def _closing(
        self, model: PoolModel, grace_s: float, opening: asyncio.Task[None] | None
    ) -> None:
        try:
            if opening is not None:
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            if model.served is not None:
                if grace_s:
                    await model.served.engine.drain(grace_s)
                await model.served.engine.close(is_for_now=not self._draining)
        except Exception as e:
            self._say(f"{model.name} was not closed in order: {type(e).__name__}: {e}")
        finally:
            self._turn(model, EngineEvent.HAS_CLOSED)
            model.is_checked = False
            with contextlib.suppress(ValueError):
                self._old.remove(model)
            self.change()

    def _start(self, model: PoolModel, work: Coroutine[Any, Any, None]) -> None:
        model.doing = asyncio.get_running_loop().create_task(work)


def _is_lack_of_memory(model: PoolModel, error: Exception) -> bool:
    refused = None if model.served is None else model.served.engine.load_problem
    return isinstance(error, DoesNotFit) or (
        refused is not None and refused.name == DoesNotFit.__name__
    )
