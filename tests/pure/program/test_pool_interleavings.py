"""The pool of models, with every await a place where something else may happen.

Engines, the preparation of models, and plans end only when the test says so. Hypothesis chooses
what happens in which order: requests, their ends, new lists of models, failures, the end of one
await. The clock moves only when the test moves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from offload.errors import BadModel, DoesNotFit
from specoffload.server.engine.messages import RequestFailed
from specoffload.server.engine.supervisor import State
from specoffload.server.router.decision import EngineEvent, Phase, after
from specoffload.server.router.model import Entry, PoolModel, Served, Wish
from specoffload.server.router.pool import ModelPool
from specoffload.server.router.sharing import Share, SharedBytes

NAMES = ("a", "b", "c")


class StillClock(asyncio.SelectorEventLoop):
    """An event loop whose clock moves only by `wait`."""

    def __init__(self) -> None:
        self.at_s = 100.0
        super().__init__(selectors.SelectSelector())

    def time(self) -> float:
        return self.at_s


class Gates:
    """Awaits that are under way. The test ends them in any order."""

    def __init__(self) -> None:
        self.closed: list[asyncio.Future[None]] = []

    async def __call__(self, then: Callable[[], Any] = lambda: None) -> Any:
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.closed.append(gate)
        await gate
        return then()

    def open(self, at: int) -> None:
        self.closed = [gate for gate in self.closed if not gate.done()]
        if self.closed:
            self.closed.pop(at % len(self.closed)).set_result(None)


class FakeEngine:
    """An engine whose process starts and ends at gates."""

    def __init__(self, world: World, entry: Entry) -> None:
        self.world, self.entry = world, entry
        self.state, self.failure = State.CLOSED, None
        self.load_problem = self.loading = self.card = None
        self.is_working, self.n_waiting = False, 0
        self.runs = False

    async def start(self) -> None:
        assert not self.runs, "an engine was started twice"
        self.state, self.failure, self.runs = State.STARTING, None, True
        self.world.starting.append(self)

    async def drain(self, grace_s: float) -> None:
        await self.world.gates()

    async def close(self, *, is_for_now: bool = False) -> None:
        self.state = State.CLOSED
        await self.world.gates()
        self.runs = False

    def ends_start(self, failure: Exception | None) -> None:
        if self.state in (State.STARTING, State.RESTARTING):
            self.failure = failure  # type: ignore[assignment]
            self.state = State.READY if failure is None else State.FAILED
            self.runs = failure is None
            self.world.pool.change()

    def dies(self) -> None:
        """The process has died, and is started again."""
        self.state = State.RESTARTING
        self.world.starting.append(self)
        self.world.pool.change()


class World:
    """A pool and all that happens to it."""

    def __init__(self, most: int, shares: bool) -> None:
        self.gates = Gates()
        self.engines: list[FakeEngine] = []
        self.starting: list[FakeEngine] = []
        self.wishes: list[Wish] = []
        self.ended: set[Wish] = set()
        self.bad: set[str] = set()
        self.most = most
        self.version = dict.fromkeys(NAMES, 0)
        self.pool = ModelPool(
            self.entries(NAMES),
            self.make,
            plan=self.plan if shares else None,
            check=self.check,
            most=most,
            idle_s=50.0,
            most_waiting=4,
            in_thread=self.in_thread,
        )

    def entries(self, names: Sequence[str]) -> list[Entry]:
        return [Entry(name, (str(self.version[name]),)) for name in names]

    async def in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self.gates(lambda: function(*arguments))

    def make(self, entry: Entry, share: Share | None) -> Served:
        engine = FakeEngine(self, entry)
        self.engines.append(engine)
        return Served(engine, None)  # type: ignore[arg-type]

    def plan(self, entries: Sequence[Entry]) -> SharedBytes:
        if "plan" in self.bad:
            raise OSError("no plan")
        return SharedBytes({}, None, {})  # type: ignore[arg-type]

    def check(self, entry: Entry) -> None:
        if entry.name in self.bad:
            raise BadModel("junk")

    # ---- what may happen

    def ask(self, name: str) -> None:
        model = self.pool.find(name)
        if model is not None:
            with contextlib.suppress(RequestFailed):
                self.wishes.append(self.pool.ask(model))

    def end_request(self, at: int) -> None:
        """End a request that is answered, or whose client leaves while it waits."""
        left = [wish for wish in self.wishes if wish not in self.ended]
        if left:
            wish = left[at % len(left)]
            self.ended.add(wish)
            wish.end()

    def end_start(self, at: int, failure: Exception | None = None) -> None:
        if self.starting:
            self.starting.pop(at % len(self.starting)).ends_start(failure)

    def kill(self, at: int) -> None:
        ready = [engine for engine in self.engines if engine.state is State.READY]
        if ready:
            ready[at % len(ready)].dies()

    def replace(self, names: Sequence[str], changed: Sequence[str]) -> None:
        for name in changed:
            self.version[name] += 1
        self.pool.replace(self.entries(names))

    def of(self, name: str, then: Callable[[PoolModel], None]) -> None:
        if (model := self.pool.find(name)) is not None:
            then(model)

    def do(self, action: tuple[Any, ...]) -> None:
        match action:
            case ("ask", name):
                self.ask(name)
            case ("end", at):
                self.end_request(at)
            case ("gate", at):
                self.gates.open(at)
            case ("ready", at):
                self.end_start(at)
            case ("fails", at):
                self.end_start(at, BadModel("its weights are damaged"))
            case ("dies", at):
                self.kill(at)
            case ("lacks", at):
                self.end_start(at, DoesNotFit("9 GiB"))
            case ("list", names, changed):
                self.replace(names, changed)
            case ("load", name):
                self.of(name, self.pool.load)
            case ("unload", name):
                self.of(name, self.pool.unload)
            case ("bad", name):
                self.bad ^= {name}
            case ("wait", seconds):
                asyncio.get_running_loop().at_s += seconds  # type: ignore[attr-defined]

    # ---- what must hold

    def holds(self) -> None:
        running = [engine for engine in self.engines if engine.runs]
        assert not self.most or len(running) <= self.most, "too many engines"
        names = [engine.entry.name for engine in running]
        assert len(names) == len(set(names)), "two versions of a model run at once"
        known = {model.served.engine for model in self.pool._all if model.served is not None}
        assert known >= set(running), "an engine runs that the pool does not know"
        waiting = [wish for model in self.pool.models.values() for wish in model.wishes]
        for wish in self.wishes:
            if wish not in self.ended and not wish.granted.done():
                assert wish in waiting, "a request waits for nothing"
        for model in self.pool._old:
            assert not model.wishes

    async def settle(self) -> None:
        """End everything that can end, as a working machine does."""
        self.bad.clear()
        for _ in range(400):
            for _ in range(3):
                await asyncio.sleep(0)
            self.holds()
            self.end_start(0)
            self.gates.open(0)
            for wish in self.wishes:
                if wish not in self.ended and wish.granted.done():
                    self.ended.add(wish)
                    wish.end()
            asyncio.get_running_loop().at_s += 1.0  # type: ignore[attr-defined]
            assert sum(m.n_uses for m in self.pool._all) <= len(self.wishes) - len(self.ended)
            if len(self.ended) == len(self.wishes) and not self.pool._old and not self.busy:
                return
        raise AssertionError("requests hang, or an old model stays")

    @property
    def busy(self) -> bool:
        return any(m.phase in (Phase.OPENING, Phase.CLOSING) for m in self.pool._all)

    async def close(self) -> None:
        closing = asyncio.ensure_future(self.pool.close())
        for _ in range(200):
            await asyncio.sleep(0)
            self.gates.open(0)
        await closing
        assert all(wish.granted.done() or wish in self.ended for wish in self.wishes)
        assert not any(engine.runs for engine in self.engines), "an engine outlives the server"


NUMBERS = st.integers(0, 5)
NAME = st.sampled_from(NAMES)
ACTIONS = st.one_of(
    st.tuples(st.just("ask"), NAME),
    st.tuples(st.sampled_from(("end", "gate", "gate", "ready", "fails", "lacks", "dies")), NUMBERS),
    st.tuples(st.just("list"), st.lists(NAME, unique=True), st.lists(NAME, unique=True)),
    st.tuples(st.sampled_from(("load", "unload", "bad")), NAME),
    st.tuples(st.just("wait"), st.sampled_from((0.1, 5.0, 60.0))),
    st.tuples(st.just("bad"), st.just("plan")),
)
# After each action the event loop goes on for some of its turns, but not always until it is idle.
COURSE = st.lists(st.tuples(ACTIONS, st.sampled_from((0, 1, 2, 6))), max_size=40)


def play(
    course: Sequence[tuple[tuple[Any, ...], int]], most: int, *, shares: bool, settles: bool
) -> World:
    async def run() -> World:
        world = World(most, shares)
        await world.pool.start()
        for action, n_turns in course:
            world.do(action)
            for _ in range(n_turns):
                await asyncio.sleep(0)
            world.holds()
        if settles:
            await world.settle()
        await world.close()
        return world

    return in_loop(run())


def in_loop(work: Coroutine[Any, Any, World]) -> World:
    loop = StillClock()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


BUSY_AND_REPLACED = [
    (("ask", "a"), 6),
    (("gate", 0), 6),
    (("ready", 0), 6),
    (("list", NAMES, ("a",)), 0),
    (("ask", "a"), 6),
    (("ask", "b"), 6),
    (("list", NAMES, ("a",)), 6),
    (("gate", 0), 1),
    (("ask", "a"), 0),
]


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@example(BUSY_AND_REPLACED, 1, False, True)
@example(BUSY_AND_REPLACED, 2, True, True)
@example(BUSY_AND_REPLACED, 2, False, True)
@example([(("bad", "plan"), 6), (("gate", 0), 6), (("ask", "a"), 6)], 2, True, True)
@example([*BUSY_AND_REPLACED[:6], (("end", 2), 6)], 2, False, True)
@given(COURSE, st.integers(0, 3), st.booleans(), st.booleans())
def test_no_request_is_lost_and_no_engine_is_unknown(
    course: list[tuple[tuple[Any, ...], int]], most: int, shares: bool, settles: bool
) -> None:
    """The server is stopped at once, or after everything has settled."""
    play(course, most, shares=shares, settles=settles)


async def played(*actions: tuple[Any, ...], most: int = 1) -> World:
    world = World(most, False)
    await world.pool.start()
    await go_on(world, *actions)
    return world


async def go_on(world: World, *actions: tuple[Any, ...]) -> None:
    """Let each action have all its effects before the next one."""
    for action in actions:
        world.do(action)
        for _ in range(8):
            await asyncio.sleep(0)
        world.holds()


A_IS_OPEN = (("ask", "a"), ("gate", 0), ("ready", 0))


def test_a_busy_model_ends_its_requests_on_its_old_preset() -> None:
    async def run() -> World:
        world = await played(*A_IS_OPEN, ("list", NAMES, ("a",)), ("ask", "a"))
        first, second = world.wishes
        (old,) = world.pool._old
        assert first.model is old
        assert old.phase is Phase.OPEN
        assert second.model is world.pool.models["a"]
        assert not second.granted.done()
        await go_on(world, ("end", 0), ("gate", 0), ("gate", 0), ("ready", 0))
        assert second.granted.done()
        assert [engine.entry.words for engine in world.engines] == [("0",), ("1",)]
        await world.settle()
        await world.close()
        return world

    in_loop(run())


def test_a_file_of_junk_closes_no_model_that_works() -> None:
    async def run() -> World:
        world = await played(*A_IS_OPEN, ("end", 0), ("bad", "b"), ("ask", "b"), ("gate", 0))
        wish = world.wishes[1]
        with pytest.raises(RequestFailed, match="model name=b failed to load: junk"):
            wish.granted.result()
        assert world.pool.models["a"].phase is Phase.OPEN
        assert [engine.entry.name for engine in world.engines] == ["a"]
        await world.settle()
        await world.close()
        return world

    in_loop(run())


def test_a_model_comes_back_if_the_one_that_took_its_room_fails() -> None:
    async def run() -> World:
        check, close, make = ("gate", 0), ("gate", 0), ("gate", 0)
        world = await played(
            *A_IS_OPEN, ("end", 0), ("ask", "b"), check, close, make, ("fails", 0), ("gate", 0)
        )
        assert world.wishes[1].granted.exception() is not None
        assert world.pool.models["b"].phase is Phase.CLOSED
        assert world.pool.models["a"].phase is Phase.OPENING
        world.end_start(0)
        await world.settle()
        assert world.pool.models["a"].is_ready
        await world.close()
        return world

    in_loop(run())


@pytest.mark.parametrize("phase", Phase)
def test_phases_have_only_the_events_of_the_picture(phase: Phase) -> None:
    follow = {event: None for event in EngineEvent}
    for event in EngineEvent:
        with contextlib.suppress(KeyError):
            follow[event] = after(phase, event)  # type: ignore[assignment]
    assert {event for event in EngineEvent if follow[event] is not None} == {
        Phase.CLOSED: {EngineEvent.OPENS},
        Phase.OPENING: {EngineEvent.IS_READY, EngineEvent.IS_CLOSED},
        Phase.OPEN: {EngineEvent.IS_CLOSED},
        Phase.CLOSING: {EngineEvent.HAS_CLOSED},
    }[phase]
