"""Media do not count towards the limit of a body that a text model reads."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specoffload.server.api.body import HeldBodies
from specoffload.server.api.media_bytes import MediaBytes
from specoffload.server.engine.messages import RequestFailed

DATA = base64.b64encode(bytes(range(256)) * 8).decode()
BODY = json.dumps(
    {
        "messages": [
            {"content": [{"type": "image", "source": {"type": "base64", "data": DATA}}]},
            {"content": [{"image_url": {"url": f"data:image/png;base64,{DATA}"}}]},
            {"content": [{"image_url": f"data:image/png;base64,{DATA}"}, {"file_data": DATA}]},
            {"content": "text " * 50},
        ]
    }
).encode()


@given(st.lists(st.integers(1, len(BODY) - 1), max_size=20))
def test_media_are_counted_in_any_parts(cuts: list[int]) -> None:
    media = MediaBytes()
    places = [0, *sorted(cuts), len(BODY)]
    for start, end in zip(places, places[1:], strict=False):
        media.add(BODY[start:end])
    # The words "data" before a colon are the only text that counts, once for each address.
    assert 4 * len(DATA) <= media.n_bytes <= 4 * len(DATA) + 2 * len("data")


def test_text_does_not_count_as_media() -> None:
    media = MediaBytes()
    media.add(json.dumps({"messages": [{"content": DATA}], "prompt": "a" * 9000}).encode())
    assert media.n_bytes == 0


@pytest.mark.parametrize(("text", "fits"), [(b"x" * 900, True), (b"x" * 1100, False)])
def test_a_body_with_media_is_read_if_its_text_fits(text: bytes, fits: bool) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for part in (b'{"data": "', *[b"QUJD" * 1000] * 5, b'", "t": "', text):
            yield part

    async def read() -> int:
        async with HeldBodies().read(chunks(), 1000) as data:
            return len(data)

    if fits:
        assert asyncio.run(read()) > 20_000
        return
    with pytest.raises(RequestFailed) as refused:
        asyncio.run(read())
    assert refused.value.problem.http_status == 413


def test_the_time_to_count_rises_with_the_length() -> None:
    """Counted in steps of the expressions: each byte is looked at by one search."""
    media = MediaBytes()
    for _ in range(200):
        media.add(b'"data":"A",' * 1000)
    assert media.n_bytes == 200_000
