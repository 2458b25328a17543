"""Runs the server of `serve` with its engine process, and returns the exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import gc
import ipaddress
import logging
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple, Protocol

import uvicorn
from fastapi import FastAPI

from offload.notes import Note, NoteKind
from offload.regular_file import check_regular
from offload.remote.address import Address
from specdec.user_path import user_path
from specoffload import report
from specoffload.chat.conversation import ChatSettings
from specoffload.config.options import ServeOptions
from specoffload.errors import UsageError
from specoffload.generation.generation import GenerateOptions
from specoffload.server.access import AccessRules, read_keys, read_origins
from specoffload.server.api.app import create_app
from specoffload.server.api.context import ServerContext
from specoffload.server.api.images import MediaRules, new_marker
from specoffload.server.api.models import Models
from specoffload.server.api.one_model import OneModel
from specoffload.server.engine.client import EngineClient
from specoffload.server.engine.process import Factory
from specoffload.server.forwarded import ForwardedHeaders
from specoffload.server.hangup import Terminal
from specoffload.server.log import RequestLog, ServerLog
from specoffload.server.prefix import BelowPrefix, SingleSlashes, read_prefix
from specoffload.server.renderer import Renderer
from specoffload.server.sockets import (
    BACKLOG,
    HttpConnection,
    IdleConnections,
    OncePerWhile,
    SocketLimits,
    raise_descriptor_limit,
)
from specoffload.server.unix_socket import is_socket_path, listen_at, removed_at_end

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_EXIT_CODES: dict[int, int] = {signal.SIGINT: 130, signal.SIGHUP: 129}
_POLLED = frozenset({"/health", "/v1/health", "/metrics"})
_TICK_S = 0.1  # uvicorn's pause between two looks at its state


def serve(
    factory: Factory,
    options: ServeOptions,
    *,
    chat: ChatSettings | None = None,
    defaults: GenerateOptions | None = None,
    workers: Sequence[Address] = (),
    name: str = "",
    log: ServerLog,
) -> int:
    """Serve until Ctrl-C (returns 130), SIGTERM (returns 0), or the terminal closes (returns 129).

    `factory` runs in the engine process and must be picklable. `name` is the model's, which
    /v1/models tells while the model is loaded. Port 0 picks a free port. `log` gets
    lines for the operator, among them `listening on http://HOST:PORT` and one for each request. It
    is opened again at SIGHUP. After one of the signals, running requests have
    `options.shutdown_timeout_s` seconds to end; a second Ctrl-C ends them at once.

    Raises UsageError if the address cannot be used or the model is refused, DeviceFailed if the
    engine process dies while loading, or too often later.
    """

    def parts(renderer: Renderer) -> tuple[OneModel, EngineClient]:
        engine = EngineClient(
            factory, max_queue=options.max_queue, workers=workers, chat=chat, say=log.say
        )
        context = ServerContext(
            engine,
            renderer,
            defaults,
            chat,
            strict_model=options.strict_model,
            media=media_rules(options),
            name=name,
        )
        return OneModel(context, has_metrics=options.metrics), engine

    return serve_parts(parts, options, log)


def media_rules(options: ServeOptions) -> MediaRules:
    """Return what the options let requests name as images."""
    marker = options.media_marker or new_marker()
    return MediaRules(options.media_path, options.allow_media_urls, marker)


def serve_parts(
    parts: Callable[[Renderer], tuple[Models, Engines]], options: ServeOptions, log: ServerLog
) -> int:
    """Serve the models of `parts` by their engines; returns as `serve` does.

    The server closes the renderer that `parts` gets.
    """
    terminal, say = Terminal(), log.say
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the server runs; the log was just opened
    keys = read_keys(options.api_key, options.api_key_file, say)
    origins = read_origins(options.cors_origins)
    limits = SocketLimits(n_connections=raise_descriptor_limit())
    prefix, tls = read_prefix(options.api_prefix), read_tls(options)
    listener = listen(options.host, options.port)
    with removed_at_end(listener), contextlib.closing(listener):
        access = AccessRules(keys, origins, is_loopback(listener))
        if not keys and not access.on_loopback:
            words = "warning: other machines can reach this server, and no --api-key is set"
            say(Note(NoteKind.WARNING, words))
        renderer = Renderer()
        models, engine = parts(renderer)
        app = create_app(models, access=access, has_page=options.ui != "none")
        stop = asyncio.Event()
        gc.freeze()  # later collections skip the objects that exist now
        with contextlib.closing(renderer):
            renderer.warm()
            running = serve_until(
                *(stop, app, engine, listener, options.shutdown_timeout_s, say, limits),
                hang_up=HangUp(terminal, log, lambda: _read_keys_again(access, options, say)),
                prefix=prefix,
                tls=tls,
            )
            return asyncio.run(running)


def _read_keys_again(
    access: AccessRules, options: ServeOptions, say: Callable[[str], None]
) -> None:
    """Take the keys that --api-key-file has now. The old ones stay if it cannot be read."""
    if options.api_key_file is None:
        return
    try:
        access.keys = read_keys(options.api_key, options.api_key_file, say)
    except UsageError as e:
        words = f"warning: the keys stay as they were: {e}"
        say(Note(NoteKind.WARNING, words))
    else:
        n_keys = report.plural(len(access.keys), "key")
        say(f"--api-key-file {options.api_key_file} was read again: {n_keys}")


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises UsageError, which says what to change."""
    if not 0 <= port <= 65535:
        raise UsageError(f"--port {port}: must be 0 to 65535")
    if is_socket_path(host):
        return listen_at(user_path(host), BACKLOG)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as e:
        raise UsageError(f"--host {host}: {e}") from e
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        if e.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is already in use: choose another with --port"
            ) from e
        raise UsageError(f"cannot listen on {host} port {port}: {e.strerror}") from e
    return listener


class TlsFiles(NamedTuple):
    """The files of the private key and of the certificate for HTTPS."""

    key: Path
    certificate: Path


def read_tls(options: ServeOptions) -> TlsFiles | None:
    """Return the files for HTTPS, or None without them. Raises UsageError for unusable files."""
    key, certificate = options.ssl_key_file, options.ssl_cert_file
    if key is None and certificate is None:
        return None
    if key is None or certificate is None:
        given, missing = ("cert", "key") if key is None else ("key", "cert")
        raise UsageError(f"--ssl-{given}-file needs --ssl-{missing}-file: HTTPS takes both")
    for name, file in (("key", key), ("cert", certificate)):
        try:
            check_regular(file)
        except OSError as e:
            reason = "no such file" if isinstance(e, FileNotFoundError) else e.strerror
            raise UsageError(f"--ssl-{name}-file {file}: {reason}") from e
    try:
        # An empty password, because otherwise the library would ask for one at the terminal.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as e:  # ssl.SSLError is one
        raise UsageError(
            f"--ssl-key-file {key} and --ssl-cert-file {certificate}: not an unencrypted key in "
            f"PEM and its certificate ({e.strerror or e})"
        ) from e
    return TlsFiles(key, certificate)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    if listener.family == socket.AF_UNIX:
        return f"{scheme}+unix://{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    return ipaddress.ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback


class Engines(Protocol):
    """The engine of a model, or those of several."""

    failed: asyncio.Event
    failure: Exception | None

    async def start(self) -> None: ...
    async def drain(self, grace_s: float) -> None: ...
    async def close(self) -> None: ...


async def serve_until(
    stop: asyncio.Event,
    app: FastAPI,
    engine: Engines,
    listener: socket.socket,
    grace_s: float,
    say: Callable[[str], None],
    limits: SocketLimits | None = None,
    hang_up: HangUp | None = None,
    prefix: str = "",
    tls: TlsFiles | None = None,
) -> int:
    """Serve until `stop`, a signal, or the engine's failure. Returns the exit code of `serve`.

    All paths begin with `prefix`. `tls` makes the server speak HTTPS.

    Raises the engine's failure. The engine process has ended when this returns or raises.
    """
    # /metrics counts the connections.
    app.state.connections = waiting = IdleConnections(limits or SocketLimits())
    for name in ("asyncio", "uvicorn.error", "specoffload.server"):
        logging.getLogger(name).addFilter(OncePerWhile())
    unsaid = () if report.is_verbose() else frozenset(prefix + path for path in _POLLED)
    below = BelowPrefix(app, prefix) if prefix else app
    config = uvicorn.Config(
        RequestLog(SingleSlashes(below), say, unsaid=unsaid),
        proxy_headers=False,  # ForwardedHeaders reads them, and others
        loop="asyncio",
        http=functools.partial(HttpConnection, waiting=waiting, say=say),  # type: ignore[arg-type]
        timeout_keep_alive=waiting.limits.keep_alive_s,
        backlog=waiting.limits.n_at_once,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=None,  # drain() limits it
        ssl_keyfile=None if tls is None else tls.key,
        ssl_certfile=None if tls is None else tls.certificate,
    )
    # uvicorn has read the addresses of proxies from the environment variable FORWARDED_ALLOW_IPS.
    config.app = ForwardedHeaders(config.app, config.forwarded_allow_ips)  # type: ignore[arg-type]
    url = url_of(listener, "http" if tls is None else "https") + prefix
    server = _Server(config, engine, grace_s, lambda: say(f"listening on {url}"), hang_up)
    watcher = asyncio.ensure_future(_stop_server(server, stop, engine.failed))
    try:
        await engine.start()
        await server.serve(sockets=[listener])
    finally:
        watcher.cancel()
        await engine.close()
    if engine.failure is not None:
        raise engine.failure
    return _EXIT_CODES.get(server.signal or signal.SIGTERM, 0)


async def _stop_server(server: uvicorn.Server, *reasons: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(reason.wait()) for reason in reasons]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        server.should_exit = True
    finally:
        for wait in waits:
            wait.cancel()


@dataclass(frozen=True)
class HangUp:
    """The objects that a SIGHUP acts on.

    If `terminal` is closed and the server needs it, the signal stops the server. Otherwise `log` is
    opened again, and `renew` is called.
    """

    terminal: Terminal
    log: ServerLog
    renew: Callable[[], None] = lambda: None


class _Server(uvicorn.Server):
    """A uvicorn server that keeps the signal for the exit code and limits the shutdown time."""

    def __init__(
        self,
        config: uvicorn.Config,
        engine: Engines,
        grace_s: float,
        on_listening: Callable[[], None],
        hang_up: HangUp | None,
    ) -> None:
        super().__init__(config)
        self.signal: int | None = None
        self._engine = engine
        self._grace_s = grace_s
        self._on_listening = on_listening
        self._hang_up = hang_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():  # asyncio has shortened the queue
            listener.listen(BACKLOG)
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running requests end, and tell new ones meanwhile that the server stops."""
        drain = asyncio.ensure_future(self._engine.drain(self._grace_s))
        n_ticks = 0
        while not drain.done() and not self.force_exit:
            await asyncio.wait({drain}, timeout=_TICK_S)
            await self.on_tick(n_ticks)  # keeps the Date of answers right
            n_ticks += 1
        drain.cancel()  # drain has ended, unless a second Ctrl-C came
        await asyncio.gather(drain, return_exceptions=True)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.signal = sig
        super().handle_exit(sig, frame)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own version raises the signal again at the end. That would kill this process
        # before the engine process is closed and the exit code is chosen.
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {sig: signal.signal(sig, self.handle_exit) for sig in _SIGNALS}
        if self._hang_up is not None:
            loop = asyncio.get_running_loop()
            before[signal.SIGHUP] = signal.signal(
                signal.SIGHUP, lambda *_: loop.call_soon_threadsafe(self._on_hang_up)
            )
        try:
            yield
        finally:
            for sig, handler in before.items():
                signal.signal(sig, handler)

    def _on_hang_up(self) -> None:
        assert self._hang_up is not None
        terminal, log = self._hang_up.terminal, self._hang_up.log
        is_closed = terminal.is_closed()
        if is_closed:
            terminal.leave()
        if not (is_closed and terminal.is_needed):
            log.reopen()
            self._hang_up.renew()
        elif not self.should_exit:
            log.say("the terminal is closed: stopping")
            self.handle_exit(signal.SIGHUP, None)
