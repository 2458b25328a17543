"""Images in the text of a prompt, where a marker stands for each of them. Plain data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from offload.errors import BadRequest
from offload.images.decoding import Bitmap


class Pixels(Protocol):
    """Memory with the pixels of images, which this process holds for another one."""

    def give_back(self) -> None: ...


@dataclass(frozen=True)
class PromptImages:
    """Images, or their files. In the prompt's text, `marker` stands for each of them, in order.

    `stored` holds the pixels, and stays in its process. It is given back when they are read.
    """

    marker: str
    files: tuple[bytes | Bitmap, ...]
    stored: Pixels | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return PromptImages, (self.marker, self.files)

    def parts(self, text: str) -> list[str | bytes | Bitmap]:
        """Return texts and files in turn. Raises BadRequest if the text lacks an image."""
        texts = text.split(self.marker)
        if len(texts) != len(self.files) + 1:
            raise BadRequest(
                f"the chat template writes {len(texts) - 1} of {len(self.files)} images: put them "
                "into messages of the user, or use another --chat-template"
            )
        parts: list[str | bytes | Bitmap] = [texts[0]]
        for file, after in zip(self.files, texts[1:], strict=True):
            parts += (file, after)
        return [part for part in parts if part != ""]


def without_images(
    text: str, marker: str, left_out: Collection[int], words: str, ends: Sequence[int] = ()
) -> tuple[str, tuple[int, ...]]:
    """Return the text with `words` in place of the markers with the numbers `left_out`.

    `ends` are numbers of characters of `text`, and are returned as those of the new text.
    """
    texts = text.split(marker)
    if not left_out:
        return text, tuple(ends)
    parts, moved = [texts[0]], list(ends)
    at = len(texts[0])
    for number, after in enumerate(texts[1:]):
        at += len(marker)
        is_out = number in left_out
        parts += [words if is_out else marker, after]
        if is_out:
            shift = len(words) - len(marker)
            moved = [
                new + shift if end >= at else new for end, new in zip(ends, moved, strict=True)
            ]
        at += len(after)
    return "".join(parts), tuple(moved)
