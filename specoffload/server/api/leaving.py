"""Notices that a client leaves, and ends the work for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

T = TypeVar("T")


async def has_left(receive: Receive) -> None:
    """Return when the client has left. `receive` gets its events, and parts of a body are lost."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def until_left(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None for a client that leaves before. `work` is ended then.

    `receive` gets the client's events.
    """
    working, left = asyncio.ensure_future(work), asyncio.ensure_future(has_left(receive))
    try:
        await asyncio.wait({working, left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (working, left):
            task.cancel()
        await asyncio.gather(working, left, return_exceptions=True)
    return None if working.cancelled() else working.result()
