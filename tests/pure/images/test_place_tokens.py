"""Numbers of images in prompts, and where a projector computes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.images.place import on_cpu_reason, projector_bytes
from offload.images.place_tokens import (
    LEAST_PLACES,
    ImageSpan,
    image_spans,
    place_tokens,
    positions_of,
)
from specoffload.slots.choosing import common

IMAGES = st.tuples(st.integers(LEAST_PLACES, 300), st.integers(1, 300), st.binary(max_size=40))
TEXTS = st.lists(st.integers(0, 2**31 - 1), max_size=20)


@given(st.lists(st.tuples(TEXTS, IMAGES), max_size=4), TEXTS)
def test_images_are_found_among_tokens(
    parts: list[tuple[list[int], tuple[int, int, bytes]]], end: list[int]
) -> None:
    tokens: list[int] = []
    wanted = []
    for text, (n_places, n_positions, identity) in parts:
        tokens += text
        wanted.append(ImageSpan(len(tokens), n_places, n_positions))
        tokens += place_tokens(n_places, n_positions, identity)
    assert image_spans([*tokens, *end]) == wanted
    assert all(-(2**31) <= token < 2**31 for token in tokens)  # files hold 32 bits each


@given(TEXTS, IMAGES, IMAGES)
def test_prompts_with_different_images_share_what_comes_before_them(
    text: list[int], one: tuple[int, int, bytes], other: tuple[int, int, bytes]
) -> None:
    first, second = place_tokens(*one), place_tokens(*other)
    n_common = common([*text, *first, 1], [*text, *second, 1])
    assert n_common == len(text) + (len(first) if one == other else 0)


def test_images_too_small_for_their_hash_are_refused() -> None:
    with pytest.raises(ValueError, match="no room for its hash"):
        place_tokens(LEAST_PLACES - 1, 1, b"")


@pytest.mark.parametrize(
    ("device_gib", "n_devices", "offload", "why"),
    [
        (24, 1, True, ""),
        (8, 1, True, "more than an eighth"),
        (24, 1, False, "--no-mmproj-offload"),
        (24, 2, True, "several GPUs"),
        (0, 1, True, "no GPU"),
    ],
)
def test_the_gpu_computes_a_projector_that_leaves_it_room(
    device_gib: int, n_devices: int, offload: bool, why: str
) -> None:
    found = on_cpu_reason(1 << 30, device_gib << 30, n_devices=n_devices, offload=offload)
    assert (why in found) if why else found == ""
    assert projector_bytes(1 << 30) > 1 << 30


def test_the_places_of_an_image_have_its_first_position() -> None:
    flat, plain = place_tokens(6, 3, b"M-RoPE"), place_tokens(5, 5, b"others")
    tokens = [7, 8, *flat, 9, 9, *plain, 7]
    expected = [0, 1, *[2] * 6, 5, 6, *[7] * 5, 12]
    assert positions_of(len(tokens), image_spans(tokens)) == expected
    assert positions_of(3, []) == [0, 1, 2]
