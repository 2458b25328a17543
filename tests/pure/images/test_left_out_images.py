"""Images that are left out of prompts, and limits of a request's images."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BadRequest
from specoffload.server.api import images
from specoffload.server.api.images import MOST_IMAGES, TakenImage, chosen
from specoffload.server.image_decoding import (
    MOST_BYTES,
    MOST_CLIENT_BYTES,
    MOST_CLIENT_DECODERS,
    Amount,
    DecodingGate,
)
from specoffload.session.images import without_images

MARK = "<m>"


@given(st.lists(st.text("ab ", max_size=5), min_size=1, max_size=6), st.data())
def test_words_take_the_places_of_images(texts: list[str], data: st.DataObject) -> None:
    n_images = len(texts) - 1
    left_out = {at for at in range(n_images) if data.draw(st.booleans())}
    # An end is before or behind a marker, and never in it.
    ends, wanted_ends, text, wanted = [], [], "", ""
    for at, part in enumerate(texts):
        for n in range(len(part) + 1):
            ends.append(len(text) + n)
            wanted_ends.append(len(wanted) + n)
        text, wanted = text + part, wanted + part
        if at < n_images:
            text += MARK
            wanted += "[out]" if at in left_out else MARK
    assert without_images(text, MARK, left_out, "[out]", ends) == (wanted, tuple(wanted_ends))


def taken(n: int, name: str, n_bytes: int = 1) -> list[TakenImage]:
    return [TakenImage("messages[0]", name, b"x" * n_bytes)] * n


def read(found: list[TakenImage]) -> list[bool]:
    return [isinstance(image.file, bytes) for image in found]


def test_old_images_are_left_out_in_steps_and_new_ones_never() -> None:
    assert all(read(chosen(taken(MOST_IMAGES - 1, "old") + taken(1, ""))))
    for n_over in (1, 16):
        found = read(chosen(taken(MOST_IMAGES - 1 + n_over, "old") + taken(1, "")))
        assert found == [False] * 16 + [True] * (MOST_IMAGES - 1 + n_over - 16 + 1)
    assert read(chosen(taken(MOST_IMAGES + 17, "old")))[:33] == [False] * 32 + [True]


def test_files_of_a_history_that_are_too_large_together_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(images, "MOST_BYTES", 10)
    given = [*taken(2, "old", 4), *taken(1, "", 3)]
    assert read(chosen(given)) == [False, True, True]
    needed = [replace(image, name="") for image in given]
    with pytest.raises(BadRequest, match="bytes together"):
        chosen(needed)


def test_a_client_with_its_share_waits_and_others_pass() -> None:
    async def run() -> None:
        gate = DecodingGate()
        large = Amount(MOST_CLIENT_BYTES, 1)
        await gate.take("a", large)
        second = asyncio.ensure_future(gate.take("a", large))
        await gate.take("b", Amount(MOST_BYTES - MOST_CLIENT_BYTES, 1))
        third = asyncio.ensure_future(gate.take("c", Amount(1, 1)))
        await asyncio.sleep(0)
        assert not second.done()
        assert not third.done()  # there is no memory left
        gate.free("b", Amount(MOST_BYTES - MOST_CLIENT_BYTES, 1))
        await asyncio.wait_for(third, 5)
        assert not second.done()
        second.cancel()
        gate.free("a", large)
        gate.free("c", Amount(1, 1))
        await gate.take("a", Amount(9 * MOST_BYTES, 1))  # the only request gets what it needs
        gate.free("a", Amount(9 * MOST_BYTES, 1))
        for _ in range(MOST_CLIENT_DECODERS):
            await gate.take("a", Amount(1, 1))
        ninth = asyncio.ensure_future(gate.take("a", Amount(1, 1)))
        await gate.take("b", Amount(1, 1))
        assert not ninth.done()
        gate.free("a", Amount(1, 1))
        await asyncio.wait_for(ninth, 5)

    asyncio.run(run())
