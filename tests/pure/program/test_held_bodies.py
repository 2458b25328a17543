"""Bodies of requests are counted while they arrive, and until nobody holds them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from specoffload.server.api import body
from specoffload.server.api.body import HeldBodies
from specoffload.server.engine.messages import RequestFailed


async def parts(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        await asyncio.sleep(0)
        yield bytes(size)


def test_parts_of_several_bodies_count_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "MOST_BYTES_AT_ONCE", 100)
    monkeypatch.setattr(body, "SMALL_BODY_BYTES", 9)
    held = HeldBodies()
    go_on = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield bytes(60)
        await go_on.wait()
        yield bytes(10)

    async def read_slowly() -> int:
        async with held.read(slow()) as data:
            return len(data)

    async def run() -> None:
        first = asyncio.ensure_future(read_slowly())
        while held.n_bytes < 60:
            await asyncio.sleep(0)
        with pytest.raises(RequestFailed) as refused:
            async with held.read(parts(30, 30)):
                pass
        assert refused.value.problem.http_status == 503
        assert held.n_bytes == 60
        async with held.read(parts(30)) as data:
            assert (len(data), held.n_bytes) == (30, 90)
        go_on.set()
        assert await first == 70
        assert held.n_bytes == 0

    asyncio.run(run())


def test_small_bodies_find_room_where_large_ones_take_it_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "MOST_BYTES_AT_ONCE", 100)
    monkeypatch.setattr(body, "SMALL_BODY_BYTES", 9)
    monkeypatch.setattr(body, "BYTES_FOR_SMALL_BODIES", 15)

    async def run() -> None:
        held = HeldBodies()
        with held.hold(100):
            async with held.read(parts(9)):
                for sizes in ((9,), (5, 5)):  # no room for two small ones, and none for a large one
                    with pytest.raises(RequestFailed):
                        async with held.read(parts(*sizes)):
                            pass
        assert held.n_bytes == 0

    asyncio.run(run())


def test_a_body_over_its_limit_is_refused_before_it_is_whole() -> None:
    held = HeldBodies()
    n_read = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal n_read
        while True:
            n_read += 10
            yield bytes(10)

    async def run() -> None:
        with pytest.raises(RequestFailed, match="over 45 bytes: shorten it") as refused:
            async with held.read(endless(), 45):
                pass
        assert refused.value.problem.http_status == 413

    asyncio.run(run())
    assert (n_read, held.n_bytes) == (50, 0)
    with held.hold(7):
        assert held.n_bytes == 7
    assert held.n_bytes == 0
