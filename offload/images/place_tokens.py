"""Numbers that stand for an image among the tokens of a prompt. Pure.

libmtmd makes rows of an image, and each row takes the place of a token. Here such a place has a
negative number, where text has a token's id. So prompts stay lists of numbers, and the caches
compare them as they compare text. The numbers of an image are

    hash, number of places, number of positions, hash, hash, ...

Equal numbers mean equal images, since the hash is of the file's bytes and of the counts. Different
images differ in their first number. Models with M-RoPE give all places of an image a few positions.
For other models the two counts are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

LEAST_PLACES = 4  # the counts and 62 bits of the hash
_WORD_BYTES = 4
_WORD = 0x7FFFFFFF


@dataclass(frozen=True)
class ImageSpan:
    """An image in a sequence: the index of its first place, its places, and its positions."""

    start: int
    n_places: int
    n_positions: int

    @property
    def end(self) -> int:
        return self.start + self.n_places

    @property
    def n_saved(self) -> int:
        """By how much less the position rises than the number of tokens."""
        return self.n_places - self.n_positions


def place_tokens(n_places: int, n_positions: int, identity: bytes) -> list[int]:
    """Return the numbers of an image.

    `identity` is of the file, of the projector and, if a file makes several images, of this one.
    Raises ValueError for fewer than LEAST_PLACES.
    """
    if n_places < LEAST_PLACES:
        raise ValueError(f"an image of {n_places} places has no room for its hash")
    n_words = n_places - 2
    identity += f"|{n_places}|{n_positions}".encode()
    words = b"".join(
        blake2b(identity, digest_size=64, salt=i.to_bytes(8, "little")).digest()
        for i in range(-(-n_words * _WORD_BYTES // 64))
    )
    hashes = [
        int.from_bytes(words[at : at + _WORD_BYTES], "little") & _WORD
        for at in range(0, n_words * _WORD_BYTES, _WORD_BYTES)
    ]
    return [-1 - word for word in (hashes[0], n_places, n_positions, *hashes[1:])]


def image_spans(tokens: Sequence[int]) -> list[ImageSpan]:
    """Return the images among `tokens`, in order. The last one may lack places at its end."""
    if not len(tokens) or min(tokens) >= 0:
        return []
    spans, at = [], 0
    while at + 2 < len(tokens):
        if tokens[at] >= 0:
            at += 1
            continue
        span = ImageSpan(at, -1 - tokens[at + 1], -1 - tokens[at + 2])
        spans.append(span)
        at = span.end
    return spans


def positions_of(n_tokens: int, images: Sequence[ImageSpan]) -> list[int]:
    """Return the position of each of the first `n_tokens`, which `images` are among.

    All places of an image get its first position, because an image is kept or dropped whole.
    """
    positions: list[int] = []
    n_saved = 0  # by how much positions lag behind the number of tokens
    for span in images:
        positions += range(len(positions) - n_saved, span.start - n_saved)
        positions += [span.start - n_saved] * span.n_places
        n_saved += span.n_saved
    positions += range(len(positions) - n_saved, n_tokens - n_saved)
    return positions[:n_tokens]
