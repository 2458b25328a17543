"""Reads the list of models again, and gives it to the pool. One reader at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from specoffload.errors import KNOWN
from specoffload.server.router.model import Entry, PoolModel, now_s
from specoffload.server.router.pool import ModelPool

_LEAST_AGE_S = 2.0  # a younger list is not read again because of an unknown name


class Listing:
    """The list of models, as its folder and its file have it.

    `read` is called in a thread. `on_read` is called with each new list, after the pool has it.
    """

    def __init__(
        self,
        pool: ModelPool,
        read: Callable[[], Sequence[Entry]],
        on_read: Callable[[Sequence[Entry]], None] = lambda entries: None,
    ) -> None:
        self._pool, self._read, self._on_read = pool, read, on_read
        self._lock = asyncio.Lock()
        self._read_s: float | None = None  # time of the last reading

    async def read_again(self) -> None:
        """Read the list. Raises UsageError for a list that cannot be read; the old one stays."""
        async with self._lock:
            await self._read_now()

    async def find(self, name: str) -> PoolModel | None:
        """Return the model of this name. Reads the list first if no model has it."""
        model = self._pool.find(name)
        if model is not None:
            return model
        async with self._lock:
            is_young = self._read_s is not None and now_s() - self._read_s < _LEAST_AGE_S
            if not is_young and self._pool.find(name) is None:
                with contextlib.suppress(*KNOWN):  # who asks for the list is told why
                    await self._read_now()
        return self._pool.find(name)

    async def _read_now(self) -> None:
        self._read_s = now_s()
        entries = await asyncio.to_thread(self._read)
        self._pool.replace(entries)
        self._on_read(entries)
