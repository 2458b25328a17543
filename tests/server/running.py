"""A server on a real socket in a thread of the test process, with a real engine process."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import openai
from fake_generator import FakeFactory

from specoffload.chat.conversation import ChatSettings
from specoffload.generation.generation import GenerateOptions
from specoffload.server.access import AccessRules
from specoffload.server.api.app import create_app
from specoffload.server.api.context import ServerContext
from specoffload.server.api.one_model import OneModel
from specoffload.server.api.shared import SharedParts
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.health import RestartPolicy, Watchdog
from specoffload.server.renderer import Renderer
from specoffload.server.router.model import Entry, RoutedEngine, Served
from specoffload.server.router.pool import ModelPool
from specoffload.server.router.several import SeveralModels
from specoffload.server.router.sharing import Share
from specoffload.server.run import TlsFiles, listen, serve_until, url_of
from specoffload.server.sockets import SocketLimits

# One client for all tests, since each client makes a TLS context. Connections are not reused.
http = httpx.Client(verify=False, timeout=20, limits=httpx.Limits(max_keepalive_connections=0))

QUICK_RESTART = RestartPolicy(limit=3, first_delay_s=0.05, max_delay_s=0.1)


class Running:
    """A server and the means to look into it; `url` ends without a slash."""

    def __init__(
        self,
        factory: FakeFactory | None = None,
        access: AccessRules | None = None,
        max_queue: int = 16,
        limits: SocketLimits | None = None,
        *,
        has_page: bool = True,
        chat: ChatSettings | None = None,
        has_metrics: bool = False,
        strict_model: bool = False,
        watchdog: Watchdog | None = None,
        defaults: GenerateOptions | None = None,
        prefix: str = "",
        name: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        self._place: dict[str, Any] = {"prefix": prefix, "tls": tls}
        self.lines: list[str] = []
        self.error: BaseException | None = None
        self._listening = threading.Event()
        self._arguments = (factory or FakeFactory(), access, max_queue)
        self._limits, self._watchdog = limits, watchdog
        self._of_context = {
            "strict_model": strict_model,
            "chat": chat,
            "defaults": defaults,
            "name": name,
        }
        self._has_page, self._has_metrics = has_page, has_metrics
        self._thread = threading.Thread(target=self._run, name="server")
        self._thread.start()
        assert self._listening.wait(20)

    def client(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "none", "max_retries": 0, "timeout": 20, **options}
        return openai.OpenAI(base_url=self.url + "/v1", **options)

    def props(self) -> dict[str, Any]:
        props: dict[str, Any] = http.get(self.url + "/props").json()
        return props

    def wait_until_healthy(self) -> None:
        eventually(lambda: http.get(self.url + "/health").status_code == 200)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)
        assert not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def wait_for_end(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as e:
            self.error = e

    async def _serve(self) -> None:
        factory, access, max_queue = self._arguments
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        with closing(listen("127.0.0.1", 0)) as listener:
            prefix, tls = self._place["prefix"], self._place["tls"]
            self.url = f"{url_of(listener, 'https' if tls else 'http')}{prefix}"
            engine = EngineClient(
                factory,
                max_queue=max_queue,
                policy=QUICK_RESTART,
                watchdog=self._watchdog,
                chat=self._of_context["chat"],
                say=self.lines.append,
            )
            with closing(Renderer(time_limit_s=1.0)) as renderer:
                context = ServerContext(engine, renderer, **self._of_context)
                models = OneModel(context, has_metrics=self._has_metrics)
                app = create_app(models, access=access, has_page=self._has_page)
                await serve_until(
                    *(self._stop, app, engine, listener, 1.0, self._hear, self._limits),
                    **self._place,
                )

    def _hear(self, line: str) -> None:
        self.lines.append(line)
        self._listening.set()


class RunningModels(Running):
    """A server of several models, with the names of `factories`. `pool` has their states."""

    def __init__(
        self,
        factories: dict[str, FakeFactory],
        *,
        most: int = 1,
        idle_s: float | None = None,
        check: Callable[[Entry], None] | None = None,
        autoload: bool = True,
        entries: Callable[[], list[Entry]] | None = None,
        access: AccessRules | None = None,
        max_queue: int = 16,
        grace_s: float = 1.0,
    ) -> None:
        self.factories = factories
        self.entries = entries or (lambda: [Entry(name, ()) for name in factories])
        self._of_pool: dict[str, Any] = {"most": most, "idle_s": idle_s, "check": check}
        self._autoload, self._grace_s = autoload, grace_s
        super().__init__(None, access, max_queue, has_metrics=True)

    def statuses(self) -> dict[str, str]:
        found = http.get(self.url + "/models").json()["data"]
        return {model["id"]: model["status"]["value"] for model in found}

    def kill(self, name: str) -> None:
        """Kill the engine process of a model."""
        served = self.pool.models[name].served
        assert served is not None
        child = served.engine._child
        assert child is not None
        child.kill()

    async def _serve(self) -> None:
        _, access, max_queue = self._arguments
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self.shared = SharedParts()
        with (
            closing(listen("127.0.0.1", 0)) as listener,
            closing(Renderer(time_limit_s=1.0)) as renderer,
        ):
            self.url = url_of(listener)

            def make(entry: Entry, share: Share | None) -> Served:
                engine = RoutedEngine(
                    self.factories[entry.name],
                    max_queue=max_queue,
                    policy=QUICK_RESTART,
                    say=lambda line: self.lines.append(f"{entry.name}: {line}"),
                )
                return Served(engine, ServerContext(engine, renderer, shared=self.shared))

            self.pool = ModelPool(
                self.entries(),
                make,
                most_waiting=max_queue + 1,
                say=self.lines.append,
                **self._of_pool,
            )
            models = SeveralModels(
                self.pool,
                entries=self.entries,
                shared=self.shared,
                has_metrics=True,
                autoload=self._autoload,
            )
            app = create_app(models, access=access)
            place = (self._stop, app, self.pool, listener, self._grace_s, self._hear)
            await serve_until(*place)


StartServer = Callable[..., Running]


def eventually(condition: Callable[[], bool], timeout_s: float = 15.0) -> None:
    """Waits until `condition()`; fails after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "this did not come true in time"
        time.sleep(0.03)
