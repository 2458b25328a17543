"""The engine process: makes the generator and serves the jobs from the channel.

It owns libllama, so a failed assertion or a device error ends this process and not the API. The
main thread computes, and reads the channel between two steps. A second thread tells the API process
every second that this one runs, also during a step of minutes. It ends this process with the API
process, so that no orphan stays.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import signal
import threading
from collections.abc import Callable

from specoffload.server.engine.channel import Channel
from specoffload.server.engine.messages import (
    Alive,
    FromEngine,
    LoadFailed,
    Loading,
    Ready,
    ToEngine,
    problem_of,
)
from specoffload.server.engine.service import Service
from specoffload.server.engine.watchdog import HEARTBEAT_S
from specoffload.session.generation import Generator
from specoffload.session.progress import OnProgress

Factory = Callable[[OnProgress], Generator]
"""Makes the generator, and tells how far it is; must be picklable, since the process is spawned."""

IGNORED_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})

log = logging.getLogger("specoffload.engine")


class _Line:
    """The channel to the API process, for two threads."""

    def __init__(self, channel: Channel[FromEngine, ToEngine]) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        watch = threading.Thread(target=self._watch, name="channel watch", daemon=True)
        watch.start()

    def send(self, message: FromEngine) -> None:
        """Raises OSError when the API process is gone."""
        with self._sending:
            self._channel.send(message)

    def take(self, *, wait: bool) -> list[ToEngine]:
        """All that have come; with `wait` at least one."""
        try:
            return self._channel.receive() if wait else self._channel.received()
        except (EOFError, OSError):
            os._exit(0)

    def _watch(self) -> None:
        """Tell every second that this process runs, until the other end is closed. The main thread
        may be deep inside libllama, where no exception reaches it, and memory is the kernel's to
        free."""
        end = select.poll()
        end.register(self._channel.fileno(), 0)  # a hang-up is told unasked, and nothing else
        with contextlib.suppress(OSError):
            while not end.poll(1000 * HEARTBEAT_S):
                self.send(Alive())
        os._exit(0)


def engine_main(channel: Channel[FromEngine, ToEngine], factory: Factory) -> None:
    """Entry point of the spawned process; returns after Shutdown or a failed load.

    Ctrl-C at a terminal goes to the whole process group, and a service manager's SIGTERM to the
    whole service. What happens then is for the API process to decide, which drains first and ends
    this process by Shutdown, SIGKILL or the end of the channel; so both signals are ignored here.
    """
    for sig in IGNORED_SIGNALS:
        signal.signal(sig, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
    line = _Line(channel)
    try:
        generator = factory(_in_percent(line.send))
    except Exception as error:
        problem = problem_of(error)
        if problem.http_status >= 500:
            log.exception("the model could not be loaded")
        line.send(LoadFailed(problem))
        return
    gc.freeze()  # what is there now stays: later collections need not look at it
    line.send(Ready(generator.card))
    generator.prepare()
    try:
        Service(generator, line.send).run(line.take)
    except OSError:
        os._exit(0)  # the API process is gone
    finally:
        generator.close()


def _in_percent(send: Callable[[FromEngine], None]) -> OnProgress:
    """Tells the API process of each per cent once."""
    told: set[tuple[str, int]] = set()

    def tell(step: str, done: float) -> None:
        per_cent = (step, int(100 * done))
        if per_cent not in told:
            told.add(per_cent)
            send(Loading(step, done))

    return tell
