"""Limits of connections: their number, the time each may take, the lines they may log."""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

BACKLOG = 128  # connections that the kernel holds until they are accepted
_MOST_CONNECTIONS = 1024
_SPARE_DESCRIPTORS = 64  # pipes, files, the listening socket


@dataclass(frozen=True)
class SocketLimits:
    """Times in seconds. A body may take `body_s`, and a second more for each `body_bytes_per_s`
    that came; a client that reads nothing of its answer for `write_s` is given up. Up to
    `linger_bytes` of a request that was answered early are read for up to `linger_s`."""

    n_connections: int = _MOST_CONNECTIONS
    header_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: int = 64 * 2**10
    keep_alive_s: int = 30
    write_s: float = 60.0
    linger_s: float = 30.0
    linger_bytes: int = 128 * 2**20

    @property
    def n_at_once(self) -> int:
        """Connections that are accepted before any is looked at, and so before one is closed for
        another: they must not take the last descriptors."""
        return max(1, min(BACKLOG, self.n_connections // 4))


def raise_descriptor_limit() -> int:
    """As many open files as this process may have; how many connections that is enough for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * _MOST_CONNECTIONS
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    n_open = _MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else soft - _SPARE_DESCRIPTORS
    return max(1, min(_MOST_CONNECTIONS, n_open))


class OncePerWhile(logging.Filter):
    """Lets a message through once in `every_s` seconds, with the number of those held back.

    Messages are the same if their text is before its values are put in.
    """

    def __init__(self, every_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._said: dict[str, tuple[float, int]] = {}  # when, and how many since

    def filter(self, record: logging.LogRecord) -> bool:
        now_s, text = self._clock(), str(record.msg)
        at_s, n_held = self._said.get(text, (-self._every_s, 0))
        if now_s - at_s < self._every_s:
            self._said[text] = (at_s, n_held + 1)
            return False
        if len(self._said) > 1000:
            self._said.clear()
        self._said[text] = (now_s, 0)
        if n_held:
            record.msg = f"{text} ({n_held} more since this was last said)"
        return True
